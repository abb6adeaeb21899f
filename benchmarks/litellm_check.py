"""Puts LiteLLM's proxy before a gateway and holds what comes through against what the gateway says itself.

`make litellm-check`. LiteLLM is installed into an environment of its own under .run/tools at first use. The cluster is emulated,
1 prefill and 2 decode engines at ten times an A40's pace; the same greedy requests go to both doors.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai

from benchmarks.load_tools import MODEL, RUN, install, journal_rows
from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.ports import free_port

# A release before 1.108 is reported as tampered with.
PACKAGE = "litellm[proxy]>=1.108"
GHOST = "ghost"
START_SECONDS = 120
CHAT = {"messages": [{"role": "user", "content": "say something"}], "max_tokens": 24}
PROMPT = {"prompt": "Once upon a time", "max_tokens": 24}
HEADERS = {
    "x-request-id": "litellm-check-7",
    "x-steelyard-slo-class": "tight",
    "x-steelyard-decision": "1",
}


@dataclass
class Site:
    """Both doors, and the journal behind them."""

    direct: openai.AsyncOpenAI
    through: openai.AsyncOpenAI
    journal: Path


class MismatchError(AssertionError):
    """Raised when LiteLLM's answer is not what the gateway says; whoever maintains this looks at the client."""


def same(direct: object, through: object) -> str:
    """Return what both doors say.

    Raises:
        MismatchError: They differ.
    """
    if direct != through:
        raise MismatchError(f"the gateway says {direct!r}, LiteLLM {through!r}")
    return f"{through}"


async def _whole_chat(client: openai.AsyncOpenAI) -> tuple[object, ...]:
    answer = await client.chat.completions.create(model=MODEL, temperature=0, **CHAT)  # type: ignore[call-overload]
    choice = answer.choices[0]
    return choice.message.content, choice.finish_reason, *_usage(answer.usage)


async def _whole_completion(client: openai.AsyncOpenAI) -> tuple[object, ...]:
    answer = await client.completions.create(model=MODEL, temperature=0, **PROMPT)  # type: ignore[call-overload]
    choice = answer.choices[0]
    return choice.text, choice.finish_reason, *_usage(answer.usage)


async def _streamed(stream: Any, text_of: Callable[[Any], str | None]) -> tuple[object, ...]:
    texts, finishes, usage = [], [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts.append(text_of(choice) or "")
            if choice.finish_reason:
                finishes.append(choice.finish_reason)
    if len([text for text in texts if text]) < 2 or len(finishes) != 1:
        raise MismatchError(f"a stream of {len(texts)} pieces with finish reasons {finishes}")
    return "".join(texts), finishes[0], *_usage(usage)


async def _streamed_chat(client: openai.AsyncOpenAI) -> tuple[object, ...]:
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, temperature=0, stream=True, stream_options={"include_usage": True}, **CHAT
    )
    return await _streamed(stream, lambda choice: choice.delta.content)


async def _streamed_completion(client: openai.AsyncOpenAI) -> tuple[object, ...]:
    stream = await client.completions.create(  # type: ignore[call-overload]
        model=MODEL, temperature=0, stream=True, stream_options={"include_usage": True}, **PROMPT
    )
    return await _streamed(stream, lambda choice: choice.text)


def _usage(usage: Any) -> tuple[int, int]:
    if usage is None:
        raise MismatchError("no usage")
    return usage.prompt_tokens, usage.completion_tokens


def answers(
    ask: Callable[[openai.AsyncOpenAI], Awaitable[tuple[object, ...]]],
) -> Callable[[Site], Awaitable[str]]:
    """Return a check that both doors answer alike."""

    async def check(site: Site) -> str:
        text, *rest = await ask(site.direct)
        same((text, *rest), await ask(site.through))
        return f"{len(str(text))} characters, {', '.join(map(str, rest))}"

    return check


def refusal(status: int, word: str, **fields: Any) -> Callable[[Site], Awaitable[str]]:
    """Return a check that a refusal keeps its status and says what is wrong."""

    async def check(site: Site) -> str:
        for client in (site.direct, site.through):
            try:
                await client.chat.completions.create(**{"model": MODEL, **CHAT, **fields})
            except openai.APIStatusError as error:
                same(status, error.status_code)
                if word not in error.message:
                    raise MismatchError(f"{word!r} is not in {error.message!r}") from error
            else:
                raise MismatchError("it was served")
        return f"{status}, with the gateway's message"

    return check


