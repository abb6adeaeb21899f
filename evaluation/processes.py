"""What runs of real processes have in common: targets, constants, taught lengths, play, score.

Everything here is in engine seconds: on a cluster at a time scale, routers and players count so.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from math import inf

from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from dataplane.core.cluster import SloPolicy
from enginemodel.model import EngineConstants
from evaluation.cells import Cell, SeedResult
from evaluation.errors import EvaluationError
from evaluation.live import LiveOptions, LivePlayer
from evaluation.scoring import Scorer
from evaluation.simulated import profile_of, slo_of, workload_of
from servicekit.channel import open_channel
from servicekit.clock import Clock
from simulator.values import Arrival, Outcome, Timing

COALESCE_SECONDS = 0.02
_SECONDS_PER = ("p0", "p1", "p2", "p3", "d0", "d1", "d2", "h0")
_TEACHING_SEED = 9
_LESSONS = 600


def refuse_what_is_simulated_only(cell: Cell) -> None:
    """Check that a cell can be had with processes.

    Raises:
        EvaluationError: It cannot; the message says what is in the way.
    """
    conditions = cell.conditions
    if conditions.prediction in {"true", "constant"}:
        raise EvaluationError("a router cannot be told output lengths: simulate this cell")
    if conditions.incidents:
        raise EvaluationError("losses of instances are only simulated")


def router_settings(cell: Cell) -> dict[str, object]:
    """Return what the routers of a cell are told."""
    settings: dict[str, object] = {
        "policy": cell.policy,
        "dispatch": cell.conditions.dispatcher,
        "predictor_error": cell.conditions.prediction_error,
        "coalesce_seconds": COALESCE_SECONDS,
    }
    if cell.settings:
        settings["policy_settings"] = {cell.policy: cell.settings}
    return settings


async def publish(control: str, slo: SloPolicy, cell: Cell) -> None:
    """Publish targets and what the routers are to believe of the engines."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        message = control_pb2.SetSloRequest()
        message.slo.default_class = slo.default_class
        for name, targets in slo.classes.items():
            entry = message.slo.classes[name]
            entry.ttft.FromNanoseconds(round(targets.ttft_seconds * 1e9))
            entry.tpot.FromNanoseconds(round(targets.tpot_seconds * 1e9))
        await stub.SetSlo(message)
        believed = times(profile_of(cell.pool).constants, cell.conditions.believed_factor)
        version = types_pb2.ConstantsVersion(
            profile=cell.pool.profile,
            constants=types_pb2.EngineConstants(**asdict(believed)),
            heldout_median_error=-1.0,
            reason="what an experiment tells the routers",
        )
        request = control_pb2.PublishConstantsRequest(constants=version, accept_jump=True)
        await stub.PublishConstants(request)


def times(constants: EngineConstants, factor: float) -> EngineConstants:
    """Return constants with every time multiplied, and the link's speed divided."""
    values = asdict(constants)
    for name in values:
        if name.startswith(_SECONDS_PER):
            values[name] *= factor
    values["handoff_bytes_per_second"] /= factor
    return EngineConstants(**values)


async def teach_lengths(control: str, cell: Cell, model: str) -> None:
    """Tell the control plane of finished requests of the workload, as after some minutes of service.

    Their lengths come from a seed that no experiment is scored on. Without this, policies that
    predict would be compared while they learn, the ones that come first with the least to go by.
    """
    arrivals = workload_of(cell).arrivals(cell.rate, 1e6, _TEACHING_SEED)
    lessons = []
    for arrival in islice(arrivals, _LESSONS):
        outcome = control_pb2.Outcome(
            request_id=f"lesson-{cell.workload}-{arrival.number}",
            router_id="lessons",
            model=model,
            tenant=arrival.tenant,
            slo_class=arrival.slo_class,
            prompt_tokens=arrival.prompt_tokens,
            completion_tokens=arrival.output_tokens,
            status="ok",
        )
        outcome.end_time.GetCurrentTime()
        lessons.append(control_pb2.ReportOutcomesRequest(outcome=outcome))
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        await stub.ReportOutcomes(iter(lessons))


async def play(
    cell: Cell,
    routers: Sequence[str],
    arrivals: Sequence[Arrival],
    clock: Clock,
    *,
    seed: int,
    on_outcome: Callable[[Outcome], None],
    drain_seconds: float = inf,
) -> int:
    """Play requests, spread over the routers as the simulator spreads them.

    Returns:
        How many still generated when the drain was over, and were cut.
    """
    count, players = len(routers), list[LivePlayer]()
    async with asyncio.TaskGroup() as group:
        for place, router in enumerate(routers):
            options = LiveOptions(
                router=router, policy=cell.policy, seed=seed, drain_seconds=drain_seconds
            )
            mine = [arrival for arrival in arrivals if arrival.number % count == place]
            players.append(LivePlayer(options, clock))
            group.create_task(players[-1].play(mine, on_outcome))
    return sum(player.cut for player in players)


def arrivals_of(cell: Cell, seed: int) -> list[Arrival]:
    """Return a cell's requests, prompt and output kept within the model's length."""
    most = profile_of(cell.pool).max_model_tokens
    return [
        _within(arrival, most)
        for arrival in workload_of(cell).arrivals(cell.rate, cell.seconds, seed)
    ]


def _within(arrival: Arrival, most_tokens: int) -> Arrival:
    prompt = min(arrival.prompt_tokens, most_tokens - 1)
    room = most_tokens - prompt
    return arrival._replace(
        prompt_tokens=prompt,
        prefix_tokens=min(arrival.prefix_tokens, prompt),
        output_tokens=min(arrival.output_tokens, room),
        max_tokens=min(arrival.max_tokens, room),
    )


def score(
    cell: Cell, seed: int, arrivals: Sequence[Arrival], outcomes: Sequence[Outcome]
) -> SeedResult:
    """Score outcomes as simulated ones are; `valid` where every request ended exactly once."""
    scorer = Scorer(cell, slo_of(cell.conditions.slo_scale), profile_of(cell.pool), Timing())
    for outcome in outcomes:
        scorer.record(outcome)
    last = max(outcome.ended_at_seconds for outcome in outcomes)
    once = {outcome.arrival.number for outcome in outcomes}
    clean = len(outcomes) == len(once) == len(arrivals)
    return scorer.result(seed, preemptions=0, virtual_seconds=last, clean=clean)
