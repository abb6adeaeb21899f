"""What paced engines and their agents are told."""

from dataclasses import replace
from pathlib import Path

import pytest

from enginemodel.profiles import A40_QWEN, PROFILES
from localcluster.errors import ClusterError
from localcluster.pace import dilation, paced_agent, paced_flags, paced_profile, paced_server
from localcluster.spec import ClusterSpec


def spec(**changes: object) -> ClusterSpec:
    """A paced cluster."""
    return ClusterSpec(engine="paced", time_scale=1 / 3, directory=Path("/nowhere"), **changes)


def flag(flags: list[str], name: str) -> str:
    """The value of a flag."""
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_engines_hold_what_the_profile_holds(name: str):
    """Slots, batch and longest prompt are the profile's; KV is, to a block, and one block is vLLM's own."""
    profile = PROFILES[name]

    flags = paced_flags(profile)

    assert flag(flags, "--max-num-seqs") == str(profile.max_num_seqs)
    assert flag(flags, "--max-num-batched-tokens") == str(profile.max_batched_tokens)
    assert flag(flags, "--max-model-len") == str(profile.max_model_tokens)
    blocks, rest = divmod(int(flag(flags, "--kv-cache-memory-bytes")), 32 * 256)
    assert rest == 0
    assert profile.kv_total_tokens <= (blocks - 1) * 32 < profile.kv_total_tokens + 32
    assert "--no-enable-prefix-caching" in flags


def test_leases_are_stretched_with_everything_else():
    """30 engine seconds; in whole real seconds, and never below what vLLM can renew."""
    lease = "kv_lease_duration"

    slowed = paced_server(spec(), "p")["kv_transfer"]["kv_connector_extra_config"]
    quick = paced_server(replace(spec(), time_scale=30.0), "p")["kv_transfer"]

    assert slowed[lease] == 90
    assert quick["kv_connector_extra_config"][lease] == 6


def test_agents_price_by_the_profile_that_engines_are_paced_by():
    """They speak to vLLM, name the profile, and size KV as it does, not as the small model does."""
    assert paced_agent(spec()) == {
        "engine": "vllm",
        "profile": A40_QWEN.name,
        "vllm_kv_bytes_per_token": A40_QWEN.kv_bytes_per_token,
    }


def test_overrides_replace_fields_and_single_constants():
    """What is not overridden stays the profile's."""
    changed = paced_profile(
        spec(profile_overrides={"kv_total_tokens": 30_000, "constants": {"d0_seconds": 0.02}})
    )

    assert changed.kv_total_tokens == 30_000
    assert changed.max_num_seqs == A40_QWEN.max_num_seqs
    assert changed.constants == replace(A40_QWEN.constants, d0_seconds=0.02)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": "gpu9"}, "no profile 'gpu9', only a40"),
        ({"profile_overrides": {"speed": 2}}, "speed"),
        ({"profile_overrides": {"constants": {"d9": 1.0}}}, "d9"),
    ],
)
def test_what_no_profile_has_is_refused(changes: dict, words: str):
    """The message names it."""
    with pytest.raises(ClusterError, match=words):
        paced_profile(spec(**changes))


@pytest.mark.parametrize("time_scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pace_is_finite(time_scale: float):
    """Full speed is for engines without a pace."""
    with pytest.raises(ClusterError, match="finite time scale"):
        dilation(replace(spec(), time_scale=time_scale))
