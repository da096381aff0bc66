"""What has changed since a run was looked at last, in a line each for people, or as values for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.events import CauseFound, JobPaused, RemedyChanged, RingGivenUp
from sftriage.model.windows import plain
from sftriage.reports.watch_lines import clean
from sftriage.runs.following import RequestRow, WindowRow
from sftriage.runs.glance import telling_row
from sftriage.runs.picture import CaptureView, captures_of, window_values
from sftriage.runs.source import View
from sftriage.words.amounts import clock_time, counted
from sftriage.words.decisions import caused, ended_sentence
from sftriage.words.news import RecentLines
from sftriage.words.run import pause_sentence, remedy_told, ring_sentence, triage_off

_Told: TypeAlias = CauseFound | RemedyChanged | RingGivenUp | JobPaused


@dataclass(frozen=True, slots=True)
class WatchPosition:
    """How much has been told of a run: windows, captures asked for beside them, notes, and which captures have ended.

    ``said`` is what was said of the windows of an ``attempt`` of the job.
    """

    windows: int = 0
    asks: int = 0
    ended: frozenset[str] = frozenset()
    said: RecentLines = field(default_factory=RecentLines)
    attempt: int = 0
    notes: int = 0
    failing: bool = False


def all_of(view: View, said: RecentLines | None = None) -> WatchPosition:
    """Nothing of what has been so far is news; of windows, the newest has been told of, or what was ``said``."""
    row = telling_row(view.rows) if view.rows else None
    if said is None:
        said = RecentLines() if row is None else RecentLines(row.news.standing)
    attempt = view.rows[-1].attempt if row else 0
    counts = len(view.rows), len(view.asks), frozenset(view.became)
    return WatchPosition(*counts, said, attempt, len(view.notes), view.failing != "")


def opening(view: View, place: str) -> str:
    """What a run is and how it stands, in one line."""
    if view.info is None:
        return f"Waiting for a run: {clean(place)}"
    what = f"Watching {clean(view.info.job)}, run {clean(view.info.run_id)}"
    if not view.rows:
        return f"{what}. No window has been judged yet."
    return f"{what}. {clean(telling_row(view.rows).sentence)}"


def closing(view: View) -> str:
    """That a run has ended, and what there was."""
    captured = sum(result.state == "stored" for result in view.became.values())
    return f"The run has ended: {counted(view.windows, 'window')} judged, {counted(captured, 'capture')} stored."


def news(told: WatchPosition, view: View, now_s: float) -> tuple[WatchPosition, list[str]]:
    """What is new, a line each, and what has been told with it. Which windows are news is `RecentLines`'s to say."""
    rows, asks, ended = _since(told, view)
    lines, said, attempt = [], told.said, told.attempt
    if len(view.rows) < told.windows:
        said, attempt = RecentLines(), 0
    for row in rows:
        if row.attempt > attempt:
            said, attempt = RecentLines(), row.attempt
            lines.append(f"{clock_time(row.time_s)}  The job was started anew (restart {row.attempt}).")
        said, is_news = said.after(row.news)
        said, refused = said.refusing(row.news, row.outcome) if row.label == "suspect" else (said, False)
        if is_news or refused or row.asked:
            lines.append(f"{clock_time(row.time_s)}  {clean(_said(row))}")
    lines += [f"{clock_time(ask.time_s)}  {clean(_ask_said(ask))}" for ask in asks]
    lines += [f"{clock_time(now_s)}  {clean(_ended_said(one, view.became[one.capture_id]))}" for one in ended]
    lines += [f"{clock_time(one.time_s)}  {clean(text)}" for one in _notes(told, view) if (text := _note_said(one))]
    if told.failing != (view.failing != ""):
        off = triage_off(clean(view.failing)) if view.failing else "Triage works again."
        lines.append(f"{clock_time(now_s)}  {off}")
    return all_of(view, said), lines


def events(told: WatchPosition, view: View) -> tuple[WatchPosition, list[dict[str, Any]]]:
    """Every window, end of a capture, cause and remedy that is new, as JSON values, and what is told with them."""
    rows, _, ended = _since(told, view)
    values = [window_values(row) for row in rows]
    values += [{"type": "capture", **plain(one)} for one in ended]
    values += [msgspec.to_builtins(one) for one in _notes(told, view)]
    return all_of(view), values


def _since(told: WatchPosition, view: View) -> tuple[Sequence[WindowRow], Sequence[RequestRow], list[CaptureView]]:
    if len(view.rows) < told.windows or len(view.asks) < told.asks:
        told = WatchPosition()
    new = view.became.keys() - told.ended
    ended = [one for one in reversed(captures_of(view)) if one.capture_id in new] if new else []
    return view.rows[told.windows :], view.asks[told.asks :], ended


def _notes(told: WatchPosition, view: View) -> list[_Told]:
    """New causes, remedies, pauses and ranks that count as missing; all where the journal began anew."""
    notes = view.notes[told.notes if len(view.notes) >= told.notes else 0 :]
    return [one for one in notes if isinstance(one, _Told)]


def _note_said(one: _Told) -> str:
    if isinstance(one, JobPaused):
        return pause_sentence(one)
    if isinstance(one, RingGivenUp):
        return ring_sentence(one)
    if isinstance(one, RemedyChanged):
        return remedy_told(one)
    return caused(one) if one.code != "unknown" else ""


def _said(row: WindowRow) -> str:
    if row.outcome == "capture":
        return f"{row.sentence} Capturing {_captured(row.asked)}."
    if row.outcome == "throttle" or (row.outcome == "ignore" and row.reason != "healthy"):
        said = "Throttled" if row.outcome == "throttle" else "Nothing was done"
        said = f"{row.sentence} {said}: {row.words}."
    else:
        said = row.sentence
    return f"{said} To resolve it: {row.resolves}" if row.resolves else said


def _ask_said(ask: RequestRow) -> str:
    by = f"{ask.by} asked for a capture" if ask.by else "Another capture led to this"
    return f"{by}: {ask.why}. " + (f"Capturing {_captured(ask.asked)}." if ask.asked else f"Refused: {ask.words}.")


def _captured(asked: Sequence[CaptureRequest]) -> str:
    beside = {"control": " to compare with"}
    return ", ".join(f"rank {one.rank}{beside.get(one.role, '')} ({one.capture_id})" for one in asked)


def _ended_said(one: CaptureView, result: CaptureResult) -> str:
    if one.state == "damaged":
        return f"No trace of rank {result.rank}: what is stored is damaged: {one.detail}."
    return ended_sentence(result, one.size_bytes)
