"""A run as `sftriage watch` follows it: its state as JSON values, and what has changed since the last poll."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sftriage.errors import InputError
from sftriage.model.captures import CaptureRequest
from sftriage.model.events import CauseFound, DifferencesFound, Event, JobBroken, JobPaused, RemedyChanged, RingGivenUp
from sftriage.model.windows import plain
from sftriage.reports.watch_lines import clean
from sftriage.runs.captures import captures_of
from sftriage.runs.decisions import CaptureStatus, RequestRow, WindowRow, picked
from sftriage.runs.directory import run_so_far
from sftriage.runs.source import RunSource, TimeColumns, View
from sftriage.runs.summary import MAX_CAPTURES, RunSummary, decisive_row
from sftriage.words.decisions import caused, ended_sentence
from sftriage.words.news import RecentLines
from sftriage.words.run import event_sentence, triage_off
from sftriage.words.verdicts import clock_time, counted, place


def picture_values(shown: RunSummary, place: str) -> dict[str, Any]:
    """What `sftriage watch` shows of a run, as JSON values; ``place`` is its directory."""
    view, info, telling = shown.view, shown.view.info, shown.decisive
    judged = shown if view.rows or view.unknown else None
    newest = view.rows[-1] if view.rows else None
    return {
        "type": "picture",
        "state": shown.state,
        "unwatched": view.unwatched,
        "run_dir": place,
        "job": "" if info is None else info.job,
        "run": "" if info is None else info.run_id,
        "policy": "" if info is None else info.policy,
        "windows": view.windows,
        "health": judged and judged.health,
        "since_step": judged and judged.since_step,
        "since_until_step": judged and judged.until_step,
        **{name: judged and getattr(judged, name) for name in ("since_s", "sentence", "done", "resolves")},
        "answers": judged and judged.answers,
        "next": judged and judged.steps,
        "cause": judged and judged.cause and judged.cause.model_dump(mode="json"),
        "differences": msgspec.to_builtins(shown.differences),
        "window": None if newest is None else window_values(newest),
        "frontier": shown.frontier,
        "suspects": () if telling is None else telling.suspects,
        "candidates": () if telling is None else telling.candidates,
        "captures": captures_of(view)[:MAX_CAPTURES],
        "losses": view.losses.largest,
        "times": view.times and view.times.values(),
        "mends": view.mends,
        "telemetry": {
            "ranks": view.telemetry.ranks,
            "world_size": view.telemetry.world_size,
            "coverage": newest and newest.coverage,
            "lines_skipped": view.skipped,
        },
    }


def window_values(row: WindowRow) -> dict[str, Any]:
    """A window and the decision on it, as JSON values."""
    return {
        "type": "window",
        **picked(row, "first_step", "last_step", "attempt", "time_s", "label", "reasons", "sentence", "exposed_s"),
        **picked(row, "advances_s", "suspects", "candidates", "regression", "coverage"),
        "decision": {
            **picked(row, "outcome", "reason", "parameters", "words"),
            "rule": row.rule or None,
            "resolves": row.resolves,
            "captures": [
                picked(request, "capture_id", "rank", "role", "profiler", "steps", "warmup_steps")
                | picked(request, "max_seconds", "max_bytes")
                | {"trigger": row.triggers.get(request.capture_id)}
                for request in row.requests
            ],
        },
    }


MAX_COLUMNS, PATIENCE_S = 128, (10.0, 0.5)
"""Columns of step times, and how long the view of a run that has ended, or goes on, waits for them."""


class FollowedRun:
    """A run that is polled, or one that has not begun yet."""

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._source = RunSource(lambda: run_so_far(run))
        self._summary: RunSummary | None = None
        self._times: TimeColumns | None = None

    @property
    def place(self) -> str:
        found = self._source.directory or self._run
        return "the first in this directory" if found is None else place(found)

    def look(self) -> View:
        """The run as it is now.

        Raises:
            InputError: the directory is not a run, is from a newer sftriage, or cannot be read.
        """
        try:
            view = self._source.view()
            if view.has_ended():
                # Read what was written between reading its journal and its end.
                view = self._source.view()
        except OSError as error:
            raise InputError(f"{self.place}: {error.strerror or error}") from error
        if view.problem:
            raise InputError(view.problem)
        return view

    def summary(self, view: View) -> RunSummary:
        """The state of the run, with its step times; recomputed only if something has changed."""
        if self._summary is None or self._summary.view is not view:
            times = self._source.step_times(view, MAX_COLUMNS, PATIENCE_S[view.going])
            if times is None and self._times is not None and view.rows and view.rows[-1].attempt == self._times.attempt:
                times = self._times  # the last ones, until the new ones have been read
            self._times, self._summary = times, RunSummary(view, times)
        return self._summary


def opening(view: View, place: str) -> str:
    """The run and its state, in one line."""
    if view.info is None:
        return f"Waiting for a run: {clean(place)}"
    title = f"Watching {clean(view.info.job)}, run {clean(view.info.run_id)}"
    if not view.rows:
        return f"{title}. No window has been judged yet."
    return f"{title}. {clean(RunSummary(view).sentence)}"


def closing(view: View) -> str:
    """The line at the end of a run, with its totals."""
    captured = sum(result.state == "stored" for result in view.results.values())
    return f"The run has ended: {counted(view.windows, 'window')} judged, {counted(captured, 'capture')} stored."


class RunNews:
    """News of a run since the last poll or since a ``view``, as lines for people or as values for programs.

    The newest window of that view counts as printed. ``ended`` are the captures that have ended.
    """

    def __init__(self, view: View | None = None) -> None:
        self.ended: set[str] = set()
        self._windows = self._requests = self._notes = self._attempt = 0
        self._failing, self._lines = False, RecentLines()
        if view is not None:
            self._new(view)
            self._attempt, self._failing = view.rows[-1].attempt if view.rows else 0, view.failing != ""
            self._lines = RecentLines(decisive_row(view.rows).news.standing if view.rows else None)

    def lines(self, view: View, now_s: float) -> list[str]:
        """A line for each news item. `RecentLines` decides which windows are news."""
        rows, requests, ended, notes = self._new(view)
        lines = []
        for row in rows:
            if row.attempt > self._attempt:
                self._lines, self._attempt = RecentLines(), row.attempt
                lines.append(f"{clock_time(row.time_s)}  The job restarted (restart {row.attempt}).")
            is_news = self._lines.after(row.news)
            refused = row.label == "suspect" and self._lines.refusing(row.news, row.outcome)
            if is_news or refused or row.requests:
                lines.append(f"{clock_time(row.time_s)}  {clean(_window_line(row))}")
        lines += [f"{clock_time(row.time_s)}  {clean(_request_line(row))}" for row in requests]
        for capture in ended:
            ended_with = view.results[capture.capture_id]
            text = ended_sentence(ended_with, capture.size_bytes, whole_job=capture.whole_job)
            if capture.state == "damaged":
                text = f"No trace of {capture.whose}: the stored capture is damaged: {capture.detail}."
            lines.append(f"{clock_time(now_s)}  {clean(text)}")
        lines += [f"{clock_time(note.time_s)}  {clean(text)}" for note in notes if (text := _note_line(note, view))]
        if self._failing != (view.failing != ""):
            self._failing = not self._failing
            off = triage_off(clean(view.failing)) if view.failing else "Triage works again."
            lines.append(f"{clock_time(now_s)}  {off}")
        return lines

    def values(self, view: View) -> list[dict[str, Any]]:
        """Every new window, end of a capture, cause and remedy, as JSON values."""
        rows, _, ended, notes = self._new(view)
        values = [window_values(row) for row in rows]
        values += [{"type": "capture", **plain(capture)} for capture in ended]
        return values + [msgspec.to_builtins(note) for note in notes]

    def _new(self, view: View) -> tuple[Sequence[WindowRow], Sequence[RequestRow], list[CaptureStatus], list[Any]]:
        if len(view.rows) < self._windows or len(view.requests) < self._requests or len(view.notes) < self._notes:
            # The journal was restarted.
            self._windows = self._requests = self._notes = self._attempt = 0
            self.ended, self._lines = set(), RecentLines()
        new = view.results.keys() - self.ended
        ended = [capture for capture in reversed(captures_of(view)) if capture.capture_id in new] if new else []
        shown = CauseFound, RemedyChanged, RingGivenUp, JobPaused, JobBroken, DifferencesFound
        notes = [note for note in view.notes[self._notes :] if isinstance(note, shown)]
        found = view.rows[self._windows :], view.requests[self._requests :], ended, notes
        self._windows, self._requests, self._notes = len(view.rows), len(view.requests), len(view.notes)
        self.ended |= new
        return found


def _window_line(row: WindowRow) -> str:
    if row.outcome == "capture":
        return f"{row.sentence} {_capturing(row.requests)}"
    refused = row.outcome == "throttle" or (row.outcome == "ignore" and row.reason != "healthy")
    why = f" {'Throttled' if row.outcome == 'throttle' else 'Nothing was done'}: {row.words}." if refused else ""
    return f"{row.sentence}{why}" + (f" To resolve it: {row.resolves}" if row.resolves else "")


def _note_line(note: Event, view: View) -> str:
    """An event in words; why a job hangs with what to do, and also if it is unknown."""
    behind = view.request_behind(note.capture_id) if isinstance(note, CauseFound) else None
    if isinstance(note, CauseFound) and isinstance(behind, WindowRow) and behind.label == "stalled":
        return f"{caused(note)} {note.next_step}"
    return event_sentence(note)


def _request_line(row: RequestRow) -> str:
    by = f"{row.by} requested a capture" if row.by else "Another capture led to this"
    return f"{by}: {row.why}. {_capturing(row.requests) if row.requests else f'Refused: {row.words}.'}"


def _capturing(requests: Sequence[CaptureRequest]) -> str:
    beside = {"control": " for comparison"}
    named = (
        f"{'every rank' if request.of_whole_job else f'rank {request.rank}'}{beside.get(request.role, '')} "
        f"({request.capture_id})"
        for request in requests
    )
    return f"Capturing {', '.join(named)}."
