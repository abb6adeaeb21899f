"""In which step a hand-off's first token came, and when engines must have looked for that.

The router journals when it sent a request to its decode engine and when its first token came; a
paced engine records when each step ended. Between the two lie whole steps, so the step that gave
the token tells when the finished pull was noticed, however noisy the machine.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One request's way onto a busy decode engine; times in real seconds, on one clock.

    Attributes:
        sent_at: The router sent it.
        token_at: Its first token was at the router.
        transfer_seconds: What the pull takes by the engine model.
        ends: When the engine's steps ended, from the last before it was sent to the first after
            the token came; no pause between them.
    """

    sent_at: float
    token_at: float
    transfer_seconds: float
    ends: Sequence[float]

    @property
    def steps(self) -> int:
        """Step ends from sending to the first token; the last of them gave the token."""
        return len(self.ends) - 2

    @property
    def way_back_seconds(self) -> float:
        """From the end of the step that gave the token until it was at the router."""
        return self.token_at - self.ends[-2]

    @property
    def transfer_steps(self) -> float:
        """The pull's length in steps."""
        return self.transfer_seconds * (len(self.ends) - 1) / (self.ends[-1] - self.ends[0])


def cut_out(
    ends: Sequence[float],
    carried: Sequence[bool],
    *,
    sent_at: float,
    token_at: float,
    transfer_seconds: float,
) -> Handoff | None:
    """Return a hand-off with the steps of its engine around it.

    Args:
        ends: When all steps of its engine ended, ascending.
        carried: Whether each followed the one before without a pause.
        sent_at: The router sent it.
        token_at: Its first token was at the router.
        transfer_seconds: What the pull takes by the engine model.

    Returns:
        None where the engine paused in between: then steps tell nothing.
    """
    first, after = bisect_right(ends, sent_at) - 1, bisect_right(ends, token_at)
    if first < 0 or after - first < 2 or after >= len(ends):
        return None
    if not all(carried[first + 1 : after + 1]):
        return None
    return Handoff(
        sent_at=sent_at,
        token_at=token_at,
        transfer_seconds=transfer_seconds,
        ends=ends[first : after + 1],
    )


def expected_steps(handoff: Handoff, *, notice_share: float, way_seconds: float) -> int | None:
    """Return after how many step ends the first token comes by the engine model.

    The pull begins with the first step after the request is there, is noticed by the first step
    that looks after it is done, and the step after that one gives the token.

    Args:
        handoff: The hand-off; only its steps, sending and transfer are looked at.
        notice_share: When in a step the engine looks, as a share of the step.
        way_seconds: From the router to the engine's scheduler.

    Returns:
        None where that is later than its steps go.
    """
    ends = handoff.ends
    begin = bisect_left(ends, handoff.sent_at + way_seconds)
    if begin >= len(ends):
        return None
    done_at = ends[begin] + handoff.transfer_seconds
    for number, (step_begin, step_end) in enumerate(pairwise(ends[begin:]), start=begin):
        if step_begin + notice_share * (step_end - step_begin) >= done_at:
            return number + 2
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """How well a time of looking explains the steps in which first tokens came.

    Attributes:
        notice_share: When in a step engines look, as a share of the step.
        same: Share of hand-offs whose token came from the expected step.
        mean_off: Expected minus real, steps; those expected later than their steps go count as
            one step late.
    """

    notice_share: float
    same: float
    mean_off: float


def explain(handoffs: Sequence[Handoff], notice_share: float, *, way_seconds: float) -> Explained:
    """Return how well `notice_share` explains hand-offs; there has to be one."""
    off = []
    for handoff in handoffs:
        steps = expected_steps(handoff, notice_share=notice_share, way_seconds=way_seconds)
        off.append(1 if steps is None else steps - handoff.steps)
    return Explained(notice_share=notice_share, same=off.count(0) / len(off), mean_off=fmean(off))


def step_counts(handoffs: Sequence[Handoff]) -> dict[int, Counter[int]]:
    """Count step ends until the first token, by the whole steps that the transfer takes."""
    counts: dict[int, Counter[int]] = {}
    for handoff in handoffs:
        counts.setdefault(int(handoff.transfer_steps), Counter())[handoff.steps] += 1
    return dict(sorted(counts.items()))
