"""Runs the load tools that people use against a gateway, and holds their numbers against the journal.

`make load-tools`, or `python -m benchmarks.load_tools [TOOL…]`: vllm (its own `bench serve`, from .venv-vllm), guidellm, aiperf,
inference-perf; the last three are installed into environments of their own under .run/tools at first use. The cluster is
emulated, 1 prefill and 2 decode engines at the pace of an A40.
"""

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from dataplane.agent.byte_tokenizer import SPECIAL_TOKENS, byte_tokenizer, byte_tokenizer_config
from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools

RUN = Path(".run/tools").resolve()
MODEL = "tiny"
REQUESTS, RATE, INPUT_TOKENS, OUTPUT_TOKENS = 40, 4, 60, 32
TTFT_GOAL_MS, TPOT_GOAL_MS = 500, 50
TIMEOUT_SECONDS = 400


@dataclass
class Site:
    """Where the gateway is, and the model's tokenizer."""

    url: str
    tokenizer: Path
    output: Path


@dataclass
class Seen:
    """A tool's own numbers; None where it gives none."""

    requests: int
    failed: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    good: float | None = None


def _vllm(site: Site) -> tuple[list[str], Callable[[], Seen]]:
    result = site.output / "vllm.json"
    command = [
        ".venv-vllm/bin/vllm", "bench", "serve", "--backend", "openai", "--base-url", site.url,
        "--model", MODEL, "--tokenizer", str(site.tokenizer), "--dataset-name", "random",
        "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS),
        "--num-prompts", str(REQUESTS), "--request-rate", str(RATE), "--ignore-eos",
        "--goodput", f"ttft:{TTFT_GOAL_MS}", f"tpot:{TPOT_GOAL_MS}",
        "--save-result", "--result-filename", str(result), "--disable-tqdm",
    ]  # fmt: skip

    def read() -> Seen:
        numbers = json.loads(result.read_text())
        good = numbers["request_goodput"] / numbers["request_throughput"]
        return Seen(
            numbers["completed"],
            numbers["failed"],
            numbers["mean_ttft_ms"],
            numbers["mean_tpot_ms"],
            good,
        )

    return command, read


def _guidellm(site: Site) -> tuple[list[str], Callable[[], Seen]]:
    result = site.output / "guidellm.json"
    command = [
        str(RUN / "guidellm/bin/guidellm"), "run",
        "--backend", f"kind=openai_http,target={site.url},model={MODEL},request_format=/v1/completions",
        "--tokenizer", f"kind=hf_auto,model={site.tokenizer}",
        "--profile", f"kind=constant,rate={RATE}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={result}", "--disable-console-interactive",
    ]  # fmt: skip

    def read() -> Seen:
        (benchmark,) = json.loads(result.read_text())["benchmarks"]
        metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
        return Seen(
            totals["successful"],
            totals["errored"],
            metrics["time_to_first_token_ms"]["successful"]["mean"],
            metrics["inter_token_latency_ms"]["successful"]["mean"],
        )

    return command, read


def _aiperf(site: Site) -> tuple[list[str], Callable[[], Seen]]:
    folder = site.output / "aiperf-report"
    command = [
        str(RUN / "aiperf/bin/aiperf"), "profile", "--model", MODEL, "--url", site.url,
        "--endpoint-type", "completions", "--streaming", "--tokenizer", str(site.tokenizer),
        "--request-rate", str(RATE), "--request-count", str(REQUESTS),
        "--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS),
        "--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(folder),
        "--ui", "none", "--goodput", f"time_to_first_token:{TTFT_GOAL_MS} inter_token_latency:{TPOT_GOAL_MS}",
    ]  # fmt: skip

    def read() -> Seen:
        (path,) = folder.rglob("profile_export_aiperf.json")
        numbers = json.loads(path.read_text())
        throughput = numbers["request_throughput"]["avg"]
        goodput = numbers.get("goodput", {}).get("avg")
        return Seen(
            int(numbers["request_count"]["avg"]),
            len(numbers.get("error_summary") or []),
            numbers["time_to_first_token"]["avg"],
            numbers["inter_token_latency"]["avg"],
            None if goodput is None else goodput / throughput,
        )

    return command, read


