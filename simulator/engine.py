"""What simulated engines have in common: a request's attempt, and who is told about it."""

from typing import Protocol

from dataplane.core.events import Leg
from simulator.values import Arrival


class Job:
    """One attempt at a request, from its first dispatch to its end; engines change it in place.

    Attributes:
        arrival: The request.
        request_id: Its id.
        listener: Who is told how it goes.
        router: Index of the front end that owns it.
        prefill: Where its prompt is computed; None without a prefill leg.
        decode: Where it generates; None before that is known.
        holder: The prefill engine that holds its KV for the pull.
        done_tokens: Prompt tokens computed by a prefill engine.
        generated_tokens: Kept up to date while it does not run; runs keep `start_step` instead.
        start_step: The engine's step count at which it would have generated nothing yet.
        finish_step: The step count at which it has generated everything.
        reported_tokens: Told to the scheduler.
        blocks: KV blocks that its decode engine reserved for it while it does not run.
        held_blocks: KV blocks that its prefill engine has for it.
        recompute_tokens: Context that the decode engine has to compute itself before it runs.
        gone: True once nobody waits for it any more.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "decode",
        "done_tokens",
        "finish_step",
        "generated_tokens",
        "gone",
        "held_blocks",
        "holder",
        "listener",
        "preemptions",
        "prefill",
        "recompute_tokens",
        "reported_tokens",
        "request_id",
        "router",
        "start_step",
    )

    def __init__(self, arrival: Arrival, listener: "Listener", router: int) -> None:
        self.arrival = arrival
        self.request_id = arrival.request_id
        self.listener = listener
        self.router = router
        self.prefill: Engine | None = None
        self.decode: Engine | None = None
        self.holder: Engine | None = None
        self.done_tokens = 0
        self.generated_tokens = 0
        self.start_step = 0
        self.finish_step = -1
        self.reported_tokens = 0
        self.blocks = 0
        self.held_blocks = 0
        self.recompute_tokens = 0
        self.preemptions = 0
        self.gone = False

    def __repr__(self) -> str:
        return f"<Job {self.arrival.request_id}, {self.generated_tokens} tokens>"


class Listener(Protocol):
    """Told by engines, at engine time, what happens to jobs."""

    def prefilled(self, job: Job) -> None:
        """Its prompt is computed and its KV held."""
        ...

    def first_token(self, job: Job, at: float) -> None:
        """Its first token will be there at a time, which no later event can change."""
        ...

    def progressed(self, jobs: list[tuple[Job, int]]) -> None:
        """These jobs generated so many more tokens."""
        ...

    def finished(self, job: Job) -> None:
        """Its last token is there."""
        ...

    def failed(self, job: Job, leg: Leg, *, retryable: bool) -> None:
        """A leg is lost."""
        ...


class Engine(Protocol):
    """What the cluster needs of either kind of engine."""

    instance_id: str
    alive: bool

    def arrive(self, job: Job) -> None:
        """Take a job off the wire."""
        ...

    def abort(self, job: Job) -> bool:
        """Drop a job in whatever phase it is; False if it is not here."""
        ...

    def release(self, job: Job) -> None:
        """Free the KV held for a job's pull; nothing happens if none is held."""
        ...

    def kill(self) -> list[Job]:
        """Stop for good and return the jobs that were here."""
        ...

    def __len__(self) -> int: ...

    @property
    def kv_used_tokens(self) -> int:
        """KV in use, in whole blocks."""
        ...

    @property
    def kv_total_tokens(self) -> int:
        """KV there is, in whole blocks."""
        ...

    def loads(self, routers: int) -> "list[Load]":
        """Return what each router has here."""
        ...


class Load:
    """What one router has on one engine, as its agent counts it."""

    __slots__ = ("decode_kv_tokens", "decode_requests", "prefill_requests", "prefill_tokens")

    def __init__(self) -> None:
        self.prefill_requests = 0
        self.prefill_tokens = 0
        self.decode_requests = 0
        self.decode_kv_tokens = 0
