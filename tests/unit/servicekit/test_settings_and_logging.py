"""Settings from the environment, and what a log line looks like."""

import io
import json
import logging

import pytest
import structlog
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from servicekit.errors import SettingsInvalid
from servicekit.logging import configure_logging
from servicekit.settings import ServiceSettings


class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="STEELYARD_TEST_")

    wait_seconds: float = Field(1.0, gt=0, description="how long to wait")


def test_the_environment_and_overrides_are_read(monkeypatch):
    """A variable beats the default, a command line beats the variable, None is not given."""
    monkeypatch.setenv("STEELYARD_TEST_WAIT_SECONDS", "2.5")
    monkeypatch.setenv("STEELYARD_TEST_LISTEN", "127.0.0.1:1")

    settings = Settings.load(listen="127.0.0.1:2", http_listen=None)

    assert (settings.wait_seconds, settings.listen) == (2.5, "127.0.0.1:2")
    assert settings.server_options().listen == "127.0.0.1:2"
    with pytest.raises(ValidationError):
        settings.listen = "x"


def test_print_config_names_every_setting_and_hides_secrets(monkeypatch):
    """Each field is a line with its variable; passwords are masked, in URLs as well."""
    monkeypatch.setenv("STEELYARD_TEST_REDIS_PASSWORD", "hunter2")
    monkeypatch.setenv("STEELYARD_TEST_REDIS_URL", "redis://:hunter3@cache:6379/0")
    shown = Settings.load().print_config()

    assert {line.partition("=")[0] for line in shown.splitlines()} == {
        f"STEELYARD_TEST_{name.upper()}" for name in Settings.model_fields
    }
    assert "hunter" not in shown
    assert "redis://:********@cache:6379/0" in shown


def test_a_bad_value_is_explained_by_its_variable(monkeypatch):
    """The error says which variable holds what that does not fit."""
    monkeypatch.setenv("STEELYARD_TEST_WAIT_SECONDS", "-1")
    with pytest.raises(SettingsInvalid, match=r"STEELYARD_TEST_WAIT_SECONDS: .*greater than 0"):
        Settings.load()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("listen", "here", "not host:port"),
        ("listen", "127.0.0.1:65536", "not host:port"),
        ("http_listen", "http://here:1", "not host:port"),
        ("redis_url", "hunter2@cache", "does not begin with redis://"),
        ("log_level", "LOUD", "no level"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(name, value, words):
    """Addresses, URLs and levels are read before anything is started; a URL is not repeated."""
    with pytest.raises(
        SettingsInvalid, match=f"STEELYARD_TEST_{name.upper()}: .*{words}"
    ) as caught:
        Settings.load(**{name: value})

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:7400", ":7400", "router-0:7400"])
def test_addresses_of_all_kinds_are_taken(address):
    """Names, IPv4, IPv6 in brackets, and all interfaces."""
    assert Settings.load(listen=address).listen == address


def test_a_setting_that_there_is_not_is_refused():
    """A misspelt name on a command line is an error, not silence."""
    with pytest.raises(SettingsInvalid, match="STEELYARD_TEST_WAIT_SECOND: no such setting"):
        Settings.load(wait_second="1")


@pytest.fixture
def logs():
    """Yield a stream that logs are written to, and undo the set-up."""
    root, stream = logging.getLogger(), io.StringIO()
    before = (root.handlers[:], root.level)
    yield stream
    structlog.reset_defaults()
    root.handlers[:], root.level = before


def test_lines_are_json_off_a_terminal(logs):
    """Our own lines and the standard library's are JSON objects with time and level."""
    configure_logging("INFO", "auto", logs)
    structlog.get_logger().info("instance_joined", instance_id="a", odd={1, 2})
    structlog.get_logger().debug("not_shown")
    logging.getLogger("grpc").warning("watch %s", "out")
    try:
        int("why")
    except ValueError:
        structlog.get_logger().exception("crashed")
    ours, theirs, crash = [json.loads(line) for line in logs.getvalue().splitlines()]

    assert (ours["event"], ours["level"], ours["instance_id"]) == ("instance_joined", "info", "a")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("watch out", "grpc", "warning")
    assert crash["exception"][0]["exc_type"] == "ValueError"
    assert "timestamp" in ours


def test_an_unknown_level_is_refused(logs):
    """A misspelt level is an error, not silence."""
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("LOUD", "auto", logs)
