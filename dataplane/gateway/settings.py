"""Settings of the gateway: a part of the router's, since it lives in the router's process."""

from pydantic import BaseModel, Field, SecretStr


class GatewayFields(BaseModel):
    """What a router can be told about its HTTP front."""

    gateway_listen: str | None = Field(
        None, description="host:port of the OpenAI API over HTTP; empty for none"
    )
    gateway_picker_endpoints: dict[str, str] = Field(
        default_factory=dict,
        description="engines' own host:port by instance id, as JSON; makes the router Envoy's picker",
    )
    gateway_api_keys: dict[str, tuple[SecretStr, ...]] = Field(
        default_factory=dict,
        description="keys by tenant, as JSON; empty: every caller is let in, without a tenant",
    )
    gateway_max_body_bytes: int = Field(
        16 * 1024 * 1024, gt=0, description="longest HTTP body accepted"
    )
    gateway_max_connections: int = Field(
        20_000, gt=0, description="HTTP connections kept open; further ones are answered 503"
    )
    gateway_idle_seconds: float = Field(
        120.0, gt=0, description="how long an HTTP connection may wait for its next request"
    )
    gateway_read_seconds: float = Field(
        30.0, gt=0, description="how long a client may take to send one request"
    )
    gateway_stall_seconds: float = Field(
        60.0, gt=0, description="how long a client may leave its answer unread"
    )
