"""Channels to agents, one an address, opened at first use."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from steelyard.v1 import agent_pb2_grpc

from dataplane.router.link import Link
from servicekit.channel import open_channel


class AgentChannels:
    """Stubs by address; idle channels to agents that left are closed by `keep`."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, agent_pb2_grpc.AgentServiceStub] = {}
        self._links: dict[str, Link] = {}
        self._calls: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<AgentChannels to {len(self._channels)}, {self._calls.total()} calls>"

    def stub(self, address: str) -> agent_pb2_grpc.AgentServiceStub:
        """Return the stub for host:port, for calls that may be cut off."""
        stub = self._stubs.get(address)
        if stub is None:
            channel = self._channels[address] = open_channel(address)
            stub = self._stubs[address] = agent_pb2_grpc.AgentServiceStub(channel)
        return stub

    def link(self, address: str) -> Link:
        """Return the stream that carries prefills and decodes; to be used while `calling`."""
        link = self._links.get(address)
        if link is None or not link.usable:
            stub = self.stub(address)
            link = self._links[address] = Link(self._channels[address], stub)
        return link

    @contextmanager
    def calling(self, address: str) -> Iterator[agent_pb2_grpc.AgentServiceStub]:
        """Give the stub for a call during which the channel stays, whoever says the agent left."""
        self._calls[address] += 1
        try:
            yield self.stub(address)
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]

    async def keep(self, addresses: set[str]) -> None:
        """Close the idle channels to all other addresses.

        An agent may be given up by the control plane and still serve: its streams go on.
        """
        for address in self._channels.keys() - addresses - self._calls.keys():
            self._stubs.pop(address)
            if (link := self._links.pop(address, None)) is not None:
                await link.close()
            await self._channels.pop(address).close()

    async def close(self) -> None:
        """Close all channels."""
        self._calls.clear()
        await self.keep(set())
