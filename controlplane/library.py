"""Publishing, listing and rolling back constants, and setting targets."""

from dataclasses import dataclass

import structlog

from controlplane.core import constants as constants_rules
from controlplane.core import slo as slo_rules
from controlplane.core.drift import Drift
from controlplane.core.values import Constants, Happening, Slo
from controlplane.errors import ConstantsJump, UnknownConstants
from controlplane.metrics import ControlMetrics
from controlplane.store import Store
from controlplane.wire import refuse
from servicekit.errors import FieldViolation


@dataclass(frozen=True, slots=True)
class Listing:
    """All versions, and which are current."""

    versions: tuple[Constants, ...]
    """By profile, newest first."""
    current: dict[str, int]
    drifting: tuple[Drift, ...]
    proposed: dict[str, Constants]
    """What live traffic makes of the constants of drifting profiles."""


class Library:
    """Fitted values under rules: nothing that cannot be, and no jump that nobody confirmed."""

    def __init__(self, store: Store, metrics: ControlMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._log = structlog.get_logger("controlplane.library")

    async def publish(self, draft: Constants, *, accept_jump: bool) -> Constants:
        """Make a draft the profile's next version.

        Raises:
            InvalidArgument: a value that cannot be.
            ConstantsJump: a value far from the current version's, and no `accept_jump`.
            ChangedMeanwhile: somebody published at the same time.
        """
        refuse(constants_rules.problems(draft))
        current = (await self._store.current_versions()).get(draft.profile, 0)
        before = await self._store.constants(draft.profile, current) if current else None
        if before is not None and not accept_jump:
            jumps = constants_rules.jumps(before.constants, draft.constants)
            if jumps:
                raise ConstantsJump(
                    "; ".join(f"{jump.field}: {jump.description}" for jump in jumps),
                    violations=[FieldViolation(jump.field, jump.description) for jump in jumps],
                    metadata={"profile": draft.profile, "current_version": str(current)},
                )
        published = await self._store.publish_constants(draft, current)
        await self.tell("constants_published", draft.profile, f"version {published.version}")
        return published

    async def get(self, profile: str, version: int) -> Constants:
        """Return a version; 0 for the current one, the reference where none was published.

        Raises:
            UnknownConstants: no such version.
        """
        if version == 0:
            version = (await self._store.current_versions()).get(profile, 0)
            if version == 0:
                return constants_rules.reference(profile)
        found = await self._store.constants(profile, version)
        if found is None:
            raise _unknown(profile, version)
        return found

    async def list(self, profile: str) -> Listing:
        """Return all versions of one profile, or of all where it is empty."""
        current = await self._store.current_versions()
        if profile:
            current = {name: version for name, version in current.items() if name == profile}
        versions: list[Constants] = []
        for name in sorted(current):
            versions += await self._store.all_constants(name)
        drifting, proposed = await self._store.drift()
        if profile:
            drifting = [drift for drift in drifting if drift.profile == profile]
            proposed = {name: made for name, made in proposed.items() if name == profile}
        return Listing(tuple(versions), current, tuple(drifting), proposed)

    async def roll_back(self, profile: str, version: int) -> Constants:
        """Make a stored version current; nothing is deleted.

        Raises:
            UnknownConstants: no such version.
        """
        if version == 0 or not await self._store.point_constants(profile, version):
            raise _unknown(profile, version)
        await self.tell("constants_rolled_back", profile, f"version {version}")
        return await self.get(profile, version)

    async def set_slo(self, slo: Slo) -> Slo:
        """Replace the targets.

        Raises:
            InvalidArgument: targets that cannot be, or a default that is none of the classes.
        """
        refuse(slo_rules.problems(slo))
        await self._store.set_slo(slo)
        await self.tell("slo_set", "slo", ", ".join(sorted(slo.classes)))
        return slo

    async def tell(self, kind: str, subject: str, detail: str) -> None:
        """Write an event, count it and log it."""
        await self._store.add_event(Happening(kind, subject, detail))
        self._metrics.events.labels(kind).inc()
        self._log.info(kind, subject=subject, detail=detail)


def _unknown(profile: str, version: int) -> UnknownConstants:
    return UnknownConstants(
        f"{profile} has no version {version}",
        metadata={"profile": profile, "version": str(version)},
    )
