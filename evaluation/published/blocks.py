"""What a generated block of the document is: a table by its rows and columns, or lines of text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from evaluation.errors import MissingResultsError
from evaluation.published.figures import (
    Value,
    closest,
    factor,
    goodput,
    interval,
    place,
    share,
    signed,
)
from evaluation.published.results import Results, Where, field_of

_BRACES = re.compile(r"\{([^}]+)\}")

Facts = Callable[[Results], Mapping[str, str]]


class Block(Protocol):
    """Something between two markers."""

    @property
    def name(self) -> str:
        """What the marker calls it."""
        ...

    def render(self, results: Results) -> str:
        """Return its Markdown.

        Raises:
            MissingResultsError: A result that it shows is not there.
        """
        ...


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers.

    Attributes:
        head: Shown above.
        where: What its rows have in common.
        value: What is said of a cell's rows; a line's own goes first.
        once: Only in the first line of a group.
    """

    head: str
    where: Where = field(default_factory=dict)
    value: Value = goodput
    once: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table.

    Attributes:
        labels: Its first cells.
        where: What its rows have in common.
        value: In place of the columns'.
    """

    labels: tuple[str, ...]
    where: Where = field(default_factory=dict)
    value: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of which every cell is a value of the rows that both its line and column want.

    Attributes:
        name: Of the marker.
        files: Where the rows are.
        heads: Above the labels.
        columns: From left to right.
        lines: From top to bottom.
        where: What all rows have in common.
        rows: How many a cell has to have; 0 for any, but none.
        ranked: Lines without a value of their own are sorted by goodput, the best first.
        grouped: A label is shown only where it changes.
        sparse: A cell without rows stays empty.
    """

    name: str
    files: tuple[str, ...]
    heads: tuple[str, ...]
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    where: Where = field(default_factory=dict)
    rows: int = 1
    ranked: bool = False
    grouped: bool = False
    sparse: bool = False

    def render(self, results: Results) -> str:
        """Return its Markdown.

        Raises:
            MissingResultsError: A cell has not the rows that it should have.
        """
        lines = self._ranked(results) if self.ranked else self.lines
        body = []
        group = ""
        for line in lines:
            repeated = self.grouped and line.labels[0] == group
            group = line.labels[0]
            labels = ("", *line.labels[1:]) if repeated else line.labels
            cells = [
                "" if repeated and column.once else self._cell(results, line, column)
                for column in self.columns
            ]
            body.append((*labels, *cells))
        return markdown((*self.heads, *(column.head for column in self.columns)), body)

    def _cell(self, results: Results, line: Line, column: Column) -> str:
        where = {**self.where, **column.where, **line.where}
        rows = results.select(self.files, where)
        if not rows and self.sparse:
            return ""
        if not rows or self.rows not in (0, len(rows)):
            raise MissingResultsError(f"{self.name}: {len(rows)} rows of {where}")
        return (line.value or column.value)(rows)

    def _ranked(self, results: Results) -> list[Line]:
        def rank(line: Line) -> float:
            if line.value is not None:
                return float("-inf")
            wheres = [{**self.where, **column.where, **line.where} for column in self.columns]
            return -sum(r.goodput for w in wheres for r in results.select(self.files, w))

        return sorted(self.lines, key=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """The cells in which late binding leads least, cells in which all is in time left out.

    Attributes:
        name: Of the marker.
        files: Where the rows are.
        most: Lines.
    """

    name: str
    files: tuple[str, ...]
    most: int

    def render(self, results: Results) -> str:
        """Return its Markdown."""
        rows = results.select(self.files, {})
        head = ("cell", "late_binding", "best other", "difference", "95 % interval")
        body = [
            (
                place(contest.ours),
                share(contest.ours.goodput),
                f"{share(contest.best.goodput)} {field_of(contest.best, 'base')}",
                signed(contest.difference.mean),
                interval(contest),
            )
            for contest in closest(rows, self.most)
        ]
        return markdown(head, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Lines with facts in braces.

    Attributes:
        name: Of the marker.
        lines: Each with `{name}` where the fact of that name goes.
        facts: By name.
    """

    name: str
    lines: tuple[str, ...]
    facts: Facts

    def render(self, results: Results) -> str:
        """Return its lines.

        Raises:
            MissingResultsError: A fact is not known.
        """
        known = self.facts(results)
        try:
            return _BRACES.sub(lambda match: known[match[1]], "\n".join(self.lines))
        except KeyError as error:
            raise MissingResultsError(f"{self.name}: no fact {error}") from error


def by_policy(*policies: str) -> tuple[Line, ...]:
    """Return a line a policy."""
    return tuple(Line((policy,), {"policy": policy}) for policy in policies)


def by_load(*loads: float) -> tuple[Column, ...]:
    """Return a column a load."""
    return tuple(Column(factor(load), {"load": load}) for load in loads)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [_line(head), "|" + "--|" * len(head), *(_line(cells) for cells in body)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
