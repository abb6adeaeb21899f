"""The name of every key in Redis; what each holds is in docs/architecture.md."""

PREFIX = "steelyard:"

INSTANCES = f"{PREFIX}instances"
"""Set of instance ids."""
SNAPSHOT = f"{PREFIX}snapshot"
"""String: the last serialized ClusterSnapshot."""
SNAPSHOTS_CHANNEL = f"{PREFIX}snapshots"
"""Channel on which every new snapshot is published whole."""
SNAPSHOT_PUBLISHER = f"{PREFIX}snapshot:publisher"
"""String with TTL: which control plane replica publishes snapshots."""
SNAPSHOT_SEQUENCE = f"{PREFIX}snapshot:sequence"
"""Counter of snapshots over all replicas."""
ROSTER = f"{PREFIX}roster"
"""Hash: `version` and `digest` of the last roster published."""
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
LENGTHS_MODELS = f"{PREFIX}lengths"
"""Set of models that have length statistics."""
ROUTERS = f"{PREFIX}routers"
"""Set of router ids."""


def instance(instance_id: str) -> str:
    """Hash: one instance, its description and its last measurements."""
    return f"{PREFIX}instance:{instance_id}"


def inflight(instance_id: str, epoch: str) -> str:
    """Sorted set: request id to lease expiry, what any router has in flight there."""
    return f"{PREFIX}inflight:{instance_id}:{epoch}"


def request(request_id: str) -> str:
    """Hash with TTL: one request in flight."""
    return f"{PREFIX}request:{request_id}"


def router(router_id: str) -> str:
    """Hash with TTL: address and start of one router."""
    return f"{PREFIX}router:{router_id}"


def constants(profile: str) -> str:
    """Hash: the current version of a profile's constants, its values included."""
    return f"{PREFIX}constants:{profile}"


def constants_version(profile: str, version: int) -> str:
    """Hash: one version of a profile's constants; never changed once written."""
    return f"{PREFIX}constants:{profile}:{version}"


def lengths(model: str) -> str:
    """Hash: decayed output-length counts of one model, by key and bucket."""
    return f"{PREFIX}lengths:{model}"


def dispatcher(pool: str) -> str:
    """String with TTL: which router decides for a pool, with its fencing token."""
    return f"{PREFIX}dispatcher:{pool}"


def dispatcher_fence(pool: str) -> str:
    """Counter that fencing tokens of a pool's dispatcher are drawn from."""
    return f"{PREFIX}dispatcher:{pool}:fence"
