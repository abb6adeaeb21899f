"""One JSON line a request: what was known, what was decided, how it went."""

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import structlog

from dataplane.core.cluster import Instance, Roster
from dataplane.core.request import Request
from dataplane.core.view import ClusterView
from servicekit.clock import Clock

_FLUSH_SECONDS = 0.2
_KEPT_DECISIONS = 2_000


class Decision(msgspec.Struct, frozen=True):
    """What a decision rested on: enough to make it again, or to show every candidate's price.

    `view` stands still. Policies with a turn of their own (round robin) show their present one.
    """

    request: Request
    policy: str
    pool: str
    sequence: int
    snapshot_age_seconds: float
    view: ClusterView
    blind: bool


class Whereabouts(Protocol):
    """Where a request went; filled in as it goes."""

    prefill: Instance | None
    decode: Instance | None


class Journal:
    """Appends rows to a file, off every request's way, and keeps recent decisions for Explain.

    Args:
        path: The file; None keeps no rows.
        clock: Paces the writing.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._rows: list[bytes] = []
        self._decisions: OrderedDict[str, tuple[Decision, Whereabouts]] = OrderedDict()
        self._encoder = msgspec.json.Encoder()
        self._roster_versions: dict[str, int] = {}
        self._file: BinaryIO | None = None
        self._log = structlog.get_logger("dataplane.router.journal")

    @property
    def enabled(self) -> bool:
        """Whether rows are written."""
        return self._path is not None

    def remember(self, decision: Decision, went: Whereabouts) -> None:
        """Keep a decision for as long as it is among the last few thousand."""
        self._decisions[decision.request.request_id] = decision, went
        if len(self._decisions) > _KEPT_DECISIONS:
            self._decisions.popitem(last=False)

    def recall(self, request_id: str) -> tuple[Decision, Whereabouts] | None:
        """Return a decision that is still kept, and where its request went."""
        return self._decisions.get(request_id)

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it is on disk within a fraction of a second."""
        if self._path is not None:
            self._rows.append(self._encoder.encode(row))

    def write_roster(self, pool: str, roster: Roster) -> None:
        """Add a row for a roster that decisions from here on rest on."""
        if self._path is None or self._roster_versions.get(pool) == roster.version:
            return
        self._roster_versions[pool] = roster.version
        self.write({"type": "roster", "pool": pool, **roster_row(roster)})

    async def run(self) -> None:
        """Write until cancelled; what has gathered is written on the way out."""
        writing: asyncio.Future[None] | None = None
        try:
            while True:
                await self._clock.sleep(_FLUSH_SECONDS)
                data = self._take()
                if data:
                    loop = asyncio.get_running_loop()
                    writing = loop.run_in_executor(None, self._write_out, data)
                    await asyncio.shield(writing)
        finally:
            if writing is not None:
                await writing
            self._write_out(self._take())
            if self._file is not None:
                self._file.close()

    def _take(self) -> bytes:
        rows, self._rows = self._rows, []
        return b"".join(row + b"\n" for row in rows)

    def _write_out(self, data: bytes) -> None:
        if not data or self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError as error:
            # Serving goes on without its journal; the operator is told once a flush.
            self._log.error("journal_not_written", path=str(self._path), error=str(error))


def roster_row(roster: Roster) -> dict[str, Any]:
    """Return a roster in plain values."""
    return {
        "roster_version": roster.version,
        "instances": [
            {
                "id": i.instance_id,
                "epoch": i.epoch,
                "role": i.role.value,
                "state": i.state.value,
                "pairing_key": i.pairing_key,
                "profile": i.profile,
                "scale": i.scale,
                "kv_total_tokens": i.kv_total_tokens,
                "max_num_seqs": i.max_num_seqs,
                "max_batched_tokens": i.max_batched_tokens,
                "max_model_tokens": i.max_model_tokens,
                "block_tokens": i.block_tokens,
                "kv_bytes_per_token": i.kv_bytes_per_token,
            }
            for i in roster.instances
        ],
        "constants": {
            profile: {"version": priced.version, **msgspec.to_builtins(priced.constants)}
            for profile, priced in roster.constants.items()
        },
    }


def view_row(view: ClusterView) -> dict[str, list[float]]:
    """Return the columns a decision rested on, in the order of the roster."""
    own, measured = view.own, view.measured
    return {
        "own_prefill_requests": own.prefill_requests.tolist(),
        "own_prefill_tokens": own.prefill_tokens.tolist(),
        "own_decode_requests": own.decode_requests.tolist(),
        "own_decode_kv_tokens": own.decode_kv_tokens.tolist(),
        "own_decode_remaining_tokens": own.decode_remaining_tokens.tolist(),
        "other_prefill_requests": measured.other_prefill_requests.tolist(),
        "other_prefill_tokens": measured.other_prefill_tokens.tolist(),
        "other_decode_requests": measured.other_decode_requests.tolist(),
        "other_decode_kv_tokens": measured.other_decode_kv_tokens.tolist(),
    }
