"""The state every scheduler keeps of its pool: the roster, the ledger, and the view over both."""

from dataclasses import dataclass

from dataplane.core.cluster import (
    Instance,
    Measurements,
    Role,
    Roster,
    Snapshot,
    State,
    empty_measurements,
)
from dataplane.core.ledger import Ledger
from dataplane.core.request import Request
from dataplane.core.slo import DEFAULT_SLO
from dataplane.core.view import VECTOR_FROM, ClusterView

_SURVIVAL_STRIDE_TOKENS = 16
_TYPICAL_GAIN = 0.02


@dataclass(slots=True)
class Progress:
    """How far a generation is, and what is left of it."""

    request: Request
    generated_tokens: int = 0
    remaining_tokens: float = 0.0
    next_survival_at: int = 0


class Pool:
    """One pool's instances and this router's part in them."""

    def __init__(self, *, vector_from: int = VECTOR_FROM) -> None:
        self.ledger = Ledger()
        self.roster = Roster(version=-1, instances=(), constants={}, slo=DEFAULT_SLO)
        self.sequence = 0
        self.stale = True
        self._vector_from = vector_from
        self._slots: dict[str, int] = {}
        self._progress: dict[str, Progress] = {}
        self._typical_remaining_tokens = 100.0
        self.view = self._make_view(empty_measurements(0))

    def __repr__(self) -> str:
        return f"<Pool of {len(self.roster.instances)}, {len(self.ledger)} in flight>"

    def refresh(self, snapshot: Snapshot) -> None:
        """Take a new snapshot; without a new roster this replaces columns and nothing else."""
        self.sequence = snapshot.sequence
        self.stale = snapshot.stale
        measured = snapshot.measurements
        if snapshot.stale:
            measured = empty_measurements(len(snapshot.roster.instances))
        if snapshot.roster is self.roster or snapshot.roster.version == self.roster.version:
            self.view.measured = measured
            return
        self.roster = snapshot.roster
        self.ledger.reseat(self.roster.instances)
        self._slots = {i.instance_id: slot for slot, i in enumerate(self.roster.instances)}
        self.view = self._make_view(measured)

    def instance(self, instance_id: str) -> Instance | None:
        """Return an instance of the roster; None where it is not there any more."""
        slot = self._slots.get(instance_id)
        return None if slot is None else self.roster.instances[slot]

    def slot(self, instance_id: str) -> int | None:
        """Return an instance's place in all columns."""
        return self._slots.get(instance_id)

    def decoders(self, pairing_key: str) -> list[Instance]:
        """Return the instances that can pull what an engine with that key has computed."""
        return [
            i
            for i in self.roster.instances
            if i.role is not Role.PREFILL
            and i.pairing_key == pairing_key
            and i.state is not State.STALE
        ]

    def committed_kv_tokens(self, instance: Instance) -> float:
        """Return the KV tokens committed at an instance, by whichever router."""
        slot = self._slots[instance.instance_id]
        return (
            self.view.own.decode_kv_tokens[slot] + self.view.measured.other_decode_kv_tokens[slot]
        )

    def decode_of(self, request_id: str) -> Instance | None:
        """Return where a request's decode is charged; the emptiest decode instance before that."""
        slot = self.ledger.decode_slot(request_id)
        if slot is not None:
            return self.roster.instances[slot]
        return min(
            (i for i in self.roster.instances if i.role is not Role.PREFILL),
            key=self.committed_kv_tokens,
            default=None,
        )

    def charge_prefill(self, request: Request, instance_id: str) -> None:
        """Charge a prompt to a prefill instance that is in the roster."""
        self.ledger.charge_prefill(
            request.request_id, self._slots[instance_id], request.prompt_tokens
        )

    def charge_decode(self, request: Request, instance_id: str) -> None:
        """Charge a generation to a decode instance that is in the roster."""
        remaining = request.length.remaining_tokens(0)
        self._progress[request.request_id] = Progress(
            request, 0, remaining, _SURVIVAL_STRIDE_TOKENS
        )
        self.ledger.charge_decode(
            request.request_id, self._slots[instance_id], request.prompt_tokens, remaining
        )
        self._typical_remaining_tokens += _TYPICAL_GAIN * (
            remaining / 2.0 - self._typical_remaining_tokens
        )
        self.view.typical_remaining_tokens = self._typical_remaining_tokens

    def streamed(self, request_id: str, tokens: int) -> None:
        """Move a generation on; the survival estimate is renewed every few tokens."""
        progress = self._progress.get(request_id)
        if progress is None:
            return
        progress.generated_tokens += tokens
        if progress.generated_tokens >= progress.next_survival_at:
            remaining = progress.request.length.remaining_tokens(progress.generated_tokens)
            progress.next_survival_at = progress.generated_tokens + _SURVIVAL_STRIDE_TOKENS
        else:
            remaining = max(1.0, progress.remaining_tokens - tokens)
        progress.remaining_tokens = remaining
        self.ledger.stream(request_id, tokens, remaining)

    def generated_tokens(self, request_id: str) -> int:
        """Return the tokens streamed so far."""
        progress = self._progress.get(request_id)
        return 0 if progress is None else progress.generated_tokens

    def close(self, request_id: str) -> bool:
        """Free everything of a request; False where there was nothing."""
        self._progress.pop(request_id, None)
        return self.ledger.close(request_id)

    def _make_view(self, measured: Measurements) -> ClusterView:
        view = ClusterView(
            self.roster, measured, self.ledger.columns, vector_from=self._vector_from
        )
        view.typical_remaining_tokens = self._typical_remaining_tokens
        return view
