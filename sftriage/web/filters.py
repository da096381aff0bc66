"""Which captures of a store are looked at, as an address says it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlencode

from sftriage.errors import UsageError
from sftriage.traces.rows import Wanted

NAMES = ("job", "run", "rank", "stage", "since", "reproduced", "profiler")
ANSWERS = ("yes", "partly", "no")
PROFILERS = ("torch", "nsys", "stacks")
MAX_TEXT = 300

SinceOf = Callable[[str, datetime], datetime]
"""The moment that a person means by ``2h`` or ``2026-11-20``; raises UsageError if it is none."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What is asked for.

    Attributes:
        texts: what was typed, by name; what was left empty is not among them.
        wanted: what it means.
        problems: what means nothing, in words, by name. It is passed over.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=Wanted)
    problems: Mapping[str, str] = field(default_factory=dict)

    @property
    def query(self) -> str:
        """The filter as part of an address."""
        return urlencode(self.texts)


def filter_of(query: Mapping[str, str], since_of: SinceOf, now: datetime) -> Filter:
    """What an address asks for."""
    texts = {name: text for name in NAMES if (text := query.get(name, "").strip()[:MAX_TEXT])}
    problems: dict[str, str] = {}
    rank = texts.get("rank", "")
    if rank and not (rank.isascii() and rank.isdecimal() and int(rank) < 2**31):
        problems["rank"] = "a rank is a whole number"
    for name, known in (("reproduced", ANSWERS), ("profiler", PROFILERS)):
        if texts.get(name, known[0]) not in known:
            problems[name] = f"{name} is one of {', '.join(known)}"
    since = None
    if "since" in texts:
        try:
            since = since_of(texts["since"], now)
        except UsageError as error:
            problems["since"] = str(error).removeprefix("--")
    said = {name: texts[name] for name in ("job", "run", "stage", "reproduced", "profiler") if name in texts}
    wanted = Wanted(
        **{name: text for name, text in said.items() if name not in problems},  # type: ignore[arg-type]  # all text
        rank=int(rank) if rank and "rank" not in problems else None,
        since=since,
    )
    return Filter(texts, wanted, problems)
