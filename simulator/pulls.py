"""KV on its way to a decode engine."""

from heapq import heapify, heappop, heappush
from operator import itemgetter

from enginemodel.model import EngineConstants, handoff_seconds
from simulator.engine import Job


class Pulls:
    """Pulls under way to one engine, by when their KV will be there."""

    def __init__(
        self, constants: EngineConstants, kv_bytes_per_token: int, *, serial_link: bool
    ) -> None:
        """Start with none; a serial link moves one prompt after the other."""
        self._constants = constants
        self._kv_bytes_per_token = kv_bytes_per_token
        self._serial_link = serial_link
        self._link_free_at = 0.0
        self._order = 0
        self._under_way: list[tuple[float, int, Job]] = []

    def __repr__(self) -> str:
        return f"<Pulls, {len(self._under_way)} under way>"

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def jobs(self) -> list[Job]:
        """Whose KV is on its way."""
        return [job for _, _, job in self._under_way]

    @property
    def next_at(self) -> float:
        """When the next one will be complete; there has to be one."""
        return self._under_way[0][0]

    def start(self, job: Job, now: float) -> float:
        """Begin to move a prompt's KV; return when it will be there."""
        seconds = handoff_seconds(
            self._constants, job.arrival.prompt_tokens, self._kv_bytes_per_token
        )
        ready_at = now + seconds
        if self._serial_link:
            fixed = self._constants.h0_seconds
            begin = max(now + fixed, self._link_free_at)
            ready_at = self._link_free_at = begin + seconds - fixed
        self._order += 1
        heappush(self._under_way, (ready_at, self._order, job))
        return ready_at

    def take_complete(self, by: float) -> list[Job]:
        """Remove those complete by a time; return them in the order in which they began."""
        complete = []
        while self._under_way and self._under_way[0][0] <= by:
            complete.append(heappop(self._under_way)[1:])
        return [job for _, job in sorted(complete, key=itemgetter(0))]

    def drop(self, job: Job) -> bool:
        """Give up a pull; False if it is not under way."""
        for entry in self._under_way:
            if entry[2] is job:
                self._under_way.remove(entry)
                heapify(self._under_way)
                return True
        return False

    def clear(self) -> None:
        """Give up all."""
        self._under_way.clear()
