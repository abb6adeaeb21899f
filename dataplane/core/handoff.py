"""Which hand-offs may reach an engine, and which are held.

An engine that is given a hand-off whose blocks were freed, overwritten, or laid out differently
answers normally and with wrong tokens. So every rule here errs towards refusing: a refused hand-off
costs a new prefill, an accepted wrong one a wrong answer.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum


class HandoffRefusal(Enum):
    """Why a hand-off must not reach the engine; the value is the reason that the caller sees."""

    EXPIRED = "HANDOFF_EXPIRED"
    """Its lease is over, or nearly."""
    CONSUMED = "HANDOFF_CONSUMED"
    """It was given to this engine before."""
    FOREIGN_EPOCH = "HANDOFF_FOREIGN_EPOCH"
    """It belongs to an earlier boot of its prefill engine."""
    PROMPT_MISMATCH = "HANDOFF_PROMPT_MISMATCH"
    """It holds another prompt."""
    PAIR_MISMATCH = "PAIR_MISMATCH"
    """Its engine and this one do not lay out KV alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTicket:
    """A hand-off without what only the engines understand.

    Attributes:
        handoff_id: Unique.
        prefill_instance_id: Where the KV lies.
        prefill_epoch: The boot of that instance.
        pairing_key: Of that engine.
        prompt_tokens: Tokens held.
        expire_unix_seconds: End of the lease, by the prefill agent's wall clock.
        prompt_digest: `prompt_digest` of the prompt; empty where nobody made one.
    """

    handoff_id: str
    prefill_instance_id: str
    prefill_epoch: str
    pairing_key: str
    prompt_tokens: int
    expire_unix_seconds: float
    prompt_digest: bytes = b""

    def holds(self, prompt: Sequence[int]) -> bool:
        """Say whether it is this prompt's, as far as can be told."""
        if len(prompt) != self.prompt_tokens:
            return False
        return not self.prompt_digest or self.prompt_digest == prompt_digest(prompt)


def prompt_digest(prompt: Sequence[int]) -> bytes:
    """Return 16 bytes that tell one prompt from another; ids are below 2^32."""
    return hashlib.blake2b(array("I", prompt).tobytes(), digest_size=16).digest()


