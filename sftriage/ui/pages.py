"""From what is known to HTML. Every value goes through a template that escapes it: a stage may be called anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sftriage import __version__
from sftriage.traces import Manifest
from sftriage.traces.findings import Findings
from sftriage.ui import words
from sftriage.ui.captures import Damaged
from sftriage.ui.decisions import page_of
from sftriage.ui.journal import WindowRow
from sftriage.ui.lanes import Lanes
from sftriage.ui.lateness import HeatMap
from sftriage.ui.outlook import CaptureStatus, Outlook, outlook
from sftriage.ui.source import Drawing, View
from sftriage.ui.span import CHOICES, Span
from sftriage.ui.timeline import MAX_TABLE_ROWS, Column, columns_of, timeline
from sftriage.words import size

COLOURS = 12
"""Stages have so many colours; the next ones begin again."""

OUTCOME_WORDS = {"capture": "captured", "hold": "held", "throttle": "throttled", "ignore": "ignored"}
LABEL_WORDS = {"healthy": "healthy", "needs_evidence": "undecided", "suspect": "suspect", "stalled": "stalled"}
STATE_WORDS = {"running": "is running", "done": "done", "failed": "failed", "refused": "was refused"}

NEWEST = 8
"""Decisions on the overview."""


class Pages:
    """Makes the pages.

    Args:
        static: the page's own files and their versions.
        now_s: seconds since the epoch.
    """

    def __init__(self, static: Mapping[str, str], now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._environment = Environment(
            loader=PackageLoader("sftriage.ui"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        for name in ("milliseconds", "signed", "clock", "stamp", "number", "percent"):
            self._environment.filters[name] = getattr(words, name)
        self._environment.filters["size"] = size
        self._environment.filters["colour"] = lambda number: number % COLOURS
        self._environment.globals.update(
            static={name: f"/static/{name}?v={version}" for name, version in static.items()},
            sftriage_version=__version__,
            outcome_words=OUTCOME_WORDS,
            label_words=LABEL_WORDS,
            state_words=STATE_WORDS,
            ago=lambda time_s: words.ago(time_s, self._now_s()),
        )

    def overview(self, view: View, span: Span, rows: Sequence[WindowRow], heat: HeatMap | Drawing | None) -> str:
        """How the job stands; ``rows`` are the windows in the span that is looked at."""
        chart = timeline(rows)
        table: tuple[Column, ...] = ()
        if chart is not None:
            table = columns_of(rows, [one.stage for one in chart.series], MAX_TABLE_ROWS)
        return self._made(
            "overview.html",
            view,
            outlook=standing(view),
            span=span,
            choices=_choices(view.rows),
            chart=chart,
            chart_data=[] if chart is None else [_said(one) for one in chart.columns],
            chart_stages=[] if chart is None else [one.stage for one in chart.series],
            table=table,
            heat=heat if isinstance(heat, HeatMap) else None,
            drawing=isinstance(heat, Drawing),
            newest=page_of(view.rows, view.became, size=NEWEST),
            running=_unfinished(view),
        )

    def decisions(self, view: View, outcome: str, number: int) -> str:
        """All decisions with an outcome; with another than there are, all."""
        outcome = outcome if outcome in OUTCOME_WORDS else ""
        return self._made(
            "decisions.html", view, outcome=outcome, page=page_of(view.rows, view.became, outcome, number)
        )

    def capture(self, view: View, manifest: Manifest, row: WindowRow | None, lanes: Lanes | None) -> str:
        """One capture that is stored."""
        shares = _shares(manifest.findings)
        return self._made("capture.html", view, manifest=manifest, row=row, lanes=lanes, shares=shares)

    def lost(self, view: View, capture_id: str, row: WindowRow) -> str:
        """A capture that was asked for and is not stored: it runs, or came to nothing, or has been removed since."""
        asked = next(one for one in row.asked if one.capture_id == capture_id)
        status = CaptureStatus(asked, view.became.get(capture_id))
        return self._made("lost.html", view, status=status, row=row)

    def damaged(self, view: View, found: Damaged) -> str:
        """Something that is no capture."""
        return self._made("refused.html", view, title="This capture cannot be shown", detail=found.problem)

    def refused(self, status: int, detail: str) -> str:
        """A request that is not answered."""
        return self._made("refused.html", View("none"), title=f"{status}", detail=detail)

    def _made(self, template: str, view: View, **values: Any) -> str:
        return self._environment.get_template(template).render(view=view, now_s=self._now_s(), **values)


def standing(view: View) -> Outlook:
    """How a job stands, judged or not yet."""
    if view.rows:
        return outlook(view.rows, view.became)
    if view.problem:
        return Outlook("no_run", view.problem)
    if view.info is None:
        return Outlook("no_run", "Start one with `sftriage run` or `sftriage demo`. This page will show it by itself.")
    if not view.going:
        return Outlook("no_run", "The run has ended before its first window was full.")
    return Outlook("warming_up", "No window has been judged yet: the job warms up, and fills its first one.")


def _choices(rows: Sequence[WindowRow]) -> tuple[int, ...]:
    """How many of the last steps can be asked for: fewer than there are."""
    steps = rows[-1].last_step - min(row.first_step for row in rows) + 1 if rows else 0
    return tuple(choice for choice in CHOICES if choice < steps)


def _said(column: Column) -> list[Any]:
    """What is read out of one column of the timeline."""
    advances = [round(advance_s, 6) for advance_s in column.advances_s]
    label = LABEL_WORDS[column.label]
    return [column.first_step, column.last_step, label, column.named, round(column.exposed_s, 6), advances]


def _unfinished(view: View) -> tuple[CaptureStatus, ...]:
    """Captures that were asked for and are not stored: running, failed, or removed since; newest first."""
    stored = {one.capture_id for one in view.captures}
    asked = [one for row in reversed(view.rows) for one in row.asked if one.capture_id not in stored]
    return tuple(CaptureStatus(one, view.became.get(one.capture_id)) for one in asked[:20])


def _shares(findings: Findings | None) -> tuple[Any, ...]:
    """What took the most of the suspect stage."""
    return () if findings is None else findings.shares[:10]
