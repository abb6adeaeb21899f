"""`steelyard generate`: one prompt, streamed to the terminal."""

import asyncio
import sys
from typing import Annotated

from cyclopts import Parameter, validators
from steelyard.v1 import router_pb2, router_pb2_grpc

from servicekit.channel import open_channel

DEFAULT_ROUTER = "127.0.0.1:7400"


def generate(
    prompt: str = "",
    *,
    router: Annotated[str, Parameter(env_var="STEELYARD_ROUTER")] = DEFAULT_ROUTER,
    model: str = "",
    max_tokens: Annotated[int, Parameter(validator=validators.Number(gte=1, lt=1 << 32))] = 64,
    temperature: float | None = None,
    slo_class: str = "",
    policy: str = "",
    token_ids: str = "",
    timeout_seconds: float = 300.0,
) -> None:
    """Generate from one prompt and print the text as it comes.

    Args:
        prompt: The text; leave it out with --token-ids.
        router: host:port of a router.
        model: Served model; may be left out where there is one.
        max_tokens: Tokens to generate at most.
        temperature: 0 is greedy; left out, the engine's default.
        slo_class: SLO class; left out, the default class.
        policy: Placement policy; left out, the router's.
        token_ids: The prompt as ids with commas between; ids are printed instead of text.
        timeout_seconds: Deadline of the whole request.
    """
    message = router_pb2.GenerateRequest(
        model=model,
        max_tokens=max_tokens,
        slo_class=slo_class,
        policy=policy,
        want_text=not token_ids,
        want_receipt=True,
    )
    if prompt:
        message.text = prompt
    if token_ids:
        try:
            message.token_ids.ids.extend(int(part) for part in token_ids.split(","))
        except ValueError:
            raise SystemExit("steelyard: --token-ids are ids with commas between: 3,17,4") from None
    if temperature is not None:
        message.sampling.temperature = temperature
    asyncio.run(_stream(router, message, timeout_seconds))


async def _stream(router: str, message: router_pb2.GenerateRequest, timeout_seconds: float) -> None:
    receipt, usage, reason = router_pb2.Receipt(), None, 0
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        async for response in stub.Generate(message, timeout=timeout_seconds):
            if response.HasField("receipt"):
                receipt = response.receipt
            ids = " ".join(map(str, response.token_ids)) + " " if response.token_ids else ""
            sys.stdout.write(response.text if message.want_text else ids)
            sys.stdout.flush()
            if response.finish_reason:
                usage, reason = response.usage, int(response.finish_reason)
    sys.stdout.write("\n")
    if usage is not None:
        name = {1: "stop", 2: "length", 3: "abort"}.get(reason, "?")
        sys.stderr.write(
            f"{usage.prompt_tokens} prompt + {usage.completion_tokens} tokens ({name}), "
            f"{receipt.policy}: {receipt.prefill_instance_id or '-'} -> "
            f"{receipt.decode_instance_id}, predicted TTFT "
            f"{receipt.predicted_ttft.ToNanoseconds() / 1e6:.0f} ms\n"
        )
