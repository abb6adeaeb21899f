"""The paper's cost: each of its terms changes a pick, and each can be taken out."""

import pytest

from dataplane.core.policies.registry import make_policy
from dataplane.core.request import Request
from enginemodel.model import decode_step_seconds, prefill_step_seconds
from enginemodel.profiles import REFERENCE
from tests.unit.core.builders import instance, pool, request

Sequences = dict[str, list[tuple[int, int]]]


def decode(sequences: Sequences, asked: Request, **settings: object) -> str:
    """Return the decode instance taken with these (prompt, output) sequences on each."""
    held = pool("p0", *(instance(n) for n in sequences))
    for name, load in sequences.items():
        for i, (prompt, output) in enumerate(load):
            held.charge_decode(request(f"{name}.{i}", prompt=prompt, output=output), name)
    return make_policy("marginal_cost", settings).place(asked, held.view).decode_id


def prefill(prompts: dict[str, list[int]], asked: Request, **settings: object) -> str | None:
    """Return the prefill instance taken with these prompts on each."""
    held = pool("d0", *prompts)
    for name, load in prompts.items():
        for i, tokens in enumerate(load):
            held.charge_prefill(request(f"{name}.{i}", prompt=tokens), name)
    return make_policy("marginal_cost", settings).place(asked, held.view).prefill_id


@pytest.mark.parametrize(
    ("setting", "sequences", "asked", "with_term", "without"),
    [
        # Few long outputs against many short ones: only the backlog sees the length.
        (
            {"backlog": 0.0},
            {"d0": [(100, 900)], "d1": [(100, 10), (100, 10)]},
            request(),
            "d1",
            "d0",
        ),
        # Equal backlogs in more requests: only the queue sees the number.
        (
            {"queue_seconds": 0.0, "backlog": 1.0},
            {"d0": [(100, 50), (100, 49)], "d1": [(100, 100)]},
            request(),
            "d1",
            "d0",
        ),
        # Full memory against a little more to generate: only the pressure sees the memory.
        (
            {"pressure": 0.0},
            {"d0": [(58_000, 10)], "d1": [(100, 60)]},
            request(output=200.0),
            "d1",
            "d0",
        ),
        # The same through the knee: with a knee above, the memory does not count yet.
        (
            {"pressure_knee": 0.99},
            {"d0": [(58_000, 10)], "d1": [(100, 60)]},
            request(output=200.0),
            "d1",
            "d0",
        ),
        # Own work carries the pressure: without it full memory costs nothing.
        (
            {"own_work": 0.0},
            {"d0": [(58_000, 10)], "d1": [(100, 60)]},
            request(output=200.0),
            "d1",
            "d0",
        ),
        # A long output fears pressure, a flat guess of a short one does not.
        (
            {"use_prediction": False, "flat_output_tokens": 1.0},
            {"d0": [(58_000, 10)], "d1": [(100, 60)]},
            request(output=200.0),
            "d1",
            "d0",
        ),
        # Tight requests weigh seconds more against the queue, whatever the class without sigma.
        (
            {"use_slo": False},
            {"d0": [(100, 1)] * 3, "d1": [(100, 5)]},
            request(slo_class="tight"),
            "d0",
            "d1",
        ),
        # Decode seconds taken for too short: the queue outweighs the backlog.
        (
            {"decode_cost_factor": 1 / 7.4},
            {"d0": [(100, 5)] * 3, "d1": [(100, 25)]},
            request(),
            "d0",
            "d1",
        ),
    ],
)
def test_each_decode_term_changes_a_pick(
    setting: dict[str, object],
    sequences: Sequences,
    asked: Request,
    with_term: str,
    without: str,
) -> None:
    """Where two candidates differ in what one term sees, taking it out turns the pick."""
    assert decode(sequences, asked) == with_term
    assert decode(sequences, asked, **setting) == without


@pytest.mark.parametrize(
    ("setting", "prompts", "with_term", "without"),
    [
        ({"backlog": 0.0}, {"p0": [3000], "p1": [10, 10]}, "p1", "p0"),
        ({"queue_seconds": 0.0}, {"p0": [30, 20], "p1": [100]}, "p1", "p0"),
        ({"prefill_cost_factor": 0.01}, {"p0": [300, 300], "p1": [900]}, "p0", "p1"),
    ],
)
def test_each_prefill_term_changes_a_pick(
    setting: dict[str, object], prompts: dict[str, list[int]], with_term: str, without: str
) -> None:
    """The same on the prefill side."""
    assert prefill(prompts, request()) == with_term
    assert prefill(prompts, request(), **setting) == without


def test_own_work_prefers_the_faster_instance() -> None:
    """On idle instances of different speed only the request's own work tells them apart."""
    held = pool(instance("p0", scale=3.0), "p1", instance("d0", scale=3.0), "d1")
    asked = [request(f"r{i}") for i in range(20)]

    placed = {make_policy("marginal_cost").place(one, held.view) for one in asked}
    blind = {make_policy("marginal_cost", {"own_work": 0.0}).place(o, held.view) for o in asked}

    assert {(p.prefill_id, p.decode_id) for p in placed} == {("p1", "d1")}
    assert len(blind) > 1


def test_terms_are_those_of_the_formula() -> None:
    """Every term of every candidate is the number that the paper's formula gives."""
    held = pool("p0", "d0")
    held.charge_prefill(request("a", prompt=500), "p0")
    held.charge_decode(request("b", prompt=54_000, output=400.0), "d0")
    asked = request("c", prompt=1000, output=300.0, slo_class="tight")
    weights = {"backlog": 2.0, "own_work": 3.0, "queue_seconds": 0.5, "pressure": 7.0}

    terms = make_policy("marginal_cost", weights).explain(asked, held.view)

    constants, sigma = REFERENCE.constants, 3.0**0.5
    tau_pre = prefill_step_seconds(constants, 1024) / 1024
    tau_dec = decode_step_seconds(constants, 1, 1000)
    press = (54_000 + 1000 + 300) / REFERENCE.kv_total_tokens - 0.8
    assert terms.prefill["p0"] == pytest.approx(
        {
            "backlog": 2.0 * 500 * tau_pre * sigma,
            "own_work": 3.0 * 1000 * tau_pre * sigma,
            "queue": 0.5,
        }
    )
    assert terms.decode["d0"] == pytest.approx(
        {
            "backlog": 2.0 * 400 * tau_dec * sigma,
            "own_work": 3.0 * 300 * tau_dec * sigma,
            "pressure": 3.0 * 300 * tau_dec * sigma * 7.0 * press,
            "queue": 0.5,
        }
    )
