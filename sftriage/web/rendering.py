"""Templates, and the words and numbers in them. Every value is escaped: a stage may be called anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined

from sftriage import __version__
from sftriage.words.advice import remedy_told
from sftriage.words.amounts import ago, clock_time, lasted, moment, size
from sftriage.words.captures import CONTROL_PART, caused, choice_words, stage_suspected
from sftriage.words.glance import LABEL_MEANINGS, OUTCOME_MEANINGS, QUESTIONS
from sftriage.words.keeping import disk_now, disk_sentence, pause_sentence, ring_sentence, triage_off

COLOURS = 12
"""Stages have so many colours; the next ones begin again."""

OUTCOME_WORDS = {"capture": "captured", "hold": "held", "throttle": "throttled", "ignore": "ignored"}
NOTE_WORDS = {
    "ask": "asked for",
    "beside": "after a capture",
    "cost": "cost",
    "cause": "cause",
    "remedy": "remedy",
    "policy": "policy",
    "evidence": "evidence",
    "taken_over": "taken over",
    "disk": "disk",
    "ring": "rank missing",
    "pause": "pause",
}
LABEL_WORDS = {"healthy": "healthy", "needs_evidence": "undecided", "suspect": "suspect", "stalled": "stalled"}
STATE_WORDS = {
    "accepted": "is about to begin",
    "armed": "is about to begin",
    "running": "is under way",
    "stored": "done",
    "failed": "failed",
    "refused": "was refused",
    "expired": "was given up",
}


_LINK = re.compile(r"""\b(href|action|data-heat)="/""")


class _Rooted(PackageLoader):
    """The templates as they lie there: as if their page were the only one. Its links begin where its addresses do."""

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Callable[[], bool] | None]:
        source, name, is_same = super().get_source(environment, template)
        return _LINK.sub(r'\1="{{ root }}/', source), name, is_same


def templates(static: Mapping[str, str], now_s: Callable[[], float]) -> Environment:
    """The templates, with the filters and names that they use.

    Args:
        static: the addresses of the page's own files, by name.
        now_s: seconds since the epoch.
    """
    environment = Environment(
        loader=_Rooted("sftriage.web"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        milliseconds=milliseconds,
        lasted=lasted,
        signed=lambda seconds: f"{'-' if seconds < 0 else '+'}{milliseconds(abs(seconds))}",
        clock=clock_time,
        stamp=lambda time_s: moment(time_s).isoformat(timespec="seconds"),
        number=lambda value: f"{value:,}",
        percent=percent,
        size=size,
        choice_words=choice_words,
        stage_suspected=stage_suspected,
        caused=caused,
        remedy_told=remedy_told,
        colour=lambda number: number % COLOURS,
    )
    environment.globals.update(
        static=static,
        sftriage_version=__version__,
        outcome_words=OUTCOME_WORDS,
        note_words=NOTE_WORDS,
        label_words=LABEL_WORDS,
        state_words=STATE_WORDS,
        control_part=CONTROL_PART,
        disk_now=disk_now,
        disk_sentence=disk_sentence,
        ring_sentence=ring_sentence,
        pause_sentence=pause_sentence,
        triage_off=triage_off,
        questions=QUESTIONS,
        label_meanings=LABEL_MEANINGS,
        outcome_meanings=OUTCOME_MEANINGS,
        ago=lambda time_s: ago(time_s, now_s()),
    )
    return environment


def milliseconds(seconds: float) -> str:
    """A duration, with three figures that count."""
    ms = seconds * 1e3
    if ms >= 1e4:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def percent(fraction: float) -> str:
    """A share."""
    return f"{fraction:.0%}" if fraction >= 0.1 or fraction == 0 else f"{fraction:.1%}"
