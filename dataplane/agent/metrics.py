"""What an agent shows at /metrics: its last measurement, read when somebody asks for the page."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane.agent.accounting import ChargePhase
from dataplane.agent.agent import Agent, AgentLoad
from dataplane.agent.telemetry import Telemetry

PREFIX = "steelyard_agent_"


class AgentCollector(Collector):
    """Turns an agent's last load into metrics; nothing is measured for it."""

    def __init__(self, agent: Agent, telemetry: Telemetry) -> None:
        self._agent = agent
        self._telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        """Yield the families of the moment."""
        yield _gauge(
            "control_plane_connected",
            "1 while a control plane takes reports.",
            float(self._telemetry.connected),
        )
        refused = CounterMetricFamily(
            PREFIX + "handoffs_refused",
            "Hand-offs that did not reach the engine.",
            labels=["reason"],
        )
        for refusal, count in sorted(self._agent.refusals.items(), key=lambda item: item[0].value):
            refused.add_metric([refusal.value], count)
        yield refused
        if (load := self._agent.last_load) is not None:
            yield from self._load(load)

    def _load(self, load: AgentLoad) -> Iterable[Metric]:
        measure, books = load.measure, self._agent.accounting
        yield _gauge("engine_healthy", "1 while the engine answers.", float(measure.healthy))
        yield _gauge("running_requests", "Requests the engine runs.", measure.running)
        yield _gauge("waiting_requests", "Requests the engine has queued.", measure.waiting)
        yield _gauge("kv_used_tokens", "KV tokens in use.", measure.kv_used_tokens)
        yield _gauge(
            "kv_total_tokens", "KV tokens there are.", self._agent.description.kv_total_tokens
        )
        yield _gauge(
            "queued_prefill_tokens",
            "Prompt tokens accepted and not prefilled.",
            load.queued_prefill_tokens,
        )
        yield _gauge(
            "held_kv_tokens", "KV held for decode engines.", books.tokens(ChargePhase.HELD)
        )
        yield _gauge("step_seconds", "Mean time of recent steps, 0 if idle.", load.step_seconds)
        yield CounterMetricFamily(
            PREFIX + "preemptions", "Preemptions since the engine's boot.", measure.preemptions
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value)
