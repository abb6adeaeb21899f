"""Between the protocol's messages and the core's values; refuses what makes no sense."""

import math
import re
from dataclasses import replace
from typing import Any

from steelyard.v1 import control_pb2, types_pb2

from controlplane.core.constants import Problem
from controlplane.core.drift import Drift
from controlplane.core.values import (
    Constants,
    Engine,
    Load,
    Outcome,
    Report,
    Role,
    RouterShare,
    Slo,
    Targets,
)
from enginemodel.model import EngineConstants
from servicekit.enums import number_of, short_name
from servicekit.errors import FieldViolation, InvalidArgument
from servicekit.times import duration, seconds_if_set, seconds_of, timestamp

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_ID_RULE = "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9./][A-Za-z0-9._/@+=-]{0,255}\Z")
_NAME_RULE = "1 to 256 letters, digits and any of ./@+=_-"
_ADDRESS = re.compile(r"\S+:\d{1,5}\Z")

_ENGINE_STRINGS = (
    "model_revision",
    "dtype",
    "pairing_key",
    "engine_kind",
    "engine_version",
    "tokenizer_sha256",
)
_ENGINE_NUMBERS = (
    "max_model_tokens",
    "vocab_size",
    "block_tokens",
    "kv_total_tokens",
    "kv_bytes_per_token",
    "max_num_seqs",
    "max_batched_tokens",
)
_CONSTANT_NAMES = tuple(field.name for field in types_pb2.EngineConstants.DESCRIPTOR.fields)


def refuse(problems: list[Problem]) -> None:
    """Raise InvalidArgument naming every bad field; return where there is none."""
    if problems:
        raise InvalidArgument(
            "; ".join(f"{problem.field}: {problem.description}" for problem in problems),
            violations=[FieldViolation(p.field, p.description) for p in problems],
        )


def engine_from(info: types_pb2.EngineInfo) -> Engine:
    """Read what registers.

    Raises:
        InvalidArgument: a field that everything hangs on is missing or malformed.
    """
    problems = [
        Problem(f"engine.{field}", f"is {value!r}; {rule}")
        for field, value, pattern, rule in (
            ("instance_id", info.instance_id, _ID, _ID_RULE),
            ("epoch", info.epoch, _ID, _ID_RULE),
            ("model", info.model, _NAME, _NAME_RULE),
            ("address", info.address, _ADDRESS, "host:port is needed"),
            ("profile", info.profile or "none", _NAME, _NAME_RULE),
        )
        if not pattern.match(value)
    ]
    if info.role not in (types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE, types_pb2.ROLE_MIXED):
        problems.append(Problem("engine.role", "is not set; PREFILL, DECODE or MIXED is needed"))
    refuse(problems)
    strings: dict[str, Any] = {name: getattr(info, name) for name in _ENGINE_STRINGS}
    numbers: dict[str, Any] = {name: int(getattr(info, name)) for name in _ENGINE_NUMBERS}
    return Engine(
        instance_id=info.instance_id,
        epoch=info.epoch,
        role=Role(short_name(types_pb2.Role, info.role)),
        model=info.model,
        address=info.address,
        handoff_lease_seconds=seconds_of(info.handoff_lease),
        profile=info.profile,
        **strings,
        **numbers,
    )


def engine_to(engine: Engine) -> types_pb2.EngineInfo:
    """Write what registered."""
    info = types_pb2.EngineInfo(
        instance_id=engine.instance_id,
        epoch=engine.epoch,
        role=number_of(types_pb2.Role, engine.role),
        model=engine.model,
        address=engine.address,
        profile=engine.profile,
        handoff_lease=duration(engine.handoff_lease_seconds),
    )
    for name in (*_ENGINE_STRINGS, *_ENGINE_NUMBERS):
        setattr(info, name, getattr(engine, name))
    return info


def report_from(request: control_pb2.ReportRequest) -> Report:
    """Read a report.

    Raises:
        InvalidArgument: a number that cannot be.
    """
    load = request.load
    if not math.isfinite(load.step_seconds) or load.step_seconds < 0:
        refuse([Problem("load.step_seconds", f"is {load.step_seconds}; finite, 0 where idle")])
    shares = tuple(
        RouterShare(
            share.router_id,
            share.prefill_requests,
            share.prefill_tokens,
            share.decode_requests,
            share.decode_kv_tokens,
            share.held_requests,
            share.held_kv_tokens,
        )
        for share in load.by_router
    )
    return Report(
        request.instance_id,
        request.epoch,
        Load(
            running=load.running,
            waiting=load.waiting,
            kv_used_tokens=load.kv_used_tokens,
            queued_prefill_tokens=load.queued_prefill_tokens,
            step_seconds=load.step_seconds,
            by_router=shares,
            preemptions=load.preemptions,
            engine_healthy=load.engine_healthy,
        ),
        request.leaving,
    )


