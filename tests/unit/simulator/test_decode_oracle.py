"""The jumping decode engine against the emulated engine, which takes every step."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.values import BatchingConfig, Idle, SequenceRequest
from simulator.decode import DecodeEngine
from simulator.engine import Job
from simulator.kernel import Kernel, Priority
from simulator.noise import StepNoise
from simulator.values import SILENT, EngineSpec
from tests.unit.simulator.helpers import arrival, profile_with


class Notes:
    """Writes down when first and last tokens are there."""

    def __init__(self, kernel):
        self.kernel, self.first, self.last, self.told_at = kernel, {}, {}, []

    def first_token(self, job, at):
        self.first[job.request_id] = at

    def progressed(self, jobs):
        self.told_at.append(self.kernel.now)

    def finished(self, job):
        self.last[job.request_id] = self.kernel.now


class Holder:
    """A prefill engine that lives and holds."""

    alive = True

    def release(self, job):
        pass


def by_jumps(profile, arrivals):
    """Return first and last tokens and preemptions from the jumping engine."""
    notes, preemptions = jump(profile, arrivals, learning_steps=0)
    return notes.first, notes.last, preemptions


def jump(profile, arrivals, *, learning_steps):
    """Run the jumping engine; return what was noted, and preemptions."""
    kernel = Kernel()
    notes = Notes(kernel)
    noise = StepNoise(SILENT, np.random.default_rng(0))
    spec = EngineSpec(role="decode", profile=profile)
    engine = DecodeEngine(
        "d", spec, kernel, noise, serial_link=False, learning_steps=learning_steps
    )
    for one in arrivals:
        job = Job(one, notes, 0)
        job.holder = Holder()
        kernel.at(one.at_seconds, Priority.WIRE, engine.arrive, job)
    kernel.run()
    return notes, engine.preemptions


def step_by_step(profile, arrivals):
    """Return the same from the engine that takes every step."""
    engine = BatchingEngine(
        BatchingConfig(
            constants=profile.constants,
            kv_total_tokens=profile.kv_total_tokens,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            block_tokens=profile.block_tokens,
            max_num_seqs=profile.max_num_seqs,
            max_batched_tokens=profile.max_batched_tokens,
        ),
        Random(0),
    )
    outputs = {one.request_id: one.output_tokens for one in arrivals}
    waiting = sorted(arrivals, key=lambda one: one.at_seconds)
    now, first, last = 0.0, {}, {}
    while waiting or len(last) < len(outputs):
        while waiting and waiting[0].at_seconds <= now:
            one = waiting.pop(0)
            engine.submit(
                SequenceRequest(
                    request_id=one.request_id,
                    prompt_tokens=one.prompt_tokens,
                    output_tokens=one.output_tokens,
                    pull=True,
                )
            )
        step = engine.begin_step(now)
        for started in engine.take_news().started:
            engine.content_arrived(started, outputs[started])
        if isinstance(step, Idle):
            step = engine.begin_step(now)
        if isinstance(step, Idle):
            times = [t for t in (step.until_seconds,) if t is not None]
            times += [waiting[0].at_seconds] if waiting else []
            now = max(now, min(times))
            continue
        outcome = engine.complete_step()
        now = step.end_seconds
        for request_id in outcome.progressed:
            first.setdefault(request_id, now)
        for request_id in outcome.finished:
            last[request_id] = now
    return first, last, engine.preemptions


REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(2, 300), st.integers(1, 120)),
    min_size=1,
    max_size=25,
)


def test_the_first_steps_are_told_one_by_one():
    """While schedulers learn they hear of every step, then of every 64th; tokens come alike."""
    arrivals = [arrival(0, 0.0, 100, 2000)]

    learning, _ = jump(profile_with(), arrivals, learning_steps=100)
    plain, _ = jump(profile_with(), arrivals, learning_steps=0)

    assert len(learning.told_at) - len(plain.told_at) == pytest.approx(100, abs=4)
    assert learning.first == pytest.approx(plain.first)
    assert learning.last == pytest.approx(plain.last)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from([480, 1600, 60_000]), st.sampled_from([2, 256]))
def test_jumping_equals_stepping(requests, kv_tokens, seats):
    """Without noise both engines give every token at the same moment, preemptions included."""
    profile = profile_with(
        kv_total_tokens=kv_tokens, max_num_seqs=seats, max_batched_tokens=100_000
    )
    arrivals = [arrival(i, *request) for i, request in enumerate(requests)]

    first, last, preemptions = by_jumps(profile, arrivals)
    expected_first, expected_last, expected_preemptions = step_by_step(profile, arrivals)

    assert expected_preemptions == preemptions
    assert first == pytest.approx(expected_first, abs=1e-9)
    assert last == pytest.approx(expected_last, abs=1e-9)
