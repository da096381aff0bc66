"""Policies tried on what was recorded: `sftriage policy test`."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from sftriage.controller.controller import shape_of
from sftriage.controller.replay import ReplayedDecision, replay
from sftriage.decisions import Verdict
from sftriage.errors import InputError
from sftriage.events import WindowJudged
from sftriage.policy.policy_set import PolicySet
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import read_journal
from sftriage.runs.recordings import load_recording

_EPOCH_2000 = datetime(2000, 1, 1, tzinfo=timezone.utc)
"""When a recording that does not say began: on a Saturday, at midnight."""


def replay_recording(tried: PolicySet, on: Path, start: datetime | None) -> tuple[str, float, list[ReplayedDecision]]:
    """What policies would have done on a recording: what that is called, when it began, and every window and stall.

    Raises:
        InputError: the recording cannot be read.
    """
    recording = load_recording(on)
    detection = tried.detection
    shape = shape_of(detection)
    name, began, stalls = on.name, _EPOCH_2000, []
    if on.is_dir():
        run = RunDirectory(on)
        info = read_info(run)
        name, began, stalls = info.run_id, _moment(info.created_at, run), _stalls(run)
    start_s = (began if start is None else start.replace(tzinfo=start.tzinfo or timezone.utc)).timestamp()
    return name, start_s, list(replay(recording.windows(shape), tried, start_s, stalls))


def _moment(text: str, run: RunDirectory) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InputError(f"{run.info_file}: created_at: {error}") from None
    return moment.replace(tzinfo=moment.tzinfo or timezone.utc)


def _stalls(run: RunDirectory) -> list[Verdict]:
    judged = [event.verdict for event in read_journal(run.decisions) if isinstance(event, WindowJudged)]
    return [verdict for verdict in judged if verdict.label == "stalled"]
