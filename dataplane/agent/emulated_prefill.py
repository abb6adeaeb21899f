"""The prefill side of an emulated engine: prompts computed, KV held, blocks read by others."""

import asyncio
from collections.abc import Callable, Collection

import msgspec

from dataplane.agent.engine import PrefillJob, PrefillResult
from dataplane.agent.side_channel import FREE, PULL, Ask, Content, SideChannel
from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.tokens import (
    Continuation,
    StopRules,
    Vocabulary,
    mix,
    text_state,
)
from dataplane.core.emulation.values import SequenceRequest, StepOutcome

CORE_PREFIX = "prefill/"
"""Keeps a prefill apart from a decode of the same request on an engine that does both."""


class HandoffBlob(msgspec.Struct, frozen=True):
    """What an emulated prefill engine gives to a decode engine: where its blocks lie."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int
    remote_block_tokens: int


class PrefillSide:
    """Prefills prompts on the core and answers the side channel."""

    def __init__(
        self,
        core: BatchingEngine,
        *,
        epoch: str,
        host: str,
        block_tokens: int,
        lease_seconds: float,
        vocabulary: Vocabulary,
        now: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._core = core
        self._epoch = epoch
        self._host = host
        self._block_tokens = block_tokens
        self._lease_seconds = lease_seconds
        self._vocabulary = vocabulary
        self._now = now
        self._wake = wake
        self._side = SideChannel(self._answer)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._contents: dict[str, int] = {}
        self._count = 0

    async def start(self) -> None:
        """Open the side channel."""
        await self._side.start(self._host)

    async def close(self) -> None:
        """Close the side channel; decode engines that want blocks see a dead peer."""
        await self._side.close()
        for future in self._waiting.values():
            future.cancel()

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Compute a prompt and hold its KV; cancelling frees it."""
        self._count += 1
        core_id = f"{CORE_PREFIX}{job.request_id}/{self._count}"
        future = self._waiting[core_id] = asyncio.get_running_loop().create_future()
        self._core.submit(
            SequenceRequest(request_id=core_id, prompt_tokens=len(job.prompt), hold=True)
        )
        self._wake()
        try:
            await future
        except asyncio.CancelledError:
            self._core.abort(core_id)
            self._core.free_held(core_id)
            self._wake()
            raise
        finally:
            del self._waiting[core_id]
        state = text_state(job.prompt)
        self._contents[core_id] = state
        return self._result(job, core_id, state)

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Tell who waits that their prompt is computed."""
        for core_id in outcome.held:
            future = self._waiting.get(core_id)
            if future is not None and not future.done():
                future.set_result(None)

    def release(self, core_id: str) -> bool:
        """Free held KV; False where none is held."""
        self._wake()
        return self._core.free_held(core_id)

    def take_gone(self) -> Collection[str]:
        """Return the hold ids of KV that was pulled or freed since the last call."""
        gone = [core_id for core_id in self._contents if not self._core.holds(core_id)]
        for core_id in gone:
            del self._contents[core_id]
        return gone

    def _result(self, job: PrefillJob, core_id: str, state: int) -> PrefillResult:
        blob = HandoffBlob(
            remote_engine_id=self._epoch,
            remote_request_id=core_id,
            remote_host=self._host,
            remote_port=self._side.port,
            remote_num_tokens=len(job.prompt),
            remote_block_tokens=self._block_tokens,
        )
        first = Continuation(state, StopRules(max_tokens=1, min_tokens=1), self._vocabulary)
        return PrefillResult(
            prompt_tokens=len(job.prompt),
            cached_prompt_tokens=0,
            first_token_id=first.between(0, 1)[0],
            engine_params=msgspec.json.encode(blob),
            lease_seconds=self._lease_seconds,
            epoch=self._epoch,
            hold_id=core_id,
        )

    def _answer(self, ask: Ask) -> Content | None:
        """Read, free or keep blocks; what is not held any more reads as something else."""
        self._core.expire(self._now())
        mine = ask.engine_id == self._epoch
        if ask.op == PULL:
            held = mine and self._core.holds(ask.request_id)
            state = self._contents.get(ask.request_id) if held else None
            return Content(ask.request_id, mix(len(ask.request_id)) if state is None else state)
        if not mine:
            return None
        if ask.op == FREE:
            self.release(ask.request_id)
        else:
            self._core.extend_held(ask.request_id, self._now())
        return None
