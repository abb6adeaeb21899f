"""One generation of an emulated engine, as its reader sees it."""

import asyncio
from collections.abc import Callable

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dataplane.agent.engine import (
    Alternative,
    Chunk,
    DecodeJob,
    Finish,
    Logprob,
    TokenUsage,
)
from dataplane.agent.stop_strings import StopScanner
from dataplane.core.emulation.tokens import Continuation, mix
from servicekit.errors import SteelyardError


class EmulatedStream:
    """Counts what the engine generates; makes tokens, text and logprobs when they are read."""

    def __init__(self, job: DecodeJob, tokenizer: Tokenizer, end: Callable[[str], None]) -> None:
        """Start with nothing.

        Args:
            job: What was asked for.
            tokenizer: For text and stop strings.
            end: Ends the request on the engine, by id.
        """
        self.job = job
        self.continuation: Continuation | None = None
        self.generated = 0
        self.step_seconds = 0.0
        self._sent = 0
        self._complete = False
        self._closed = False
        self._error: SteelyardError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._end = end
        self._tokenizer = tokenizer
        self._decode: DecodeStream | None = None
        self._scanner: StopScanner | None = None
        if job.want_text or job.sampling.stop:
            self._decode = DecodeStream(skip_special_tokens=True)
            self._scanner = StopScanner(job.sampling.stop)

    def progress(self, step_seconds: float) -> None:
        """Note one more token."""
        self.generated += 1
        self.step_seconds = step_seconds
        self._notify()

    def complete(self) -> None:
        """Note that the engine is done with it."""
        self._complete = True
        self._notify()

    def fail(self, error: SteelyardError) -> None:
        """Make the reader see an error."""
        self._error = error
        self._notify()

    async def read(self) -> Chunk:
        """Wait for at least one token or the end, and return everything that is there."""
        while self.generated == self._sent and not (self._complete or self._error or self._closed):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        if self._closed or self.continuation is None:
            return Chunk(finish=Finish.ABORT, usage=self._usage())
        return self._chunk(self.continuation)

    async def close(self) -> None:
        """End the request on the engine, unless it has ended."""
        if not self._closed:
            self._closed = True
            if not self._complete:
                self._end(self.job.request_id)
            self._notify()

    def _chunk(self, continuation: Continuation) -> Chunk:
        """Make what came since the last chunk."""
        start = self._sent
        tokens = continuation.between(start, self.generated)
        text, stop_reason = "", ""
        if self._decode is not None and self._scanner is not None:
            tokens, text = self._text(tokens)
            stop_reason = self._scanner.found
        self._sent = start + len(tokens)
        chunk = Chunk(token_ids=tokens, step_seconds=self.step_seconds)
        if self.job.sampling.logprobs is not None:
            chunk.logprobs = self._logprobs(tokens, start)
        if stop_reason:
            chunk.finish = Finish.STOP
            self._end(self.job.request_id)
            self._complete = True
        elif self._complete and self._sent == self.generated:
            chunk.finish, stop_reason = self._finish(continuation)
        if chunk.finish is not None:
            chunk.stop_reason = stop_reason
            chunk.usage = self._usage()
        if self.job.want_text:
            chunk.text = text
        return chunk

    def _text(self, tokens: list[int]) -> tuple[list[int], str]:
        """Return the tokens up to a stop string, and their text without it."""
        assert self._decode is not None
        assert self._scanner is not None
        pieces: list[str] = []
        for index, token in enumerate(tokens):
            piece = self._decode.step(self._tokenizer, token)
            pieces.append(self._scanner.feed(piece or ""))
            if self._scanner.found:
                return tokens[: index + 1], "".join(pieces)
        if self._complete:
            pieces.append(self._scanner.flush())
        return tokens, "".join(pieces)

    def _finish(self, continuation: Continuation) -> tuple[Finish, str]:
        """Say why the engine ended it."""
        stop_token_id = continuation.stop_token_id
        if stop_token_id is None:
            return Finish.LENGTH, ""
        named = stop_token_id in self.job.sampling.stop_token_ids
        return Finish.STOP, str(stop_token_id) if named else ""

    def _logprobs(self, tokens: list[int], start: int) -> list[Logprob]:
        """Make up log probabilities that depend on token and position alone."""
        wanted = self.job.sampling.logprobs or 0
        return [
            Logprob(token, best := -(mix(token * 65_537 + position) & 1023) / 1024.0, [
                Alternative(f"token_id:{token + rank}", best - rank) for rank in range(wanted)
            ], f"token_id:{token}")
            for position, token in enumerate(tokens, start)
        ]  # fmt: skip

    def _usage(self) -> TokenUsage:
        return TokenUsage(len(self.job.prompt), self._sent)

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
