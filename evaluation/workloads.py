"""Workloads: what requests come, read from TOML, the same for every policy and backend.

Everything random comes from streams spawned off one seed (numpy SeedSequence), one for each thing
that is drawn, so that a change of one (a rate, a share) leaves all others as they were. The streams
depend on the workload's name and the seed, and on nothing about the cluster.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from evaluation.arrivals import CHUNK, ArrivalProcess, make_process
from evaluation.errors import InvalidWorkloadError
from evaluation.lengths import Lengths, make_lengths
from evaluation.traces import TraceRow, read_trace
from simulator.values import Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of request.

    Attributes:
        name: Also the tenant that its requests come from.
        share: Of all requests.
        prompt: Prompt lengths.
        output: Output lengths.
        max_tokens: The cap that clients state.
        turns: Requests of a session in the mean; above 1, later ones repeat the earlier context.
        shared_share: Of a later turn's prompt, what it shares with the turn before.
    """

    name: str
    share: float
    prompt: Lengths
    output: Lengths
    max_tokens: int = 4096
    turns: float = 1.0
    shared_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """A trace file in place of families and an arrival process.

    Attributes:
        path: The file.
        max_prompt_tokens: Longer prompts are cut.
        max_output_tokens: Longer outputs are cut.
        prompt_scale: Multiplies prompts before they are cut.
    """

    path: Path
    max_prompt_tokens: int = 4000
    max_output_tokens: int = 2000
    prompt_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What comes, but for how much of it a second.

    Attributes:
        name: Its name; part of the seed.
        families: Kinds of requests; empty where a trace is given.
        process: When they come.
        tight_share: Of requests, in the tight class; the others are loose.
        trace: Takes the place of families and process.
        cancel_share: Of requests, whose client leaves before the end.
        cancel_seconds: Mean time after which it leaves.
    """

    name: str
    families: tuple[Family, ...] = ()
    process: ArrivalProcess = field(default_factory=ArrivalProcess)
    tight_share: float = 0.5
    trace: TraceSource | None = None
    cancel_share: float = 0.0
    cancel_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Check shares and that there is something to draw from."""
        for name in ("tight_share", "cancel_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidWorkloadError(f"{self.name}: {name} is {getattr(self, name)}; 0 to 1")
        if self.trace is None:
            total = sum(family.share for family in self.families)
            if not abs(total - 1.0) < 1e-6:
                raise InvalidWorkloadError(f"{self.name}: the families' shares add up to {total}")

    def mean_output_by_tenant(self) -> dict[str, float]:
        """Return each family's mean output, what a router has learned after a while."""
        return {family.name: family.output.mean_tokens for family in self.families}

    def arrivals(self, rate: float, seconds: float, seed: int) -> Iterator[Arrival]:
        """Yield the requests of `seconds` at `rate` a second in the mean, in order of time.

        Raises:
            TraceFormatError: The trace cannot be read.
        """
        root = np.random.SeedSequence([seed, crc32(self.name.encode())])
        streams = [np.random.default_rng(child) for child in root.spawn(9)]
        rows = self._trace_rows(rate, streams) if self.trace else self._family_rows(rate, streams)
        for arrival in rows:
            if arrival.at_seconds > seconds:
                return
            yield arrival

    def _family_rows(
        self, rate: float, streams: Sequence[np.random.Generator]
    ) -> Iterator[Arrival]:
        times = self.process.times(rate, streams[0], streams[1])
        edges = np.cumsum([family.share for family in self.families])
        index = 0
        sessions = _Sessions(streams[6])
        while True:
            kinds = np.searchsorted(edges, streams[2].random(CHUNK), side="right")
            kinds = np.minimum(kinds, len(self.families) - 1)
            prompts = np.zeros(CHUNK, dtype=np.int64)
            outputs = np.zeros(CHUNK, dtype=np.int64)
            for kind, family in enumerate(self.families):
                chosen = kinds == kind
                prompts = np.where(chosen, family.prompt.draw(streams[3], CHUNK), prompts)
                outputs = np.where(chosen, family.output.draw(streams[4], CHUNK), outputs)
            common = self._common(streams)
            rows = zip(kinds.tolist(), prompts.tolist(), outputs.tolist(), common, strict=True)
            for kind, prompt, output, (slo_class, error_z, leaves) in rows:
                family = self.families[kind]
                session, shared = 0, 0
                if family.turns > 1.0:
                    session, shared = sessions.next(family, prompt)
                yield Arrival(
                    index,
                    next(times),
                    prompt,
                    min(output, family.max_tokens),
                    family.max_tokens,
                    slo_class,
                    family.name,
                    session,
                    shared,
                    error_z,
                    leaves,
                )
                index += 1

    def _common(self, streams: Sequence[np.random.Generator]) -> list[tuple[str, float, float]]:
        """Draw what does not depend on the kind: class, prediction error, when the client leaves."""
        tight = streams[5].random(CHUNK) < self.tight_share
        errors = streams[7].standard_normal(CHUNK)
        leaves = np.full(CHUNK, np.inf)
        if self.cancel_share > 0.0:
            draws = streams[8].random(CHUNK), streams[8].exponential(self.cancel_seconds, CHUNK)
            leaves = np.where(draws[0] < self.cancel_share, draws[1], np.inf)
        classes = np.where(tight, "tight", "loose")
        return list(zip(classes.tolist(), errors.tolist(), leaves.tolist(), strict=True))

    def _trace_rows(self, rate: float, streams: Sequence[np.random.Generator]) -> Iterator[Arrival]:
        """Replay a trace from a random place on, over and over, at another speed."""
        source = self.trace
        if source is None:
            return
        rows = read_trace(source.path)
        native = len(rows) / max(rows[-1].at_seconds, 1e-9)
        speed = rate / native
        start = int(streams[0].integers(len(rows)))
        begin = rows[start].at_seconds
        length = rows[-1].at_seconds + 1.0 / native
        index = 0
        while True:
            for common in self._common(streams):
                lap, place = divmod(start + index, len(rows))
                row = rows[place]
                at = (lap * length + row.at_seconds - begin) / speed
                yield _from_trace(index, at, row, source, common)
                index += 1


class _Sessions:
    """Hands out session ids and shared prefixes, family by family."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._open: dict[str, list[tuple[int, int]]] = {}
        self._last = 0

    def next(self, family: Family, prompt_tokens: int) -> tuple[int, int]:
        """Return the session of a request and what of its prompt it shares with the one before."""
        waiting = self._open.setdefault(family.name, [])
        if waiting and self._random.random() < 1.0 - 1.0 / family.turns:
            place = int(self._random.integers(len(waiting)))
            session, before = waiting[place]
            waiting[place] = (session, prompt_tokens)
            return session, min(int(family.shared_share * prompt_tokens), before)
        self._last += 1
        waiting.append((self._last, prompt_tokens))
        if len(waiting) > 64:
            waiting.pop(0)
        return self._last, 0


def _from_trace(
    number: int, at: float, row: TraceRow, source: TraceSource, common: tuple[str, float, float]
) -> Arrival:
    slo_class, error_z, leaves = common
    prompt = min(max(1, round(row.prompt_tokens * source.prompt_scale)), source.max_prompt_tokens)
    return Arrival(
        number,
        at,
        prompt,
        min(row.output_tokens, source.max_output_tokens),
        source.max_output_tokens,
        row.slo_class or slo_class,
        row.tenant or "trace",
        row.session,
        0,
        error_z,
        leaves,
    )


def workload_names() -> list[str]:
    """Return the names of the workloads that come with the package."""
    folder = resources.files("evaluation").joinpath("workloads")
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def load_workload(name: str) -> Workload:
    """Read a workload: one of the package by name, or a TOML file by path.

    Raises:
        InvalidWorkloadError: There is none, or it does not hold what it should.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise InvalidWorkloadError(f"no workload file {name}")
        return parse_workload(tomllib.loads(path.read_text(encoding="utf-8")), path.parent)
    if name not in workload_names():
        raise InvalidWorkloadError(f"no workload {name!r}; there are {workload_names()}")
    text = resources.files("evaluation").joinpath("workloads", f"{name}.toml").read_text("utf-8")
    return parse_workload(tomllib.loads(text), Path())


def parse_workload(document: Mapping[str, Any], folder: Path) -> Workload:
    """Construct a workload from its TOML document; relative trace paths start at `folder`.

    Raises:
        InvalidWorkloadError: A field is missing, unknown or out of range.
    """
    fields = dict(document)
    fields.pop("description", None)
    name = fields.get("name", "without a name")
    try:
        if "trace" in fields:
            trace = dict(fields["trace"])
            fields["trace"] = TraceSource(**(trace | {"path": folder / trace["path"]}))
        if "arrivals" in fields:
            fields["process"] = make_process(**fields.pop("arrivals"))
        fields["families"] = tuple(_family(dict(f)) for f in fields.get("families", ()))
        return Workload(**fields)
    except (TypeError, KeyError) as error:
        raise InvalidWorkloadError(f"workload {name}: {error}") from error


def _family(fields: dict[str, Any]) -> Family:
    fields["prompt"] = make_lengths(fields["prompt"])
    fields["output"] = make_lengths(fields["output"])
    return Family(**fields)


def with_arrivals(workload: Workload, arrivals: Mapping[str, Any]) -> Workload:
    """Return the workload with another arrival process."""
    return replace(workload, process=make_process(**arrivals))
