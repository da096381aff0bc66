"""Manual capture requests: `sftriage capture` writes a file to the run directory, and the controller answers it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from sftriage.base.files import write_atomically
from sftriage.errors import CaptureError, UsageError
from sftriage.model.captures import ENDED, ManualRequest
from sftriage.model.events import FollowUpDecided, ManualRequestDecided
from sftriage.model.windows import plain
from sftriage.runs.decisions import decided_in, states_in
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import read_journal
from sftriage.runs.liveness import WatcherLook
from sftriage.words.decisions import decision_values
from sftriage.words.verdicts import place

_MAX_TEXT = 500
_Text = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]

_TEXTS = {"reason": "the reason", "who": "the requester's name"}
_WRONG_TEXT = {
    "string_pattern_mismatch": "has control characters; give one line of text",
    "string_too_long": f"is too long; {_MAX_TEXT} characters at most",
    "string_too_short": "is empty; give one line of text",
    "string_unicode": "is not UTF-8 text",
}


class _RequestText(BaseModel):
    """Limits on fields that commands and objects do not check themselves."""

    who: _Text
    reason: _Text
    max_bytes: Annotated[int, Field(ge=2**20, le=2**36)]


def leave(directory: RunDirectory, request: ManualRequest) -> None:
    """Write a request where the run reads it.

    Raises:
        UsageError: the request is invalid, or the run directory cannot be written.
    """
    from sftriage.policy.schema import Capture  # not above: readers of requests do not need policies

    try:
        _RequestText.model_validate(request, from_attributes=True)
        Capture.model_validate({"profiler": request.profiler, **request.options})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        of = _TEXTS.get(str(first["loc"][0]))
        if of is not None and first["type"] in _WRONG_TEXT:
            raise UsageError(f"{of} {_WRONG_TEXT[first['type']]}") from None
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    try:
        directory.requests.mkdir(mode=0o700, exist_ok=True)
        write_atomically(_path(directory, request), json.dumps(plain(request)))
    except OSError as error:
        raise UsageError(f"{directory.requests} cannot be written: {error.strerror}") from error


def withdraw(directory: RunDirectory, request: ManualRequest) -> None:
    """Withdraw a request, if the run has not read it yet."""
    _path(directory, request).unlink(missing_ok=True)


def _path(directory: RunDirectory, request: ManualRequest) -> Path:
    return directory.requests / f"{request.request_id}.json"


POLL_S = 0.1
ANSWER_S = 15.0
"""The controller looks for requests four times a second; a long turn of its loop takes less than this."""

_T = TypeVar("_T")


def answer(directory: RunDirectory, request: ManualRequest) -> dict[str, Any]:
    """The decision to capture.

    Raises:
        UsageError: no controller is there, or it does not answer; the request is withdrawn.
        CaptureError: the decision is not to capture.
    """
    try:
        decision = _waited(directory, lambda: _decision(directory, request), ANSWER_S)
        if decision is None:
            raise UsageError(f"the controller of {place(directory.path)} did not answer; try again")
    except UsageError:
        withdraw(directory, request)
        raise
    if decision["outcome"] != "capture":
        raise CaptureError(f"not captured: {decision['words']}. {decision['resolves']}".strip())
    return decision


def ended(
    directory: RunDirectory, decision: dict[str, Any], deadline_s: float, doing: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The results of a decision's captures, once all have ended; none if they do not end in time.

    ``doing`` receives the progress of a slow capture; as long as that changes, this keeps waiting.

    Raises:
        UsageError: the controller is gone, so they cannot end.
    """
    ids, progress = [request["capture_id"] for request in decision["requests"]], set[str]()

    def found() -> list[dict[str, Any]] | None:
        states = states_in(read_journal(directory.decisions))
        known = [states[capture_id] for capture_id in ids if capture_id in states]
        for capture in known:
            if capture.state not in ENDED and capture.detail:
                progress.add(capture.detail)
                doing(f"rank {capture.rank}: {capture.detail}")
        ended = [plain(capture) for capture in known if capture.state in ENDED]
        return ended if len(ended) == len(ids) else None

    while True:
        before = len(progress)
        if (results := _waited(directory, found, deadline_s)) is not None or len(progress) == before:
            return results or []


def after_interrupt(directory: RunDirectory, manual: ManualRequest) -> str:
    """The fate of a request whose caller stops waiting for it."""
    decision, run = _decision(directory, manual), f"--run {place(directory.path)}"
    if decision is None or not decision["requests"]:
        return f"withdrawn before an answer; if it was accepted just now, `sftriage decisions {run}` shows it"
    shown = ", ".join(f"`sftriage traces show {request['capture_id']} {run}`" for request in decision["requests"])
    return f"the capture continues, and is stored when it ends: {shown}"


def follow_ups(directory: RunDirectory, ended: list[dict[str, Any]]) -> list[str]:
    """The captures that ended ones have led to: the stacks of a rank that hung."""
    ids = {result["capture_id"] for result in ended}
    decided = decided_in(read_journal(directory.decisions))
    led = (event.decision for event in decided if isinstance(event, FollowUpDecided) and event.capture_id in ids)
    return [request.capture_id for decision in led for request in decision.requests]


def _decision(directory: RunDirectory, request: ManualRequest) -> dict[str, Any] | None:
    for event in decided_in(read_journal(directory.decisions)):
        if isinstance(event, ManualRequestDecided) and event.request.request_id == request.request_id:
            return decision_values(event.decision)
    return None


def _waited(directory: RunDirectory, poll: Callable[[], _T | None], deadline_s: float) -> _T | None:
    """The result of ``poll``, as soon as there is one; None if there is none in time.

    Raises:
        UsageError: the job is not being watched.
    """
    rings, watchers = Path(read_info(directory).rings), WatcherLook(directory)
    end_s = time.monotonic() + deadline_s
    while (found := poll()) is None and (now_s := time.monotonic()) < end_s:
        state = watchers.at(now_s, rings).state
        # (the controller may have answered just before it ended)
        if state in ("unwatched", "left") and (found := poll()) is None:
            run = place(directory.path)
            why = f"as its sftriage ended; take over with `sftriage attach --run {run}`"
            raise UsageError(f"{run} is not being watched, {'and its job has ended' if state == 'left' else why}")
        time.sleep(POLL_S)
    return found
