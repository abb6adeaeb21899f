"""Outgoing channels, all opened alike."""

import grpc

from servicekit.options import DEFAULT_MAX_MESSAGE_BYTES


def open_channel(
    address: str, *, max_message_bytes: int = 4 * DEFAULT_MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """Open a channel to host:port on a trusted network.

    It notices a dead peer within seconds (keepalive) and tries again within a second after a
    refused connection, where gRPC alone would back off for minutes. Nothing is retried: whoever
    calls knows whether a call may run twice.
    """
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 50),
            # Also the time that an attempt to connect is given: a busy host needs more than the
            # backoff itself.
            ("grpc.min_reconnect_backoff_ms", 2_000),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_retries", 0),
            # Instances are reached directly, whatever http_proxy says of the way out.
            ("grpc.enable_http_proxy", 0),
        ],
    )
