from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from evaluation.arrivals import make_process
from evaluation.errors import InvalidWorkloadError
from evaluation.workloads import load_workload, parse_workload, with_arrivals, workload_names

GENERATED = [name for name in workload_names() if not name.startswith("azure")]


def times_of(process, rate, count, seed=0):
    """Return the first arrival times of a process."""
    streams = [np.random.default_rng([seed, i]) for i in (0, 1)]
    return np.array(list(islice(process.times(rate, *streams), count)))


@pytest.mark.parametrize("name", GENERATED)
def test_same_seed_same_requests(name):
    """A workload repeats for a seed and differs for another."""
    workload = load_workload(name)

    first, again, other = (list(workload.arrivals(30.0, 20.0, seed)) for seed in (7, 7, 8))

    assert first == again
    assert first != other


@pytest.mark.parametrize("name", GENERATED)
def test_mean_rate(name):
    """Over a long time the mean rate is the one asked for."""
    count = sum(1 for _ in load_workload(name).arrivals(10.0, 3000.0, 1))

    assert count / 3000.0 == pytest.approx(10.0, rel=0.1)


def test_rate_only_moves_times():
    """Another rate gives the same requests, only closer together."""
    workload = with_arrivals(load_workload("mixed"), {"process": "poisson"})

    slow = list(islice(workload.arrivals(5.0, 1e6, 3), 500))
    fast = list(islice(workload.arrivals(10.0, 1e6, 3), 500))

    assert [a._replace(at_seconds=0.0) for a in slow] == [a._replace(at_seconds=0.0) for a in fast]
    assert [a.at_seconds for a in slow] == pytest.approx([2.0 * a.at_seconds for a in fast])


def test_mix_and_shares():
    """Families come in their shares, classes in the tight share, lengths within their limits."""
    requests = list(load_workload("mixed").arrivals(50.0, 200.0, 5))

    tenants = Counter(request.tenant for request in requests)
    total = len(requests)
    assert tenants["chat"] / total == pytest.approx(0.6, abs=0.02)
    assert tenants["reasoning"] / total == pytest.approx(0.2, abs=0.02)
    assert sum(r.slo_class == "tight" for r in requests) / total == pytest.approx(0.5, abs=0.02)
    documents = [r.prompt_tokens for r in requests if r.tenant == "documents"]
    assert min(documents) >= 800
    assert max(documents) <= 4000


def test_bursts_are_burstier_than_poisson():
    """The two-state process has the dispersion that its states make, Poisson has 1."""
    dispersion = {}
    for name in ("poisson", "bursts"):
        counts = np.histogram(times_of(make_process(name), 20.0, 40_000), np.arange(0, 1900, 2.0))[
            0
        ]
        dispersion[name] = counts.var() / counts.mean()

    assert dispersion["poisson"] == pytest.approx(1.0, abs=0.2)
    assert dispersion["bursts"] > 5.0


def test_gamma_gaps_have_their_spread():
    """Gamma gaps have the coefficient of variation asked for."""
    gaps = np.diff(times_of(make_process("gamma", gap_cv=2.5), 10.0, 40_000))

    assert gaps.std() / gaps.mean() == pytest.approx(2.5, rel=0.1)


def test_train_alternates():
    """A burst train is quiet and busy in turn, by the clock."""
    process = make_process("train", high=2.0, high_seconds=4.0, low=0.5, low_seconds=8.0)
    times = times_of(process, 100.0, 30_000)

    phase = times % 12.0
    busy = np.mean(phase >= 8.0)

    assert busy == pytest.approx(2.0 / 3.0, abs=0.02)


def test_sessions_share_prefixes():
    """Later turns of a session share a prefix, first turns share nothing."""
    requests = list(load_workload("sessions").arrivals(20.0, 60.0, 1))

    first_of = {}
    for request in requests:
        first_of.setdefault(request.session, request)
    later = [r for r in requests if first_of[r.session] is not r]

    assert all(request.prefix_tokens == 0 for request in first_of.values())
    assert len(later) > len(first_of)
    assert all(0 < r.prefix_tokens < r.prompt_tokens for r in later if r.prompt_tokens > 100)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tight_share": 1.5}, "tight_share"),
        ({"families": []}, "shares add up"),
        ({"arrivals": {"process": "tides"}}, "tides"),
        ({"arrivals": {"process": "bursts", "higher": 3.0}}, "higher"),
        ({"colour": "blue"}, "colour"),
        ({"trace": {}}, "path"),
    ],
)
def test_wrong_descriptions_are_refused(change, said):
    """What is wrong with a description is named."""
    lengths = {"kind": "uniform", "low": 1, "high": 2}
    document = {
        "name": "x",
        "families": [{"name": "a", "share": 1.0, "prompt": lengths, "output": lengths}],
    }

    with pytest.raises(InvalidWorkloadError, match=said):
        parse_workload(document | change, Path())


def test_unknown_name_lists_what_there_is():
    """An unknown workload is answered with those that there are."""
    with pytest.raises(InvalidWorkloadError, match="documents"):
        load_workload("dokuments")
