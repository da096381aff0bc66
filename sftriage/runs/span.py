"""Which part of a run is looked at: all of it, its last steps, or the steps between two. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from sftriage.runs.following import WindowRow

CHOICES: tuple[int, ...] = (200, 1000, 10_000)
"""How many of the last steps one can ask for with one click."""


NONE = ("last", 0)
"""Asks for nothing at all."""

_WORDS = {
    "last": "last is a whole number of steps, 1 or more",
    "from": "from is the number of a step",
    "to": "to is the number of a step",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a run. ``last`` is a number of steps; ``first_step`` and ``last_step`` are both included.

    ``problems`` are what was asked for and means nothing, in words. It is passed over.
    """

    last: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    problems: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Span:
        """What an address asks for; what was left empty is not asked for."""
        asked = {name: _whole(text) for name in _WORDS if (text := query.get(name, "").strip())}
        problems = tuple(_WORDS[name] for name, number in asked.items() if number is None or (name, number) == NONE)
        last = asked.get("last")
        if last:
            return cls(last=last, problems=problems)
        return cls(first_step=asked.get("from"), last_step=asked.get("to"), problems=problems)

    @property
    def query(self) -> str:
        """The span as part of an address."""
        values = {"last": self.last, "from": self.first_step, "to": self.last_step}
        return urlencode({name: value for name, value in values.items() if value is not None})

    @property
    def whole(self) -> bool:
        """It is all of the run."""
        return self == Span()

    def select(self, rows: Sequence[WindowRow]) -> tuple[WindowRow, ...]:
        """The windows that touch it."""
        if self.whole or not rows:
            return tuple(rows)
        first, last = self._ends(rows)
        attempt = rows[-1].attempt if self.last else None
        return tuple(
            row
            for row in rows
            if row.last_step >= first and row.first_step <= last and (attempt is None or row.attempt == attempt)
        )

    def heat_steps(self, rows: Sequence[WindowRow]) -> tuple[int, int, int] | None:
        """The attempt, and the first and the last step of the newest attempt in the span; ``rows`` are those it has."""
        judged = [row for row in rows if row.attempt == rows[-1].attempt and row.stages]
        if not judged:
            return None
        first, last = self._ends(rows)
        first = max(first, min(row.first_step for row in judged))
        last = min(last, max(row.last_step for row in judged))
        return (judged[-1].attempt, first, last) if first <= last else None

    def _ends(self, rows: Sequence[WindowRow]) -> tuple[int, int]:
        if self.last is not None:
            newest = rows[-1].last_step
            return newest - self.last + 1, newest
        first = -(2**62) if self.first_step is None else self.first_step
        return first, 2**62 if self.last_step is None else self.last_step


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else None
