"""Who a run has to live with, and what would help, as its windows have it: for the terminal and an assistant."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from sftriage.mitigate.advice import Advice, Remedy, Straggler
from sftriage.records import plain
from sftriage.runs.source import View
from sftriage.words.advice import ASSUMPTIONS, NOBODY, NOTHING, TITLES, remedy_sentence, straggler_sentence

RECENT_WINDOWS = 10
MIN_WINDOWS = 4
"""Of the recent windows at least so many, and half of them, name who is there to stay."""


def straggler_of(view: View) -> Straggler | None:
    """Who has been slow for long, and is still: the chronic first suspect of most recent windows; None for nobody."""
    recent = [row for row in view.rows[-RECENT_WINDOWS:] if row.label != "stalled"]
    first = [(row, row.suspects[0]) for row in recent if row.suspects and row.suspects[0].pattern == "chronic"]
    most = Counter((one.ranks, one.where) for _, one in first).most_common(1)
    if not most or most[0][1] < max(MIN_WINDOWS, len(recent) / 2):
        return None
    (ranks, where), _ = most[0]
    named = [(row, one) for row, one in first if (one.ranks, one.where) == (ranks, where)]
    n_ranks = max(view.telemetry.world_size or 0, 1 + max(ranks))
    late_s, step_s = median(one.gain_s for _, one in named), median(row.exposed_s for row, _ in named)
    return Straggler(named[-1][1].who, where, ranks, n_ranks, min(late_s, step_s), step_s)


def advice_lines(advice: Advice) -> list[str]:
    """The advice in words, the most useful remedy first."""
    one = advice.straggler
    lines = [NOBODY if one is None else straggler_sentence(one.who, one.where, one.late_s, one.step_s, one.n_ranks)]
    if advice.remedies and advice.best is None:
        lines.append(NOTHING)
    return lines + [line for remedy in advice.remedies for line in _remedy(remedy)]


def _remedy(remedy: Remedy) -> tuple[str, str]:
    return f"{TITLES[remedy.code]}. {_sentence(remedy)}", f"  Taken for granted: {ASSUMPTIONS[remedy.code]}."


def _sentence(remedy: Remedy) -> str:
    return remedy_sentence(remedy.code, remedy.saves_s, remedy.pays_from_s, remedy.numbers, remedy.ahead)


def advice_values(advice: Advice) -> dict[str, Any]:
    """All figures as JSON values; seconds are of a step."""
    return {
        "straggler": None if advice.straggler is None else plain(advice.straggler),
        "step_s": advice.step_s,
        "best": None if advice.best is None else advice.best.code,
        "remedies": [
            {**plain(one), "says": _sentence(one), "taken_for_granted": ASSUMPTIONS[one.code]}
            for one in advice.remedies
        ],
    }
