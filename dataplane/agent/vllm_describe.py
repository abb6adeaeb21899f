"""What a vLLM server is, from /v1/models, /version, /server_info, /metrics and its model's files."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from huggingface_hub import try_to_load_from_cache

from dataplane.agent.engine import EngineDescription
from dataplane.agent.errors import EngineAnswerUnreadable
from dataplane.agent.vllm_metrics import MetricsSample

T = TypeVar("T")

_SAMPLE_BYTES = 1 << 20
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}


class _Model(msgspec.Struct):
    id: str
    root: str = ""
    max_model_len: int = 0


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class ModelConfig(msgspec.Struct):
    """Of /server_info."""

    dtype: str = ""
    quantization: str | None = None


class CacheConfig(msgspec.Struct):
    """Of /server_info."""

    block_size: int | None = None
    cache_dtype: str = ""
    kv_cache_size_tokens: int | None = None
    prefix_caching_hash_algo: str = ""


class ParallelConfig(msgspec.Struct):
    """Of /server_info."""

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1


class SchedulerConfig(msgspec.Struct):
    """Of /server_info."""

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0


class KvTransferConfig(msgspec.Struct):
    """Of /server_info."""

    kv_connector: str | None = None
    engine_id: str = ""
    kv_connector_extra_config: dict[str, Any] = {}


class VllmConfig(msgspec.Struct):
    """Of /server_info: what decides whether engines can hand KV to each other."""

    model_config: ModelConfig = msgspec.field(default_factory=ModelConfig)
    cache_config: CacheConfig = msgspec.field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = msgspec.field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    kv_transfer_config: KvTransferConfig | None = None
    instance_id: str = ""


class _ServerInfo(msgspec.Struct):
    vllm_config: VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What /v1/models says of the base model."""

    name: str
    root: str
    max_model_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallbacks:
    """What to believe where the server does not say (it says all of it in dev mode).

    Attributes:
        dtype: Of weights and KV.
        max_num_seqs: Sequences a step can hold.
        max_batched_tokens: Tokens a step can compute.
        lease_seconds: How long hand-offs are held.
        profile: Name of its step times; empty: made from model, dtype and version.
        kv_bytes_per_token: Of the model that the engine stands in for; 0: the served model's own.
        clock_rate: Seconds that the agent counts while one passes; the server's own are real.
    """

    dtype: str
    max_num_seqs: int
    max_batched_tokens: int
    lease_seconds: float
    profile: str
    kv_bytes_per_token: int = 0
    clock_rate: float = 1.0


def read_models(data: bytes) -> ServedModel:
    """Read /v1/models.

    Raises:
        EngineAnswerUnreadable: it has another shape.
    """
    models = _decode(data, _Models, "/v1/models").data
    if not models:
        raise EngineAnswerUnreadable("the engine serves no model")
    return ServedModel(
        name=models[0].id, root=models[0].root, max_model_tokens=models[0].max_model_len
    )


def read_version(data: bytes) -> str:
    """Read /version."""
    return _decode(data, _Version, "/version").version


def read_server_info(data: bytes) -> VllmConfig:
    """Read /server_info?config_format=json."""
    return _decode(data, _ServerInfo, "/server_info").vllm_config


