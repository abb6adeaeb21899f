"""A vLLM OpenAI server on this host behind the agent's seam: token ids in, token ids out.

What it relies on and where that was seen: docs/engine-findings.md.
"""

import asyncio
from collections.abc import Collection, Coroutine, Sequence

import msgspec
import structlog

from dataplane.agent.engine import (
    DecodeJob,
    EngineDescription,
    EngineMeasure,
    PrefillJob,
    PrefillResult,
    TokenStream,
)
from dataplane.agent.errors import EngineFailed, EngineUnavailable, HandoffRefused, NotSupported
from dataplane.agent.fixed_length import with_fixed_length
from dataplane.agent.validation import check_sampling
from dataplane.agent.vllm_describe import (
    Fallbacks,
    ModelFiles,
    VllmConfig,
    describe_vllm,
    read_models,
    read_server_info,
    read_version,
)
from dataplane.agent.vllm_http import COMPLETIONS, VllmHttp, unreadable
from dataplane.agent.vllm_metrics import MetricsSample, read_metrics
from dataplane.agent.vllm_shapes import (
    HandoffFields,
    PrefillAnswer,
    decode_body,
    handoff_fields,
    nudge_body,
    prefill_body,
    refused_body,
)
from dataplane.agent.vllm_stream import VllmStream
from dataplane.core.handoff import HandoffRefusal
from servicekit.clock import Clock
from servicekit.errors import NotFound, SteelyardError

_PREFILL = msgspec.json.Decoder(PrefillAnswer)
_NUDGE_AFTER_SECONDS = 0.3
_SERVER_INFO_TIMEOUT_SECONDS = 60.0
_RESTARTED = "restarted"
_SOME_TOKEN_ID = 1


