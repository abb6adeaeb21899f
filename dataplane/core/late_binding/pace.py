"""How fast a prefill engine is: its constants times what was learned of them."""

from collections.abc import Sequence

from enginemodel.model import EngineConstants


class Pace:
    """Prefill constants in force, seconds; see enginemodel.model for the formula."""

    __slots__ = ("fixed_seconds", "floor_seconds", "linear", "quadratic")

    def __init__(
        self, floor_seconds: float, fixed_seconds: float, linear: float, quadratic: float
    ) -> None:
        self.floor_seconds = floor_seconds
        self.fixed_seconds = fixed_seconds
        self.linear = linear
        self.quadratic = quadratic

    def __repr__(self) -> str:
        return f"<Pace {self.linear * 1e6:.1f} us a token>"

    def prompt_seconds(self, tokens: int) -> float:
        """Return what a prompt adds to a step that others share."""
        return tokens * (self.linear + self.quadratic * tokens)

    def work_seconds(self, tokens: int, squares: int) -> float:
        """Return the same for many prompts, from the sums of their lengths and of the squares."""
        return self.linear * tokens + self.quadratic * squares

    def batch_seconds(self, tokens: int, squares: int, chunk_tokens: int) -> float:
        """Return the time of a batch alone, with a fixed part for each chunk it takes."""
        chunks = max(1, -(-tokens // chunk_tokens))
        work = self.linear * tokens + self.quadratic * squares
        return max(self.floor_seconds, self.fixed_seconds * chunks + work)


def pace_of(constants: EngineConstants, factor: float) -> Pace:
    """Return the pace of an engine whose constants are off by `factor`."""
    return Pace(
        constants.p0_seconds * factor,
        constants.p1_seconds * factor,
        constants.p2_seconds_per_token * factor,
        constants.p3_seconds_per_token_squared * factor,
    )


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Return the pace of one engine of several that together do as much in the same time.

    Work is shared by speed, so times per token are averaged harmonically.
    """

    def harmonic(values: list[float]) -> float:
        return len(values) / sum((1.0 / max(value, 1e-15) for value in values), 0.0)

    return Pace(
        harmonic([pace.floor_seconds for pace in paces]),
        harmonic([pace.fixed_seconds for pace in paces]),
        harmonic([pace.linear for pace in paces]),
        harmonic([pace.quadratic for pace in paces]),
    )