class ModelFiles:
    """The model's files, where they lie on this host."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find(self, name: str) -> Path | None:
        """Return a file of the model: of its folder, or of the local Hugging Face cache."""
        path = Path(self._root) / name
        if path.is_file():
            return path
        if Path(self._root).is_absolute() or not self._root:
            return None
        cached = try_to_load_from_cache(self._root, name)
        return Path(cached) if isinstance(cached, str) else None

    def tokenizer(self) -> bytes | None:
        """Return tokenizer.json."""
        path = self.find("tokenizer.json")
        return path.read_bytes() if path else None

    def tokenizer_config(self) -> bytes | None:
        """Return tokenizer_config.json; a chat_template.jinja beside it is put in, as it wins."""
        path = self.find("tokenizer_config.json")
        if path is None:
            return None
        template = self.find("chat_template.jinja")
        if template is None:
            return path.read_bytes()
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config["chat_template"] = template.read_text(encoding="utf-8")
        return msgspec.json.encode(config)

    def config(self) -> dict[str, Any]:
        """Return config.json; empty where there is none."""
        path = self.find("config.json")
        if path is None:
            return {}
        config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        text: dict[str, Any] = config.get("text_config") or {}
        return config | text

    def revision(self) -> str:
        """Return a hash of config.json and of both ends of each file of weights; empty if unknown.

        Whole weights would take minutes to read; their ends tell revisions apart.
        """
        config = self.find("config.json")
        if config is None:
            return ""
        digest = hashlib.sha256(config.read_bytes())
        for path in sorted(config.parent.glob("*.safetensors")):
            with path.open("rb") as file:
                digest.update(f"{path.name}/{path.stat().st_size}".encode())
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(path.stat().st_size - _SAMPLE_BYTES, 0))
                digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]


def describe_vllm(
    *,
    model: ServedModel,
    version: str,
    config: VllmConfig | None,
    sample: MetricsSample,
    files: ModelFiles,
    fallbacks: Fallbacks,
) -> EngineDescription:
    """Put the sources together; `config` is None for a server without dev mode."""
    config = config or VllmConfig()
    transfer = config.kv_transfer_config or KvTransferConfig()
    dtype = config.model_config.dtype.removeprefix("torch.") or fallbacks.dtype
    block_tokens = config.cache_config.block_size or sample.block_tokens
    revision = files.revision()
    tokenizer = files.tokenizer()
    model_config = files.config()
    stated_lease = transfer.kv_connector_extra_config.get("kv_lease_duration")
    lease = fallbacks.lease_seconds
    if stated_lease is not None:
        lease = float(stated_lease) * fallbacks.clock_rate
    kv_bytes = _kv_bytes(model_config, dtype, config.cache_config.cache_dtype)
    layout = [model.name, revision, version, dtype, block_tokens, *_layout(config, transfer)]
    return EngineDescription(
        epoch=_epoch(config, transfer, sample),
        model=model.name,
        model_revision=revision,
        dtype=dtype,
        max_model_tokens=model.max_model_tokens,
        vocab_size=int(model_config.get("vocab_size", 0)),
        block_tokens=block_tokens,
        kv_total_tokens=config.cache_config.kv_cache_size_tokens or sample.kv_total_tokens,
        kv_bytes_per_token=fallbacks.kv_bytes_per_token or kv_bytes,
        max_num_seqs=config.scheduler_config.max_num_seqs or fallbacks.max_num_seqs,
        max_batched_tokens=(
            config.scheduler_config.max_num_batched_tokens or fallbacks.max_batched_tokens
        ),
        pairing_key=hashlib.sha256(msgspec.json.encode(layout)).hexdigest()[:16],
        lease_seconds=lease,
        profile=fallbacks.profile or f"{model.name}-{dtype}-vllm-{version}",
        engine_kind="vllm",
        engine_version=version,
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest() if tokenizer else "",
    )


def _layout(config: VllmConfig, transfer: KvTransferConfig) -> list[Any]:
    """List what else two engines must share for one to read the other's KV.

    NIXL's own compatibility hash leaves the block size out, and no endpoint tells it.
    """
    extra = transfer.kv_connector_extra_config
    parallel = config.parallel_config
    return [
        config.model_config.quantization,
        config.cache_config.cache_dtype,
        config.cache_config.prefix_caching_hash_algo,
        parallel.pipeline_parallel_size,
        parallel.tensor_parallel_size,
        parallel.decode_context_parallel_size,
        transfer.kv_connector,
        sorted((key, value) for key, value in extra.items() if key != "kv_lease_duration"),
    ]


def _epoch(config: VllmConfig, transfer: KvTransferConfig, sample: MetricsSample) -> str:
    """Name the boot: the connector's id of it, else vLLM's, else when the server started."""
    return transfer.engine_id or config.instance_id or f"start-{sample.start_seconds}"


def _kv_bytes(model_config: dict[str, Any], dtype: str, cache_dtype: str) -> int:
    """Return layers · 2 · KV heads · head size · bytes; 0 for models that do not say."""
    layers = model_config.get("num_hidden_layers", 0)
    heads = model_config.get("num_attention_heads", 0)
    kv_heads = model_config.get("num_key_value_heads", heads)
    head_size = model_config.get("head_dim") or (
        model_config.get("hidden_size", 0) // heads if heads else 0
    )
    kind = dtype if cache_dtype in ("", "auto") else cache_dtype.partition("_")[0]
    return int(layers * 2 * kv_heads * head_size * _DTYPE_BYTES.get(kind, 0))


def _decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise EngineAnswerUnreadable(f"{what} has another shape: {error}") from error
