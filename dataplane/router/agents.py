"""Channels to agents, one an address, opened at first use."""

import grpc
from steelyard.v1 import agent_pb2_grpc

from servicekit.channel import open_channel


class AgentChannels:
    """Stubs by address; channels to agents that left are closed by `keep`."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, agent_pb2_grpc.AgentServiceStub] = {}

    def stub(self, address: str) -> agent_pb2_grpc.AgentServiceStub:
        """Return the stub for host:port."""
        stub = self._stubs.get(address)
        if stub is None:
            channel = self._channels[address] = open_channel(address)
            stub = self._stubs[address] = agent_pb2_grpc.AgentServiceStub(channel)
        return stub

    async def keep(self, addresses: set[str]) -> None:
        """Close the channels to all other addresses."""
        for address in self._channels.keys() - addresses:
            self._stubs.pop(address)
            await self._channels.pop(address).close(grace=30.0)

    async def close(self) -> None:
        """Close all channels."""
        await self.keep(set())
