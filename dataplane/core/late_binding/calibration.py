"""What late binding learns while it serves: corrections of the constants, and the hand-off time."""

from collections import deque
from math import exp, log

_CLIP = 1.5
_FAR = 0.5
_SLOWEST = 1e-3
_WINDOW = 128
_RENEW_EVERY = 8
_QUANTILE = 0.85
_MOST_DEFAULTS = 6.0
_SHORTEST_TRIP_SECONDS = 0.0005
_LONGEST_TRIP_SECONDS = 0.05
_TRIP_TOLERANCE = 0.1


class Multiplier:
    """One factor on an engine's constants, moved by observed over predicted step times.

    A step far off moves it fast only when the one before was far off to the same side: a single
    stall or preemption is no reason, wrong constants are.
    """

    __slots__ = ("_far", "_fast_gain", "_slow_gain", "value")

    def __init__(self, *, slow_gain: float, fast_gain: float, value: float = 1.0) -> None:
        self.value = value
        self._slow_gain = slow_gain
        self._fast_gain = fast_gain
        self._far = 0

    def __repr__(self) -> str:
        return f"<Multiplier {self.value:.3f}>"

    def observe(self, actual_seconds: float, predicted_seconds: float) -> None:
        """Take in one step; `predicted_seconds` was computed with the factor in force."""
        if actual_seconds < _SLOWEST * predicted_seconds or predicted_seconds <= 0.0:
            return
        off = max(-_CLIP, min(_CLIP, log(actual_seconds / predicted_seconds)))
        side = 0 if abs(off) <= _FAR else (1 if off > 0.0 else -1)
        fast = side != 0 and side == self._far
        self._far = side
        self.value *= exp((self._fast_gain if fast else self._slow_gain) * off)


class RoundTrip:
    """Dispatch to an agent and back, without the engine's work: the median of recent prefills.

    On a busy host it is many times what it is on an idle one. An engine that is given its next
    work only when it has none left stands still for that long, so work is sent ahead by as much.
    """

    __slots__ = ("_count", "_samples", "seconds")

    def __init__(self, default_seconds: float) -> None:
        self._samples: deque[float] = deque(maxlen=_WINDOW // 2)
        self._count = 0
        self.seconds = default_seconds

    def __repr__(self) -> str:
        return f"<RoundTrip {self.seconds * 1e3:.1f} ms>"

    def observe(self, seconds: float) -> bool:
        """Take in one prefill's time on the way; True when what is believed has changed."""
        self._samples.append(max(0.0, seconds))
        self._count += 1
        if self._count % _RENEW_EVERY or len(self._samples) < 2 * _RENEW_EVERY:
            return False
        median = sorted(self._samples)[len(self._samples) // 2]
        learned = min(max(median, _SHORTEST_TRIP_SECONDS), _LONGEST_TRIP_SECONDS)
        if abs(learned - self.seconds) < _TRIP_TOLERANCE * self.seconds:
            return False
        self.seconds = learned
        return True


class HandoffTime:
    """From hand-off to first token without the KV transfer: 85th percentile of recent legs.

    A mean would be late for half of the requests that have just enough time.
    """

    __slots__ = ("_count", "_default_seconds", "_legs", "seconds")

    def __init__(self, default_seconds: float) -> None:
        self._default_seconds = default_seconds
        self._legs: deque[float] = deque(maxlen=_WINDOW)
        self._count = 0
        self.seconds = default_seconds

    def __repr__(self) -> str:
        return f"<HandoffTime {self.seconds * 1e3:.1f} ms of {len(self._legs)} legs>"

    def set_default(self, default_seconds: float) -> None:
        """Change what is assumed while too little was seen; also the scale of the upper bound."""
        self._default_seconds = default_seconds
        self._renew()

    def observe(self, leg_seconds: float) -> None:
        """Take in one decode leg, without its KV transfer."""
        self._legs.append(max(0.0, leg_seconds))
        self._count += 1
        if self._count % _RENEW_EVERY == 0:
            self._renew()

    def _renew(self) -> None:
        if len(self._legs) < 2 * _RENEW_EVERY:
            self.seconds = self._default_seconds
            return
        # Legs of seconds mean a full decode pool, not a slow hand-off: they are bounded, or every
        # request would look late.
        learned = sorted(self._legs)[int(_QUANTILE * len(self._legs))]
        self.seconds = min(learned, _MOST_DEFAULTS * self._default_seconds)
