"""The name of every key in Redis; what an operator reads there is in docs/redis.md."""

PREFIX = "steelyard:"

INSTANCES = f"{PREFIX}instances"
"""Set of instance ids."""
LOADS = f"{PREFIX}loads"
"""Hash: instance id to its last report, JSON; what snapshots are made from in one read."""
LAST_SEEN = f"{PREFIX}last_seen"
"""Sorted set: instance id to the time its last report came in, ms since 1970 by Redis's clock."""
SNAPSHOT = f"{PREFIX}snapshot"
"""String: the last serialized ClusterSnapshot."""
SNAPSHOTS_CHANNEL = f"{PREFIX}snapshots"
"""Channel on which every new snapshot is published whole."""
SNAPSHOT_PUBLISHER = f"{PREFIX}snapshot:publisher"
"""String with TTL: which control plane replica publishes snapshots."""
SNAPSHOT_STATE = f"{PREFIX}snapshot:state"
"""Hash: `sequence`, `published_unix`, `publisher`, and versions of the parts of the last one."""
GENERATION = f"{PREFIX}generation"
"""Counter of changes that replicas cannot see in reports: constants, SLO, drains, membership."""
SLO = f"{PREFIX}slo"
"""Hash: targets by class."""
OUTCOMES = f"{PREFIX}outcomes"
"""Capped stream: one row a finished request."""
EVENTS = f"{PREFIX}events"
"""Capped stream: joins, drains, quarantines, publications, drift alarms."""
CONSTANTS_PROFILES = f"{PREFIX}constants"
"""Set of profiles that have published constants."""
DRIFT = f"{PREFIX}drift"
"""Hash: instance and part to ratio, profile and time of drifting instances."""
DRIFT_PROPOSED = f"{PREFIX}drift:proposed"
"""Set of profiles that have proposed constants."""
CALIBRATION = f"{PREFIX}calibration"
"""String with TTL: who calibrates."""
LENGTHS_STATE = f"{PREFIX}lengths"
"""Hash: `cursor` in the outcomes up to which statistics are folded, `version`, `models`."""


def instance(instance_id: str) -> str:
    """Hash: one instance, its description and its last measurements."""
    return f"{PREFIX}instance:{instance_id}"


def member(instance_id: str) -> str:
    """Hash without TTL: what an instance registered as, its state, and whether it is drained."""
    return f"{PREFIX}member:{instance_id}"


def replaced(instance_id: str) -> str:
    """Set with TTL: earlier epochs of an instance that may not come back."""
    return f"{PREFIX}replaced:{instance_id}"


def inflight(instance_id: str, epoch: str) -> str:
    """Sorted set: request id to lease expiry, what any router has in flight there."""
    return f"{PREFIX}inflight:{instance_id}:{epoch}"


def request(request_id: str) -> str:
    """Hash with TTL: one request in flight."""
    return f"{PREFIX}request:{request_id}"


def constants(profile: str) -> str:
    """Hash: the current version of a profile's constants, its values included."""
    return f"{PREFIX}constants:{profile}"


def constants_version(profile: str, version: int) -> str:
    """Hash: one version of a profile's constants; never changed once written."""
    return f"{PREFIX}constants:{profile}:{version}"


def constants_proposed(profile: str) -> str:
    """Hash: what live traffic says that a profile's constants should be."""
    return f"{PREFIX}constants:{profile}:proposed"


def lengths(model: str) -> str:
    """Hash: decayed output-length counts of one model, by key and bucket."""
    return f"{PREFIX}lengths:{model}"


def dispatcher(pool: str) -> str:
    """String with TTL: which router decides for a pool, with its fencing token."""
    return f"{PREFIX}dispatcher:{pool}"


def dispatcher_fence(pool: str) -> str:
    """Counter that fencing tokens of a pool's dispatcher are drawn from."""
    return f"{PREFIX}dispatcher:{pool}:fence"
