"""What late binding says that it would do is what it does."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dataplane.core.events import Action, Reject, WakeAt
from dataplane.core.late_binding import LateBinding, LateBindingSettings
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from tests.unit.core.builders import pool, request, started
from tests.unit.core.fake_cluster import FakeCluster
from tests.unit.core.test_any_scheduler import Step, engine, happen, submit

busy = st.lists(
    st.builds(
        Step,
        pause=st.sampled_from([0.0005, 0.002, 0.01]),
        what=st.sampled_from(["submit"] * 12 + ["cancel", "drain", "join"]),
        number=st.integers(0, 60),
        name=st.sampled_from(["p0", "p1", "d0", "d1"]),
    ),
    min_size=20,
    max_size=80,
)


class Foretold(LateBinding):
    """Late binding that is asked, before each request, what it would do with it."""

    def __init__(self, held: Pool) -> None:
        super().__init__(held)
        self.foretold: list[tuple[str, bool, str]] = []

    def submit(self, asked: Request, now: float) -> list[Action]:
        """Ask, then do; keeps what was said and whether the request was sent at once."""
        preview = self.preview(now)
        said = preview.held_back(asked) if self.engines.usable else "nowhere to go"
        forming = now == self.dispatcher._now
        place = None if said else preview.place(asked, self.pool.view)
        actions = super().submit(asked, now)
        sent = [
            a for a in actions if not isinstance(a, WakeAt) and a.request_id == asked.request_id
        ]
        went = bool(sent) and not isinstance(sent[0], Reject)
        # Until a timer goes off, somebody who waits may be about to be sent.
        if not forming and "first" not in said:
            self.foretold.append((said, went, asked.request_id))
            if not said and went:
                assert sent[0].instance_id in {place.prefill_id, place.decode_id}
        return actions


def steps(*parts: tuple[float, str, int]) -> list[Step]:
    """Return steps at one engine."""
    return [Step(pause=pause, what=what, number=number, name="p0") for pause, what, number in parts]


# The sixth is in time for the fleet's mean engine and late for the one that is free.
@example(
    script=steps(
        *[(0.0005, "submit", 0)] * 3,
        (0.01, "submit", 0),
        (0.01, "cancel", 4),
        (0.0005, "submit", 49),
        *[(0.0005, "submit", 0)] * 14,
    )
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=busy)
def test_what_is_foretold_is_what_is_done(script: list[Step]) -> None:
    """A request of which nothing is said to hold it back is sent at once, and no other is."""
    engines = {n: engine(n) for n in ("p0", "p1", "d0", "d1")}
    scheduler = Foretold(pool(*engines.values()))
    cluster = FakeCluster(scheduler, engines)
    at = 0.0
    for count, step in enumerate(script):
        at += step.pause
        if step.what == "submit":
            cluster.at(at, lambda step=step, n=count: submit(cluster, step, n))
        else:
            cluster.at(at, lambda step=step: happen(cluster, step))
    cluster.run()

    assert [told for told in scheduler.foretold if bool(told[0]) == told[1]] == []


def test_a_busy_line_holds_back_until_it_is_nearly_done() -> None:
    """A second long prompt waits for the only prefill engine, and is told for how long."""
    scheduler = LateBinding(pool("p0", "d0"))
    scheduler.submit(request("a", prompt=4000), 0.0)

    assert (
        scheduler.preview(0.0).held_back(request("x")).startswith("every prefill engine has work")
    )
    assert "is given more in 0." in scheduler.preview(0.01).held_back(request("x"))
    assert scheduler.preview(10.0).held_back(request("x")) == ""


def test_a_full_decode_engine_holds_back_what_does_not_fit() -> None:
    """The longest prompt with room is told, and one that short is sent."""
    scheduler = LateBinding(pool("p0", "p1", engine("d0", pairing_key="k")))
    scheduler.submit(request("a", prompt=3000), 0.0)
    held = scheduler.preview(0.1).held_back(request("x", prompt=2000, at=0.1))
    longest = int(held.partition("at most ")[2].partition(" ")[0])

    assert held.startswith("no decode engine has room for it within the TPOT targets: at most ")
    assert 0 < longest < 1000
    assert scheduler.preview(0.1).held_back(request("x", prompt=longest - 1, at=0.1)) == ""
    assert started(scheduler.submit(request("y", prompt=2000, at=0.1), 0.1)) == []
    assert started(scheduler.submit(request("x", prompt=longest - 1, at=0.1), 0.1)) == ["x"]


def test_a_full_queue_would_refuse() -> None:
    """A queue at its limit takes nobody in."""
    scheduler = LateBinding(pool("p0", "d0"), LateBindingSettings(queue_limit=1))
    for name in ("a", "b"):
        scheduler.submit(request(name, prompt=4000), 0.0)

    assert "would be refused" in scheduler.preview(0.0).held_back(request("x"))
