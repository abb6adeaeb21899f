"""vLLM's CPU worker at the pace of the engine model: `--worker-cls steelyard_enginekit.paced.worker.PacedWorker`.

Scheduler, KV manager, NIXL and HTTP server are vLLM's own and untouched. On CPU a step is schedule,
`execute_model`, `sample_tokens`, update, one after another in one thread, so the wait at the end of
`sample_tokens` is the rest of the step. Steps without tokens (transfers are looked after, once a
millisecond) are not paced.

Imported inside vLLM only; see `settings.py` for what the environment tells it.
"""

import os
import time
from typing import Any

from vllm.distributed.kv_transfer import (  # type: ignore[import-not-found,unused-ignore]
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.v1.worker.cpu_worker import (  # type: ignore[import-not-found,unused-ignore]
    CPUWorker,
)

from enginemodel.model import handoff_seconds, step_seconds
from steelyard_enginekit.paced.pacer import Pacer
from steelyard_enginekit.paced.priority import QueueWait, raise_priority
from steelyard_enginekit.paced.pulls import PullHold, pulled_tokens
from steelyard_enginekit.paced.record import StepRecord
from steelyard_enginekit.paced.settings import VARIABLE, PaceSettings, parse_settings
from steelyard_enginekit.paced.shape import step_shape


class _RealClock:
    """The machine's."""

    def monotonic(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class PacedWorker(CPUWorker):  # type: ignore[misc,unused-ignore]
    """See the module."""

    def init_device(self) -> None:
        """Set up the device, then the pace.

        Raises:
            InvalidPaceError: the environment does not say a pace.
        """
        super().init_device()
        self._pace = parse_settings(os.environ.get(VARIABLE, ""))
        raise_priority(self._pace)
        self._pacer = Pacer(
            _RealClock(),
            carry_seconds=self._pace.carry_seconds,
            debt_seconds=self._pace.debt_seconds,
        )
        self._queue_wait = QueueWait()
        self._pulls = PullHold()
        self._record = StepRecord(self._pace.record) if self._pace.record else None
        self._under_way = False

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache; the connector exists from then on, and its news are held back."""
        super().initialize_from_config(kv_cache_config)
        if has_kv_transfer_group():
            block_tokens = self.vllm_config.cache_config.block_size
            _hold_back(get_kv_transfer_group(), self._pulls, self._pace, block_tokens)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Begin the step's time, then compute."""
        if scheduler_output.total_num_scheduled_tokens:
            shape = step_shape(scheduler_output)
            modelled = step_seconds(
                self._pace.constants, shape.chunks, shape.sequences, shape.kv_tokens
            )
            self._pacer.begin(shape, modelled * self._pace.dilation)
            self._under_way = True
        output = super().execute_model(scheduler_output)
        if output is not None:  # no sampling follows
            self._end_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, then wait until the step is due."""
        output = super().sample_tokens(grammar_output)
        self._end_step()
        return output

    def _end_step(self) -> None:
        if not self._under_way:
            return
        self._under_way = False
        step = self._pacer.end()
        if self._record is not None:
            self._record.write(
                step,
                end_unix=time.time(),
                queue_wait_seconds=self._queue_wait.since_last(),
                pulls_held=self._pulls.held,
            )


def _hold_back(connector: Any, pulls: PullHold, pace: PaceSettings, block_tokens: int) -> None:
    """Have the connector tell of finished pulls when the modelled link would have finished them.

    A pull begins when the worker is told to load. vLLM takes a finished pull as seen at the next look of a step, as
    it does with an unpaced one.
    """
    load, results = connector.start_load_kv, connector.get_transfer_results

    def start_load_kv(forward_context: Any, **options: Any) -> None:
        now = time.perf_counter()
        for request_id, meta in connector._connector_metadata.reqs_to_recv.items():  # noqa: SLF001
            blocks = max(map(len, meta.local_block_ids), default=0)
            tokens = pulled_tokens(blocks, block_tokens, meta.remote and meta.remote.num_tokens)
            if blocks == 0 and not meta.awaiting_kvs:
                continue  # only a message to the prefill engine; nothing will finish
            seconds = handoff_seconds(pace.constants, tokens, pace.kv_bytes_per_token)
            pulls.begin(request_id, now, seconds * pace.dilation)
        load(forward_context, **options)

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        found = results(finished_req_ids)
        found.finished_recving = pulls.release(
            found.finished_recving, found.failed_recving, time.perf_counter()
        )
        return found

    connector.start_load_kv = start_load_kv
    connector.get_transfer_results = get_transfer_results