def _inference_perf(site: Site) -> tuple[list[str], Callable[[], Seen]]:
    save_tokenizer(RUN / "ascii-tokenizer", ascii_tokenizer())
    folder = site.output / "inference-perf-report"
    shutil.rmtree(folder, ignore_errors=True)
    config = {
        "api": {"type": "completion", "streaming": True},
        "server": {
            "type": "vllm",
            "model_name": MODEL,
            "base_url": site.url,
            "ignore_eos": True,
        },
        "tokenizer": {"pretrained_model_name_or_path": str(RUN / "ascii-tokenizer")},
        "data": {
            "type": "random",
            "input_distribution": _fixed(INPUT_TOKENS),
            "output_distribution": _fixed(OUTPUT_TOKENS),
        },
        "load": {
            "type": "constant",
            "num_workers": 1,
            "stages": [{"rate": RATE, "duration": REQUESTS // RATE}],
        },
        "report": {
            "request_lifecycle": {"summary": True, "per_stage": False, "per_request": False}
        },
        "storage": {"local_storage": {"path": str(folder)}},
    }
    path = site.output / "inference-perf.json"
    path.write_text(json.dumps(config))
    command = [str(RUN / "inference-perf/bin/inference-perf"), "--config_file", str(path)]

    def read() -> Seen:
        (report,) = folder.rglob("summary_lifecycle_metrics.json")
        numbers = json.loads(report.read_text())
        latency = numbers["successes"]["latency"]
        return Seen(
            numbers["successes"]["count"],
            numbers["failures"]["count"],
            latency["time_to_first_token"]["mean"] * 1e3,
            latency["time_per_output_token"]["mean"] * 1e3,
        )

    return command, read


def _fixed(tokens: int) -> dict[str, Any]:
    return {
        "min": tokens,
        "max": tokens,
        "mean": tokens,
        "std_dev": 0,
        "total_count": 2 * REQUESTS,
    }


TOOLS = {
    "vllm": _vllm,
    "guidellm": _guidellm,
    "aiperf": _aiperf,
    "inference-perf": _inference_perf,
}


def install(tool: str, package: str = "") -> None:
    """Install a tool into an environment of its own, by its name unless the package has another."""
    folder = RUN / tool
    if tool == "vllm" or (folder / "done").exists():
        return
    uv = Path(sys.executable).with_name("uv")
    # inference-perf needs a newer Python than ours.
    python = shutil.which("python3.12") or "3.12" if tool == "inference-perf" else sys.executable
    subprocess.run([uv, "venv", "-q", "--clear", "--python", python, folder], check=True)
    subprocess.run(
        [uv, "pip", "install", "-q", "--python", folder / "bin/python", package or tool],
        check=True,
    )
    (folder / "done").touch()


def ascii_tokenizer() -> Tokenizer:
    """Return one that counts ASCII text as the model does and whose every token is a character.

    inference-perf draws random tokens and gives a request up whose text is not, in 20 tries, as
    many tokens again; of random bytes two thirds of a prompt are no characters.
    """
    names = [*SPECIAL_TOKENS, *map(chr, range(0x20, 0x7F))]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer as the folder of a model that tools can load."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(byte_tokenizer_config())
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 262}')


def journal_rows(path: Path) -> list[dict[str, Any]]:
    """Requests of a journal."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["type"] == "request"]


async def run(tools: list[str]) -> int:
    """Run each tool and print a table.

    Returns:
        How many tools did not finish all of their requests.
    """
    tokenizer = RUN / "tokenizer"
    save_tokenizer(tokenizer, byte_tokenizer())
    journal = RUN / "journal.jsonl"
    journal.unlink(missing_ok=True)
    spec = ClusterSpec(
        engine="emulated",
        pools=Pools(1, 2),
        directory=RUN,
        log_level="WARNING",
        agent_settings={"model": MODEL, "max_model_tokens": 4096},
        router_settings={"journal_path": str(journal)},
    )
    print(
        "| tool | requests, failed | TTFT ms: tool, journal | TPOT ms: tool, journal "
        "| good share: tool, journal |\n|--|--|--|--|--|"
    )
    failed = 0
    async with LocalCluster(spec) as cluster:
        address = cluster.addresses.gateways[0]
        for tool in tools:
            install(tool)
            before = len(journal_rows(journal))
            command, read = TOOLS[tool](Site(f"http://{address}", tokenizer, RUN))
            with (RUN / f"{tool}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    code = await process.wait()
            await asyncio.sleep(0.5)  # the journal is written five times a second
            if code:
                print(
                    f"| {tool} | ended with {code}, see {RUN / f'{tool}.log'} | | | |", flush=True
                )
                failed += 1
                continue
            seen = read()
            failed += (seen.requests, seen.failed) != (REQUESTS, 0)
            print(line(tool, seen, journal_rows(journal)[before:]), flush=True)
    return failed


def line(tool: str, seen: Seen, rows: list[dict[str, Any]]) -> str:
    """One row of the table."""
    rows = [row for row in rows if row["status"] == "ok"]
    ttft = statistics.fmean(row["ttft_seconds"] for row in rows) * 1e3
    tpot = statistics.fmean(row["tpot_seconds"] for row in rows if row["tpot_seconds"]) * 1e3
    good = statistics.fmean(
        row["ttft_seconds"] * 1e3 <= TTFT_GOAL_MS and row["tpot_seconds"] * 1e3 <= TPOT_GOAL_MS
        for row in rows
    )
    good_seen = "-" if seen.good is None else f"{seen.good:.2f}"
    return (
        f"| {tool} | {seen.requests}, {seen.failed} | {seen.ttft_ms:.1f}, {ttft:.1f} "
        f"| {seen.tpot_ms:.2f}, {tpot:.2f} | {good_seen}, {good:.2f} |"
    )


def main() -> None:
    """Run the command line."""
    sys.exit(asyncio.run(run(sys.argv[1:] or list(TOOLS))))


if __name__ == "__main__":
    main()
