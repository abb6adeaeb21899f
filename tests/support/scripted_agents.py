"""Agents that do what a test tells them: a real AgentService over loopback, engines made up.

They hold KV as real ones do: a prefilled prompt stays held until somebody pulls, releases or aborts
it. A decode that fails before its first token pulls nothing.
"""
# ruff: noqa: N802  the names are those of the protocol

import asyncio
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
from steelyard.v1 import agent_pb2, agent_pb2_grpc, types_pb2

from dataplane.agent.exchange import Exchange
from tests.support.snapshots import engine

VOCABULARY = 300


def expected_tokens(prompt: Iterable[int], count: int) -> list[int]:
    """Return what a scripted decode generates."""
    start = sum(prompt)
    return [(start + position) % VOCABULARY for position in range(count)]


@dataclass(frozen=True)
class PrefillScript:
    """How one prefill goes.

    Attributes:
        end: `answer`, `hang` until it is ended from outside, `deaf`: compute on whatever the caller
            does, until `Script.resume` is set, and hold the KV; or `fail`.
        code: With `fail`.
    """

    end: Literal["answer", "hang", "deaf", "fail"] = "answer"
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True)
class DecodeScript:
    """How one decode goes: `tokens` of it, one a message, then its end.

    Attributes:
        tokens: Before the end; None generates all that were asked for.
        end: `finish` with the last token, `vanish` without a finish reason, `hang`, `fail`, or
            `abort` as an engine that is shut down.
        code: With `fail`.
        pause_at: Token before which it waits for `Script.resume`; None never waits.
    """

    tokens: int | None = None
    end: Literal["finish", "vanish", "hang", "fail", "abort"] = "finish"
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    pause_at: int | None = None


@dataclass
class Script:
    """What all agents of a cluster do next, and what they have seen."""

    prefills: deque[PrefillScript] = field(default_factory=deque)
    decodes: deque[DecodeScript] = field(default_factory=deque)
    held: dict[str, str] = field(default_factory=dict)
    running: set[tuple[str, str]] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    resume: asyncio.Event = field(default_factory=asyncio.Event)

    def reset(self) -> None:
        """Start over."""
        self.prefills.clear()
        self.decodes.clear()
        self.calls.clear()
        self.entered.clear()
        self.resume.clear()

    def enter(self, agent: str, what: str, request_id: str) -> None:
        """Note a call that begins to work."""
        self.calls.append((what, agent))
        self.running.add((what, request_id))
        self.entered.set()

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is held."""
        return not self.held and not self.running


class ScriptedAgent(agent_pb2_grpc.AgentServiceServicer):
    """One agent of a scripted cluster."""

    def __init__(self, name: str, script: Script, **changes: Any) -> None:
        self.info = engine(name, **changes)
        self._script = script
        self._prefills: dict[str, asyncio.Task[Any]] = {}
        self._server: grpc.aio.Server | None = None
        self._stopping = asyncio.Event()
        self.knows_exchange = True

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = grpc.aio.server()
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.info.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Close the port and end all calls."""
        if self._server is not None:
            await self._server.stop(None)

    async def Exchange(self, requests, context):
        """Serve legs as calls; an old agent knows no such method."""
        if not self.knows_exchange:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        await Exchange(self.Prefill, self.Decode, self._stopping).run(requests, context)

    async def Prefill(self, request, context):
        """Prefill as the script says."""
        script, name = self._script, self.info.instance_id
        todo = script.prefills.popleft() if script.prefills else PrefillScript()
        key = ("prefill", request.request_id)
        script.enter(name, *key)
        work = asyncio.ensure_future(self._compute(todo, request))
        if todo.end != "deaf":
            self._prefills[request.request_id] = work
        try:
            if todo.end == "deaf":
                return await asyncio.shield(work)
            return await work
        except asyncio.CancelledError:
            if work.cancelled():
                await context.abort(grpc.StatusCode.ABORTED, "aborted by its id")
            raise
        except grpc.RpcError as error:
            await context.abort(error.args[0], "as the script says")
        finally:
            if todo.end != "deaf":
                work.cancel()
                script.running.discard(key)

    async def _compute(self, todo: PrefillScript, request) -> agent_pb2.PrefillResponse:
        script = self._script
        if todo.end == "hang":
            await asyncio.Event().wait()
        if todo.end == "fail":
            raise grpc.RpcError(todo.code)
        if todo.end == "deaf":
            await script.resume.wait()
            script.running.discard(("prefill", request.request_id))
        handoff = types_pb2.Handoff(
            handoff_id=uuid.uuid4().hex,
            prefill_instance_id=self.info.instance_id,
            prefill_epoch=self.info.epoch,
            pairing_key=self.info.pairing_key,
            prompt_tokens=len(request.prompt_token_ids),
        )
        script.held[handoff.handoff_id] = request.request_id
        return agent_pb2.PrefillResponse(
            handoff=handoff, prompt_tokens=len(request.prompt_token_ids)
        )

    async def Decode(self, request, context):
        """Generate as the script says."""
        script, name = self._script, self.info.instance_id
        todo = script.decodes.popleft() if script.decodes else DecodeScript()
        key = ("decode", request.request_id)
        script.enter(name, *key)
        count = request.max_tokens if todo.tokens is None else todo.tokens
        count = min(count, request.max_tokens)
        tokens = expected_tokens(request.prompt_token_ids, count)
        try:
            for position, token in enumerate(tokens):
                if position == todo.pause_at:
                    await script.resume.wait()
                script.held.pop(request.handoff.handoff_id, None)
                response = agent_pb2.DecodeResponse(token_ids=[token])
                if todo.end == "finish" and position + 1 == count:
                    response.finish_reason = types_pb2.FINISH_REASON_LENGTH
                    response.usage.prompt_tokens = len(request.prompt_token_ids)
                    response.usage.completion_tokens = count
                await context.write(response)
            if todo.end == "hang":
                await asyncio.Event().wait()
            if todo.end == "abort":
                await context.write(
                    agent_pb2.DecodeResponse(finish_reason=types_pb2.FINISH_REASON_ABORT)
                )
            if todo.end == "fail":
                await context.abort(todo.code, "as the script says")
        finally:
            script.running.discard(key)

    async def Abort(self, request, context):
        """End a prefill by its id, or free what it holds."""
        self._script.calls.append(("abort", self.info.instance_id))
        work = self._prefills.get(request.request_id)
        found = work is not None and not work.done()
        if work is not None:
            work.cancel()
        for handoff_id, request_id in list(self._script.held.items()):
            if request_id == request.request_id:
                del self._script.held[handoff_id]
                found = True
        return agent_pb2.AbortResponse(found=found)

    async def Release(self, request, context):
        """Free a hand-off."""
        self._script.calls.append(("release", self.info.instance_id))
        known = self._script.held.pop(request.handoff.handoff_id, None)
        return agent_pb2.ReleaseResponse(released=known is not None)
