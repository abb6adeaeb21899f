"""Correctness gates: before anything is measured, the cluster must answer rightly.

Within each pool (model and revision): tokens are counted exactly on both sides, all decode engines
say the same greedy tokens, every prefill-decode pair hands over KV that continues them, and prefix
caches are empty. The gates warm every pair as a side effect: a NIXL handshake takes up to half a
second, once. What fails is named by instance and token.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from calibrator.agents import AgentClient, Generated, Prefilled, random_prompt
from calibrator.cluster import Target, pairs_of
from calibrator.errors import ProbeFailed
from calibrator.freeing import free
from calibrator.gate_result import GateResult
from servicekit.clock import Clock

_OUTPUT_TOKENS = 12
_SEED = 20_260
_ROUND_TRIPS = 5
_RESET_ATTEMPTS = 12
_RESET_PAUSE_SECONDS = 0.25


@dataclass(slots=True)
class _Findings:
    """What went wrong so far, by gate, and how much was compared."""

    failures: dict[str, list[str]] = field(default_factory=dict)
    checks: Counter[str] = field(default_factory=Counter)
    remarks: dict[str, str] = field(default_factory=dict)

    def expect(self, gate: str, message: str, *, holds: bool) -> None:
        """Count a comparison, and note the message where it fails."""
        self.checks[gate] += 1
        if not holds:
            self.failures.setdefault(gate, []).append(message)

    def result(self, gate: str) -> GateResult:
        """Sum up one gate."""
        failures = self.failures.get(gate, [])
        detail = "; ".join(failures[:5]) or self.remarks.get(gate, "")
        if len(failures) > 5:
            detail += f"; and {len(failures) - 5} more"
        return GateResult(gate, not failures, self.checks[gate], detail)


_Reference = dict[tuple[str, int], Generated]
"""What a pool says after each prompt, by pool and position of the prompt."""


class Gates:
    """Runs all gates on a set of instances.

    Args:
        clients: Of all instances, by id.
        slots: How many calls may run at once.
        clock: Paces repeated tries.
    """

    def __init__(
        self, clients: Mapping[str, AgentClient], slots: asyncio.Semaphore, clock: Clock
    ) -> None:
        self._clients = clients
        self._clock = clock
        self._slots = slots
        self._findings = _Findings()

    async def run(self, targets: Sequence[Target]) -> list[GateResult]:
        """Run the gates, each in turn, up to the first that fails."""
        results: list[GateResult] = []
        reference: _Reference = {}
        steps: dict[str, Callable[[], Awaitable[None]]] = {
            "prefix_cache": lambda: self._check_reset(targets),
            "token_counts": lambda: self._count_tokens(targets),
            "greedy_equality": lambda: self._compare_decodes(targets, reference),
            "pairs": lambda: self._check_pairs(targets, reference),
        }
        for gate, step in steps.items():
            try:
                await step()
            except ProbeFailed as error:
                self._findings.expect(gate, f"{error.instance_id}: {error.message}", holds=False)
            results.append(self._findings.result(gate))
            if not results[-1].passed:
                break
        return results

    async def reset_caches(self, targets: Sequence[Target]) -> None:
        """Empty every prefix cache; engines that cannot are remarked, not failed."""
        unable: list[str] = []

        async def one(target: Target) -> None:
            async with self._slots:
                if not await self._clients[target.instance_id].reset_prefix_cache():
                    unable.append(target.instance_id)
            self._findings.checks["prefix_cache"] += 1

        await _all(one(target) for target in targets)
        if unable:
            self._findings.remarks["prefix_cache"] = (
                f"{', '.join(sorted(unable))} cannot reset a prefix cache; probes are random prompts"
            )

    async def reset_quietly(self, targets: Sequence[Target]) -> None:
        """Empty the caches of whoever still answers, at the end."""
        await _all(_quietly(self.reset_caches([target])) for target in targets)

    async def round_trips(self, targets: Sequence[Target]) -> dict[str, float]:
        """Return the shortest of a few idle round trips to each agent, seconds."""
        times: dict[str, float] = {}
        for target in targets:
            client = self._clients[target.instance_id]
            each = [await client.round_trip_seconds() for _ in range(_ROUND_TRIPS)]
            times[target.instance_id] = min(each)
        return times

    async def _check_reset(self, targets: Sequence[Target]) -> None:
        """Reset every cache, and see on prefill engines that a repeated prompt is not found."""
        await self.reset_caches(targets)
        if "prefix_cache" in self._findings.remarks:
            return

        await _all(self._check_reset_of(target) for target in targets if target.prefills)

    async def _check_reset_of(self, target: Target) -> None:
        """Prefill the same prompt before and after a reset.

        Engines free a released prompt with a step to come, and do not reset while it is held: it
        is tried for a while.
        """
        client = self._clients[target.instance_id]
        prompt = self._prompts(target)[-1]
        cached = 0
        for attempt in range(_RESET_ATTEMPTS):
            if attempt > 0:
                await self._clock.sleep(_RESET_PAUSE_SECONDS if cached else 0.0)
                await client.reset_prefix_cache()
            async with self._slots:
                held = await client.prefill(prompt)
                await asyncio.shield(free(held, prompt, client, self._clients))
            cached = held.cached_prompt_tokens
            if attempt > 0 and cached == 0:
                break
        self._findings.expect(
            "prefix_cache",
            f"{target.instance_id} found {cached} tokens of a prompt in a cache that was reset",
            holds=cached == 0,
        )
        await client.reset_prefix_cache()

    async def _count_tokens(self, targets: Sequence[Target]) -> None:
        """Compare counted with sent tokens, on every engine."""

        async def one(target: Target) -> None:
            client = self._clients[target.instance_id]
            for prompt in self._prompts(target)[:2]:
                async with self._slots:
                    if target.decodes:
                        self._check_generated(target, prompt, await self._generate(client, prompt))
                    if target.prefills:
                        held = await client.prefill(prompt)
                        try:
                            self._check_prefilled(target, prompt, held)
                        finally:
                            await asyncio.shield(free(held, prompt, client, self._clients))

        await _all(one(target) for target in targets)

    def _check_generated(self, target: Target, prompt: Sequence[int], generated: Generated) -> None:
        name = target.instance_id
        self._findings.expect(
            "token_counts",
            f"{name} counted {generated.prompt_tokens} prompt tokens of {len(prompt)}",
            holds=generated.prompt_tokens == len(prompt),
        )
        sent = len(generated.token_ids)
        self._findings.expect(
            "token_counts",
            f"{name} sent {sent} tokens and counted {generated.completion_tokens} where "
            f"{_OUTPUT_TOKENS} were asked for",
            holds=sent == generated.completion_tokens == _OUTPUT_TOKENS,
        )

    def _check_prefilled(self, target: Target, prompt: Sequence[int], held: Prefilled) -> None:
        self._findings.expect(
            "token_counts",
            f"{target.instance_id} counted {held.prompt_tokens} prompt tokens of {len(prompt)}",
            holds=held.prompt_tokens == len(prompt),
        )

    async def _compare_decodes(self, targets: Sequence[Target], reference: _Reference) -> None:
        """Let every decode engine of a pool continue the same prompts by itself."""
        for pool in sorted({target.pool for target in targets}):
            decodes = [t for t in targets if t.pool == pool and t.decodes]
            if not decodes:
                continue
            for index, prompt in enumerate(self._prompts(decodes[0])):
                said = await self._continue_everywhere(decodes, prompt)
                usual = Counter(g.token_ids for g in said.values()).most_common(1)[0][0]
                reference[pool, index] = next(g for g in said.values() if g.token_ids == usual)
                for name, generated in said.items():
                    self._findings.expect(
                        "greedy_equality",
                        _difference(name, f"the other decode engines of {pool}", generated, usual),
                        holds=generated.token_ids == usual,
                    )

    async def _continue_everywhere(
        self, decodes: Sequence[Target], prompt: Sequence[int]
    ) -> dict[str, Generated]:
        async def one(target: Target) -> tuple[str, Generated]:
            async with self._slots:
                client = self._clients[target.instance_id]
                return target.instance_id, await self._generate(client, prompt)

        return dict(await asyncio.gather(*(one(target) for target in decodes)))

    async def _check_pairs(
        self, targets: Sequence[Target], reference: Mapping[tuple[str, int], Generated]
    ) -> None:
        """Hand a prompt over every pair, and compare with what the decode engine says alone."""
        self._check_pairing_keys(targets)
        if self._findings.failures.get("pairs"):
            return

        async def one(pair: tuple[Target, Target], index: int) -> None:
            prefill, decode = pair
            prompts = self._prompts(decode)
            prompt, expected = prompts[index], reference[decode.pool, index]
            first, second = sorted(target.instance_id for target in pair)
            async with self._clients[first].busy, self._clients[second].busy, self._slots:
                said = await self._hand_over(pair, prompt)
            self._findings.expect(
                "pairs",
                _difference(
                    f"{prefill.instance_id} -> {decode.instance_id}",
                    f"{decode.instance_id} alone",
                    said,
                    expected.token_ids,
                ),
                holds=said.token_ids == expected.token_ids,
            )

        pairs = pairs_of(targets)
        await _all(one(pair, index) for index in (0, 2) for pair in pairs)

    def _check_pairing_keys(self, targets: Sequence[Target]) -> None:
        """Fail where engines of one pool could never hand KV to each other."""
        for pool in sorted({target.pool for target in targets}):
            members = [target for target in targets if target.pool == pool]
            usual = Counter(target.pairing_key for target in members).most_common(1)[0][0]
            like = next(target for target in members if target.pairing_key == usual)
            for target in members:
                self._findings.expect(
                    "pairs",
                    f"{target.instance_id} cannot pair with the others of {pool}: its block size "
                    f"is {target.block_tokens} tokens, theirs {like.block_tokens} (pairing key "
                    f"{target.pairing_key!r}, not {usual!r})",
                    holds=target.pairing_key == usual,
                )

    def _prompts(self, target: Target) -> list[list[int]]:
        """Return prompts at and around a block's edge, the same for all instances of a pool."""
        members = [c.target for c in self._clients.values() if c.target.pool == target.pool]
        block = max(members[0].block_tokens, 1)
        longest = min(member.limits.max_model_tokens for member in members) - _OUTPUT_TOKENS - 1
        vocab_size = min(member.vocab_size for member in members)
        lengths = [max(min(length, longest), 1) for length in (5, block, 2 * block + 1)]
        return [
            random_prompt(length, vocab_size, _SEED + index) for index, length in enumerate(lengths)
        ]

    async def _hand_over(self, pair: tuple[Target, Target], prompt: Sequence[int]) -> Generated:
        prefill, decode = (self._clients[target.instance_id] for target in pair)
        held = await prefill.prefill(prompt)
        pulled = False
        try:
            said = await self._generate(decode, prompt, held)
            pulled = True
        finally:
            if not pulled:
                await asyncio.shield(free(held, prompt, prefill, self._clients))
        return said

    async def _generate(
        self, client: AgentClient, prompt: Sequence[int], held: Prefilled | None = None
    ) -> Generated:
        return await client.decode(prompt, _OUTPUT_TOKENS, held)


def _difference(name: str, others: str, said: Generated, expected: Sequence[int]) -> str:
    """Say where two texts part."""
    pairs = zip(said.token_ids, expected, strict=False)
    for position, (mine, theirs) in enumerate(pairs):
        if mine != theirs:
            return f"{name} says token {mine} at position {position} where {others} says {theirs}"
    return f"{name} says {len(said.token_ids)} tokens where {others} says {len(expected)}"


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Run calls side by side; the first failure is raised when all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _quietly(call: Awaitable[None]) -> None:
    """Free what can be freed; the failure before it is the one that is told."""
    try:
        await call
    except ProbeFailed:
        return
