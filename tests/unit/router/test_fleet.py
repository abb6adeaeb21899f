"""Pools by name: found, ambiguous, unknown, emptied."""

import pytest
from steelyard.v1 import types_pb2

from dataplane.core.errors import RejectReason
from dataplane.core.predictor import BUCKET_EDGES, HistogramPredictor, LengthQuery
from dataplane.core.schedulers import make_scheduler
from dataplane.router.admission import missing_role
from dataplane.router.fleet import Fleet
from dataplane.router.journal import Journal
from dataplane.router.snapshots import SnapshotReader
from servicekit.clock import SystemClock
from servicekit.errors import InvalidArgument, NotFound, Unavailable
from tests.support.snapshots import engine, roster, snapshot
from tests.unit.core.builders import request


class Seen:
    """A fleet that is shown snapshots."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.reader = SnapshotReader("router-0")
        self.fleet = Fleet(
            lambda name, pool: make_scheduler(name, {}, pool),
            HistogramPredictor(),
            Journal(None, clock),
            clock,
            lambda _policy, _seconds: None,
        )
        self.sequence = 0

    def show(self, *engines, **extra) -> Fleet:
        self.sequence += 1
        message = snapshot(roster(*engines), sequence=self.sequence, version=self.sequence, **extra)
        self.fleet.arrived(self.reader.read(message.SerializeToString()))
        return self.fleet


def test_the_only_pool_needs_no_name():
    """An empty model means the only one; its bare name and its full one both find it."""
    fleet = Seen().show(engine("p0", model="m", model_revision="r1"))

    assert fleet.driver("").name == "m@r1"
    assert fleet.driver("m") is fleet.driver("m@r1") is fleet.driver("")


def test_of_two_revisions_the_bare_name_means_the_last():
    """Without a revision a request goes to the one whose name sorts last."""
    fleet = Seen().show(
        engine("p0", model="m", model_revision="r1"), engine("p1", model="m", model_revision="r2")
    )

    assert fleet.driver("m").name == "m@r2"
    assert fleet.driver("m@r1").name == "m@r1"


def test_an_unknown_model_is_told_what_there_is():
    """NOT_FOUND names the field and the models served."""
    fleet = Seen().show(engine("p0", model="a"), engine("p1", model="b"))
    with pytest.raises(NotFound, match=r"'zzz'.*a, b") as caught:
        fleet.driver("zzz")

    assert caught.value.metadata["field"] == "model"


def test_no_model_among_two_is_refused():
    """An empty model is INVALID_ARGUMENT where there is a choice."""
    fleet = Seen().show(engine("p0", model="a"), engine("p1", model="b"))
    with pytest.raises(InvalidArgument, match=r"model: .*a, b"):
        fleet.driver("")


@pytest.mark.parametrize("model", ["", "tiny"])
def test_before_anybody_joined_everything_is_unavailable(model):
    """A router that has seen nobody asks its clients to come again, whatever they name."""
    with pytest.raises(Unavailable) as caught:
        Seen().fleet.driver(model)

    assert caught.value.retry_after_seconds == 1.0


def test_a_pool_whose_last_instance_left_is_empty():
    """No placement falls on instances that are gone; the pool keeps its name and its ledger."""
    seen = Seen()
    fleet = seen.show("p0", "d0")
    driver = fleet.driver("tiny")
    ticket = driver.submit(request("a"), "least_loaded")
    seen.show(engine("p9", model="other"), engine("d9", model="other"))

    assert driver.pool.roster.instances == ()
    assert missing_role(driver.pool.roster) is RejectReason.NO_PREFILL_INSTANCE
    driver.close(ticket)
    assert len(driver.pool.ledger) == 0


def test_a_pool_comes_back_after_it_was_empty():
    """Instances that join an emptied pool are used again."""
    seen = Seen()
    fleet = seen.show("p0", "d0")
    seen.show()
    seen.show("p0", "d0")

    assert len(fleet.driver("tiny").pool.roster.instances) == 2


def test_addresses_are_those_of_all_pools():
    """Channels are kept to every instance there is, of whatever pool."""
    fleet = Seen().show(engine("p0", address="a:1"), engine("d0", model="b", address="b:1"))

    assert fleet.addresses() == {"a:1", "b:1"}


def test_shared_lengths_reach_the_predictor():
    """A new router predicts what others have learned."""
    weights = [0.0] * len(BUCKET_EDGES)
    weights[BUCKET_EDGES.index(16)] = 100.0
    table = types_pb2.LengthTable(
        lengths=[types_pb2.LengthStatistics(key="tiny|||", weights=weights)]
    )
    fleet = Seen().show("p0", lengths=table, lengths_version=1)
    query = LengthQuery(
        model="tiny", tenant="", slo_class="loose", prompt_tokens=5, max_tokens=500, request_id=""
    )

    assert fleet.predictor.predict(query).mean_tokens < 17
