"""The emulated engine's batching: limits hold, steps cost what the model says, all ends once."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.values import BatchingConfig, Idle, SequenceRequest, Step
from enginemodel.model import decode_step_seconds, handoff_seconds, prefill_step_seconds
from enginemodel.profiles import REFERENCE

CONSTANTS = REFERENCE.constants
CONFIG = BatchingConfig(
    constants=CONSTANTS,
    kv_total_tokens=60_000,
    kv_bytes_per_token=REFERENCE.kv_bytes_per_token,
    block_tokens=16,
    max_num_seqs=256,
    max_batched_tokens=2048,
    lease_seconds=30.0,
)


def engine(**changes):
    """An engine of the reference profile with some limits changed."""
    return BatchingEngine(replace(CONFIG, **changes), Random(1))


def request(request_id="r", prompt_tokens=100, output_tokens=3, **kind):
    """One generation."""
    return SequenceRequest(
        request_id=request_id, prompt_tokens=prompt_tokens, output_tokens=output_tokens, **kind
    )


def drive(core, now=0.0, steps=1_000_000, arrives=None):
    """Run steps until idle for good; returns (steps taken, tokens by request, finished, time).

    `arrives` is called with each pull that starts and tells its content at once.
    """
    taken, tokens, finished = [], {}, []
    for _ in range(steps):
        step = core.begin_step(now)
        for request_id in core.take_news().started:
            core.content_arrived(request_id, arrives(request_id) if arrives else 3)
            if isinstance(step, Idle):
                step = Idle(now)
        if isinstance(step, Idle):
            if step.until_seconds is None:
                break
            now = max(now, step.until_seconds)
            continue
        outcome = core.complete_step()
        now = step.end_seconds
        taken.append(step)
        for request_id in outcome.progressed:
            tokens[request_id] = tokens.get(request_id, 0) + 1
        finished += outcome.finished
    return taken, tokens, finished, now


def test_prefill_then_decode_cost_what_the_engine_model_says():
    """A lone request takes one prefill step and one decode step for each further token."""
    core = engine()
    core.submit(request(prompt_tokens=500, output_tokens=3))

    taken, tokens, finished, now = drive(core)

    first = prefill_step_seconds(CONSTANTS, 500)
    rest = [decode_step_seconds(CONSTANTS, 1, 501), decode_step_seconds(CONSTANTS, 1, 502)]
    assert [step.duration_seconds for step in taken] == pytest.approx([first, *rest])
    assert tokens == {"r": 3}
    assert finished == ["r"]
    assert now == pytest.approx(first + sum(rest))
    assert core.kv_used_tokens == 0


def test_long_prompts_are_computed_in_chunks():
    """A prompt above the step budget takes several steps, the later ones with context."""
    core = engine()
    core.submit(request(prompt_tokens=5000, output_tokens=1))

    taken, *_ = drive(core)

    assert [step.prefill_tokens for step in taken] == [2048, 2048, 904]
    assert [step.duration_seconds for step in taken] == pytest.approx(
        [
            prefill_step_seconds(CONSTANTS, 2048, 0),
            prefill_step_seconds(CONSTANTS, 2048, 2048),
            prefill_step_seconds(CONSTANTS, 904, 4096),
        ]
    )


def test_prompts_that_share_a_step_pay_its_fixed_part_once():
    """Two prompts in one step cost one fixed part, the sum of tokens and both attentions."""
    core = engine()
    core.submit(request("a", prompt_tokens=300, output_tokens=1))
    core.submit(request("b", prompt_tokens=400, output_tokens=1))

    step = core.begin_step(0.0)

    linear = CONSTANTS.p1_seconds + CONSTANTS.p2_seconds_per_token * 700
    attention = CONSTANTS.p3_seconds_per_token_squared * (300**2 + 400**2)
    assert step.duration_seconds == pytest.approx(linear + attention)


def test_prompt_tokens_in_a_decode_step_add_their_work_only():
    """A mixed step is the decode step plus the prompt's linear and quadratic parts."""
    core = engine()
    core.submit(request("a", prompt_tokens=100, output_tokens=5))
    first = core.begin_step(0.0)
    core.complete_step()
    core.submit(request("b", prompt_tokens=400, output_tokens=1))

    step = core.begin_step(first.end_seconds)

    added = CONSTANTS.p2_seconds_per_token * 400 + CONSTANTS.p3_seconds_per_token_squared * 400**2
    assert step.duration_seconds == pytest.approx(decode_step_seconds(CONSTANTS, 1, 101) + added)


def test_no_more_sequences_run_than_there_are_seats():
    """With two seats the third request waits for one to be given up."""
    core = engine(max_num_seqs=2)
    for name in "abc":
        core.submit(request(name, prompt_tokens=10, output_tokens=2))

    step = core.begin_step(0.0)

    assert (core.running, core.waiting) == (2, 1)
    core.complete_step()
    _, tokens, finished, _ = drive(core, step.end_seconds)
    assert finished == ["a", "b", "c"]
    assert tokens["c"] == 2