def constants_from(message: types_pb2.ConstantsVersion) -> Constants:
    """Read constants to publish; version and time are not taken over.

    Raises:
        InvalidArgument: no profile that could be named.
    """
    if not _NAME.match(message.profile):
        refuse([Problem("constants.profile", f"is {message.profile!r}; {_NAME_RULE}")])
    return Constants(
        profile=message.profile,
        version=0,
        constants=_values_from(message.constants),
        standard_error=(
            _values_from(message.standard_error) if message.HasField("standard_error") else None
        ),
        heldout_median_error=message.heldout_median_error,
        sample_count=message.sample_count,
        fingerprint=message.fingerprint,
        instance_scale=dict(message.instance_scale),
        reason=message.reason,
    )


def stored_constants(message: types_pb2.ConstantsVersion) -> Constants:
    """Read constants as the control plane handed them out, version and all."""
    return replace(
        constants_from(message), version=message.version, uncalibrated=message.uncalibrated
    )


def drift_to(drift: Drift) -> control_pb2.Drift:
    """Write one drifting instance."""
    return control_pb2.Drift(
        instance_id=drift.instance_id,
        profile=drift.profile,
        part=drift.part,
        ratio=drift.ratio,
        since_time=timestamp(drift.since_unix_seconds),
    )


def constants_to(constants: Constants) -> types_pb2.ConstantsVersion:
    """Write one version."""
    message = types_pb2.ConstantsVersion(
        profile=constants.profile,
        version=constants.version,
        constants=_values_to(constants.constants),
        heldout_median_error=constants.heldout_median_error,
        sample_count=constants.sample_count,
        fingerprint=constants.fingerprint,
        instance_scale=constants.instance_scale,
        publish_time=timestamp(constants.published_unix_seconds),
        uncalibrated=constants.uncalibrated,
        reason=constants.reason,
    )
    if constants.standard_error is not None:
        message.standard_error.CopyFrom(_values_to(constants.standard_error))
    return message


def _values_from(message: types_pb2.EngineConstants) -> EngineConstants:
    return EngineConstants(**{name: getattr(message, name) for name in _CONSTANT_NAMES})


def _values_to(values: EngineConstants) -> types_pb2.EngineConstants:
    return types_pb2.EngineConstants(**{name: getattr(values, name) for name in _CONSTANT_NAMES})


def slo_from(message: types_pb2.SloPolicy) -> Slo:
    """Read targets."""
    classes = {
        name: Targets(
            ttft_seconds=seconds_if_set(targets, "ttft"),
            tpot_seconds=seconds_if_set(targets, "tpot"),
            ttft_seconds_per_prompt_token=seconds_of(targets.ttft_per_prompt_token),
        )
        for name, targets in message.classes.items()
    }
    return Slo(classes, message.default_class)


def slo_to(slo: Slo) -> types_pb2.SloPolicy:
    """Write targets."""
    message = types_pb2.SloPolicy(default_class=slo.default_class)
    for name, targets in slo.classes.items():
        entry = message.classes[name]
        if targets.ttft_seconds is not None:
            entry.ttft.CopyFrom(duration(targets.ttft_seconds))
        if targets.tpot_seconds is not None:
            entry.tpot.CopyFrom(duration(targets.tpot_seconds))
        if targets.ttft_seconds_per_prompt_token:
            entry.ttft_per_prompt_token.CopyFrom(duration(targets.ttft_seconds_per_prompt_token))
    return message


def outcome_from(message: control_pb2.Outcome) -> Outcome:
    """Read a finished request.

    Raises:
        InvalidArgument: no request id, or a number that cannot be.
    """
    problems = []
    if not message.request_id:
        problems.append(Problem("outcome.request_id", "is empty"))
    if not math.isfinite(message.predicted_tokens) or message.predicted_tokens < 0:
        problems.append(
            Problem("outcome.predicted_tokens", f"is {message.predicted_tokens}; finite, >= 0")
        )
    refuse(problems)
    optional: dict[str, Any] = {
        f"{name.removesuffix('_time')}_seconds": seconds
        for name in (
            "ttft", "tpot", "total", "predicted_ttft", "predicted_tpot", "prefill_engine_time",
        )
        if (seconds := seconds_if_set(message, name)) is not None
    }  # fmt: skip
    if message.HasField("prefill_tokens_ahead"):
        optional["prefill_tokens_ahead"] = message.prefill_tokens_ahead
    plain: dict[str, Any] = {
        name: getattr(message, name)
        for name in (
            "request_id", "router_id", "model", "tenant", "slo_class", "policy",
            "prefill_instance_id", "decode_instance_id", "constants_version", "prompt_tokens",
            "predicted_tokens", "completion_tokens", "slo_met", "cached_prompt_tokens",
        )
    }  # fmt: skip
    return Outcome(
        **plain,
        **optional,
        status=message.status or "ok",
        end_unix_seconds=seconds_of(message.end_time),
    )
