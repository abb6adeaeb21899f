"""The few numbers that the agent reads out of vLLM's /metrics: a line scan, no full parse.

The page has 60 KB; a Prometheus parser takes tens of milliseconds for it, this a fraction of one.
"""

import re
from dataclasses import dataclass

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """One reading, summed over the engines (data-parallel ranks) of the server.

    Attributes:
        start_seconds: Text of the server's start time; another one is another boot.
        running: Requests in the batch.
        waiting: Requests queued.
        kv_used_share: Mean share of the KV cache in use.
        preemptions: Since the boot.
        block_tokens: Tokens of a KV block; 0 where the server does not say.
        kv_total_tokens: Tokens of the KV cache; 0 where the server does not say.
    """

    start_seconds: str
    running: int
    waiting: int
    kv_used_share: float
    preemptions: int
    block_tokens: int
    kv_total_tokens: int


def read_metrics(text: str) -> MetricsSample:
    """Read a /metrics page; what is missing is 0."""
    start, sums, counts = "", dict[str, float](), dict[str, int]()
    block_tokens = kv_total_tokens = 0
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name = line[5 : line.index("{")] if "{" in line else line[5:].partition(" ")[0]
            if name in _WANTED:
                sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
                counts[name] = counts.get(name, 0) + 1
            elif name == "cache_config_info":
                labels = dict(_LABEL.findall(line))
                block_tokens = _number(labels, "block_size")
                kv_total_tokens += _number(labels, "kv_cache_size_tokens") or (
                    block_tokens * _number(labels, "num_gpu_blocks")
                )
        elif line.startswith("process_start_time_seconds "):
            start = line.rpartition(" ")[2]
    return MetricsSample(
        start_seconds=start,
        running=round(sums.get("num_requests_running", 0)),
        waiting=round(sums.get("num_requests_waiting", 0)),
        kv_used_share=sums.get("kv_cache_usage_perc", 0.0) / counts.get("kv_cache_usage_perc", 1),
        preemptions=round(sums.get("num_preemptions_total", 0)),
        block_tokens=block_tokens,
        kv_total_tokens=kv_total_tokens,
    )


_WANTED = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
    }
)


def _number(labels: dict[str, str], name: str) -> int:
    value = labels.get(name, "")
    return int(value) if value.isdigit() else 0
