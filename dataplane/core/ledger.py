"""What this router has in flight, in requests and tokens, by instance.

Charged on dispatch, moved on by streamed tokens, the prefill charge freed at hand-off, everything
freed exactly once on any exit. Never drained by the clock: a request that stalls still holds what
it holds.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from dataplane.core.cluster import Instance


@dataclass(slots=True)
class Entry:
    """What one request is charged, and where; slots are None where nothing is charged."""

    prompt_tokens: int
    prefill_slot: int | None = None
    decode_slot: int | None = None
    generated_tokens: int = 0
    remaining_tokens: float = 0.0


class Columns:
    """The ledger's sums, one entry an instance, in the order of the current roster."""

    __slots__ = (
        "decode_kv_tokens",
        "decode_remaining_tokens",
        "decode_requests",
        "prefill_requests",
        "prefill_tokens",
    )

    def __init__(self, count: int) -> None:
        zeros = bytes(8 * count)
        self.prefill_requests = array("d", zeros)
        self.prefill_tokens = array("d", zeros)
        self.decode_requests = array("d", zeros)
        self.decode_kv_tokens = array("d", zeros)
        self.decode_remaining_tokens = array("d", zeros)

    def copied(self) -> "Columns":
        """Return a copy that does not move with the ledger."""
        copy = Columns(0)
        for name in self.__slots__:
            setattr(copy, name, array("d", getattr(self, name)))
        return copy


class Ledger:
    """Requests in flight and their sums; all operations O(1) but for a change of roster."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._keys: list[tuple[str, str]] = []
        self.columns = Columns(0)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __repr__(self) -> str:
        return f"<Ledger {len(self._entries)} in flight over {len(self._keys)} instances>"

    def request_ids(self) -> Iterable[str]:
        """Return the ids of all requests in flight."""
        return self._entries.keys()

    def reseat(self, instances: Iterable[Instance]) -> None:
        """Take a new roster: keep what is in flight on boots that stay, drop what is on others.

        A dropped charge belongs to an engine that is gone; its request stays in the ledger until
        its exit is reported.
        """
        keys = [(instance.instance_id, instance.epoch) for instance in instances]
        if keys == self._keys:
            return
        old_keys, self._keys = self._keys, keys
        position = {key: slot for slot, key in enumerate(keys)}
        moved = [position.get(key) for key in old_keys]
        self.columns = Columns(len(keys))
        for entry in self._entries.values():
            if entry.prefill_slot is not None:
                entry.prefill_slot = moved[entry.prefill_slot]
            if entry.decode_slot is not None:
                entry.decode_slot = moved[entry.decode_slot]
            self._add(entry, 1)

    def charge_prefill(self, request_id: str, slot: int, prompt_tokens: int) -> None:
        """Charge a prompt to a prefill instance."""
        entry = self._entry(request_id, prompt_tokens)
        self._free_prefill(entry)
        entry.prefill_slot = slot
        self.columns.prefill_requests[slot] += 1
        self.columns.prefill_tokens[slot] += entry.prompt_tokens

    def charge_decode(
        self, request_id: str, slot: int, prompt_tokens: int, remaining_tokens: float
    ) -> None:
        """Charge a generation to a decode instance: its slot, its KV, its remaining output."""
        entry = self._entry(request_id, prompt_tokens)
        self._free_decode(entry)
        entry.decode_slot = slot
        entry.remaining_tokens = remaining_tokens
        self._add_decode(entry, 1)

    def finish_prefill(self, request_id: str) -> None:
        """Free the prefill charge at hand-off; unknown ids are ignored."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._free_prefill(entry)

    def stream(self, request_id: str, tokens: int, remaining_tokens: float) -> None:
        """Move a generation on by `tokens`; `remaining_tokens` is the new estimate, > 0."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.generated_tokens += tokens
        slot = entry.decode_slot
        if slot is not None:
            self.columns.decode_kv_tokens[slot] += tokens
            self.columns.decode_remaining_tokens[slot] += remaining_tokens - entry.remaining_tokens
        entry.remaining_tokens = remaining_tokens

    def generated_tokens(self, request_id: str) -> int:
        """Return the tokens streamed so far; 0 for unknown ids."""
        entry = self._entries.get(request_id)
        return 0 if entry is None else entry.generated_tokens

    def decode_slot(self, request_id: str) -> int | None:
        """Return where a request's decode is charged; None where it is not."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.decode_slot

    def close(self, request_id: str) -> bool:
        """Free everything of a request; False where it was freed before or never charged."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self._free_prefill(entry)
        self._free_decode(entry)
        return True

    def _entry(self, request_id: str, prompt_tokens: int) -> Entry:
        entry = self._entries.get(request_id)
        if entry is None:
            entry = self._entries[request_id] = Entry(prompt_tokens)
        return entry

    def _free_prefill(self, entry: Entry) -> None:
        if entry.prefill_slot is not None:
            self.columns.prefill_requests[entry.prefill_slot] -= 1
            self.columns.prefill_tokens[entry.prefill_slot] -= entry.prompt_tokens
            entry.prefill_slot = None

    def _free_decode(self, entry: Entry) -> None:
        if entry.decode_slot is not None:
            self._add_decode(entry, -1)
            entry.decode_slot = None

    def _add(self, entry: Entry, sign: int) -> None:
        if entry.prefill_slot is not None:
            self.columns.prefill_requests[entry.prefill_slot] += sign
            self.columns.prefill_tokens[entry.prefill_slot] += sign * entry.prompt_tokens
        if entry.decode_slot is not None:
            self._add_decode(entry, sign)

    def _add_decode(self, entry: Entry, sign: int) -> None:
        slot = entry.decode_slot
        if slot is None:
            return
        kv_tokens = entry.prompt_tokens + entry.generated_tokens
        self.columns.decode_requests[slot] += sign
        self.columns.decode_kv_tokens[slot] += sign * kv_tokens
        remaining = self.columns.decode_remaining_tokens[slot] + sign * entry.remaining_tokens
        # Estimates are fractions: sums drift by rounding, so an idle instance is set to zero.
        idle = self.columns.decode_requests[slot] == 0
        self.columns.decode_remaining_tokens[slot] = 0.0 if idle else remaining
