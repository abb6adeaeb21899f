"""From a request's class and wishes to the targets that hold for it."""

from dataplane.core.cluster import SloPolicy
from dataplane.core.request import Targets

NO_TARGETS = Targets(float("inf"), float("inf"))
DEFAULT_SLO = SloPolicy(
    # The paper's targets: tight is three times a light-load token, loose three times tight.
    classes={"tight": Targets(0.175, 0.0397), "loose": Targets(0.525, 0.1191)},
    default_class="loose",
)


def resolve(policy: SloPolicy, slo_class: str, wish: Targets = NO_TARGETS) -> tuple[str, Targets]:
    """Return the class that holds and its targets, tightened by the request's own.

    Raises:
        KeyError: There is no class of that name.
    """
    name = slo_class or policy.default_class
    return name, policy.classes[name].tightened(wish)


def urgency(policy: SloPolicy, targets: Targets) -> float:
    """Return the weight of targets in costs (the paper's sigma): 1 for the loosest class.

    The paper only says that it is above 1 for tight requests; this is the square root of how many
    times tighter a request's TTFT target is than the loosest class's, which makes the paper's
    tight class 1.73. A request without targets weighs 1.
    """
    loosest = max((t.ttft_seconds for t in policy.classes.values()), default=float("inf"))
    if not 0.0 < targets.ttft_seconds < loosest < float("inf"):
        return 1.0
    return float((loosest / targets.ttft_seconds) ** 0.5)
