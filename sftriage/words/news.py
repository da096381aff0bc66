"""Which windows `sftriage run` and `sftriage watch` print, and when. Pure.

A healthy job is quiet: important news is printed at once, and `sftriage decisions` has everything else.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from sftriage.model.captures import Decision, Outcome
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import MOST_FRACTION

WITHIN_S = 60.0
MOST_TIMES, MOST = 2, 6
"""How often the same news is printed within a minute, and the maximum number of window lines."""

ONE_OFF_S = 1.0
"""A one-off that cost the job less is not printed."""

Urgency = Literal["at_once", "now", "lasting", "calm", "never"]
"""When to print a window: always; if it is new; once it has lasted; in a quiet minute; never."""

_OVER = (("late_excess_s", "min_lateness_s"), ("shared_excess_s", "min_group_s"))
"""Delays and their thresholds."""
_EXCESS_REASONS = frozenset({"roaming", "intermittent", "co_critical", "sync_ambiguous", "no_baseline"})
"""Reasons of a held window that concern a delay, not missing evidence: a small delay is jitter."""


@dataclass(frozen=True, slots=True)
class News:
    """A window that may be printed; two with the same ``standing`` have the same news."""

    urgency: Urgency
    standing: tuple[Hashable, ...]
    time_s: float
    first_step: int
    last_step: int


def news_of(verdict: Verdict, decision: Decision) -> News:
    """A window and its decision as news."""
    first = verdict.suspects[0] if verdict.label in ("suspect", "stalled") and verdict.suspects else None
    named = first and (first.identity, first.pattern == "one-off")
    regression = verdict.regression
    # (a slowdown by one named rank is no news beside that rank)
    alike = regression is not None and regression.until_step is None and (regression.scope == "all" or not first)
    slower = regression.kind if regression is not None and alike else None
    link = () if verdict.link is None else (verdict.link.host, verdict.link.peer)
    return News(
        urgency_of(verdict, decision),
        (verdict.label, named, slower, verdict.reasons if verdict.label == "stalled" else (), *link),
        decision.time_s,
        verdict.first_step,
        verdict.last_step,
    )


def urgency_of(verdict: Verdict, decision: Decision) -> Urgency:
    """When a window is printed.

    Contention for CPUs and delays without a suspect come and go: they are printed once they have lasted.
    """
    if decision.outcome == "capture" or verdict.label == "stalled":
        return "at_once"
    if verdict.label == "healthy":
        return "calm"
    if verdict.reasons == ("self_inflicted",):
        return "never"
    regression = verdict.regression
    slower = regression is not None and regression.until_step is None
    if regression is not None and slower and regression.scope == "all":
        return "lasting" if (regression.descheduled_fraction or 0.0) >= MOST_FRACTION else "now"
    if verdict.label == "suspect":
        if verdict.suspects[0].pattern == "one-off":
            return "now" if verdict.suspects[0].gain_s >= ONE_OFF_S else "never"
        return "lasting" if decision.reason in ("contended", "descheduled") else "now"
    if verdict.link is not None:
        return "now"
    numbers = verdict.numbers
    slight = _EXCESS_REASONS.issuperset(verdict.reasons) and all(
        name in numbers and threshold in numbers and numbers[name] < numbers[threshold] for name, threshold in _OVER
    )
    return "lasting" if slower or not slight else "never"


class RecentLines:
    """The last printed line, those of the last minute, and the first of the windows held back until they last.

    A change is printed at once and not repeated. The same news is printed at most twice within a minute, and at most
    six lines in total; news that may pass is printed after a minute, if its windows have no
    step in common with the first of them; recovery is printed after a quiet minute. So a terminal is never
    flooded, and is out of date for at most a minute.

    Args:
        last: the standing of the line printed last, if any.
    """

    def __init__(self, last: Hashable = None) -> None:
        self._last = last
        self._recent: list[tuple[Hashable, float]] = []
        self._since: News | None = None
        self._refused: set[Hashable] = set()

    def after(self, found: News) -> bool:
        """Whether to print the next window."""
        if found.urgency == "never":
            return False
        self._since = (self._since or found) if found.urgency == "lasting" else None
        # (a clock that was set back must not suppress lines)
        recent = [(standing, at_s) for standing, at_s in self._recent if 0.0 <= found.time_s - at_s < WITHIN_S]
        many = len(recent) >= MOST or sum(standing == found.standing for standing, _ in recent) >= MOST_TIMES
        lasted = self._since is not None and not 0.0 <= found.time_s - self._since.time_s < WITHIN_S
        due = {
            "at_once": True,
            "now": not many,
            "lasting": not many and lasted and self._apart(found),
            "calm": not recent,
        }[found.urgency]
        if found.standing == self._last or not due:
            return False
        self._last, self._recent = found.standing, [*recent, (found.standing, found.time_s)]
        return True

    def refusing(self, found: News, outcome: Outcome) -> bool:
        """Whether to print why the last printed suspect is not captured: once per suspect."""
        about = found.standing[:2], outcome
        if outcome == "capture" or found.standing != self._last or about in self._refused:
            return False
        self._refused.add(about)
        return True

    def anew(self) -> None:
        """Forget the printed lines, except for which suspects the reason for not capturing was printed."""
        self._last, self._recent, self._since = None, [], None

    def lacks(self, found: News) -> bool:
        """Whether the last window was not printed but should be, as nothing follows it."""
        return found.standing != self._last and (found.urgency != "lasting" or self._apart(found))

    def _apart(self, found: News) -> bool:
        return self._since is not None and found.first_step > self._since.last_step
