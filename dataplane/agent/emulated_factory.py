"""Makes an emulated engine from settings: a reference profile with what is set taken over it."""

from dataclasses import replace

from tokenizers import Tokenizer

from dataplane.agent.byte_tokenizer import byte_tokenizer, byte_tokenizer_config
from dataplane.agent.engine_emulated import EmulatedOptions, EngineEmulated
from dataplane.agent.settings import AgentSettings
from dataplane.core.emulation.values import BatchingConfig
from enginemodel.model import EngineConstants
from enginemodel.profiles import PROFILES, REFERENCE, EngineProfile
from servicekit.clock import Clock
from servicekit.errors import SettingsInvalid


def emulated_engine(settings: AgentSettings, clock: Clock) -> EngineEmulated:
    """Make the engine; not started yet.

    Raises:
        SettingsInvalid: no such profile, constant or tokenizer, or a model longer than the KV cache.
    """
    path = settings.tokenizer_path
    if path is None:
        tokenizer, config = byte_tokenizer(), byte_tokenizer_config()
        return EngineEmulated(emulated_options(settings), clock, tokenizer, config)
    if not path.is_file():
        raise SettingsInvalid(f"{AgentSettings.variable('tokenizer_path')}: {path} is no file")
    beside = path.with_name("tokenizer_config.json")
    return EngineEmulated(
        emulated_options(settings),
        clock,
        Tokenizer.from_file(str(path)),
        beside.read_bytes() if beside.is_file() else None,
    )


def emulated_options(settings: AgentSettings) -> EmulatedOptions:
    """Put profile and settings together.

    Raises:
        SettingsInvalid: as `emulated_engine`.
    """
    profile = PROFILES.get(settings.profile or REFERENCE.name)
    if profile is None:
        known = ", ".join(PROFILES)
        raise SettingsInvalid(f"no profile {settings.profile!r}; there are: {known}")
    batching = BatchingConfig(
        constants=_constants(settings, profile),
        kv_total_tokens=settings.kv_total_tokens or profile.kv_total_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        block_tokens=settings.block_tokens or profile.block_tokens,
        max_num_seqs=settings.max_num_seqs or profile.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens or profile.max_batched_tokens,
        lease_seconds=settings.handoff_lease_seconds,
        notice_share=settings.notice_share,
        jitter_sigma=settings.jitter_sigma,
        stall_probability=settings.stall_probability,
        stall_seconds=settings.stall_seconds,
    )
    return EmulatedOptions(
        model=settings.model,
        profile=profile.name,
        batching=batching,
        max_model_tokens=_max_model_tokens(settings, profile, batching),
        vocab_size=settings.vocab_size,
        mean_output_tokens=settings.mean_output_tokens,
        time_scale=settings.time_scale,
        seed=settings.seed,
        host=settings.side_channel_host,
        slowness_schedule=tuple(sorted(settings.slowness_schedule)),
    )


def _constants(settings: AgentSettings, profile: EngineProfile) -> EngineConstants:
    unknown = settings.constants.keys() - EngineConstants.__dataclass_fields__.keys()
    if unknown:
        raise SettingsInvalid(
            f"{AgentSettings.variable('constants')}: no constant {', '.join(sorted(unknown))}"
        )
    return replace(profile.constants, **settings.constants).slowed(settings.slowness)


def _max_model_tokens(
    settings: AgentSettings, profile: EngineProfile, batching: BatchingConfig
) -> int:
    """Take the model's length; by default no longer than the KV cache.

    Raises:
        SettingsInvalid: a length was set that does not fit.
    """
    fits = batching.kv_total_tokens // batching.block_tokens * batching.block_tokens
    if settings.max_model_tokens is None:
        return min(profile.max_model_tokens, fits)
    if settings.max_model_tokens > fits:
        raise SettingsInvalid(
            f"{AgentSettings.variable('max_model_tokens')}: {settings.max_model_tokens} tokens "
            f"do not fit in a KV cache of {fits}"
        )
    return settings.max_model_tokens
