"""What is wrong with a policy, and where: every problem of a document in one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sftriage.errors import InputError

MAX_SHOWN = 50
"""A document can hold tens of thousands of mistakes; nobody reads past the first screens of them."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake. ``line`` and ``column`` count from 1; a line of 0 means the document as a whole.

    ``source`` is the file it is in, where several are looked at together.
    """

    line: int
    column: int
    path: str
    message: str
    source: str = ""

    def said(self, source: str) -> str:
        """The problem as one line: ``FILE:LINE:COLUMN: field: message``."""
        source = self.source or source
        place = f"{source}:{self.line}:{self.column}" if self.line else source
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class PolicyError(InputError):
    """A policy that cannot be used. ``str(error)`` is one line for each problem, in the order of the document."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.source, problem)))
        lines = [problem.said(source) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            lines.append(f"{source}: and {len(self.problems) - MAX_SHOWN} more")
        super().__init__("\n".join(lines))
