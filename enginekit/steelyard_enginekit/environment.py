"""The environment and the flags that a vLLM server on CPU wants.

Every entry is here because its absence was seen to hurt:

- `VLLM_ENABLE_V1_MULTIPROCESSING=0` with the `uni` executor: the worker lives in the engine core, so
  a server is two processes and 0.9 GB instead of three and 1.3 GB.
- `TORCHDYNAMO_DISABLE=1`: otherwise the first request with logprobs compiles a kernel for 19 s, with
  `--enforce-eager` too.
- `OMP_NUM_THREADS=1`: greedy tokens are equal either way; logprobs are bitwise equal between a pair
  and a solo engine only with one thread (up to about 1,000 prompt tokens).
- `UCX_TLS`: shared memory alone makes NIXL's backend fail, TCP must be among the transports.
- `VLLM_HOST_IP` and `VLLM_NIXL_SIDE_CHANNEL_HOST`: what a prefill engine tells a decode engine to
  connect to. On one host it is the loopback; across hosts it must be an address the peer reaches.
- `VLLM_NIXL_SIDE_CHANNEL_PORT` must differ between the engines of a host.
- `VLLM_SERVER_DEV_MODE=1` opens /reset_prefix_cache and /server_info, and much more that must
  not face a network: keep such a server on the loopback or behind its agent.
"""

import json
from collections.abc import Mapping

PREFILL, DECODE, SOLO = "prefill", "decode", "solo"
ROLES = (PREFILL, DECODE, SOLO)

_KV_ROLES = {PREFILL: "kv_producer", DECODE: "kv_consumer"}

# Must be in the environment before vLLM, torch or UCX are imported, and the same for every server
# that is forked from one image.
PROCESS_ENVIRONMENT: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # vLLM sets this one itself, but only when NIXL is not imported yet, and the warm image has it.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_TLS": "tcp,sm,self",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


def server_environment(*, host: str, side_channel_port: int | None) -> dict[str, str]:
    """The variables that differ from server to server."""
    variables = {"VLLM_HOST_IP": host, "VLLM_NIXL_SIDE_CHANNEL_HOST": host}
    if side_channel_port is not None:
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
    return variables


def kv_transfer_config(role: str, overrides: Mapping[str, object] | None = None) -> str | None:
    """The `--kv-transfer-config` of a role as JSON; None for a solo engine.

    Block sizes must be equal on both sides: with 32 against 64 the handshake succeeds, HTTP says
    200 and the tokens are wrong.
    """
    if role not in _KV_ROLES:
        return None
    config: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLES[role],
        "kv_buffer_device": "cpu",
    }
    return json.dumps(config | dict(overrides or {}))


def server_arguments(
    *,
    host: str,
    port: int,
    role: str,
    flags: list[str],
    kv_overrides: Mapping[str, object] | None = None,
) -> list[str]:
    """VLLM's argument list: defaults for a small CPU engine first, then `flags`, which win.

    64 MiB of KV cache hold 65,536 tokens of the tiny model. The block size must be a multiple of 32
    on CPU; vLLM's default there is 128.
    """
    arguments = [
        "--host", host,
        "--port", str(port),
        "--enforce-eager",
        "--dtype", "float32",
        "--seed", "0",
        "--max-model-len", "2048",
        "--max-num-seqs", "16",
        "--max-num-batched-tokens", "2048",
        "--kv-cache-memory-bytes", str(64 << 20),
        "--distributed-executor-backend", "uni",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    transfer = kv_transfer_config(role, kv_overrides)
    if transfer is not None:
        arguments += ["--kv-transfer-config", transfer]
    return arguments + flags