def test_the_last_admitted_is_preempted_and_still_gets_every_token():
    """Without a block for the next token the newest sequence loses its KV and recomputes."""
    core = engine(kv_total_tokens=64, max_num_seqs=8)
    core.submit(request("old", prompt_tokens=16, output_tokens=30))
    core.submit(request("new", prompt_tokens=16, output_tokens=30))

    taken, tokens, finished, _ = drive(core)

    assert core.preemptions > 0
    assert tokens == {"old": 30, "new": 30}
    assert finished == ["old", "new"]
    assert any(step.prefill_tokens > 16 for step in taken[1:])
    assert core.kv_used_tokens == 0


def test_a_prefill_leg_holds_its_blocks_until_they_are_pulled():
    """The KV of a finished prefill stays in use until somebody frees it."""
    core = engine()
    core.submit(request(prompt_tokens=100, output_tokens=1, hold=True))
    step = core.begin_step(0.0)

    outcome = core.complete_step()

    assert outcome.held == ["r"]
    assert core.kv_used_tokens == 112
    assert core.begin_step(step.end_seconds) == Idle(step.end_seconds + 30.0)
    assert core.free_held("r")
    assert not core.free_held("r")
    assert core.kv_used_tokens == 0


def test_held_blocks_are_freed_when_their_lease_ends():
    """At the end of the lease the hand-off is gone; a renewal moves that end."""
    core = engine(lease_seconds=5.0)
    core.submit(request(prompt_tokens=100, output_tokens=1, hold=True))
    end = core.begin_step(0.0).end_seconds
    core.complete_step()

    assert core.extend_held("r", end + 4.0)
    assert core.expire(end + 5.0) == []
    assert core.expire(end + 9.0) == ["r"]
    assert core.kv_used_tokens == 0
    assert not core.extend_held("r", end + 9.0)


def test_a_pull_into_an_idle_engine_takes_the_transfer_and_one_decode_step():
    """An idle engine sees the KV arrive at once and computes the last prompt token only."""
    core = engine()
    core.submit(request(prompt_tokens=1000, output_tokens=1, pull=True))

    taken, _, finished, now = drive(core, arrives=lambda _: 1)

    step = decode_step_seconds(CONSTANTS, 1, 1000)
    transfer = handoff_seconds(CONSTANTS, 1000, REFERENCE.kv_bytes_per_token)
    assert finished == ["r"]
    assert [s.prefill_tokens for s in taken] == [0]
    assert now == pytest.approx(transfer + step)


@pytest.mark.parametrize(("notice_share", "extra_steps"), [(0.99, 1), (0.0, 2)])
def test_a_pull_beside_running_steps_is_noticed_late(notice_share, extra_steps):
    """A busy engine looks for finished pulls once a step and runs them in the step after."""
    core = engine(notice_share=notice_share)
    core.submit(request("busy", prompt_tokens=10, output_tokens=50))
    first = core.begin_step(0.0)
    core.complete_step()
    core.submit(request("pulled", prompt_tokens=20, output_tokens=1, pull=True))
    now, steps = first.end_seconds, 0
    got = []
    while "pulled" not in got:
        step = core.begin_step(now)
        for request_id in core.take_news().started:
            core.content_arrived(request_id, 1)
        got = core.complete_step().progressed
        now, steps = step.end_seconds, steps + 1

    assert steps == 1 + extra_steps


def test_a_pull_waits_for_its_content_and_then_for_nothing():
    """While the prefill engine has not answered an idle engine waits for no time at all."""
    core = engine()
    core.submit(request(prompt_tokens=100, pull=True))

    assert core.begin_step(0.0) == Idle(None)
    core.content_arrived("r", 2)
    idle = core.begin_step(1.0)

    assert isinstance(idle, Step)


def test_an_aborted_pull_tells_that_its_blocks_are_not_wanted():
    """Whether queued or under way, an aborted pull is reported as done with."""
    core = engine(max_num_seqs=1)
    for name in ("under way", "queued"):
        core.submit(request(name, pull=True))
    core.begin_step(0.0)
    core.take_news()

    assert core.abort("under way")
    assert core.abort("queued")

    assert core.take_news().done == ["under way", "queued"]
    assert core.kv_used_tokens == 0


def test_an_abort_during_a_step_gets_nothing_from_it():
    """A request aborted while its step runs leaves no token and no KV."""
    core = engine()
    core.submit(request("a"))
    core.submit(request("b"))
    core.begin_step(0.0)

    assert core.abort("a")
    outcome = core.complete_step()

    assert outcome.progressed == ["b"]
    assert not core.abort("a")
    assert core.running == 1


