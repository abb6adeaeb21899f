"""What a step computes, and when a hand-off counts as arrived."""

from dataclasses import dataclass, field

import pytest
from steelyard_enginekit.paced.pulls import PullHold, pulled_tokens
from steelyard_enginekit.paced.shape import StepShape, step_shape

from dataplane.core.emulation.pricing import StepClock
from dataplane.core.emulation.values import BatchingConfig
from enginemodel.model import step_seconds
from enginemodel.profiles import REFERENCE


@dataclass
class New:
    """A request that the worker has not seen."""

    req_id: str
    num_computed_tokens: int = 0


@dataclass
class Cached:
    """Requests that it has."""

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Scheduled:
    """What vLLM's scheduler says of a step."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step."""
        return sum(self.num_scheduled_tokens.values())


def test_prompts_are_chunks_after_what_is_computed():
    """A new prompt, the second chunk of another and a prompt with a cached prefix tell where they stand."""
    scheduled = Scheduled(
        {"new": 700, "going": 952, "cached": 100},
        [New("new"), New("cached", 64)],
        Cached(["going"], [2048]),
    )

    shape = step_shape(scheduled)

    assert sorted(shape.chunks) == [(100, 64), (700, 0), (952, 2048)]
    assert (shape.sequences, shape.kv_tokens) == (0, 0)
    assert shape.requests == {"new", "going", "cached"}


def test_one_token_after_others_is_a_decode():
    """So is the first step after a pull; a prompt of one token is not."""
    scheduled = Scheduled(
        {"going": 1, "pulled": 1, "tiny": 1},
        [New("pulled", 499), New("tiny")],
        Cached(["going"], [9]),
    )

    shape = step_shape(scheduled)

    assert (shape.sequences, shape.kv_tokens) == (2, 10 + 500)
    assert shape.chunks == ((1, 0),)


def test_a_preempted_request_is_prefilled_again():
    """It has nothing computed any more, and all its tokens are a chunk of a mixed step."""
    scheduled = Scheduled({"back": 340, "going": 1}, [], Cached(["back", "going"], [0, 77]))

    assert step_shape(scheduled) == StepShape(((340, 0),), 1, 78, frozenset({"back", "going"}))


def test_a_step_costs_what_the_emulated_engine_takes_for_it():
    """Paced and emulated engines price the same parts the same: chunks, decodes and both together."""
    from random import Random

    config = BatchingConfig(
        constants=REFERENCE.constants,
        kv_total_tokens=60_000,
        kv_bytes_per_token=REFERENCE.kv_bytes_per_token,
        block_tokens=16,
        max_num_seqs=256,
        max_batched_tokens=2048,
    )
    scheduled = Scheduled({"chunk": 300, "going": 1}, [New("chunk")], Cached(["going"], [900]))
    shape = step_shape(scheduled)

    emulated = StepClock(config, Random(0)).step(0.0, [(300, 0, False), (1, 900, True)])
    modelled = step_seconds(config.constants, shape.chunks, shape.sequences, shape.kv_tokens)

    assert modelled == pytest.approx(emulated.duration_seconds)


def test_a_pull_moves_the_tokens_that_are_held_for_it():
    """Not the whole of its last block; of a prompt that is cached in part, only the missing blocks."""
    assert pulled_tokens(3, 32, 70) == 70
    assert pulled_tokens(1, 32, 70) == 32
    assert pulled_tokens(3, 32, None) == 96


def test_an_arrived_pull_is_held_until_its_time_has_come():
    """It is seen at the first look after the modelled link is done, once."""
    pulls = PullHold()
    pulls.begin("a", 10.0, 0.060)

    assert pulls.release({"a"}, (), 10.005) == set()
    assert pulls.held == 1
    assert pulls.release((), (), 10.059) == set()
    assert pulls.release((), (), 10.061) == {"a"}
    assert pulls.release((), (), 10.100) == set()
    assert pulls.held == 0


def test_a_pull_that_takes_longer_than_modelled_is_seen_when_it_arrives():
    """The model is a floor; it brings nothing that is not there."""
    pulls = PullHold()
    pulls.begin("a", 10.0, 0.060)

    assert pulls.release((), (), 10.070) == set()
    assert pulls.release({"a"}, (), 10.080) == {"a"}


def test_a_failed_pull_is_told_at_once():
    """Nothing was moved that could take its time; its neighbour stays held."""
    pulls = PullHold()
    pulls.begin("a", 10.0, 0.060)
    pulls.begin("b", 10.0, 0.060)

    assert pulls.release({"a", "b"}, {"a"}, 10.001) == {"a"}
    assert pulls.held == 1


def test_a_second_begin_does_not_start_the_time_again():
    """VLLM may tell a worker twice; the link was busy from the first time on."""
    pulls = PullHold()
    pulls.begin("a", 10.0, 0.060)
    pulls.begin("a", 10.050, 0.060)

    assert pulls.release({"a"}, (), 10.061) == {"a"}
