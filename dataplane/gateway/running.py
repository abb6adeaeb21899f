"""Runs what one HTTP request asks for: one generation, or several side by side."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from steelyard.v1 import agent_pb2, router_pb2, types_pb2

from dataplane.gateway.asking import Asker
from dataplane.router.front import Front, Served
from servicekit.clock import Clock
from servicekit.deadline import Deadline

_QUEUED_EVENTS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One generation.

    Attributes:
        index: Its place among the choices.
        prompt: Its prompt's place in the request.
        message: What the router is asked.
    """

    index: int
    prompt: int
    message: router_pb2.GenerateRequest


@dataclass(slots=True)
class Progress:
    """Something new of one job."""

    job: Job
    served: Served
    response: agent_pb2.DecodeResponse


def jobs_of(
    asker: Asker,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    sampling: types_pb2.SamplingParams,
    *,
    choices: int,
) -> list[Job]:
    """Return one job a prompt and choice; the choices of a seeded prompt are seeded apart."""
    jobs = []
    for place, (ids, most) in enumerate(zip(prompts, max_tokens, strict=True)):
        for choice in range(choices):
            message = router_pb2.GenerateRequest(
                model=model,
                max_tokens=most,
                sampling=sampling,
                slo_class=asker.slo_class,
                slo=asker.slo,
                tenant=asker.tenant,
                correlation_id=asker.call.request_id,
                want_text=True,
            )
            # In place: a long list given to a constructor takes twice the time.
            message.token_ids.ids.extend(ids)
            if choice and sampling.HasField("seed"):
                message.sampling.seed = sampling.seed + choice
            jobs.append(Job(place * choices + choice, place, message))
    return jobs


class Runner:
    """Gives jobs to the router; whatever way its iterators end, nothing of them is left behind."""

    def __init__(self, front: Front, clock: Clock) -> None:
        self._front = front
        self._clock = clock

    def run(self, jobs: Sequence[Job], asker: Asker, arrived_at: float) -> AsyncGenerator[Progress]:
        """Yield what engines send, of several jobs as it comes; close it in every case.

        Raises:
            SteelyardError: A job cannot be served, or not to its end; the others are ended.
        """
        if len(jobs) == 1:
            return self._one(jobs[0], asker, arrived_at)
        return self._many(jobs, asker, arrived_at)

    async def _one(self, job: Job, asker: Asker, arrived_at: float) -> AsyncGenerator[Progress]:
        served = await self._front.open(
            job.message, arrived_at, Deadline.after(None, self._clock), asker.policy
        )
        responses = self._front.responses(served, asker.call.request_id, asker.call.trace_id)
        async with aclosing(responses) as stream:
            async for response in stream:
                yield Progress(job, served, response)

    async def _many(
        self, jobs: Sequence[Job], asker: Asker, arrived_at: float
    ) -> AsyncGenerator[Progress]:
        queue: asyncio.Queue[Progress | BaseException | None] = asyncio.Queue(_QUEUED_EVENTS)

        async def follow(job: Job) -> None:
            try:
                async with aclosing(self._one(job, asker, arrived_at)) as progress:
                    async for one in progress:
                        await queue.put(one)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001  raised again by the reader
                await queue.put(error)

        tasks = [asyncio.create_task(follow(job)) for job in jobs]
        left = len(jobs)
        try:
            while left:
                event = await queue.get()
                if event is None:
                    left -= 1
                elif isinstance(event, BaseException):
                    raise event
                else:
                    yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """Token counts of one HTTP request, as the decode engines gave them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def with_job(
        self, job: Job, choices: int, usage: types_pb2.Usage, cached: int
    ) -> "UsageTotals":
        """Add a finished job; a prompt that has several choices counts once."""
        first = job.index % choices == 0
        return replace(
            self,
            prompt_tokens=self.prompt_tokens + (usage.prompt_tokens if first else 0),
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            cached_tokens=self.cached_tokens
            + (max(usage.cached_prompt_tokens, cached) if first else 0),
        )

    def row(self) -> dict[str, object]:
        """Return it as clients read it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
