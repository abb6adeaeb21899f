"""The seam between an agent and its engine: values and small protocols.

Nothing here speaks gRPC or HTTP. An engine owns its requests: whoever asked for one closes its
stream (or cancels the coroutine) and the engine frees everything that belongs to it within a step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol


class Role(StrEnum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for others."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether it generates."""
        return self is not Role.PREFILL


class Finish(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample; None is the engine's default. Ranges: SamplingParams of the protocol."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int | None = None
    logprobs: int | None = None
    extra_json: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """One prompt to prefill and hold."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """A held KV cache.

    Attributes:
        prompt_tokens: As the engine counted them.
        cached_prompt_tokens: Of these, found in the prefix cache.
        first_token_id: What prefill sampled, where the engine says.
        engine_params: What the decode engine needs, opaque.
        lease_seconds: How long it is held, from now.
        epoch: The boot that holds it.
        hold_id: The engine's name for what it holds, for `pulled`; empty where it has none.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    first_token_id: int | None
    engine_params: bytes
    lease_seconds: float
    epoch: str
    hold_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """One generation; without engine_params the engine computes the prompt itself."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    engine_params: bytes | None = None
    want_text: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative to a generated token."""

    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a generated token, alternatives, most probable first, and its text."""

    token_id: int
    logprob: float
    top: Sequence[Alternative] = ()
    token: str = ""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Chunk:
    """What a stream brought since it was last read: one engine step or several.

    Attributes:
        token_ids: New tokens.
        text: Their text, where asked for.
        logprobs: One entry a token, where asked for.
        finish: Set on the last chunk.
        stop_reason: The stop string or token that ended it, where the engine says.
        usage: Set on the last chunk.
        step_seconds: Time of the last step in it; 0 where unknown.
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[Logprob] = ()
    finish: Finish | None = None
    stop_reason: str = ""
    usage: TokenUsage | None = None
    step_seconds: float = 0.0


class TokenStream(Protocol):
    """One generation under way."""

    async def read(self) -> Chunk:
        """Wait for at least one token or the end, and return everything that is there.

        Not to be called again after a chunk with `finish` set.

        Raises:
            SteelyardError: the request failed; nothing of it is left on the engine.
        """
        ...

    async def close(self) -> None:
        """End the request on the engine, unless it has ended; safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What an engine is, for one boot; fields as in EngineInfo of the protocol."""

    epoch: str
    model: str
    model_revision: str
    dtype: str
    max_model_tokens: int
    vocab_size: int
    block_tokens: int
    kv_total_tokens: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_batched_tokens: int
    pairing_key: str
    lease_seconds: float
    profile: str
    engine_kind: str
    engine_version: str
    tokenizer_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasure:
    """How an engine is doing.

    Attributes:
        healthy: Whether it answers.
        running: Requests it runs.
        waiting: Requests it has queued.
        kv_used_tokens: KV in use.
        preemptions: Since its boot.
        epoch: The boot that was measured; another than before means that it has restarted.
        age_seconds: How old the measurement is.
    """

    healthy: bool
    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    preemptions: int = 0
    epoch: str = ""
    age_seconds: float = 0.0


class Prefiller(Protocol):
    """Computes prompts for other engines."""

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Compute a prompt and hold its KV; cancelling frees it."""
        ...


class Decoder(Protocol):
    """Generates."""

    async def decode(self, job: DecodeJob) -> TokenStream:
        """Start a generation."""
        ...


class Releaser(Protocol):
    """Frees hand-offs that nobody will pull."""

    async def release(self, engine_params: bytes, prompt: Sequence[int]) -> bool:
        """Free a held KV cache; False where it stays until its lease ends."""
        ...


class Measurable(Protocol):
    """Says what it is and how it is doing."""

    async def describe(self) -> EngineDescription:
        """Return what it is, in its present boot."""
        ...

    async def measure(self) -> EngineMeasure:
        """Return how it is doing; never raises, an engine that does not answer is unhealthy."""
        ...


class Engine(Prefiller, Decoder, Releaser, Measurable, Protocol):
    """Everything an agent asks of an engine."""

    def pulled(self) -> Collection[str] | None:
        """Hold ids of what is not held any more, since the last call; None: it does not say."""
        ...

    async def tokenizer(self) -> bytes | None:
        """Return the model's tokenizer.json; None where it has none."""
        ...

    async def tokenizer_config(self) -> bytes | None:
        """Return tokenizer_config.json, chat template included; None where the model has none."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            NotSupported: it cannot.
        """
        ...

    async def close(self) -> None:
        """Let go of the engine; a spawned one ends."""
        ...
