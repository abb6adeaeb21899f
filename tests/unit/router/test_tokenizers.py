"""Tokenizers come from agents once, and only the right one is used."""

import asyncio
import hashlib

import grpc
import pytest
import pytest_asyncio
from steelyard.v1 import agent_pb2, agent_pb2_grpc
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from dataplane.router.agents import AgentChannels
from dataplane.router.tokenizers import Tokenizers
from servicekit.errors import FailedPrecondition, Unavailable


def word_tokenizer() -> bytes:
    """Make a tokenizer of a few words that drops white space."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "weigh": 1, "first": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str().encode()


class Shelf(agent_pb2_grpc.AgentServiceServicer):
    """An agent that serves a tokenizer in small pieces, and counts how often."""

    def __init__(self) -> None:
        self.data = word_tokenizer()
        self.asked = 0

    async def GetTokenizer(self, request, context):  # noqa: N802
        """Send it in pieces."""
        self.asked += 1
        for start in range(0, len(self.data), 100):
            yield agent_pb2.GetTokenizerResponse(data=self.data[start : start + 100])


@pytest_asyncio.fixture
async def shelf():
    """Yield an agent with a tokenizer, its address, and tokenizers that ask it."""
    agent, server, channels = Shelf(), grpc.aio.server(), AgentChannels()
    agent_pb2_grpc.add_AgentServiceServicer_to_server(agent, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield agent, address, Tokenizers(channels)
    await channels.close()
    await server.stop(None)


def sha256(data: bytes) -> str:
    """Return what agents name a tokenizer by."""
    return hashlib.sha256(data).hexdigest()


@pytest.mark.asyncio
async def test_a_tokenizer_is_fetched_once(shelf):
    """Many texts at once make one call; short and long ones give the same ids as the library."""
    agent, address, tokenizers = shelf
    texts = ["weigh first", "first", "weigh " * 1_000]
    ids = await asyncio.gather(
        *(tokenizers.encode(text, sha256(agent.data), address) for text in texts * 5)
    )

    assert ids[:3] == [[1, 2], [2], [1] * 1_000]
    assert agent.asked == 1


@pytest.mark.asyncio
async def test_another_tokenizer_than_asked_for_is_not_used(shelf):
    """An agent whose engine has another model now is UNAVAILABLE, not wrong tokens."""
    agent, address, tokenizers = shelf
    wanted = sha256(agent.data)
    agent.data += b" "
    with pytest.raises(Unavailable) as caught:
        await tokenizers.encode("weigh", wanted, address)
    agent.data = agent.data[:-1]

    assert caught.value.reason == "TOKENIZER_UNAVAILABLE"
    assert await tokenizers.encode("weigh", wanted, address) == [1]


@pytest.mark.asyncio
async def test_a_dead_agent_is_unavailable_and_asked_again(shelf):
    """A fetch that failed is not remembered."""
    agent, address, tokenizers = shelf
    with pytest.raises(Unavailable):
        await tokenizers.encode("weigh", sha256(agent.data), "127.0.0.1:1")

    assert await tokenizers.encode("weigh", sha256(agent.data), address) == [1]


@pytest.mark.asyncio
async def test_without_a_tokenizer_text_is_refused(shelf):
    """A model that has none takes ids alone: FAILED_PRECONDITION says so."""
    _, address, tokenizers = shelf
    with pytest.raises(FailedPrecondition) as caught:
        await tokenizers.encode("weigh", "", address)

    assert caught.value.reason == "NO_TOKENIZER"


@pytest.mark.asyncio
async def test_text_that_makes_no_token_makes_none(shelf):
    """White space alone is empty for this tokenizer; admission refuses it by name."""
    agent, address, tokenizers = shelf

    assert await tokenizers.encode("  \n ", sha256(agent.data), address) == []
