"""What is kept of each request once it has ended: journal row, outcome, metrics, lengths."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.duration_pb2 import Duration
from steelyard.v1 import control_pb2, types_pb2

from dataplane.core.cluster import Instance
from dataplane.core.predictor import HistogramPredictor, LengthQuery
from dataplane.router.journal import Decision, Journal, view_row
from dataplane.router.metrics import RouterMetrics
from dataplane.router.outcomes import OutcomeReporter
from dataplane.router.session import Record
from servicekit.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One request that has ended."""

    decision: Decision
    query: LengthQuery
    record: Record
    status: str
    correlation_id: str
    trace_id: str
    constants_version: int


class Accounts:
    """Books the ends of requests."""

    def __init__(
        self,
        *,
        router_id: str,
        journal: Journal,
        reporter: OutcomeReporter,
        metrics: RouterMetrics,
        predictor: HistogramPredictor,
        clock: Clock,
        journal_views: bool,
    ) -> None:
        self._router_id = router_id
        self._journal = journal
        self._reporter = reporter
        # Looking a series up by its labels costs more than counting.
        self._requests = cache(metrics.requests.labels)
        self._tokens = cache(metrics.tokens.labels)
        self._retries = cache(metrics.retries.labels)
        self._slo = cache(metrics.slo.labels)
        self._ttft = cache(metrics.ttft.labels)
        self._tpot = cache(metrics.tpot.labels)
        self._ttft_ratio = cache(metrics.ttft_ratio.labels)
        self._predictor = predictor
        self._clock = clock
        self._journal_views = journal_views

    def book(self, ending: Ending) -> None:
        """Book one."""
        met = self._slo_met(ending)
        if ending.status == "ok":
            self._predictor.learn(ending.query, ending.record.completion_tokens)
        self._count(ending, met=met)
        self._reporter.add(self._outcome(ending, met=met))
        if self._journal.enabled:
            self._journal.write(self._row(ending, met=met))

    def _slo_met(self, ending: Ending) -> bool:
        targets, record = ending.decision.request.targets, ending.record
        ttft, tpot = record.ttft_seconds, record.tpot_seconds
        return (
            ending.status == "ok"
            and ttft is not None
            and ttft <= targets.ttft_seconds
            and (tpot is None or tpot <= targets.tpot_seconds)
        )

    def _count(self, ending: Ending, *, met: bool) -> None:
        request, record = ending.decision.request, ending.record
        model = ending.decision.pool
        self._requests(model, ending.decision.policy, ending.status).inc()
        self._tokens(model, "prompt").inc(request.prompt_tokens)
        self._tokens(model, "completion").inc(record.completion_tokens)
        if record.attempts > 1:
            self._retries(model).inc(record.attempts - 1)
        if ending.status != "ok":
            return
        self._slo(model, request.slo_class, str(met).lower()).inc()
        ttft, tpot = record.ttft_seconds, record.tpot_seconds
        if ttft is not None:
            self._ttft(model, request.slo_class).observe(ttft)
            if ending.record.predicted is not None and ending.record.predicted.ttft_seconds > 0:
                self._ttft_ratio(model).observe(ttft / ending.record.predicted.ttft_seconds)
        if tpot is not None:
            self._tpot(model, request.slo_class).observe(tpot)

    def _outcome(self, ending: Ending, *, met: bool) -> control_pb2.Outcome:
        request, record = ending.decision.request, ending.record
        outcome = control_pb2.Outcome(
            request_id=request.request_id,
            router_id=self._router_id,
            model=ending.query.model,
            tenant=ending.query.tenant,
            slo_class=request.slo_class,
            policy=ending.decision.policy,
            prefill_instance_id=_id(record.prefill),
            decode_instance_id=_id(record.decode),
            constants_version=ending.constants_version,
            prompt_tokens=request.prompt_tokens,
            predicted_tokens=request.predicted_tokens,
            completion_tokens=record.completion_tokens,
            status=ending.status,
            slo_met=met,
        )
        now = self._clock.monotonic()
        _set(outcome.total, now - record.arrived_at)
        if record.ttft_seconds is not None:
            _set(outcome.ttft, record.ttft_seconds)
        if record.tpot_seconds is not None:
            _set(outcome.tpot, record.tpot_seconds)
        if ending.record.predicted is not None:
            _set(outcome.predicted_ttft, ending.record.predicted.ttft_seconds)
            _set(outcome.predicted_tpot, ending.record.predicted.tpot_seconds)
        if record.prefill_engine_seconds > 0:
            _set(outcome.prefill_engine_time, record.prefill_engine_seconds)
            outcome.cached_prompt_tokens = record.cached_prompt_tokens
        if record.prefill_tokens_ahead is not None:
            outcome.prefill_tokens_ahead = record.prefill_tokens_ahead
        outcome.end_time.FromNanoseconds(round(self._clock.unix() * 1e9))
        return outcome

    def _row(self, ending: Ending, *, met: bool) -> dict[str, Any]:
        decision, record = ending.decision, ending.record
        request, predicted = decision.request, ending.record.predicted
        now = self._clock.monotonic()
        row: dict[str, Any] = {
            "type": "request",
            "request_id": request.request_id,
            "correlation_id": ending.correlation_id,
            "trace_id": ending.trace_id,
            "router_id": self._router_id,
            "arrived_unix": record.arrived_unix,
            "arrived_monotonic": record.arrived_at,
            "model": ending.query.model,
            "pool": decision.pool,
            "tenant": ending.query.tenant,
            "slo_class": request.slo_class,
            "urgency": request.urgency,
            "ttft_target_seconds": _finite(request.targets.ttft_seconds),
            "tpot_target_seconds": _finite(request.targets.tpot_seconds),
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
            "predicted_tokens": request.predicted_tokens,
            "policy": decision.policy,
            "snapshot_sequence": decision.sequence,
            "snapshot_age_seconds": _finite(decision.snapshot_age_seconds),
            "roster_version": decision.view.roster.version,
            "typical_remaining_tokens": decision.view.typical_remaining_tokens,
            "constants_version": ending.constants_version,
            "prefill_id": _id(record.prefill),
            "decode_id": _id(record.decode),
            "attempts": record.attempts,
            "causes": record.causes,
            "status": ending.status,
            "finish_reason": types_pb2.FinishReason.Name(record.finish_reason),  # type: ignore[arg-type]
            "completion_tokens": record.completion_tokens,
            "cached_prompt_tokens": record.cached_prompt_tokens,
            "predicted_ttft_seconds": predicted.ttft_seconds if predicted else None,
            "predicted_tpot_seconds": predicted.tpot_seconds if predicted else None,
            "prefill_engine_seconds": record.prefill_engine_seconds,
            "prefill_done_seconds": _since(record.prefill_done_at, record.arrived_at),
            "decode_sent_seconds": _since(record.decode_sent_at, record.arrived_at),
            "ttft_seconds": record.ttft_seconds,
            "tpot_seconds": record.tpot_seconds,
            "longest_gap_seconds": record.longest_gap_seconds,
            "total_seconds": now - record.arrived_at,
            "slo_met": met,
        }
        if self._journal_views:
            row["view"] = view_row(decision.view)
        return row


def _set(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(round(seconds * 1e9))


def _id(instance: Instance | None) -> str:
    return "" if instance is None else instance.instance_id


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _since(at: float, start: float) -> float | None:
    return at - start if at else None
