"""What is predicted of output lengths, before and while a request streams."""

from math import log, sqrt
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.errors import InvalidSettingError
from dataplane.core.lengths import BUCKET_EDGES, DecayingCounts, LengthHistogram, bucket_of
from dataplane.core.predictor import HistogramPredictor, LengthEstimate, LengthQuery, keys

COUNT = len(BUCKET_EDGES)
histograms = st.lists(st.floats(0.0, 100.0), min_size=COUNT, max_size=COUNT).filter(
    lambda weights: sum(weights) > 1.0
)


def query(**changes: object) -> LengthQuery:
    """Return a query of a kind."""
    values = {
        "model": "m",
        "tenant": "t",
        "slo_class": "tight",
        "prompt_tokens": 300,
        "max_tokens": 4000,
        "request_id": "r",
    }
    return LengthQuery(**(values | changes))


def one(tokens: int, times: float = 100.0) -> list[float]:
    """Return counts of one length alone."""
    weights = [0.0] * COUNT
    weights[bucket_of(tokens)] = times
    return weights


def test_nothing_seen_is_a_guess() -> None:
    """Without any outcome the default is predicted, capped by what the request allows."""
    predictor = HistogramPredictor(default_tokens=200.0)

    assert predictor.predict(query()).mean_tokens == 200.0
    assert predictor.predict(query(max_tokens=50)).mean_tokens == 50.0


def test_outcomes_are_learned_by_kind() -> None:
    """Each kind of request gets its own prediction, soon after its outcomes change."""
    predictor = HistogramPredictor()
    for _ in range(200):
        predictor.learn(query(tenant="long"), 1000)
        predictor.learn(query(tenant="short"), 50)

    assert predictor.predict(query(tenant="long")).mean_tokens == pytest.approx(1000, rel=0.25)
    assert predictor.predict(query(tenant="short")).mean_tokens == pytest.approx(50, rel=0.8)


@pytest.mark.parametrize(
    "changes", [{"tenant": "other"}, {"slo_class": "loose"}, {"prompt_tokens": 3000}]
)
def test_unknown_kinds_fall_back(changes: dict[str, object]) -> None:
    """A kind that was never seen is predicted by the more general ones, down to the model."""
    predictor = HistogramPredictor(default_tokens=1.0)
    for _ in range(50):
        predictor.learn(query(), 400)

    assert predictor.predict(query(**changes)).mean_tokens == pytest.approx(400, rel=0.25)
    assert predictor.predict(query(model="other")).mean_tokens == 1.0


def test_little_evidence_is_shrunk_towards_the_general() -> None:
    """One outlier of a new kind does not overturn what is known in general."""
    predictor = HistogramPredictor()
    for _ in range(300):
        predictor.learn(query(tenant="many"), 100)
    predictor.learn(query(tenant="new"), 4000)

    assert predictor.predict(query(tenant="new")).mean_tokens < 1000


def test_old_outcomes_fade() -> None:
    """After a change of the workload the new lengths win; without decay the mean stays between."""
    means = []
    for decay in (0.99, 1.0):
        predictor = HistogramPredictor(decay=decay)
        for tokens in (50, 1000):
            for _ in range(500):
                predictor.learn(query(), tokens)
        means.append(predictor.predict(query()).mean_tokens)

    assert means[0] == pytest.approx(1000, rel=0.25)
    assert means[1] < 650


@given(st.lists(st.integers(0, COUNT - 1), max_size=60), st.sampled_from([0.5, 0.9, 1.0]))
def test_fading_equals_multiplying_the_old(buckets: list[int], decay: float) -> None:
    """Counting with growing units is the same as shrinking all old counts each time."""
    counts, naive = DecayingCounts(decay), [0.0] * COUNT
    for bucket in buckets * 3:
        counts.add(bucket)
        naive = [weight * decay for weight in naive]
        naive[bucket] += 1.0

    assert counts.weights() == pytest.approx(naive)
    assert counts.evidence == pytest.approx(sum(naive))


@given(
    weights=histograms,
    generated=st.integers(0, 70_000),
    most=st.integers(1, 70_000),
    factor=st.floats(0.2, 5.0),
)
def test_the_rest_equals_the_sum_over_lengths(
    weights: list[float], generated: int, most: int, factor: float
) -> None:
    """The quick answer is the conditional mean that a loop over all lengths gives."""
    mass = total = 0.0
    lower = 0
    for edge, weight in zip(BUCKET_EDGES, weights, strict=True):
        length = min((lower + edge + 1) / 2.0 * factor, float(most))
        if length > generated and weight > 0.0:
            mass += weight
            total += weight * (length - generated)
        lower = edge

    rest = LengthHistogram(weights).rest(generated, most, factor)

    if mass <= 1e-6 * sum(weights):
        return
    assert rest == pytest.approx(total / mass, rel=1e-6, abs=1e-3)


