"""Replaces what stands between the markers of a document."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.errors import EvaluationError, MissingResultsError
from evaluation.published.blocks import Block
from evaluation.published.results import Results

_BLOCK = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A document as it should be.

    Attributes:
        text: All of it.
        stale: Names of blocks that were not as they should be.
        missing: Why blocks are as they were, by name.
    """

    text: str
    stale: list[str]
    missing: dict[str, str]


def rewrite(text: str, blocks: Sequence[Block], results: Results) -> Rewritten:
    """Return a document with its blocks rendered; those without results stay as they are.

    Raises:
        EvaluationError: The document has a block that is not known, lacks one, or has it twice.
    """
    by_name = {block.name: block for block in blocks}
    marked = [match[1] for match in _BLOCK.finditer(text)]
    if sorted(marked) != sorted(by_name) or text.count("<!-- table: ") != len(marked):
        wrong = sorted(set(marked) ^ set(by_name)) or "one that is twice there or does not end"
        raise EvaluationError(f"blocks of the document and known ones differ: {wrong}")
    stale: list[str] = []
    missing: dict[str, str] = {}

    def renewed(match: re.Match[str]) -> str:
        try:
            body = by_name[match[1]].render(results)
        except MissingResultsError as error:
            missing[match[1]] = str(error)
            return match[0]
        if body + "\n" != match[2]:
            stale.append(match[1])
        return f"<!-- table: {match[1]} -->\n{body}\n<!-- end -->"

    return Rewritten(_BLOCK.sub(renewed, text), stale, missing)
