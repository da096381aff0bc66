"""What was decided in a run, as its journal has it: in order, with what became of the captures that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftriage.errors import InputError, UsageError
from sftriage.events import (
    CaptureChanged,
    Decided,
    Event,
    FollowUpDecided,
    ManualRequestDecided,
    WindowJudged,
)
from sftriage.records import ENDED, CaptureResult, Decision, plain
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import read_journal
from sftriage.words import decision_values, reason_sentence


def decided_in(events: Sequence[Event]) -> list[Decided]:
    """The events by which something was decided."""
    return [one for one in events if isinstance(one, WindowJudged | ManualRequestDecided | FollowUpDecided)]


def results_in(events: Sequence[Event]) -> dict[str, CaptureResult]:
    """What became of the captures that have ended, by id."""
    ended = (one.result for one in events if isinstance(one, CaptureChanged) and one.result.state in ENDED)
    return {result.capture_id: result for result in ended}


def decisions_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """A run's decisions as values, in order, each with what became of the captures it asked for (``results``).

    Raises:
        InputError: the journal cannot be read.
    """
    events = list(read_journal(directory.decisions))
    results = results_in(events)
    return [
        {
            **decision_values(one.decision),
            "results": [plain(results[it.capture_id]) for it in one.decision.requests if it.capture_id in results],
        }
        for one in decided_in(events)
    ]


def window_of(directory: RunDirectory, what: str) -> WindowJudged:
    """The last window that holds a step, is ``FIRST-LAST``, or led to a capture.

    Raises:
        UsageError: there is no such window or capture.
        InputError: the journal cannot be read.
    """
    damaged: list[bytes] = []
    decided = decided_in(list(read_journal(directory.decisions, damaged)))
    for event in reversed(decided):
        if isinstance(event, WindowJudged) and _is(event.decision, what):
            return event
    for event in decided:
        if any(one.capture_id == what for one in event.decision.requests):
            raise UsageError(f"{what} was not led to by a window: {reason_sentence(event.decision)}")
    advice = "`sftriage decisions` lists its windows"
    if damaged:
        advice += f" ({'1 line' if len(damaged) == 1 else f'{len(damaged)} lines'} of its journal "
        advice += f"{'is' if len(damaged) == 1 else 'are'} damaged)"
    raise UsageError(f"{directory.path} has no window or capture {what}; {advice}")


def _is(decision: Decision, what: str) -> bool:
    first, last = decision.first_step, decision.last_step
    if what == f"{first}-{last}" or (what.isdecimal() and first <= int(what) <= last):
        return True
    return any(one.capture_id == what for one in decision.requests)


def why_none(directory: RunDirectory, step: int) -> str:
    """Why nothing was decided about a step, in words."""
    decided = decided_in(list(read_journal(directory.decisions)))
    windows = [
        (one.decision.first_step, one.decision.last_step)
        for one in decided
        if isinstance(one, WindowJudged) and one.verdict.label != "stalled"
    ]
    try:
        ended = not Path(read_info(directory).rings).is_dir()
    except InputError:
        ended = True
    return why_undecided(windows, step, ended=ended)


def why_undecided(windows: Sequence[tuple[int, int]], step: int, *, ended: bool) -> str:
    """Why no window holds a step, in words.

    Args:
        windows: first and last step of those that were decided.
        step: the step.
        ended: the job has.
    """
    if not windows:
        return "no window was" + ("; the job has ended" if ended else " yet")
    first, last = min(one for one, _ in windows), max(one for _, one in windows)
    if step < first:
        return f"it is one of the job's first steps, which are warm-up; the first window begins at step {first}"
    if step > last:
        return f"the last window ends at step {last}" + (", and the job has ended" if ended else " so far")
    return "its windows are missing: nobody watched the job then"
