"""The pool's engines as late binding keeps them over rosters: by boot, with what it learned."""

from dataclasses import dataclass

from dataplane.core.cluster import Instance, Role
from dataplane.core.late_binding.calibration import Multiplier
from dataplane.core.late_binding.gate import Decoder, Group
from dataplane.core.late_binding.lines import Line, ReadyLines
from dataplane.core.late_binding.pace import Pace, mean_pace, pace_of
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.view import ClusterView, Side
from enginemodel.model import EngineConstants, decode_step_seconds, handoff_seconds
from enginemodel.profiles import REFERENCE

_PREFILL_GAINS = (0.03, 0.2)
_DECODE_GAINS = (0.003, 0.1)


@dataclass(slots=True)
class Transfer:
    """What moving KV costs; nothing in a pool that does not hand off."""

    constants: EngineConstants
    kv_bytes_per_token: int
    hands_off: bool = False

    def seconds(self, tokens: int) -> float:
        """Return the time to move a prompt's KV."""
        if not self.hands_off:
            return 0.0
        return handoff_seconds(self.constants, tokens, self.kv_bytes_per_token)


class Engines:
    """Lines, decoders and groups; rebuilt with the roster, keeping what was learned."""

    def __init__(self, settings: LateBindingSettings) -> None:
        self._settings = settings
        self.lines: dict[str, Line] = {}
        self.decoders: dict[str, Decoder] = {}
        self.usable: list[Line] = []
        self.groups: dict[Line, Group] = {}
        self.all_alike = True
        self.ready = ReadyLines()
        self.fleet: Pace = pace_of(REFERENCE.constants, 1.0)
        self.transfer = Transfer(REFERENCE.constants, REFERENCE.kv_bytes_per_token)
        self._learned = 0
        self._ahead_seconds = settings.dispatch_ahead_seconds
        self._factors: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<Engines {len(self.lines)} prefill, {len(self.decoders)} decode>"

    def reseat(self, view: ClusterView) -> None:
        """Take a new roster; engines that restarted keep what their profile learned."""
        old_lines, old_decoders = self.lines, self.decoders
        self.lines, self.decoders = {}, {}
        for slot, instance in enumerate(view.roster.instances):
            constants = view.constants_of(instance)
            if instance.role is not Role.DECODE:
                self.lines[instance.instance_id] = self._line(
                    old_lines.get(instance.instance_id), instance, constants
                )
            if instance.role is not Role.PREFILL:
                decoder = self._decoder(old_decoders.get(instance.instance_id), instance, constants)
                decoder.slot = slot
                self.decoders[instance.instance_id] = decoder
        for line in old_lines.values():
            line.usable = self.lines.get(line.instance.instance_id) is line
        for decoder in old_decoders.values():
            if self.decoders.get(decoder.instance.instance_id) is not decoder:
                decoder.slot = -1
        self._regroup(view)

    def learned(self, line: Line) -> None:
        """Take in that a line's pace has changed; the mean is renewed now and then."""
        self._factors[("prefill", line.instance.profile)] = line.multiplier.value
        self._learned += 1
        if self.usable and self._learned >= len(self.usable):
            self._learned = 0
            self.fleet = mean_pace([line.pace for line in self.usable])

    def send_ahead(self, round_trip_seconds: float) -> None:
        """Give engines more work early enough for a round trip of this length.

        The setting holds up to a round trip of twice the one it was made for; what is above is
        added, since short trips are hidden by the batches that are put together.
        """
        settings = self._settings
        longer = round_trip_seconds - 2.0 * settings.round_trip_seconds
        self._ahead_seconds = settings.dispatch_ahead_seconds + max(0.0, longer)
        for line in self.lines.values():
            line.ahead_seconds = self._ahead_seconds
        self.ready.rebuild(self.usable)

    def fastest_step_seconds(self) -> float:
        """Return the shortest decode step of any engine."""
        steps = [
            decode_step_seconds(d.constants, 1, 0) * d.multiplier.value
            for d in self.decoders.values()
        ]
        return min(steps, default=0.0)

    def _regroup(self, view: ClusterView) -> None:
        usable = set(view.side("prefill").slots)
        by_key: dict[str, Group] = {}
        self.groups, self.usable = {}, []
        for slot, instance in enumerate(view.roster.instances):
            line = self.lines.get(instance.instance_id)
            if line is None:
                continue
            line.usable = slot in usable
            line.ahead_seconds = self._ahead_seconds
            if instance.role is Role.MIXED:
                self.groups[line] = Group(Side(view, (slot,), blind=False, vector_from=1))
            else:
                group = by_key.get(instance.pairing_key)
                if group is None:
                    group = Group(view.side("decode", instance.pairing_key))
                    by_key[instance.pairing_key] = group
                self.groups[line] = group
            if line.usable:
                self.usable.append(line)
        self.all_alike = len({id(self.groups[line]) for line in self.usable}) <= 1
        self.ready.rebuild(self.usable)
        if self.usable:
            self.fleet = mean_pace([line.pace for line in self.usable])
            first = self.usable[0]
            self.transfer = Transfer(
                first.constants,
                first.instance.kv_bytes_per_token,
                any(line.instance.role is Role.PREFILL for line in self.usable),
            )

    def _line(self, old: Line | None, instance: Instance, constants: EngineConstants) -> Line:
        if old is not None and old.instance.epoch == instance.epoch:
            old.set_constants(instance, constants)
            return old
        slow, fast = _PREFILL_GAINS
        factor = self._factors.get(("prefill", instance.profile), 1.0)
        multiplier = Multiplier(slow_gain=slow, fast_gain=fast, value=factor)
        line = Line(instance, constants, multiplier, pace_of(constants, factor))
        self.ready.used(line)
        return line

    def _decoder(
        self, old: Decoder | None, instance: Instance, constants: EngineConstants
    ) -> Decoder:
        if old is not None and old.instance.epoch == instance.epoch:
            old.instance, old.constants = instance, constants
            return old
        alike = [
            d.multiplier.value
            for d in self.decoders.values()
            if d.instance.profile == instance.profile
        ]
        slow, fast = _DECODE_GAINS
        factor = sum(alike) / len(alike) if alike else 1.0
        multiplier = Multiplier(slow_gain=slow, fast_gain=fast, value=factor)
        return Decoder(instance, constants, multiplier)
