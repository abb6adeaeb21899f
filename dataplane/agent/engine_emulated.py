"""An engine without a GPU behind the agent's seam: the batching core in real time.

It gives misuse the answers that vLLM gives: a hand-off pulled after its lease, of another boot, or
by an engine with other blocks ends normally, with wrong tokens; a dead prefill engine is an error.
Only the agent's guards stand between that and a client.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random

import structlog
from tokenizers import Tokenizer

from dataplane.agent.byte_tokenizer import EOS_TOKEN_ID, speakable_ids
from dataplane.agent.emulated_decode import DecodeSide, read_blob
from dataplane.agent.emulated_driver import MAX_TIME_SCALE, Driver
from dataplane.agent.emulated_prefill import PrefillSide
from dataplane.agent.engine import (
    DecodeJob,
    EngineDescription,
    EngineMeasure,
    PrefillJob,
    PrefillResult,
    TokenStream,
)
from dataplane.agent.errors import EngineUnavailable
from dataplane.agent.fine_timer import FineTimer
from dataplane.agent.validation import check_decode, check_prefill
from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.tokens import Vocabulary
from dataplane.core.emulation.values import BatchingConfig, PullNews, Step, StepOutcome
from servicekit.clock import Clock

_RENEWALS_PER_LEASE = 6
VERSION = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedOptions:
    """What an emulated engine is.

    Attributes:
        model: Served name.
        profile: What its step times are called.
        batching: Its limits and prices, in engine seconds, but for the lease: that is real time,
            since the routers and agents around the engine are not scaled.
        max_model_tokens: Longest prompt plus output; fits in the KV cache.
        vocab_size: Ids are below it.
        mean_output_tokens: Mean length of texts that end by themselves.
        time_scale: Engine seconds a real second; inf for as fast as the machine can.
        seed: Of jitter and stalls.
        slowness_schedule: (seconds after its start, factor on every step), in order; each holds
            until the next.
        host: Where other engines reach its side channel.
    """

    model: str
    profile: str
    batching: BatchingConfig
    max_model_tokens: int
    vocab_size: int
    mean_output_tokens: float
    time_scale: float
    seed: int
    host: str
    slowness_schedule: tuple[tuple[float, float], ...] = ()


class EngineEmulated:
    """See the module; `start` before use."""

    def __init__(
        self,
        options: EmulatedOptions,
        clock: Clock,
        tokenizer: Tokenizer,
        tokenizer_config: bytes | None = None,
    ) -> None:
        self._clock = clock
        self._constants = options.batching.constants
        self._slowness_schedule = options.slowness_schedule
        self._log = structlog.get_logger("dataplane.agent.emulated")
        self._tokenizer_json = tokenizer.to_str().encode()
        self._tokenizer_config = tokenizer_config
        self._description = _describe(options, uuid.uuid4().hex[:16], self._tokenizer_json)
        time_scale = min(options.time_scale, MAX_TIME_SCALE)
        batching = options.batching
        scaled = replace(batching, lease_seconds=batching.lease_seconds * time_scale)
        self._timer: FineTimer | None = None
        self._core = BatchingEngine(scaled, Random(options.seed))
        self._driver = Driver(
            self._core,
            clock,
            time_scale=time_scale,
            sleep=self._sleep,
            on_outcome=self._on_outcome,
            on_news=self._on_news,
        )
        vocabulary = Vocabulary(
            alphabet=speakable_ids(tokenizer, vocab_size=options.vocab_size),
            eos_token_id=EOS_TOKEN_ID,
            mean_output_tokens=options.mean_output_tokens,
        )
        self._prefill = PrefillSide(
            self._core,
            epoch=self._description.epoch,
            host=options.host,
            block_tokens=batching.block_tokens,
            lease_seconds=batching.lease_seconds,
            vocabulary=vocabulary,
            now=self._driver.now,
            wake=self._driver.wake,
        )
        self._decode = DecodeSide(
            self._core,
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            block_tokens=batching.block_tokens,
            time_scale=time_scale,
            wake=self._driver.wake,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        """Show the engine's state."""
        return f"EngineEmulated(epoch={self._description.epoch}, {self._core!r})"

    async def start(self) -> None:
        """Open the side channel and start stepping."""
        await self._prefill.start()
        self._timer = FineTimer()
        self._tasks = [
            asyncio.create_task(self._driver.run()),
            asyncio.create_task(self._renew_leases()),
            asyncio.create_task(self._keep_schedule()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._note_crash)

    def slow(self, factor: float) -> None:
        """Make every step and hand-off from now on take that many times what it was made with."""
        self._core.reprice(self._constants.slowed(factor))
        self._log.info("emulated_engine_repriced", factor=factor)

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Compute a prompt and hold its KV; cancelling frees it."""
        self._check_alive()
        check_prefill(job, self._description)
        return await self._prefill.prefill(job)

    async def decode(self, job: DecodeJob) -> TokenStream:
        """Start a generation."""
        self._check_alive()
        check_decode(job, self._description)
        return self._decode.decode(job)

    async def release(self, engine_params: bytes, prompt: Sequence[int]) -> bool:
        """Free a held KV cache, here or at the prefill engine that holds it."""
        del prompt
        blob = read_blob(engine_params)
        if blob.remote_engine_id == self._description.epoch:
            return self._prefill.release(blob.remote_request_id)
        await self._decode.free(blob)
        return True

    async def describe(self) -> EngineDescription:
        """Return what it is."""
        return self._description

    async def measure(self) -> EngineMeasure:
        """Return how it is doing."""
        return EngineMeasure(
            healthy=self._alive,
            running=self._core.running,
            waiting=self._core.waiting,
            kv_used_tokens=self._core.kv_used_tokens,
            preemptions=self._core.preemptions,
            epoch=self._description.epoch,
        )

    def pulled(self) -> Collection[str] | None:
        """Hold ids of what is not held any more, since the last call."""
        return self._prefill.take_gone()

    async def tokenizer(self) -> bytes | None:
        """Return its tokenizer.json."""
        return self._tokenizer_json

    async def tokenizer_config(self) -> bytes | None:
        """Return the tokenizer_config.json that it was made with."""
        return self._tokenizer_config

    async def reset_prefix_cache(self) -> None:
        """Do nothing: it has no prefix cache, so every prompt meets an empty one."""

    async def close(self) -> None:
        """Stop stepping; everything under way fails."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._decode.close()
        await self._prefill.close()
        if self._timer is not None:
            self._timer.close()

    async def _sleep(self, seconds: float) -> None:
        assert self._timer is not None
        await self._timer.sleep(seconds)

    @property
    def _alive(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def _note_crash(self, task: asyncio.Task[None]) -> None:
        """Say why it is unhealthy from now on."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.critical("emulated_engine_crashed", exc_info=error)

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineUnavailable("the emulated engine is not running")

    def _on_outcome(self, outcome: StepOutcome, step: Step) -> None:
        self._decode.on_outcome(outcome, step)
        if outcome.held:
            self._prefill.on_outcome(outcome)

    def _on_news(self, news: PullNews) -> None:
        self._decode.on_news(news)

    async def _keep_schedule(self) -> None:
        """Slow down and speed up as was set; never ends by itself, for the engine lives as long."""
        passed = 0.0
        for after_seconds, factor in self._slowness_schedule:
            await self._clock.sleep(after_seconds - passed)
            passed = after_seconds
            self.slow(factor)
        await asyncio.get_running_loop().create_future()

    async def _renew_leases(self) -> None:
        while True:
            await self._clock.sleep(self._description.lease_seconds / _RENEWALS_PER_LEASE)
            await self._decode.renew()


def _describe(options: EmulatedOptions, epoch: str, tokenizer_json: bytes) -> EngineDescription:
    """Say what the options make."""
    batching = options.batching
    dtype = "bfloat16"
    parts = (options.model, dtype, batching.block_tokens, batching.kv_bytes_per_token, VERSION)
    layout = "/".join(str(part) for part in ("emulated", *parts))
    return EngineDescription(
        epoch=epoch,
        model=options.model,
        model_revision="",
        dtype=dtype,
        max_model_tokens=options.max_model_tokens,
        vocab_size=options.vocab_size,
        block_tokens=batching.block_tokens,
        kv_total_tokens=batching.kv_total_tokens // batching.block_tokens * batching.block_tokens,
        kv_bytes_per_token=batching.kv_bytes_per_token,
        max_num_seqs=batching.max_num_seqs,
        max_batched_tokens=batching.max_batched_tokens,
        pairing_key=hashlib.sha256(layout.encode()).hexdigest()[:16],
        lease_seconds=batching.lease_seconds,
        profile=options.profile,
        engine_kind="emulated",
        engine_version=VERSION,
        tokenizer_sha256=hashlib.sha256(tokenizer_json).hexdigest(),
    )
