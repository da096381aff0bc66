"""What has changed since a run was looked at last, in a line each for people, or as values for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sftriage.records import plain
from sftriage.reports.watch_lines import clean
from sftriage.runs.following import RequestRow, WindowRow
from sftriage.runs.outlook import telling_row
from sftriage.runs.picture import CaptureView, captures_of, window_values
from sftriage.runs.source import View
from sftriage.words import clock_time, size


@dataclass(frozen=True, slots=True)
class Told:
    """How much has been told of a run: windows, captures asked for beside them, and which captures have ended.

    ``last`` is what was said of the last window, as far as another has to differ from it.
    """

    windows: int = 0
    asks: int = 0
    ended: frozenset[str] = frozenset()
    last: tuple[object, ...] = ()


def all_of(view: View) -> Told:
    """Nothing of what has been so far is news."""
    last = _kind(view.rows[-1]) if view.rows else ()
    return Told(len(view.rows), len(view.asks), frozenset(view.became), last)


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
    return f"The run has ended: {len(view.rows)} windows judged, {captured} captured."


def news(told: Told, view: View, now_s: float) -> tuple[Told, list[str]]:
    """What is new, a line each, and what has been told with it. Windows that are as the one before are no news."""
    rows, asks, ended = _since(told, view)
    lines, last = [], told.last if len(view.rows) >= told.windows else ()
    for row in rows:
        kind = _kind(row)
        if last and last[0] != row.attempt:
            lines.append(f"{clock_time(row.time_s)}  The job was started anew (restart {row.attempt}).")
        if kind != last or row.asked:
            lines.append(f"{clock_time(row.time_s)}  {clean(_said(row))}")
        last = kind
    lines += [f"{clock_time(ask.time_s)}  {clean(_ask_said(ask))}" for ask in asks]
    lines += [f"{clock_time(now_s)}  {clean(_ended_said(one))}" for one in ended]
    return all_of(view), lines


def events(told: Told, view: View) -> tuple[Told, list[dict[str, Any]]]:
    """Every window and every end of a capture that is new, as JSON values, and what has been told with them."""
    rows, _, ended = _since(told, view)
    values = [window_values(row) for row in rows]
    values += [{"type": "capture", **plain(one)} for one in ended]
    return all_of(view), values


def _since(told: Told, view: View) -> tuple[Sequence[WindowRow], Sequence[RequestRow], list[CaptureView]]:
    """What is new; all of it where the journal began anew."""
    if len(view.rows) < told.windows or len(view.asks) < told.asks:
        told = Told()
    new = view.became.keys() - told.ended
    ended = [one for one in reversed(captures_of(view)) if one.capture_id in new] if new else []
    return view.rows[told.windows :], view.asks[told.asks :], ended


def _kind(row: WindowRow) -> tuple[object, ...]:
    """What two windows share of which the second is no news."""
    first = row.suspects[0] if row.label == "suspect" and row.suspects else None
    slower = row.regression and (row.regression.since_step, row.regression.until_step)
    return (row.attempt, row.label, row.named if first else "", first and first.pattern, row.outcome, slower)


def _said(row: WindowRow) -> str:
    if row.outcome == "capture":
        ranks = ", ".join(f"rank {one.rank} ({one.capture_id})" for one in row.asked)
        return f"{row.sentence} Capturing {ranks}."
    if row.outcome == "throttle" or (row.outcome == "ignore" and row.reason != "healthy"):
        said = "Throttled" if row.outcome == "throttle" else "Nothing was done"
        said = f"{row.sentence} {said}: {row.words}."
    else:
        said = row.sentence
    return f"{said} To resolve it: {row.resolves}" if row.resolves else said


def _ask_said(ask: RequestRow) -> str:
    by = f"{ask.by} asked for a capture" if ask.by else "Another capture led to this"
    ranks = ", ".join(f"rank {one.rank} ({one.capture_id})" for one in ask.asked)
    return f"{by}: {ask.why}. " + (f"Capturing {ranks}." if ranks else f"Refused: {ask.words}.")


def _ended_said(one: CaptureView) -> str:
    if one.state != "stored":
        return f"No trace of rank {one.rank}: {one.state}{one.detail and ', '}{one.detail}."
    return (
        f"Captured steps {one.first_step} to {one.last_step} of rank {one.rank} "
        f"({size(one.size_bytes)}): sftriage traces show {one.capture_id}"
    )
