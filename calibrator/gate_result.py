"""What a correctness gate found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate.

    Attributes:
        name: "token_counts", "greedy_equality", "pairs", "prefix_cache".
        passed: Whether publication may go on.
        checks: How many comparisons it made.
        detail: What failed: which instance, which token; or a remark.
    """

    name: str
    passed: bool
    checks: int
    detail: str = ""