class EngineVllm:
    """One server; `start` before use. Prefill and decode may both be asked of it."""

    def __init__(
        self,
        http: VllmHttp,
        clock: Clock,
        *,
        fallbacks: Fallbacks,
        metrics_interval_seconds: float,
        fixed_lengths: bool = False,
    ) -> None:
        self._http = http
        self._clock = clock
        self._fallbacks = fallbacks
        self._fixed_lengths = fixed_lengths
        self._metrics_interval_seconds = metrics_interval_seconds
        self._description: EngineDescription | None = None
        self._files = ModelFiles("")
        self._start_seconds = ""
        self._engine_id = ""
        self._sample: MetricsSample | None = None
        self._sampled_at = 0.0
        self._known_peers: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("dataplane.agent.vllm")

    def __repr__(self) -> str:
        """Show where it is and which boot is known."""
        epoch = self._description.epoch if self._description else None
        return f"EngineVllm({self._http!r}, epoch={epoch})"

    async def start(self) -> None:
        """Learn what the server is and watch its metrics.

        Raises:
            SteelyardError: it does not answer, or not as we know it.
        """
        await self.describe()
        self._run(self._watch_metrics())

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Compute a prompt and hold its KV; cancelling closes the connection, which frees it."""
        description = self._known()
        check_sampling(job.sampling)
        body = prefill_body(job, description.model)
        data = await self._http.post(COMPLETIONS, body, job.request_id)
        try:
            answer = _PREFILL.decode(data)
        except msgspec.DecodeError as error:
            raise unreadable("a prefill's answer", error) from error
        params = bytes(answer.kv_transfer_params)
        if params == b"null":
            raise NotSupported("the engine gave no hand-off: it has no KV connector")
        await self._notice_boot(handoff_fields(params).remote_engine_id)
        usage = answer.usage.value()
        token_ids = answer.choices[0].token_ids if answer.choices else None
        return PrefillResult(
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            first_token_id=token_ids[0] if token_ids else None,
            engine_params=params,
            lease_seconds=self._known().lease_seconds,
            epoch=self._known().epoch,
        )

    async def decode(self, job: DecodeJob) -> TokenStream:
        """Start a generation.

        Raises:
            HandoffRefused: the hand-off's blocks are not those of this prompt; vLLM would answer
                with wrong tokens, or end with every request in it.
        """
        description = self._known()
        check_sampling(job.sampling)
        if self._fixed_lengths:
            job = with_fixed_length(job)
        fields = handoff_fields(job.engine_params) if job.engine_params is not None else None
        if fields is not None:
            _check_blocks(fields, len(job.prompt), description.block_tokens)
        body = decode_body(job, description.model)
        answer = await self._http.stream(COMPLETIONS, body, job.request_id)
        if fields is not None:
            self._known_peers.add(fields.remote_engine_id)
        return VllmStream(job, answer, self._clock)

    async def release(self, engine_params: bytes, prompt: Sequence[int]) -> bool:
        """Free a held KV cache of a prefill engine that this one may pull from.

        vLLM frees blocks when a decode engine says so; one says so, without taking a slot or moving
        KV, when it refuses a request that came with the hand-off. A decode engine that has never
        spoken to that prefill engine and is idle sends it only with its next step: it gets one.
        """
        del prompt
        fields = handoff_fields(engine_params)
        description = self._known()
        if fields.remote_engine_id == self._engine_id:
            return False  # an engine cannot be its own peer
        status = await self._http.status_of(
            COMPLETIONS, refused_body(engine_params, description.model, _SOME_TOKEN_ID)
        )
        if status < 400 or status >= 500:
            raise EngineFailed(f"the engine answered {status} to a request that it must refuse")
        if fields.remote_engine_id not in self._known_peers:
            self._known_peers.add(fields.remote_engine_id)
            self._run(self._nudge(description.model))
        return True

    async def describe(self) -> EngineDescription:
        """Ask the server what it is; called again when it has restarted."""
        model = read_models(await self._http.get("/v1/models"))
        version = read_version(await self._http.get("/version"))
        config = await self._server_info()
        sample = await self._take_sample()
        self._files = ModelFiles(model.root)
        self._description = await asyncio.to_thread(
            describe_vllm,
            model=model,
            version=version,
            config=config,
            sample=sample,
            files=self._files,
            fallbacks=self._fallbacks,
        )
        self._start_seconds = sample.start_seconds
        transfer = config.kv_transfer_config if config else None
        self._engine_id = transfer.engine_id if transfer else ""
        return self._description

    async def measure(self) -> EngineMeasure:
        """Return the last reading of its metrics; unhealthy while it does not answer."""
        sample, description = self._sample, self._description
        if sample is None or description is None:
            return EngineMeasure(healthy=False)
        same_boot = sample.start_seconds == self._start_seconds
        return EngineMeasure(
            healthy=True,
            running=sample.running,
            waiting=sample.waiting,
            kv_used_tokens=round(sample.kv_used_share * description.kv_total_tokens),
            preemptions=sample.preemptions,
            epoch=description.epoch if same_boot else _RESTARTED,
            age_seconds=self._clock.monotonic() - self._sampled_at,
        )

    def pulled(self) -> Collection[str] | None:
        """Return None: vLLM does not say which hand-offs were pulled."""
        return None

    async def tokenizer(self) -> bytes | None:
        """Return the model's tokenizer.json from its files on this host."""
        return self._files.tokenizer()

    async def tokenizer_config(self) -> bytes | None:
        """Return tokenizer_config.json with the model's chat template in it."""
        return self._files.tokenizer_config()

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            NotSupported: the server is not in dev mode.
        """
        try:
            await self._http.post("/reset_prefix_cache", b"{}")
        except NotFound as error:
            raise NotSupported(
                "the engine has no /reset_prefix_cache: start it with VLLM_SERVER_DEV_MODE=1"
            ) from error

    async def close(self) -> None:
        """Stop watching and close the connections; requests under way are aborted by that."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    def _known(self) -> EngineDescription:
        if self._description is None:
            raise EngineUnavailable("the engine has not answered yet")
        return self._description

    async def _server_info(self) -> VllmConfig | None:
        """Read the server's configuration; None where it is not in dev mode."""
        try:
            data = await self._http.get(
                "/server_info?config_format=json", timeout_seconds=_SERVER_INFO_TIMEOUT_SECONDS
            )
        except NotFound:
            self._log.warning("engine_not_in_dev_mode", hint="set VLLM_SERVER_DEV_MODE=1")
            return None
        return read_server_info(data)

    async def _notice_boot(self, engine_id: str) -> None:
        """Look again at a server whose hand-off names another boot than we know."""
        if self._engine_id and engine_id != self._engine_id:
            await self.describe()
        self._engine_id = self._engine_id or engine_id

    async def _watch_metrics(self) -> None:
        while True:
            await self._clock.sleep(self._metrics_interval_seconds)
            try:
                await self._take_sample()
            except SteelyardError as error:
                if self._sample is not None:
                    self._log.warning("engine_lost", reason=error.message)
                self._sample = None

    async def _take_sample(self) -> MetricsSample:
        asked_at = self._clock.monotonic()
        text = (await self._http.get("/metrics")).decode()
        if self._sample is None:
            self._log.info("engine_answers")
        self._sample, self._sampled_at = read_metrics(text), asked_at
        return self._sample

    async def _nudge(self, model: str) -> None:
        await self._clock.sleep(_NUDGE_AFTER_SECONDS)
        try:
            await self._http.post(COMPLETIONS, nudge_body(model, _SOME_TOKEN_ID))
        except SteelyardError as error:
            self._log.info("nudge_failed", reason=error.message)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_blocks(fields: HandoffFields, prompt_tokens: int, block_tokens: int) -> None:
    """Refuse a hand-off whose size is not the prompt's."""
    if fields.remote_num_tokens is not None and fields.remote_num_tokens != prompt_tokens:
        raise HandoffRefused(
            HandoffRefusal.PROMPT_MISMATCH,
            f"the hand-off is of {fields.remote_num_tokens} tokens, the prompt has {prompt_tokens}",
        )
    groups = fields.remote_block_ids or []
    wanted = -(-prompt_tokens // block_tokens) if block_tokens else 0
    if len(groups) == 1 and wanted and len(groups[0]) != wanted:
        raise HandoffRefused(
            HandoffRefusal.PROMPT_MISMATCH,
            f"the hand-off has {len(groups[0])} blocks, the prompt takes {wanted}",
        )
