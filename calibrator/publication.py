"""Publishes what a campaign found: all profiles and the targets, or nothing."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from calibrator.control import ControlClient
from calibrator.errors import ClusterUnavailable
from calibrator.slo import ClassTargets
from controlplane.core.values import Constants


async def publish_all(
    control: ControlClient,
    drafts: Sequence[Constants],
    slo: Mapping[str, ClassTargets],
    *,
    length_scaled: bool,
) -> dict[str, int]:
    """Publish drafts, then targets; where one fails, point back to what held before.

    Args:
        control: The control plane.
        drafts: One a profile.
        slo: Targets by class; none leaves them as they are.
        length_scaled: Set the form of the targets that grows with the prompt.

    Returns:
        The version of each profile.

    Raises:
        ClusterUnavailable: Something was not published; nothing of it holds.
    """
    before = {draft.profile: (await control.current(draft.profile)).version for draft in drafts}
    versions: dict[str, int] = {}
    try:
        for draft in drafts:
            versions[draft.profile] = (await control.publish(draft)).version
        if slo:
            await control.set_slo(slo, length_scaled=length_scaled)
    except ClusterUnavailable:
        for profile in versions:
            if before[profile] > 0:
                with suppress(ClusterUnavailable):
                    await control.roll_back(profile, before[profile])
        raise
    return versions