async def headers_reach_the_gateway(site: Site) -> str:
    """Check that what a client says in headers is in the journal's row."""
    raw = await site.through.chat.completions.with_raw_response.create(
        model=MODEL, extra_headers=HEADERS, extra_body={"metadata": {"team": "a"}}, **CHAT
    )  # type: ignore[call-overload]
    await asyncio.sleep(0.5)  # the journal is written five times a second
    row = journal_rows(site.journal)[-1]
    same(
        (HEADERS["x-request-id"], HEADERS["x-steelyard-slo-class"]),
        (row["correlation_id"], row["slo_class"]),
    )
    back = sorted(name for name in raw.headers if "steelyard" in name or "x-request-id" in name)
    return f"in the journal; comes back as {', '.join(back) or 'nothing'}"


CHECKS: Mapping[str, Callable[[Site], Awaitable[str]]] = {
    "chat": answers(_whole_chat),
    "chat, streamed": answers(_streamed_chat),
    "completions": answers(_whole_completion),
    "completions, streamed": answers(_streamed_completion),
    "a bad field": refusal(400, "top_p", top_p=7),
    "a model that the gateway does not know": refusal(404, GHOST, model=GHOST),
    "`x-request-id`, `x-steelyard-slo-class`, `metadata`": headers_reach_the_gateway,
}


def configuration(url: str) -> dict[str, Any]:
    """Return LiteLLM's configuration (JSON is YAML): one model there is, one that there is not."""
    return {
        "model_list": [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"openai/{name}",
                    "api_base": f"{url}/v1",
                    "api_key": "none",
                },
            }
            for name in (MODEL, GHOST)
        ],
        # Without it the client's headers end at the proxy.
        "general_settings": {"forward_client_headers_to_llm_api": True},
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }


async def _until_up(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_SECONDS):
        while process.returncode is None:
            try:
                async with session.get(f"{url}/health/liveliness") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"LiteLLM ended with {process.returncode}, see {RUN / 'litellm.log'}")


async def run() -> int:
    """Run all checks and print a table.

    Returns:
        How many failed.
    """
    install("litellm", PACKAGE)
    journal = RUN / "litellm-journal.jsonl"
    journal.unlink(missing_ok=True)
    spec = ClusterSpec(
        pools=Pools(1, 2),
        directory=RUN,
        log_level="WARNING",
        agent_settings={"model": MODEL, "max_model_tokens": 4096, "time_scale": 10.0},
        router_settings={"journal_path": str(journal)},
    )
    async with LocalCluster(spec) as cluster:
        gateway = f"http://{cluster.addresses.gateways[0]}"
        port = free_port()
        path = RUN / "litellm.json"
        path.write_text(json.dumps(configuration(gateway)))
        command = [str(RUN / "litellm/bin/litellm"), "--config", str(path), "--port", str(port)]
        key = f"sk-{secrets.token_hex(32)}"  # the proxy does not start without
        variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
        with (RUN / "litellm.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, "--host", "127.0.0.1", stdout=log, stderr=log, env=os.environ | variables
            )
        try:
            proxy = f"http://127.0.0.1:{port}"
            await _until_up(proxy, process)
            clients = [
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
                for url in (gateway, proxy)
            ]
            return await _check_all(Site(clients[0], clients[1], journal))
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _check_all(site: Site) -> int:
    failed = 0
    print(f"LiteLLM {_version()}\n\n| what | through LiteLLM |\n|--|--|")
    for name, check in CHECKS.items():
        try:
            outcome = f"same: {await check(site)}"
        except (MismatchError, openai.OpenAIError) as error:
            failed += 1
            outcome = f"FAILED: {error}"
        print(f"| {name} | {outcome} |", flush=True)
    return failed


def _version() -> str:
    code = "import importlib.metadata as m; print(m.version('litellm'))"
    command = [str(RUN / "litellm/bin/python"), "-c", code]
    return str(subprocess.run(command, capture_output=True, text=True, check=True).stdout).strip()


def main() -> None:
    """Run the command line."""
    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    main()
