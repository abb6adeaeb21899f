"""The command line of a spawned vLLM server."""

import pytest

from dataplane.agent.settings import AgentSettings
from dataplane.agent.vllm_factory import spawn_command
from servicekit.errors import SettingsInvalid


def command(**fields):
    """The words for some settings."""
    return spawn_command(AgentSettings(**fields))


def test_flags_follow_the_command_and_the_server_listens_where_the_agent_looks():
    """Words are split as a shell does; host and port come from the URL."""
    words = command(
        vllm_flags="some/model --kv-transfer-config '{\"a\": 1}'", vllm_url="http://127.0.0.1:9"
    )

    assert words == [
        "vllm", "serve", "some/model", "--kv-transfer-config", '{"a": 1}',
        "--host", "127.0.0.1", "--port", "9",
    ]  # fmt: skip


@pytest.mark.parametrize("flags", ["--port 7", "--port=7"])
def test_a_port_that_is_given_is_left_alone(flags):
    """Whoever sets the port knows why."""
    assert command(vllm_flags=flags) == ["vllm", "serve", *flags.split()]


@pytest.mark.parametrize(
    "bad", [{"vllm_command": []}, {"vllm_flags": "'open"}, {"vllm_url": "http://localhost"}]
)
def test_a_command_line_that_makes_no_sense_is_refused(bad):
    """The start ends with the setting's name, not with a server that nobody finds."""
    with pytest.raises(SettingsInvalid):
        command(**bad)