def test_a_request_that_can_never_fit_is_refused():
    """Prompt and output above the whole KV cache would wait for ever."""
    core = engine(kv_total_tokens=160)

    with pytest.raises(ValueError, match="exceed a KV cache of 160"):
        core.submit(request(prompt_tokens=150, output_tokens=11))


def test_a_live_id_is_refused():
    """Two live requests of one id could not be told apart."""
    core = engine()
    core.submit(request())

    with pytest.raises(ValueError, match="live already"):
        core.submit(request())


def test_jitter_is_repeatable_and_keeps_the_mean():
    """The same seed gives the same steps; the mean factor is 1."""
    steps = []
    for _ in range(2):
        core = engine(jitter_sigma=0.1)
        core.submit(request(prompt_tokens=10, output_tokens=2000))
        steps.append([step.duration_seconds for step in drive(core)[0][1:]])
    plain = [decode_step_seconds(CONSTANTS, 1, 10 + n) for n in range(1, 2000)]

    assert steps[0] == steps[1]
    assert len(set(steps[0])) > 1000
    assert sum(steps[0]) == pytest.approx(sum(plain), rel=0.02)


def test_stalls_lengthen_some_steps():
    """A stall adds its whole length, about as often as was asked for."""
    core = engine(stall_probability=0.1, stall_seconds=0.5)
    core.submit(request(prompt_tokens=10, output_tokens=1000))

    stalled = [step for step in drive(core)[0] if step.duration_seconds > 0.5]

    assert 60 < len(stalled) < 140


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 300),
        st.integers(1, 60),
        st.sampled_from(["plain", "pull", "hold"]),
        st.integers(0, 40),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=25,
)


class Rig:
    """Feeds an engine with random requests and keeps its own books of them."""

    def __init__(self, core, requests):
        self.core = core
        self.todo = sorted(enumerate(requests), key=lambda item: item[1][3])
        self.aborts, self.ended, self.tokens, self.wanted = {}, {}, {}, {}

    def submit_due(self, turn):
        """Submit what arrives by now."""
        while self.todo and self.todo[0][1][3] <= turn:
            number, (prompt, output, kind, _, abort_after) = self.todo.pop(0)
            name = f"{kind}-{number}"
            self.wanted[name] = 1 if kind == "hold" else output
            pull, hold = kind == "pull", kind == "hold"
            self.core.submit(request(name, prompt, self.wanted[name], pull=pull, hold=hold))
            if abort_after is not None:
                self.aborts.setdefault(turn + abort_after, []).append(name)

    def abort_due(self, turn):
        """Abort what is to be aborted now, unless it has ended."""
        for name in self.aborts.pop(turn, []):
            if self.core.abort(name):
                self.end(name)

    def end(self, name):
        """Note the one end of a request."""
        assert name not in self.ended
        self.ended[name] = self.tokens.get(name, 0)

    def take(self, outcome):
        """Count tokens; the last one must be the last that was wanted."""
        for name in outcome.progressed:
            assert name not in self.ended
            self.tokens[name] = self.tokens.get(name, 0) + 1
        for name in outcome.finished:
            self.end(name)
            assert self.ended[name] == self.wanted[name]

    def turn(self, turn, now):
        """Take one step; returns the time after it, None when nothing is left to do."""
        self.submit_due(turn)
        step = self.core.begin_step(now)
        for name in self.core.take_news().started:
            self.core.content_arrived(name, self.wanted[name])
        self.abort_due(turn)
        if isinstance(step, Step):
            assert step.prefill_tokens + step.sequences <= 64
            self.take(self.core.complete_step())
            return step.end_seconds
        if step.until_seconds is None and not self.todo and not self.core.waiting:
            return None
        return max(now, step.until_seconds or now)


@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, kv_blocks=st.integers(24, 80), seats=st.integers(1, 8))
def test_whatever_comes_every_request_ends_once_and_kv_returns_to_zero(requests, kv_blocks, seats):
    """Under random arrivals, aborts, pulls and holds: budget kept, all tokens, no KV left."""
    core = engine(
        kv_total_tokens=kv_blocks * 16, max_num_seqs=seats, max_batched_tokens=64, lease_seconds=2.0
    )
    rig, now, turn, last = Rig(core, requests), 0.0, 0, 0.0
    while now is not None:
        last, now = now, rig.turn(turn, now)
        assert core.kv_used_tokens <= kv_blocks * 16
        assert core.running <= seats
        turn += 1
        assert turn < 50_000, "the engine made no progress"

    assert rig.ended.keys() == rig.wanted.keys()
    core.expire(last + 100.0)
    assert core.kv_used_tokens == 0
    assert (core.running, core.waiting, core.held) == (0, 0, 0)
