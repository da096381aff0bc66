"""What becomes of a capture that somebody has asked for, as the journal tells it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sftriage.decisions import ENDED, ManualRequest
from sftriage.errors import CaptureError, UsageError
from sftriage.events import FollowUpDecided, ManualRequestDecided
from sftriage.records import plain
from sftriage.runs.asks import withdraw
from sftriage.runs.decisions import decided_in, states_in
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import read_journal
from sftriage.runs.liveness import WatcherLook
from sftriage.words.amounts import place
from sftriage.words.decisions import decision_values

POLL_S = 0.1
ANSWER_S = 15.0
"""Who runs the job looks for asks four times a second; a long turn of its loop is over by then."""

_T = TypeVar("_T")


def answer(directory: RunDirectory, ask: ManualRequest) -> dict[str, Any]:
    """The decision to capture.

    Raises:
        UsageError: nobody is there to answer, or nobody does; the ask is withdrawn.
        CaptureError: it is another decision.
    """
    try:
        decision = _waited(directory, lambda: _decision(directory, ask), ANSWER_S)
        if decision is None:
            raise UsageError(f"nobody answers in {place(directory.path)}, though its job is being watched: try again")
    except UsageError:
        withdraw(directory, ask)
        raise
    if decision["outcome"] != "capture":
        raise CaptureError(f"not captured: {decision['words']}. {decision['resolves']}".strip())
    return decision


def ended(
    directory: RunDirectory, decision: dict[str, Any], deadline_s: float, doing: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """What became of the captures of a decision, once all of them have ended; nothing where they do not in time.

    ``doing`` is told what is done with one that takes its time; as long as that changes, it is waited on.

    Raises:
        UsageError: nobody is there any more who could bring them to their end.
    """
    ids, told = _capture_ids(decision), set[str]()

    def found() -> list[dict[str, Any]] | None:
        states = states_in(read_journal(directory.decisions))
        results = {capture_id: one for capture_id, one in states.items() if one.state in ENDED}
        for one in (states[capture_id] for capture_id in ids if capture_id in states.keys() - results.keys()):
            if one.detail:
                told.add(one.detail)
                doing(f"rank {one.rank}: {one.detail}")
        return [plain(results[capture_id]) for capture_id in ids] if results.keys() >= set(ids) else None

    while True:
        before = len(told)
        if (results := _waited(directory, found, deadline_s)) is not None or len(told) == before:
            return results or []


def left_alone(directory: RunDirectory, ask: ManualRequest) -> str:
    """What becomes of a capture that is waited for no longer."""
    decision, where = _decision(directory, ask), f"--run {place(directory.path)}"
    ids = [] if decision is None else _capture_ids(decision)
    if not ids:
        return f"withdrawn before it was answered; `sftriage decisions {where}` shows it if it was taken up just now"
    shown = ", ".join(f"`sftriage traces show {capture_id} {where}`" for capture_id in ids)
    return f"the capture goes on by itself, and is stored once it has ended: {shown}"


def follow_ups(directory: RunDirectory, ended: list[dict[str, Any]]) -> list[str]:
    """The captures that these have led to: the stacks of a rank that hung."""
    ids = {result["capture_id"] for result in ended}
    decided = decided_in(read_journal(directory.decisions))
    led = (one.decision for one in decided if isinstance(one, FollowUpDecided) and one.capture_id in ids)
    return [request.capture_id for decision in led for request in decision.requests]


def _capture_ids(decision: dict[str, Any]) -> list[str]:
    return [request["capture_id"] for request in decision["requests"]]


def _decision(directory: RunDirectory, ask: ManualRequest) -> dict[str, Any] | None:
    for one in decided_in(read_journal(directory.decisions)):
        if isinstance(one, ManualRequestDecided) and one.request.request_id == ask.request_id:
            return decision_values(one.decision)
    return None


def _waited(directory: RunDirectory, look: Callable[[], _T | None], deadline_s: float) -> _T | None:
    """What ``look`` finds, as soon as it finds something; None if it does not.

    Raises:
        UsageError: nobody watches the job, so that nothing is to be found.
    """
    rings, watchers = Path(read_info(directory).rings), WatcherLook(directory)
    end_s = time.monotonic() + deadline_s
    while (found := look()) is None and (now_s := time.monotonic()) < end_s:
        state = watchers.at(now_s, rings).state
        # (who has gone may have said it with their last word)
        if state in ("unwatched", "left") and (found := look()) is None:
            where = place(directory.path)
            if state == "left":
                raise UsageError(f"nobody watches {where}, and its job has ended")
            raise UsageError(
                f"nobody watches {where} since its sftriage ended: `sftriage attach --run {where}` takes over"
            )
        time.sleep(POLL_S)
    return found
