"""Feeds the drift watch: loads from the snapshots, times from the outcomes stream.

The replica that publishes snapshots does it, alone. What it has learned lies in its memory; another
that takes over begins with new baselines. Flags and proposals lie in the store, for everybody.
"""

import structlog
from steelyard.v1 import types_pb2

from controlplane.core.drift import Drift, DriftWatch, Part
from controlplane.core.load_history import LoadHistory
from controlplane.core.values import Constants, Happening, Outcome
from controlplane.feed import SnapshotFeed
from controlplane.library import Library
from controlplane.metrics import ControlMetrics
from controlplane.publisher import Publisher
from controlplane.store import Store
from controlplane.wire import stored_constants
from servicekit.clock import Clock
from servicekit.errors import Aborted, InvalidArgument, RedisUnavailable

_LOOK_SECONDS = 0.1
_FOLD_SECONDS = 1.0
_WRITE_SECONDS = 10.0
_MOST_OUTCOMES = 2_000
_FEWEST_TOKENS = 8


class DriftFolder:
    """Watches while its replica publishes.

    Args:
        store: Outcomes come from there, flags and proposals go there.
        feed: Loads and roster.
        publisher: Tells whether this replica is the one.
        library: Publishes proposals where that is wanted.
        metrics: Shows ratios.
        clock: Paces the loop.
        publish_after_seconds: Publish what a drift proposes once it has lasted that long, and was
            learned for as long; None never does.
    """

    def __init__(
        self,
        store: Store,
        feed: SnapshotFeed,
        publisher: Publisher,
        library: Library,
        *,
        metrics: ControlMetrics,
        clock: Clock,
        publish_after_seconds: float | None,
    ) -> None:
        self._store = store
        self._feed = feed
        self._publisher = publisher
        self._library = library
        self._metrics = metrics
        self._clock = clock
        self._publish_after_seconds = publish_after_seconds
        self.outcomes = 0
        """Finished requests looked at here."""
        self._log = structlog.get_logger("controlplane.drift")
        self._reset()

    def _reset(self) -> None:
        """Know nothing, as when another replica has watched so far."""
        self._watch = DriftWatch()
        self._loads = LoadHistory()
        self._engines: dict[str, types_pb2.EngineInfo] = {}
        self._roster_version: int | None = None
        self._sequence = 0
        self._cursor: str | None = None
        self._published: dict[str, float] = {}
        self._told: dict[tuple[str, Part], Drift] = {}
        self._folded_monotonic = self._written_monotonic = float("-inf")

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            try:
                await self.step()
            except RedisUnavailable as error:
                self._log.debug("drift_interrupted", reason=error.message)

    async def step(self) -> None:
        """Take in loads, and once a second outcomes.

        Raises:
            RedisUnavailable: The store does not answer; the next step goes on.
        """
        if not self._publisher.holder:
            if self._cursor is not None:
                self._reset()
            return
        self._take_snapshot()
        now = self._clock.monotonic()
        if now - self._folded_monotonic < _FOLD_SECONDS:
            return
        self._folded_monotonic = now
        await self._fold()
        changed = await self._tell()
        if changed or (self._watch.drifting and now - self._written_monotonic > _WRITE_SECONDS):
            self._written_monotonic = now
            proposals = self._watch.proposals()
            await self._store.write_drift(self._watch.drifting, list(proposals.values()))
            await self._publish(proposals)

    def _take_snapshot(self) -> None:
        """Remember the loads of the latest snapshot, and a new roster."""
        snapshot = self._feed.latest
        if snapshot is None or snapshot.sequence == self._sequence:
            return
        self._sequence = snapshot.sequence
        if snapshot.roster_version != self._roster_version:
            self._roster_version = snapshot.roster_version
            self._take_roster(self._feed.roster)
        loads, now = snapshot.loads, self._clock.unix()
        for index, instance in enumerate(self._feed.roster.instances):
            if index < len(loads.running):
                running, kv_tokens = loads.running[index], loads.kv_used_tokens[index]
                self._loads.add(instance.engine.instance_id, now, running, kv_tokens)

    def _take_roster(self, roster: types_pb2.Roster) -> None:
        engines = {i.engine.instance_id: i.engine for i in roster.instances}
        for instance_id, known in self._engines.items():
            if instance_id not in engines or engines[instance_id].epoch != known.epoch:
                self._watch.forget(instance_id)
                self._loads.forget(instance_id)
        self._engines = engines
        for message in roster.constants:
            self._watch.calibrated(stored_constants(message))

    async def _fold(self) -> None:
        """Take in new outcomes."""
        if self._cursor is None:
            self._cursor = await self._store.outcomes_end()
        while True:
            self._cursor, outcomes = await self._store.outcomes_after(self._cursor, _MOST_OUTCOMES)
            for outcome in outcomes:
                self.outcomes += 1
                if outcome.status == "ok":
                    self._take_prefill(outcome)
                    self._take_decode(outcome)
            if len(outcomes) < _MOST_OUTCOMES:
                return

    def _take_prefill(self, outcome: Outcome) -> None:
        """Use the prefill time of a request that waited behind nobody."""
        engine = self._engines.get(outcome.prefill_instance_id)
        tokens = outcome.prompt_tokens - outcome.cached_prompt_tokens
        seconds = outcome.prefill_engine_seconds
        if engine is None or not seconds or tokens < 1 or outcome.prefill_tokens_ahead != 0:
            return
        self._watch.prefilled(
            engine.instance_id,
            engine.profile,
            tokens=tokens,
            chunk_tokens=engine.max_batched_tokens or tokens,
            seconds=seconds,
            now=self._clock.unix(),
        )

    def _take_decode(self, outcome: Outcome) -> None:
        """Use the time per token against the batch that telemetry showed meanwhile."""
        engine = self._engines.get(outcome.decode_instance_id)
        seconds, total = outcome.tpot_seconds, outcome.total_seconds
        if (
            engine is None
            or not seconds
            or total is None
            or outcome.completion_tokens < _FEWEST_TOKENS
        ):
            return
        end = outcome.end_unix_seconds
        begin = end - seconds * (outcome.completion_tokens - 1)
        load = self._loads.mean(engine.instance_id, begin, end)
        if load is None:
            return
        self._watch.decoded(
            engine.instance_id,
            engine.profile,
            sequences=max(load.running, 1.0),
            kv_tokens=load.kv_tokens,
            seconds=seconds,
            now=self._clock.unix(),
        )

    async def _tell(self) -> bool:
        """Show ratios, and write an event for each drift that begins or ends.

        Returns:
            Whether one did.
        """
        drifting = {(d.instance_id, d.part): d for d in self._watch.drifting}
        for key, drift in drifting.items():
            self._metrics.drift_ratio.labels(*key).set(drift.ratio)
            if key not in self._told:
                await self._event("drift", drift)
        for key, drift in self._told.items():
            if key not in drifting:
                self._metrics.drift_ratio.labels(*key).set(1.0)
                await self._event("drift_ended", drift)
        changed = drifting.keys() != self._told.keys()
        self._told = drifting
        return changed

    async def _event(self, kind: str, drift: Drift) -> None:
        detail = f"{drift.part} at {drift.ratio:.2f} times its constants ({drift.profile})"
        await self._store.add_event(Happening(kind, drift.instance_id, detail))
        self._metrics.events.labels(kind).inc()
        self._log.warning(kind, instance_id=drift.instance_id, detail=detail)

    async def _publish(self, proposals: dict[str, Constants]) -> None:
        """Publish what lasted, where that is wanted."""
        settle_seconds = self._publish_after_seconds
        if settle_seconds is None:
            return
        now = self._clock.unix()
        for profile, proposed in proposals.items():
            since = [d.since_unix_seconds for d in self._watch.drifting if d.profile == profile]
            settled = since and now - min(since) >= settle_seconds
            if settled and now - self._published.get(profile, 0.0) >= settle_seconds:
                self._published[profile] = now
                try:
                    await self._library.publish(proposed, accept_jump=True)
                except (Aborted, InvalidArgument) as error:
                    self._log.warning("proposal_not_published", reason=error.message)
