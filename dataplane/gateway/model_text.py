"""A model's text: its tokenizer and its chat template, fetched from an agent once."""

import asyncio
from collections.abc import Sequence

import grpc
from steelyard.v1 import agent_pb2
from tokenizers import Tokenizer

from dataplane.gateway.chat_template import ChatTemplate
from dataplane.gateway.errors import refused
from dataplane.router.agents import AgentChannels
from dataplane.router.tokenizers import Tokenizers
from servicekit.errors import Unavailable

# Below this many characters tokenising takes less time than handing the text to a thread.
_INLINE_CHARACTERS = 2_000
_FETCH_TIMEOUT_SECONDS = 10.0


class ModelText:
    """Between text and token ids of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return a text's token ids."""
        if len(text) < _INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_names(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary writes them."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def _encode(self, text: str, add_special_tokens: bool) -> Sequence[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


class ModelTexts:
    """Texts of models by the digest of their tokenizer; a new revision is a new entry."""

    def __init__(self, tokenizers: Tokenizers, agents: AgentChannels) -> None:
        self._tokenizers = tokenizers
        self._agents = agents
        self._texts: dict[str, ModelText] = {}
        self._templates: dict[str, ChatTemplate] = {}

    async def text(self, sha256: str, address: str) -> ModelText:
        """Return a model's tokenizer.

        Raises:
            SteelyardError: It has none, or it cannot be fetched.
        """
        known = self._texts.get(sha256)
        if known is None:
            tokenizer = await self._tokenizers.get(sha256, address)
            known = self._texts.setdefault(sha256, ModelText(tokenizer))
        return known

    async def template(self, sha256: str, address: str) -> ChatTemplate:
        """Return a model's chat template.

        Raises:
            HttpFault: It has none.
            SteelyardError: It cannot be fetched.
        """
        known = self._templates.get(sha256)
        if known is None:
            config = await self._fetch_config(address)
            known = self._templates.setdefault(sha256, ChatTemplate(config))
        return known

    async def _fetch_config(self, address: str) -> bytes:
        call = self._agents.stub(address).GetTokenizer(
            agent_pb2.GetTokenizerRequest(file=agent_pb2.TOKENIZER_FILE_CONFIG),
            timeout=_FETCH_TIMEOUT_SECONDS,
        )
        data = bytearray()
        try:
            async for piece in call:
                data += piece.data
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise refused("messages", "the model has no chat template") from error
            raise Unavailable(
                f"the chat template could not be fetched: {error.details()}",
                reason="TOKENIZER_UNAVAILABLE",
                retry_after_seconds=1.0,
            ) from error
        return bytes(data)
