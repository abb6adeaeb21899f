"""Exact prompt token counts: the model's own tokenizer, fetched from an agent once."""

import asyncio
import hashlib

import grpc
from steelyard.v1 import agent_pb2
from tokenizers import Tokenizer

from dataplane.router.agents import AgentChannels
from servicekit.errors import FailedPrecondition, Unavailable

# Below this many characters tokenising takes less time than handing the text to a thread.
_INLINE_CHARACTERS = 2_000
_FETCH_TIMEOUT_SECONDS = 10.0


class Tokenizers:
    """Tokenizers by the SHA-256 of their tokenizer.json; a new revision is a new entry."""

    def __init__(self, agents: AgentChannels) -> None:
        self._agents = agents
        self._loaded: dict[str, Tokenizer] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def encode(self, text: str, sha256: str, address: str) -> list[int]:
        """Return the token ids of a text, special tokens added as the engine would.

        Args:
            text: The prompt.
            sha256: Which tokenizer; empty where the model has none.
            address: An agent that serves it.

        Raises:
            FailedPrecondition: The model has no tokenizer.
            Unavailable: It could not be fetched.
        """
        tokenizer = await self.get(sha256, address)
        if len(text) < _INLINE_CHARACTERS:
            return list(tokenizer.encode(text).ids)
        encoding = await asyncio.to_thread(tokenizer.encode, text)
        return list(encoding.ids)

    async def get(self, sha256: str, address: str) -> Tokenizer:
        """Return a model's tokenizer, fetched at its first use.

        Raises:
            FailedPrecondition: The model has no tokenizer.
            Unavailable: It could not be fetched.
        """
        if not sha256:
            raise FailedPrecondition(
                "the model's engines have no tokenizer: send token_ids instead of text",
                reason="NO_TOKENIZER",
            )
        return self._loaded.get(sha256) or await self._load(sha256, address)

    async def _load(self, sha256: str, address: str) -> Tokenizer:
        async with self._locks.setdefault(sha256, asyncio.Lock()):
            if sha256 in self._loaded:
                return self._loaded[sha256]
            data = bytearray()
            try:
                with self._agents.calling(address) as stub:
                    request = agent_pb2.GetTokenizerRequest()
                    async for piece in stub.GetTokenizer(request, timeout=_FETCH_TIMEOUT_SECONDS):
                        data += piece.data
            except grpc.aio.AioRpcError as error:
                raise Unavailable(
                    f"the tokenizer could not be fetched: {error.details()}",
                    reason="TOKENIZER_UNAVAILABLE",
                    retry_after_seconds=1.0,
                ) from error
            _check(data, sha256, address)
            tokenizer: Tokenizer = await asyncio.to_thread(Tokenizer.from_buffer, bytes(data))
            self._loaded[sha256] = tokenizer
            return tokenizer


def _check(data: bytes | bytearray, sha256: str, address: str) -> None:
    """Make sure that an agent has sent the tokenizer that was asked for.

    Raises:
        Unavailable: It has sent another: its engine has restarted with another model.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise Unavailable(
            f"the agent at {address} serves tokenizer {found[:12]}, not {sha256[:12]}",
            reason="TOKENIZER_UNAVAILABLE",
            retry_after_seconds=1.0,
        )
