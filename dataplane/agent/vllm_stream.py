"""One streamed generation of a vLLM server."""

import asyncio

import msgspec

from dataplane.agent.engine import Chunk, DecodeJob, Finish, Logprob, TokenUsage
from dataplane.agent.errors import EngineFailed, EngineUnavailable
from dataplane.agent.http_client import Answer
from dataplane.agent.vllm_http import meaning, unreadable
from dataplane.agent.vllm_shapes import Choice, StreamEvent, finish_of, logprobs_of
from servicekit.clock import Clock

_EVENT = msgspec.json.Decoder(StreamEvent)
_DATA = b"data: "
_DONE = b"[DONE]"


class SseReader:
    """Cuts a byte stream into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


class VllmStream:
    """Reads whatever the server has sent, however many engine steps that is."""

    def __init__(self, job: DecodeJob, answer: Answer, clock: Clock) -> None:
        self._job = job
        self._answer = answer
        self._clock = clock
        self._sse = SseReader()
        self._done = False
        self._closed = asyncio.Event()
        self._finish: Finish | None = None
        self._stop_reason = ""
        self._usage: TokenUsage | None = None
        self._sent_tokens = 0
        self._last_seconds: float | None = None

    async def read(self) -> Chunk:
        """Wait for at least one token or the end, and return everything that is there.

        Raises:
            EngineFailed: the engine gave the request up.
            EngineUnavailable: the server went away.
        """
        chunk = Chunk()
        token_ids: list[int] = []
        logprobs: list[Logprob] = []
        while not self._done and (not token_ids or self._finish is not None):
            data = await self._receive()
            if data is None:
                return Chunk(finish=Finish.ABORT, usage=self._counted())
            for payload in self._sse.feed(data):
                self._take(payload, chunk, token_ids, logprobs)
        chunk.token_ids, chunk.logprobs = token_ids, logprobs
        self._sent_tokens += len(token_ids)
        chunk.step_seconds = self._step_seconds(len(token_ids))
        if self._done:
            chunk.finish = self._finish or Finish.ABORT
            chunk.stop_reason = self._stop_reason
            chunk.usage = self._usage or self._counted()
        return chunk

    async def close(self) -> None:
        """End the request: vLLM aborts it when the connection closes."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._done:
            self._answer.release()
        else:
            self._answer.close()

    async def _receive(self) -> bytes | None:
        """Return the next bytes; None where somebody has closed the stream.

        Raises:
            EngineUnavailable: the server ended the stream before the request.
        """
        if self._closed.is_set():
            return None
        try:
            data = await self._answer.read_some()
        except OSError as error:
            if self._closed.is_set():
                return None
            raise EngineUnavailable(f"the engine's stream broke: {error!r}") from error
        if not data:
            if self._closed.is_set():
                return None
            raise EngineUnavailable("the engine ended the stream before the request")
        return data

    def _take(
        self, payload: bytes, chunk: Chunk, token_ids: list[int], logprobs: list[Logprob]
    ) -> None:
        """Add one event to a chunk."""
        if payload == _DONE:
            self._done = True
            return
        try:
            event = _EVENT.decode(payload)
        except msgspec.DecodeError as error:
            raise unreadable("an event", error) from error
        if event.error is not None:
            code = event.error.code
            raise meaning(
                int(code) if code is not None and str(code).isdigit() else 500, event.error
            )
        if event.usage is not None:
            self._usage = event.usage.value()
        for choice in event.choices:
            self._take_choice(choice, chunk, token_ids, logprobs)

    def _take_choice(
        self, choice: Choice, chunk: Chunk, token_ids: list[int], logprobs: list[Logprob]
    ) -> None:
        new = choice.token_ids or []
        token_ids += new
        if self._job.want_text:
            chunk.text += choice.text
        if choice.logprobs is not None:
            logprobs += logprobs_of(choice.logprobs, new)
        if choice.finish_reason is not None:
            if choice.finish_reason == "error":
                raise EngineFailed("the engine gave the request up")
            self._finish = finish_of(choice.finish_reason)
            self._stop_reason = "" if choice.stop_reason is None else str(choice.stop_reason)

    def _step_seconds(self, tokens: int) -> float:
        """Return the gap to the chunk before, for each token; 0 for the first."""
        now, before = self._clock.monotonic(), self._last_seconds
        if not tokens:
            return 0.0
        self._last_seconds = now
        return 0.0 if before is None else (now - before) / tokens

    def _counted(self) -> TokenUsage:
        return TokenUsage(len(self._job.prompt), self._sent_tokens)
