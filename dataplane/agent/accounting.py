"""What every router has on this engine, counted from the requests themselves.

A request is one `Charge`. It stands in one phase at a time, moves on, and is freed once, however
often and from wherever `free` is called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class ChargePhase(Enum):
    """Where a request's tokens count."""

    PREFILL = auto()
    """Waiting for prefill, or in it."""
    DECODE = auto()
    """Generating, or waiting to with a hand-off."""
    HELD = auto()
    """Prefilled, the KV waits to be pulled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCounts:
    """What one router has here; fields as in RouterLoad of the protocol."""

    router_id: str
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_kv_tokens: int
    held_requests: int
    held_kv_tokens: int


class _Cell:
    """Requests and tokens of one router in one phase."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0


class Charge:
    """One request in the books."""

    __slots__ = ("_accounting", "_freed", "_phase", "_tokens", "router_id")

    def __init__(
        self, accounting: "Accounting", router_id: str, phase: ChargePhase, tokens: int
    ) -> None:
        self._accounting = accounting
        self.router_id = router_id
        self._phase = phase
        self._tokens = tokens
        self._freed = False

    def __repr__(self) -> str:
        """Show phase and size."""
        state = "freed" if self._freed else self._phase.name
        return f"Charge(router={self.router_id!r}, {state}, tokens={self._tokens})"

    def grow(self, tokens: int) -> None:
        """Note tokens generated; nothing once it is freed."""
        if not self._freed:
            self._tokens += tokens
            self._accounting.cell(self.router_id, self._phase).tokens += tokens

    def move_to(self, phase: ChargePhase) -> None:
        """Enter another phase with all tokens; nothing once it is freed."""
        if self._freed or phase is self._phase:
            return
        self._accounting.apply(self.router_id, self._phase, -1, -self._tokens)
        self._phase = phase
        self._accounting.apply(self.router_id, phase, 1, self._tokens)

    def free(self) -> None:
        """Leave the books; any further call does nothing."""
        if not self._freed:
            self._freed = True
            self._accounting.apply(self.router_id, self._phase, -1, -self._tokens)


class Accounting:
    """The books of one agent."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start empty.

        Args:
            on_change: Called when a request enters, moves or leaves; not for tokens generated.
        """
        self._on_change = on_change
        self._cells: dict[str, dict[ChargePhase, _Cell]] = {}

    def __repr__(self) -> str:
        """Show the counts."""
        return f"Accounting({self.by_router()})"

    def charge(self, router_id: str, phase: ChargePhase, tokens: int) -> Charge:
        """Enter a request."""
        self.apply(router_id, phase, 1, tokens)
        return Charge(self, router_id, phase, tokens)

    def by_router(self) -> list[RouterCounts]:
        """Return what each router has here, by router id; routers with nothing are left out."""
        counts = []
        for router_id, cells in sorted(self._cells.items()):
            prefill, decode, held = (cells[phase] for phase in ChargePhase)
            if not (prefill.requests or decode.requests or held.requests):
                del self._cells[router_id]
                continue
            counts.append(
                RouterCounts(
                    router_id=router_id,
                    prefill_requests=prefill.requests,
                    prefill_tokens=prefill.tokens,
                    decode_requests=decode.requests,
                    decode_kv_tokens=decode.tokens,
                    held_requests=held.requests,
                    held_kv_tokens=held.tokens,
                )
            )
        return counts

    def tokens(self, phase: ChargePhase) -> int:
        """Return the tokens of all routers in a phase."""
        return sum(cells[phase].tokens for cells in self._cells.values())

    def requests(self, phase: ChargePhase) -> int:
        """Return the requests of all routers in a phase."""
        return sum(cells[phase].requests for cells in self._cells.values())

    def apply(self, router_id: str, phase: ChargePhase, requests: int, tokens: int) -> None:
        """Change one router's counts; for charges only."""
        cell = self.cell(router_id, phase)
        cell.requests += requests
        cell.tokens += tokens
        if cell.requests < 0 or cell.tokens < 0:
            raise AssertionError(f"{router_id} was freed twice in {phase.name}")
        self._on_change()

    def cell(self, router_id: str, phase: ChargePhase) -> _Cell:
        """Return the counts of one router in one phase; for charges only."""
        cells = self._cells.get(router_id)
        if cells is None:
            cells = self._cells[router_id] = {phase: _Cell() for phase in ChargePhase}
        return cells[phase]


class StepMeter:
    """Mean time of recent engine steps, seen from the gaps between tokens."""

    def __init__(self, *, memory_seconds: float = 0.5) -> None:
        """Start without a step.

        Args:
            memory_seconds: Time constant; after twice that without a token the engine is idle.
        """
        self._memory_seconds = memory_seconds
        self._mean_seconds = 0.0
        self._last_monotonic = -float("inf")

    def __repr__(self) -> str:
        """Show the mean."""
        return f"StepMeter(mean_seconds={self._mean_seconds:.6f})"

    def record(self, step_seconds: float, now_monotonic: float) -> None:
        """Note one step; what is not positive says nothing."""
        if step_seconds <= 0:
            return
        age_seconds = now_monotonic - self._last_monotonic
        if age_seconds > 2 * self._memory_seconds:
            self._mean_seconds = step_seconds
        else:
            share = min(1.0, step_seconds / self._memory_seconds)
            self._mean_seconds += share * (step_seconds - self._mean_seconds)
        self._last_monotonic = now_monotonic

    def mean_seconds(self, now_monotonic: float) -> float:
        """Return the mean, 0 where the engine has been idle."""
        if now_monotonic - self._last_monotonic > 2 * self._memory_seconds:
            return 0.0
        return self._mean_seconds
