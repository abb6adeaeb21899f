"""Runs the seeds of cells over processes, and carries on where an earlier run stopped."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import TypeAlias

import msgspec

from evaluation.backend import Backend
from evaluation.cells import Cell, SeedResult
from evaluation.rows import Row, make_row

Task: TypeAlias = tuple[Cell, int]


class Finished(msgspec.Struct, frozen=True):
    """One line of a result file: one seed of one cell."""

    key: str
    cell: Cell
    result: SeedResult


class ResultFile:
    """Finished seeds in a JSONL file, written as they finish.

    A line that was cut off by a crash is dropped; its seed runs again.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder(order="deterministic")
        self.finished: dict[tuple[str, int], SeedResult] = {}
        self.cells: dict[str, Cell] = {}
        if path is not None and path.is_file():
            self._load(path)

    def _load(self, path: Path) -> None:
        decoder = msgspec.json.Decoder(Finished)
        for line in path.read_bytes().splitlines():
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            self.finished[(entry.key, entry.result.seed)] = entry.result
            self.cells[entry.key] = entry.cell

    def add(self, cell: Cell, result: SeedResult) -> None:
        """Keep a result, on disk first."""
        key = cell.key()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(self._encoder.encode(Finished(key, cell, result)) + b"\n")
        self.finished[(key, result.seed)] = result
        self.cells[key] = cell


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    backend: Backend,
    *,
    jobs: int = 1,
    results: ResultFile | None = None,
    shuffle: Random | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Row]:
    """Run what is not finished yet and return a row a cell, in their order.

    Args:
        cells: What to run.
        seeds: The same for all, so that rows compare in pairs.
        backend: Runs a seed; pickled into the processes.
        jobs: Processes; 1 runs in this one.
        results: Takes results as they come and holds earlier ones.
        shuffle: Runs seed by seed and pool by pool, the policies of each in random order: what a
            machine does over hours must not favour any.
        progress: Called with (done, total) after each seed.
    """
    results = results or ResultFile(None)
    tasks = [
        (cell, seed)
        for cell in cells
        for seed in seeds
        if (cell.key(), seed) not in results.finished
    ]
    if shuffle is not None:
        tasks = in_random_order(tasks, shuffle)
    total = len(cells) * len(seeds)
    done = total - len(tasks)
    progress(done, total)
    for cell, result in _run(tasks, backend, jobs):
        results.add(cell, result)
        done += 1
        progress(done, total)
    by_key: dict[str, list[SeedResult]] = defaultdict(list)
    for (key, seed), result in results.finished.items():
        if seed in seeds:
            by_key[key].append(result)
    return [make_row(cell, by_key[cell.key()]) for cell in cells]


def in_random_order(tasks: Sequence[Task], rng: Random) -> list[Task]:
    """Return the tasks seed by seed and pool by pool, in random order within."""
    pools = {id(cell): msgspec.json.encode(cell.pool, order="deterministic") for cell, _ in tasks}
    first = {pool: place for place, pool in enumerate(dict.fromkeys(pools.values()))}
    shuffled = rng.sample(tasks, len(tasks))
    return sorted(shuffled, key=lambda task: (task[1], first[pools[id(task[0])]]))


def _run(tasks: Sequence[Task], backend: Backend, jobs: int) -> Iterator[tuple[Cell, SeedResult]]:
    """Yield results in the order in which they are ready."""
    if jobs <= 1:
        for cell, seed in tasks:
            yield cell, backend.run(cell, seed)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(backend.run, cell, seed): cell for cell, seed in tasks}
        try:
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        finally:
            # After a failure nobody wants to wait for the rest.
            pool.shutdown(cancel_futures=True)
