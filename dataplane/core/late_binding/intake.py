"""What becomes of a request that comes in: its deadline, when it may overtake, on time or late."""

from dataplane.core.late_binding.dispatcher import Dispatcher
from dataplane.core.late_binding.engines import Engines
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.late_binding.waiting import Waiting
from dataplane.core.request import Request

_SHORTEST_TTFT_SECONDS = 1e-3
_FIFO_PROMPT_SECONDS = 0.0015
_FIFO_START_SECONDS = 0.03


class Intake:
    """Turns requests into what waits, and keeps the virtual queue that fairness is measured by."""

    def __init__(
        self, settings: LateBindingSettings, engines: Engines, dispatcher: Dispatcher
    ) -> None:
        self._settings = settings
        self._terms = settings.fairness.terms
        self._engines = engines
        self._dispatcher = dispatcher
        self._sequence = 0
        self._fifo_ends_at = 0.0

    def take(self, request: Request, now: float) -> Waiting:
        """Return what waits; it is doomed where it cannot make its target any more."""
        ttft, deadline, cost = self._due(request)
        wait = self._terms.wait_factor * self._fifo_wait(cost, now)
        due_by = request.arrived_at + max(wait, self._terms.ttft_factor * ttft)
        self._sequence += 1
        item = Waiting(request, self._sequence, deadline, ttft, due_by, deadline - cost)
        item.doomed = item.latest_start < self._given_up_before(now)
        return item

    def doomed(self, request: Request, now: float) -> bool:
        """Tell whether a request that came in now could not make its target any more."""
        _, deadline, cost = self._due(request)
        return deadline - cost < self._given_up_before(now)

    def deadline(self, request: Request) -> float:
        """Return when a request's prefill must be over, whatever engine it is on."""
        return self._due(request)[1]

    def _due(self, request: Request) -> tuple[float, float, float]:
        """Return a request's TTFT target, when its prefill must be over, and what that takes."""
        tokens = request.prompt_tokens
        ttft = min(
            max(request.targets.ttft_seconds, _SHORTEST_TTFT_SECONDS),
            self._settings.longest_ttft_seconds,
        )
        deadline = request.arrived_at + ttft - self._engines.transfer.seconds(tokens)
        return ttft, deadline, self._engines.fleet.prompt_seconds(tokens)

    def _given_up_before(self, now: float) -> float:
        start_by = (
            now + self._engines.fleet.fixed_seconds + self._dispatcher.after_prefill_seconds()
        )
        return start_by - self._settings.doomed_after_seconds

    def _fifo_wait(self, prompt_seconds: float, now: float) -> float:
        """Return how long a prompt would wait in one queue over all engines served in order."""
        share = (prompt_seconds + _FIFO_PROMPT_SECONDS) / max(1, len(self._engines.usable))
        self._fifo_ends_at = max(now, self._fifo_ends_at) + share
        return self._fifo_ends_at - now + _FIFO_START_SECONDS
