"""What there is to measure: READY instances by profile and side, and the pairs between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steelyard.v1 import types_pb2

from calibrator.design import Limits
from calibrator.errors import NoReadyInstance
from servicekit.enums import short_name


@dataclass(frozen=True, slots=True)
class Target:
    """One READY instance."""

    instance_id: str
    address: str
    epoch: str
    prefills: bool
    decodes: bool
    model: str
    profile: str
    pairing_key: str
    block_tokens: int
    vocab_size: int
    kv_bytes_per_token: int
    limits: Limits
    fingerprint: str
    handoff_lease_seconds: float

    @property
    def pool(self) -> str:
        """What pairs are formed within: the model with its revision."""
        return self.model


@dataclass(frozen=True, slots=True)
class ProfileTargets:
    """The instances of one profile."""

    profile: str
    targets: tuple[Target, ...]

    @property
    def prefills(self) -> tuple[Target, ...]:
        """Those that prefill."""
        return tuple(target for target in self.targets if target.prefills)

    @property
    def decodes(self) -> tuple[Target, ...]:
        """Those that decode."""
        return tuple(target for target in self.targets if target.decodes)

    @property
    def limits(self) -> Limits:
        """What every instance of the profile can hold."""
        each = [target.limits for target in self.targets]
        return Limits(
            max_model_tokens=min(limits.max_model_tokens for limits in each),
            max_batched_tokens=min(limits.max_batched_tokens for limits in each),
            max_num_seqs=min(limits.max_num_seqs for limits in each),
            kv_total_tokens=min(limits.kv_total_tokens for limits in each),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of a token's KV; 0 where no instance knows."""
        return max(target.kv_bytes_per_token for target in self.targets)

    @property
    def fingerprint(self) -> str:
        """What was measured, in words."""
        return self.targets[0].fingerprint


def ready_targets(instances: Iterable[types_pb2.Instance]) -> list[Target]:
    """Return the READY instances, by id.

    Raises:
        NoReadyInstance: There is none.
    """
    everyone = list(instances)
    ready = [i for i in everyone if i.state == types_pb2.INSTANCE_STATE_READY]
    if not ready:
        states = ", ".join(
            f"{i.engine.instance_id} is {short_name(types_pb2.InstanceState, i.state)}"
            for i in everyone
        )
        raise NoReadyInstance(
            f"no instance is READY ({states or 'none is registered'}); nothing can be measured"
        )
    return sorted((_target(i.engine) for i in ready), key=lambda target: target.instance_id)


def by_profile(targets: Sequence[Target]) -> list[ProfileTargets]:
    """Group instances by profile, in order of name."""
    names = sorted({target.profile for target in targets})
    return [
        ProfileTargets(name, tuple(target for target in targets if target.profile == name))
        for name in names
    ]


def pairs_of(targets: Sequence[Target]) -> list[tuple[Target, Target]]:
    """Return every (prefill, decode) pair of two instances that may hand KV to each other.

    Rounds come one after the other in which no instance appears twice.
    """
    found: list[tuple[Target, Target]] = []
    for pool in sorted({target.pool for target in targets}):
        prefills = [t for t in targets if t.pool == pool and t.prefills]
        decodes = [t for t in targets if t.pool == pool and t.decodes]
        size = max(len(prefills), len(decodes))
        rounds = [(i, (i + shift) % size) for shift in range(size) for i in range(size)]
        found += [
            (prefills[i], decodes[j])
            for i, j in rounds
            if i < len(prefills)
            and j < len(decodes)
            and prefills[i].instance_id != decodes[j].instance_id
            and prefills[i].pairing_key == decodes[j].pairing_key
        ]
    return found


def _target(engine: types_pb2.EngineInfo) -> Target:
    prefills = engine.role in (types_pb2.ROLE_PREFILL, types_pb2.ROLE_MIXED)
    decodes = engine.role in (types_pb2.ROLE_DECODE, types_pb2.ROLE_MIXED)
    parts = (
        f"profile={engine.profile}",
        f"engine={engine.engine_kind} {engine.engine_version}".strip(),
        f"model={engine.model}",
        f"dtype={engine.dtype}",
        f"block_tokens={engine.block_tokens}",
        f"max_batched_tokens={engine.max_batched_tokens}",
        f"max_num_seqs={engine.max_num_seqs}",
        f"kv_total_tokens={engine.kv_total_tokens}",
    )
    revision = f"@{engine.model_revision}" if engine.model_revision else ""
    return Target(
        instance_id=engine.instance_id,
        address=engine.address,
        epoch=engine.epoch,
        prefills=prefills,
        decodes=decodes,
        model=engine.model + revision,
        profile=engine.profile,
        pairing_key=engine.pairing_key,
        block_tokens=engine.block_tokens,
        vocab_size=engine.vocab_size,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        limits=Limits(
            max_model_tokens=engine.max_model_tokens,
            max_batched_tokens=engine.max_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            kv_total_tokens=engine.kv_total_tokens,
        ),
        fingerprint=" ".join(parts),
        handoff_lease_seconds=engine.handoff_lease.ToTimedelta().total_seconds(),
    )
