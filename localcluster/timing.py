"""What a time scale other than 1 means for the services of a cluster.

Agents and routers count engine seconds, by their clocks: targets, constants, leases and policies'
own times need no change, and what they report reads in engine seconds. The control plane lives by
Redis's clock, so its intervals are stretched instead. gRPC deadlines stay real.
"""

from math import isfinite

from controlplane.settings import ControlPlaneSettings

_INTERVALS = (
    "report_interval_seconds",
    "stale_after_seconds",
    "gone_after_seconds",
    "snapshot_interval_seconds",
    "publisher_lease_seconds",
)


def engine_time(time_scale: float) -> dict[str, float]:
    """Return the settings by which an agent or a router counts engine seconds.

    Full speed has no pace to count by: there, they stay with the machine's time.
    """
    return {"clock_rate": time_scale} if isfinite(time_scale) and time_scale != 1.0 else {}


def stretched_intervals(time_scale: float) -> dict[str, float]:
    """Return the control plane's intervals in real seconds; never shorter than they are by default."""
    if time_scale >= 1.0:
        return {}
    fields = ControlPlaneSettings.model_fields
    return {name: fields[name].default / time_scale for name in _INTERVALS}