class HandoffBook:
    """What a decode agent remembers of hand-offs, so that none is used wrongly.

    Used ids are remembered for twice their lease: after that they are refused as expired anyway.
    Of every prefill instance the last epoch is remembered; hand-offs of an epoch that it has
    replaced are refused.
    """

    def __init__(self, *, pairing_key: str, margin_seconds: float, remember_seconds: float) -> None:
        """Start with no memory.

        Args:
            pairing_key: Of this agent's engine.
            margin_seconds: A hand-off must be good for longer than this: the clocks of two
                machines differ, and the engine needs time to ask for the blocks.
            remember_seconds: How long after its expiry a used id is remembered.
        """
        self._pairing_key = pairing_key
        self._margin_seconds = margin_seconds
        self._remember_seconds = remember_seconds
        self._consumed: OrderedDict[str, float] = OrderedDict()
        self._epoch: dict[str, tuple[str, float]] = {}
        """By prefill instance: its last epoch, and the latest expiry seen of it."""
        self._replaced_epochs: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        """Show how much is remembered."""
        return f"HandoffBook(consumed={len(self._consumed)}, instances={len(self._epoch)})"

    def set_pairing_key(self, pairing_key: str) -> None:
        """Take over the key of a restarted engine; what was consumed stays remembered."""
        self._pairing_key = pairing_key

    def admit(
        self,
        ticket: HandoffTicket,
        prompt: Sequence[int] | None,
        *,
        now_unix_seconds: float,
        valid_for_seconds: float | None = None,
    ) -> HandoffRefusal | None:
        """Decide on a hand-off and, if it may be used, remember it as used.

        Args:
            ticket: The hand-off.
            prompt: What it is to be used for; None where it is only to be freed.
            now_unix_seconds: Wall clock of this machine.
            valid_for_seconds: How long it is still good by the sender's monotonic clock, where
                the sender says; beats a skewed wall clock in one direction only: towards refusal.
        """
        refusal = self._check(ticket, now_unix_seconds, valid_for_seconds)
        if refusal is None and prompt is not None and not ticket.holds(prompt):
            refusal = HandoffRefusal.PROMPT_MISMATCH
        if refusal is None:
            self._forget(now_unix_seconds)
            self._consumed[ticket.handoff_id] = ticket.expire_unix_seconds
            self._learn_epoch(ticket)
        return refusal

    def _check(
        self, ticket: HandoffTicket, now_unix_seconds: float, valid_for_seconds: float | None
    ) -> HandoffRefusal | None:
        """Apply the rules in the order that helps the caller most."""
        if ticket.pairing_key != self._pairing_key:
            return HandoffRefusal.PAIR_MISMATCH
        if self._is_replaced(ticket):
            return HandoffRefusal.FOREIGN_EPOCH
        if ticket.handoff_id in self._consumed:
            return HandoffRefusal.CONSUMED
        if ticket.expire_unix_seconds - now_unix_seconds <= self._margin_seconds:
            return HandoffRefusal.EXPIRED
        if valid_for_seconds is not None and valid_for_seconds <= 0:
            return HandoffRefusal.EXPIRED
        return None

    def _is_replaced(self, ticket: HandoffTicket) -> bool:
        """Say whether its boot is over; of two boots, the one that gave leases last lives."""
        instance_id, epoch = ticket.prefill_instance_id, ticket.prefill_epoch
        if (instance_id, epoch) in self._replaced_epochs:
            return True
        known, latest_unix_seconds = self._epoch.get(instance_id, (epoch, 0.0))
        return known != epoch and ticket.expire_unix_seconds < latest_unix_seconds

    def _learn_epoch(self, ticket: HandoffTicket) -> None:
        """Note which boot of the prefill instance is the current one."""
        instance_id, epoch = ticket.prefill_instance_id, ticket.prefill_epoch
        known, latest_unix_seconds = self._epoch.get(instance_id, (epoch, 0.0))
        if known != epoch:
            self._replaced_epochs.add((instance_id, known))
            latest_unix_seconds = 0.0
        self._epoch[instance_id] = (epoch, max(latest_unix_seconds, ticket.expire_unix_seconds))

    def _forget(self, now_unix_seconds: float) -> None:
        """Drop what the expiry rule covers by now; oldest first, amortised constant time."""
        horizon = now_unix_seconds - self._remember_seconds
        while self._consumed:
            handoff_id, expire_unix_seconds = next(iter(self._consumed.items()))
            if expire_unix_seconds > horizon:
                return
            del self._consumed[handoff_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldHandoff:
    """A hand-off whose KV this agent's engine holds.

    Attributes:
        ticket: The hand-off.
        request_id: The request that was prefilled; a retry may hold a second one.
        hold_id: The engine's own name for what it holds; empty where it has none.
        engine_params: What the engine gave, for a release.
        since_seconds: When it began, by the agent's monotonic clock.
    """

    ticket: HandoffTicket
    request_id: str
    hold_id: str
    engine_params: bytes
    since_seconds: float


class HeldTable:
    """What a prefill agent's engine holds, oldest first; every entry leaves exactly once."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, HeldHandoff] = OrderedDict()

    def __repr__(self) -> str:
        """Show how much is held."""
        return f"HeldTable(held={len(self._held)}, tokens={self.tokens})"

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tokens(self) -> int:
        """Prompt tokens held in all."""
        return sum(held.ticket.prompt_tokens for held in self._held.values())

    def add(self, held: HeldHandoff) -> None:
        """Note a new hand-off."""
        self._held[held.ticket.handoff_id] = held

    def find(self, handoff_id: str) -> HeldHandoff | None:
        """Return a hand-off that is held; None where it is not (any more)."""
        return self._held.get(handoff_id)

    def of_request(self, request_id: str) -> list[HeldHandoff]:
        """Return the hand-offs of a request."""
        return [held for held in self._held.values() if held.request_id == request_id]

    def remove(self, handoff_id: str) -> HeldHandoff | None:
        """Take out one that was released; None where it is not held (any more)."""
        return self._held.pop(handoff_id, None)

    def remove_holds(self, hold_ids: Collection[str]) -> list[HeldHandoff]:
        """Take out those that the engine, by its own names, does not hold any more."""
        gone = [held for held in self._held.values() if held.hold_id in hold_ids]
        return [self._held.pop(held.ticket.handoff_id) for held in gone]

    def expire(self, now_unix_seconds: float) -> list[HeldHandoff]:
        """Take out all whose lease has ended."""
        return [
            self._held.pop(held.ticket.handoff_id)
            for held in list(self._held.values())
            if held.ticket.expire_unix_seconds <= now_unix_seconds
        ]

    def trim(self, most_tokens: int, *, seen_seconds: float) -> list[HeldHandoff]:
        """Take out the oldest until at most `most_tokens` are held.

        For engines that do not say which hand-off was pulled but do say how much KV is in use:
        hand-offs are pulled about in order.

        Args:
            most_tokens: KV in use when it was measured.
            seen_seconds: When that was; what was held later stays out of it.
        """
        old = [held for held in self._held.values() if held.since_seconds < seen_seconds]
        tokens = sum(held.ticket.prompt_tokens for held in old)
        gone: list[HeldHandoff] = []
        for held in old:
            if tokens <= most_tokens:
                break
            tokens -= held.ticket.prompt_tokens
            gone.append(self._held.pop(held.ticket.handoff_id))
        return gone

    def clear(self) -> list[HeldHandoff]:
        """Take all out: the engine has restarted."""
        gone = list(self._held.values())
        self._held.clear()
        return gone
