"""A grpc.aio server that does nothing: what any Python gRPC service costs on this machine, now.

Run as a process: `python -m benchmarks.grpc_floor PORT`.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from steelyard.v1 import router_pb2, router_pb2_grpc


class Nothing(router_pb2_grpc.RouterServiceServicer):
    """Answers Route with an empty response, Generate with `max_tokens` one-token messages."""

    async def Route(self, request: router_pb2.RouteRequest, context: Any) -> Any:  # noqa: N802, ARG002
        """Answer at once."""
        return router_pb2.RouteResponse()

    async def Generate(  # noqa: N802
        self,
        request: router_pb2.GenerateRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Answer with messages of one token."""
        for _ in range(request.max_tokens):
            yield router_pb2.GenerateResponse(token_ids=[7])


async def main(port: int) -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(Nothing(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
