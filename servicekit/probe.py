"""`python -m servicekit.probe host:port [service]`: exit code 0 when healthy, for compose."""

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 3.0


def probe(address: str, service: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Ask grpc.health.v1; returns its status name, or the gRPC code where it does not answer."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = stub.Check(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code.name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: Sequence[str]) -> int:
    """Print the status; 0 for SERVING, 1 for anything else, 2 for bad usage."""
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -m servicekit.probe host:port [service]\n")
        return 2
    answer = probe(arguments[0], arguments[1] if len(arguments) > 1 else "")
    sys.stdout.write(f"{answer}\n")
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
