"""What every test may ask for; the parts themselves are in tests/support."""

from tests.support.redis_fixtures import redis_client, redis_url, shared_redis

__all__ = ["redis_client", "redis_url", "shared_redis"]
