"""A demo whose job hangs: a policy that calls it stalled soon, and its end once the reason is known."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import get_args

import yaml

from sftriage.model.events import CauseFound, Event, JobObserved, Observation, WindowJudged
from sftriage.model.hangs import HangKind
from sftriage.sinks.stream import Sink

HANG_KINDS = frozenset(get_args(HangKind))
STALLED_AFTER = "5s"
CAUSE_AFTER_S, STALL_AFTER_S = 20.0, 90.0
"""How long after the stall its cause may be found, and how long after the first step there may be no stall."""


def write_policy(policy: Path, folder: Path) -> Path:
    """A policy as it is, but for a stall that is reported soon; in a folder, under its own name."""
    document = yaml.safe_load(policy.read_text(encoding="utf-8"))
    if isinstance(document, dict) and isinstance(spec := document.get("spec"), dict):
        spec["detection"] = {**(spec.get("detection") or {}), "stalled_after": STALLED_AFTER}
    path = folder / policy.name
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")
    return path


class HangEnd(Sink):
    """Ends the job once the reason for its hang is known, or if there is none in time.

    Attributes:
        done: whether it has ended the job.
    """

    name = "demo"

    def __init__(self) -> None:
        self.done = False
        self._deadline_s = 0.0
        self._stalled = False

    def take(self, event: Event | Observation) -> None:
        match event:
            case CauseFound() if event.code in HANG_KINDS:
                self._end()
            case WindowJudged() if event.verdict.label == "stalled" and not self._stalled:
                self._stalled, self._deadline_s = True, event.decision.time_s + CAUSE_AFTER_S
            case JobObserved() if event.job is not None:
                self._deadline_s = self._deadline_s or event.time_s + STALL_AFTER_S
                if event.time_s > self._deadline_s:
                    self._end()

    def _end(self) -> None:
        if not self.done:
            self.done = True
            # (the launcher passes it on to the job)
            os.kill(os.getpid(), signal.SIGTERM)
