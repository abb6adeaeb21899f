"""The decode side of an emulated engine: streams fed by the core, KV pulled from others."""

import asyncio
from collections.abc import Callable, Coroutine

import msgspec
from tokenizers import Tokenizer

from dataplane.agent.emulated_prefill import HandoffBlob
from dataplane.agent.emulated_stream import EmulatedStream
from dataplane.agent.engine import DecodeJob, Sampling
from dataplane.agent.errors import DuplicateRequest, EngineFailed
from dataplane.agent.fixed_length import output_tokens
from dataplane.agent.side_channel import FREE, RENEW, Peer
from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.tokens import (
    MASK,
    Continuation,
    StopRules,
    Vocabulary,
    corrupt,
    mix,
    text_state,
)
from dataplane.core.emulation.values import PullNews, SequenceRequest, Step, StepOutcome
from servicekit.errors import InvalidArgument

CORE_PREFIX = "decode/"


class DecodeSide:
    """Generates on the core."""

    def __init__(
        self,
        core: BatchingEngine,
        *,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        block_tokens: int,
        time_scale: float,
        wake: Callable[[], None],
    ) -> None:
        self._core = core
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._time_scale = time_scale
        self._wake = wake
        self._streams: dict[str, EmulatedStream] = {}
        self._blobs: dict[str, HandoffBlob] = {}
        self._peers: dict[tuple[str, int], Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def decode(self, job: DecodeJob) -> EmulatedStream:
        """Start a generation.

        Raises:
            DuplicateRequest: its id is live here.
            InvalidArgument: its hand-off is unreadable, or its length cannot be.
        """
        core_id = CORE_PREFIX + job.request_id
        if core_id in self._streams:
            raise DuplicateRequest(f"request {job.request_id} is generating here already")
        stream = EmulatedStream(job, self._tokenizer, self.abort)
        rules = _rules(job)
        output_tokens = job.max_tokens
        if job.engine_params is not None:
            self._blobs[core_id] = read_blob(job.engine_params)
        else:
            output_tokens = self._give_content(stream, rules, text_state(job.prompt))
        self._streams[core_id] = stream
        self._core.submit(
            SequenceRequest(
                request_id=core_id,
                prompt_tokens=len(job.prompt),
                output_tokens=output_tokens,
                pull=job.engine_params is not None,
            )
        )
        self._wake()
        return stream

    def abort(self, request_id: str) -> None:
        """End a generation in whatever phase."""
        core_id = CORE_PREFIX + request_id
        self._streams.pop(core_id, None)
        self._core.abort(core_id)
        self._wake()

    def on_outcome(self, outcome: StepOutcome, step: Step) -> None:
        """Feed the streams."""
        step_seconds = step.duration_seconds / self._time_scale
        streams = self._streams
        for core_id in outcome.progressed:
            stream = streams.get(core_id)
            if stream is not None:
                stream.progress(step_seconds)
        for core_id in outcome.finished:
            stream = streams.pop(core_id, None)
            if stream is not None:
                stream.complete()

    def on_news(self, news: PullNews) -> None:
        """Fetch what pulls bring, and tell prefill engines what they may free."""
        for core_id in news.started:
            self._start(self._fetch(core_id))
        for core_id in news.done:
            blob = self._blobs.pop(core_id, None)
            if blob is not None:
                self._start(self._tell(FREE, blob))

    async def renew(self) -> None:
        """Keep the leases of hand-offs that are queued here, as vLLM's heartbeats do."""
        for blob in list(self._blobs.values()):
            await self._tell(RENEW, blob)

    async def free(self, blob: HandoffBlob) -> None:
        """Tell a prefill engine that nobody will pull."""
        await self._tell(FREE, blob)

    async def close(self) -> None:
        """End all streams and close all connections."""
        for stream in list(self._streams.values()):
            stream.fail(EngineFailed("the engine was shut down"))
        self._streams.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self._peers.values():
            await peer.close()

    def _give_content(self, stream: EmulatedStream, rules: StopRules, state: int) -> int:
        """Tell a stream what its KV holds; returns how long its text will be, tokens."""
        stream.continuation = Continuation(state, rules, self._vocabulary)
        return stream.continuation.length_tokens()

    async def _fetch(self, core_id: str) -> None:
        """Ask the prefill engine what the blocks hold."""
        blob, stream = self._blobs.get(core_id), self._streams.get(core_id)
        if blob is None or stream is None:
            return
        try:
            state = await self._peer(blob).pull(blob.remote_engine_id, blob.remote_request_id)
        except OSError as error:
            self.abort(stream.job.request_id)
            stream.fail(
                EngineFailed(
                    f"KV of request {stream.job.request_id} could not be pulled: {error}",
                    reason="KV_PULL_FAILED",
                )
            )
            return
        if blob.remote_block_tokens != self._block_tokens:
            state = corrupt(state, blob.remote_block_tokens)
        output_tokens = self._give_content(stream, _rules(stream.job), state)
        self._core.content_arrived(core_id, output_tokens)
        self._wake()

    async def _tell(self, op: str, blob: HandoffBlob) -> None:
        await self._peer(blob).tell(op, blob.remote_engine_id, blob.remote_request_id)

    def _peer(self, blob: HandoffBlob) -> Peer:
        key = (blob.remote_host, blob.remote_port)
        if key not in self._peers:
            self._peers[key] = Peer(*key)
        return self._peers[key]

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def read_blob(engine_params: bytes) -> HandoffBlob:
    """Read what a prefill engine gave.

    Raises:
        InvalidArgument: it is not from an emulated engine.
    """
    try:
        return msgspec.json.decode(engine_params, type=HandoffBlob)
    except msgspec.DecodeError as error:
        raise InvalidArgument.of("handoff.engine_params", f"unreadable: {error}") from error


def _rules(job: DecodeJob) -> StopRules:
    """Translate sampling parameters; a seed counts only where something is sampled."""
    sampling: Sampling = job.sampling
    seed_state = 0
    if sampling.seed is not None and sampling.temperature != 0:
        seed_state = mix(sampling.seed & MASK)
    return StopRules(
        max_tokens=job.max_tokens,
        min_tokens=sampling.min_tokens or 0,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        seed_state=seed_state,
        output_tokens=output_tokens(sampling),
    )
