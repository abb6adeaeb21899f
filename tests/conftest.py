"""What every test may ask for; the parts themselves are in tests/support."""

import logging

import pytest
import structlog

from tests.support.redis_fixtures import redis_client, redis_url, shared_redis

__all__ = ["redis_client", "redis_url", "shared_redis"]


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was():
    """Undo what a service that ran in this process did to logging: its stream ends with its test."""
    configured, config = structlog.is_configured(), structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    if structlog.is_configured() and not configured:
        structlog.reset_defaults()
    elif configured:
        structlog.configure(**config)
    root.handlers[:], root.level = handlers, level
