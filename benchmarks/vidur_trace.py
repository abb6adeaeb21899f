"""Runs Vidur over a trace in its own environment and prints the CPU seconds of its simulation.

Usage: PYTHON_WITH_VIDUR vidur_trace.py TRACE.csv OUTPUT_FOLDER

The package has no profiles of models and devices: it fetches them from a hub and fits its predictor
to them. Here steps are priced by three constants of the simulated A40 instead, which takes Vidur's predictor out of what
is measured; what is left is its event loop, schedulers and memory planner.
"""

import sys
import time
from types import SimpleNamespace

from vidur.config import (
    CacheConfig,
    ClusterConfig,
    MetricsConfig,
    ReplicaConfig,
    RoundRobinGlobalSchedulerConfig,
    SimulationConfig,
    TraceRequestGeneratorConfig,
    VllmSchedulerConfig,
)
from vidur.execution_time_predictor.execution_time_predictor_registry import (
    ExecutionTimePredictorRegistry,
)
from vidur.simulator import Simulator
from vidur.types import ExecutionTimePredictorType

STEP_SECONDS = 11.8e-3
SECONDS_PER_TOKEN = 5.54e-5
SECONDS_PER_KV_TOKEN = 8e-8
MAX_TOKENS = 16_384


class LinearPredictor:
    """Prices a step by its new tokens and the KV it reads."""

    def __init__(self, **_: object) -> None:
        """Take and forget what Vidur's own predictors are fitted with."""

    def get_execution_time(self, batch: object, pipeline_stage: int) -> SimpleNamespace:
        """Return a step's length, in the form that Vidur asks for."""
        del pipeline_stage
        seconds = (
            STEP_SECONDS
            + SECONDS_PER_TOKEN * sum(batch.num_q_tokens)  # type: ignore[attr-defined]
            + SECONDS_PER_KV_TOKEN * sum(batch.num_kv_tokens)  # type: ignore[attr-defined]
        )
        return SimpleNamespace(total_time=seconds, model_time=seconds, model_time_ms=1e3 * seconds)


def main(trace: str, folder: str) -> None:
    """Simulate six replicas and print requests and CPU seconds."""
    kind = ExecutionTimePredictorType.RANDOM_FORREST
    ExecutionTimePredictorRegistry.unregister(kind)
    ExecutionTimePredictorRegistry.register(kind, LinearPredictor)
    config = SimulationConfig(
        log_level="warning",
        cluster_config=ClusterConfig(
            num_replicas=6,
            replica_config=ReplicaConfig(
                num_pipeline_stages=1,
                tensor_parallel_size=1,
                device="a40",
                network_device="a40_pairwise_nvlink",
            ),
            cache_config=CacheConfig(num_blocks=60_000 // 16),
            global_scheduler_config=RoundRobinGlobalSchedulerConfig(),
            replica_scheduler_config=VllmSchedulerConfig(
                batch_size_cap=256, max_batched_tokens=8192, max_tokens_in_batch=8192
            ),
        ),
        request_generator_config=TraceRequestGeneratorConfig(
            trace_file=trace,
            prefill_scale_factor=1.0,
            time_scale_factor=1.0,
            max_tokens=MAX_TOKENS,
        ),
        metrics_config=MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, store_plots=False, output_dir=folder
        ),
    )
    simulator = Simulator(config)
    begin = time.process_time()
    simulator.run()
    print(time.process_time() - begin)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
