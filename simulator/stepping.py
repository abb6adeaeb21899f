"""Steps of a decode engine between two changes of its batch, in closed form (see noise.py)."""

from simulator.noise import BLOCK_STEPS, StepNoise


class StepRun:
    """Consecutive steps that grow longer by the same amount each, from `begin` on.

    Attributes:
        begin: When the first step begins.
        first_seconds: Length of the first step, without noise.
    """

    __slots__ = (
        "_cursor",
        "_growth_seconds",
        "_noise",
        "_notice_share",
        "begin",
        "first_seconds",
    )

    def __init__(self, noise: StepNoise, notice_share: float) -> None:
        """Start idle; `notice_share` says when in a step finished pulls are looked for."""
        self._noise = noise
        self._notice_share = notice_share
        self._cursor = 0
        self._growth_seconds = 0.0
        self.begin = 0.0
        self.first_seconds = 0.0

    @property
    def steps_left(self) -> int:
        """How many steps noise is drawn for."""
        return BLOCK_STEPS - self._cursor

    def start(self, begin: float, first_seconds: float, growth_seconds: float) -> None:
        """Price the steps from now on."""
        self.begin = begin
        self.first_seconds = first_seconds
        self._growth_seconds = growth_seconds

    def take(self, steps: int) -> None:
        """Leave steps behind; at most `steps_left`."""
        self._cursor += steps
        if self._cursor == BLOCK_STEPS:
            self._noise.renew()
            self._cursor = 0

    def time_after(self, steps: int) -> float:
        """Return when the `steps`-th step ends."""
        noise = self._noise
        n = self._cursor
        m = n + steps
        growth = self._growth_seconds
        factors = noise.factors
        return (
            self.begin
            + (self.first_seconds - growth * n) * (factors[m] - factors[n])
            + growth * (noise.weighted[m] - noise.weighted[n])
            + noise.stalls[m]
            - noise.stalls[n]
        )

    def time_after_one(self, seconds: float) -> float:
        """Return when a first step that is priced otherwise ends."""
        n, noise = self._cursor, self._noise
        seconds = seconds * (noise.factors[n + 1] - noise.factors[n])
        return self.begin + seconds + noise.stalls[n + 1] - noise.stalls[n]

    def steps_to(self, time: float, most: int) -> int:
        """Return the first of `most` steps that ends at or after a time; the last if none does."""
        steps = int((time - self.begin) / self.first_seconds)
        steps = min(max(1, steps), most)
        if self.time_after(steps) >= time:
            while steps > 1 and self.time_after(steps - 1) >= time:
                steps -= 1
            return steps
        while steps < most:
            steps += 1
            if self.time_after(steps) >= time:
                break
        return steps

    def look_of(self, step: int, end: float) -> float:
        """Return when in a step that ends at a time finished pulls are looked for."""
        begin = self.time_after(step - 1) if step > 1 else self.begin
        return begin + self._notice_share * (end - begin)

    def noticing_step(self, ready_at: float, most: int) -> int:
        """Return the first step, up to one beyond `most`, that looks not before a time."""
        step = self.steps_to(ready_at, most)
        if self.look_of(step, self.time_after(step)) < ready_at:
            step += 1
        return step