@given(weights=histograms, max_tokens=st.integers(1, 5000), factor=st.floats(0.2, 5.0))
def test_a_living_stream_always_has_a_rest(
    weights: list[float], max_tokens: int, factor: float
) -> None:
    """However far a stream is, at least one token is left, and no more than it may generate."""
    estimate = LengthEstimate(100.0, LengthHistogram(weights), max_tokens, factor)
    for generated in (0, 1, max_tokens // 2, max_tokens - 1, max_tokens, max_tokens + 5, 10**6):
        rest = estimate.remaining_tokens(generated)

        assert 1.0 <= rest <= max(1.0, max_tokens - generated)


def test_a_stream_that_outlives_its_kind_is_expected_to_go_on() -> None:
    """Past the mean of a heavy-tailed kind the rest grows, it does not shrink to nothing."""
    weights = one(50, 90.0)
    weights[bucket_of(2000)] = 10.0
    estimate = LengthEstimate(0.0, LengthHistogram(weights), 10_000)

    assert estimate.remaining_tokens(0) < 260
    assert estimate.remaining_tokens(100) > 1500
    assert estimate.remaining_tokens(8000) == 2000.0


def test_a_mean_alone_counts_down_to_one() -> None:
    """Without a histogram the rest is what the mean leaves, at least one token."""
    estimate = LengthEstimate(100.0, (), 1000)

    assert estimate.remaining_tokens(40) == 60.0
    assert estimate.remaining_tokens(200) == 1.0


def test_predictions_are_capped_by_the_request() -> None:
    """What may not be generated is not predicted, nor does it count into the mean."""
    predictor = HistogramPredictor()
    for tokens in (100, 3000):
        for _ in range(200):
            predictor.learn(query(), tokens)

    capped = predictor.predict(query(max_tokens=200))

    assert capped.mean_tokens <= 200
    assert capped.mean_tokens == pytest.approx(150, rel=0.2)


def test_a_new_router_is_not_cold() -> None:
    """What others learned is used at once, and a broken row is left out."""
    predictor = HistogramPredictor()

    predictor.share({key: one(700) for key in keys(query())} | {"m||x|64": [1.0]})

    assert predictor.predict(query()).mean_tokens == pytest.approx(700, rel=0.25)


def test_own_outcomes_give_way_to_the_shared_ones() -> None:
    """Own outcomes are dropped once two shared tables after them have counted them too."""
    predictor = HistogramPredictor()
    for _ in range(1000):
        predictor.learn(query(), 50)
    for times in (100.0, 101.0, 102.0):
        predictor.share({key: one(700, times) for key in keys(query())})

    assert predictor.predict(query()).mean_tokens == pytest.approx(700, rel=0.25)


def test_without_news_own_outcomes_stay() -> None:
    """An empty table, or the same again, takes nothing away."""
    predictor = HistogramPredictor()
    table = {"other|||": one(700)}
    predictor.share(table)
    for _ in range(100):
        predictor.learn(query(), 50)
    for _ in range(5):
        predictor.share(dict(table))
        predictor.share({})

    assert predictor.predict(query()).mean_tokens < 70


def test_injected_error_is_fixed_by_the_request() -> None:
    """The same request has the same error with any predictor, and keeps it while it streams."""
    predictors = [HistogramPredictor(error=1.5), HistogramPredictor(error=1.5)]
    for predictor in predictors:
        for _ in range(200):
            predictor.learn(query(), 500)
    first, second = (p.predict(query(request_id="x")) for p in predictors)

    assert first == second or first.mean_tokens == second.mean_tokens
    assert first.factor != 1.0
    assert first.remaining_tokens(0) == pytest.approx(first.mean_tokens)
    assert predictors[0].predict(query(request_id="y")).factor != first.factor


@pytest.mark.parametrize("error", [0.25, 1.0, 1.5])
def test_injected_error_has_the_spread_asked_for(error: float) -> None:
    """Factors have mean 1, and their logarithms the deviation that the error stands for."""
    predictor = HistogramPredictor(error=error)
    factors = [predictor.predict(query(request_id=f"r{i}")).factor for i in range(4000)]

    sigma = sqrt(log(1.0 + error * error))
    assert pstdev([log(factor) for factor in factors]) == pytest.approx(sigma, rel=0.05)
    assert fmean(factors) == pytest.approx(1.0, abs=0.15)


def test_names_cannot_forge_keys() -> None:
    """A separator within a name does not make it another name's key."""
    assert keys(query(tenant="a|b")) == keys(query(tenant="a_b"))
    assert keys(query(tenant="", slo_class="a|b")) != keys(query(tenant="a", slo_class="b"))


def test_memory_is_bounded() -> None:
    """Kinds beyond a few thousand push out those not seen for longest."""
    predictor = HistogramPredictor(default_tokens=1.0)
    for i in range(6000):
        predictor.learn(query(tenant=f"t{i}"), 100)
        predictor.predict(query(tenant=f"t{i}"))

    assert len(predictor._own) <= 4096
    assert len(predictor._blends) <= 4096


@pytest.mark.parametrize("wrong", [{"decay": 0.0}, {"decay": 1.1}, {"error": -0.1}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    """Settings outside their range are refused on construction."""
    with pytest.raises(InvalidSettingError):
        HistogramPredictor(**wrong)
