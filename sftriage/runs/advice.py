"""Who a run has to live with, and what would help, as its windows have it: for the terminal and an assistant."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from sftriage.errors import UsageError
from sftriage.mitigate.advice import (
    RECENT_WINDOWS,
    Advice,
    Chronic,
    Messages,
    Pipeline,
    Remedy,
    Straggler,
    UnderStraggler,
    advice_of,
    as_measured,
    straggler_in,
    tells,
)
from sftriage.model.events import RemedyChanged
from sftriage.model.windows import plain
from sftriage.runs.following import WindowRow
from sftriage.runs.source import View
from sftriage.words.advice import (
    ASSUMPTIONS,
    NOBODY,
    NOTHING,
    TITLES,
    link_sentence,
    remedy_sentence,
    remedy_told,
    straggler_sentence,
)


def straggler_of(view: View) -> Straggler | None:
    """Who has been slow for long, and is still: the chronic first suspect of most recent windows; None for nobody."""
    newest = islice((row for row in reversed(view.rows) if tells(row.label, row.reasons)), RECENT_WINDOWS)
    return straggler_in([_chronic(row) for row in newest][::-1], view.telemetry.world_size or 0)


def pipeline_of_run(view: View) -> Pipeline | None:
    """The pipeline with a slow link, as its ranks measured it last; None where there is none, or no more."""
    told = next((one for one in reversed(view.notes) if isinstance(one, RemedyChanged) and one.pipeline), None)
    if told is None or told.pipeline is None or told.reason in ("gone", "restarted"):
        return None
    try:
        return Pipeline(*msgspec.structs.astuple(told.pipeline))
    except UsageError:
        return None


def advice_of_run(view: View, messages: Messages | None = None, pipeline: Pipeline | None = None) -> Advice:
    """What would help the run, by its own figures as far as nobody names others."""
    straggler = straggler_of(view)
    advice = advice_of(straggler, messages, pipeline or pipeline_of_run(view), _exchange(view, straggler))
    return replace(advice, tried=tuple(tried_in(view)))


def tried_in(view: View) -> list[RemedyChanged]:
    """What has come of remedies that were tried, of each group of ranks the last."""
    tried = [one for one in view.notes if isinstance(one, RemedyChanged) and one.state != "advised"]
    return list({one.switch: one for one in tried}.values())


def _exchange(view: View, straggler: Straggler | None) -> UnderStraggler | None:
    """What gradients take around a straggler, by what its group measured last; None where that is not on record."""
    for told in reversed(view.notes):
        if isinstance(told, RemedyChanged) and straggler is not None and (told.rank,) == straggler.ranks:
            n, ring_s = int(told.numbers.get("ring_ranks", 0)), told.numbers.get("ring_s", 0.0)
            if n >= 3 and ring_s > 0.0:
                return as_measured(n, ring_s)
    return None


def _chronic(row: WindowRow) -> Chronic | None:
    if not row.suspects or row.suspects[0].pattern != "chronic":
        return None
    first = row.suspects[0]
    return Chronic(first.who, first.where, first.ranks, first.gain_s, row.step_s)


def advice_lines(advice: Advice) -> list[str]:
    """The advice in words, the most useful remedy first."""
    one = advice.straggler
    lines = [] if one is None else [straggler_sentence(one.who, one.where, one.late_s, one.step_s, one.n_ranks)]
    lines += [] if advice.slow_link is None else [link_sentence(*advice.slow_link)]
    lines = lines or [NOBODY]
    lines += map(remedy_told, advice.tried)
    if advice.remedies and advice.best is None:
        lines.append(NOTHING)
    for remedy in advice.remedies:
        lines += [remedy_line(remedy), f"  Taken for granted: {ASSUMPTIONS[remedy.code]}."]
    return lines


def remedy_line(remedy: Remedy) -> str:
    """A remedy in words: what, what it saves, and from where on."""
    return f"{TITLES[remedy.code]}. {_sentence(remedy)}"


def _sentence(remedy: Remedy) -> str:
    return remedy_sentence(remedy.code, remedy.saves_s, remedy.pays_from_s, remedy.numbers, remedy.ahead)


def advice_values(advice: Advice) -> dict[str, Any]:
    """All figures as JSON values; seconds are of a step."""
    return {
        "straggler": None if advice.straggler is None else plain(advice.straggler),
        "slow_link": None if advice.slow_link is None else advice.slow_link._asdict(),
        "step_s": advice.step_s,
        "tried": [msgspec.to_builtins(one) for one in advice.tried],
        "best": None if advice.best is None else advice.best.code,
        "remedies": [
            {**plain(one), "says": _sentence(one), "taken_for_granted": ASSUMPTIONS[one.code]}
            for one in advice.remedies
        ],
    }
