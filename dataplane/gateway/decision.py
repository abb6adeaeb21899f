"""What an answer tells of how it was routed, where asked for."""

from typing import Any

from dataplane.gateway.running import Progress


def decision_header(progress: Progress) -> dict[str, Any]:
    """Return the value of `x-steelyard-decision`: where a request runs, and what was promised."""
    served, record = progress.served, progress.served.record
    predicted = record.predicted
    return {
        "request_id": served.request_id,
        "prefill": record.prefill.instance_id if record.prefill else None,
        "decode": record.decode.instance_id if record.decode else None,
        "policy": served.decision.policy,
        "constants_version": served.constants_version,
        "slo_class": served.taken.request.slo_class,
        "predicted_ttft_seconds": predicted.ttft_seconds if predicted else None,
        "predicted_tpot_seconds": predicted.tpot_seconds if predicted else None,
    }
