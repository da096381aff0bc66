"""Journals, written and read entry by entry."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sftriage.decisions import ENDED, CaptureResult, Decision, ManualRequest, Trigger, Verdict
from sftriage.events import (
    CaptureChanged,
    CostMeasured,
    EvidenceGathered,
    FollowUpDecided,
    ManualRequestDecided,
    PolicyChanged,
    WindowJudged,
    encode,
)
from sftriage.runs.journal import Journal, read_journal


class Recorder(Journal):
    """A journal to which things are added by what they are."""

    def window(self, verdict: Verdict, decision: Decision, triggers: Mapping[str, Trigger] | None = None) -> None:
        self.append(WindowJudged(verdict, decision, triggers or {}))

    def ask(self, ask: ManualRequest, decision: Decision) -> None:
        self.append(ManualRequestDecided(ask, decision))

    def beside(self, capture_id: str, decision: Decision) -> None:
        self.append(FollowUpDecided(capture_id, decision))

    def capture(self, result: CaptureResult, time_s: float = 1.0) -> None:
        self.append(CaptureChanged(time_s, result))

    def policy(self, **change: Any) -> None:
        self.append(msgspec.convert(change, PolicyChanged))

    def cost(self, **cost: Any) -> None:
        self.append(CostMeasured(**cost))

    def evidence(self, **evidence: Any) -> None:
        self.append(EvidenceGathered(**evidence))


def entries(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What a journal holds, as JSON values; of one type alone, where that is named, and of captures only their ends."""
    values = [json.loads(encode(event)) for event in read_journal(path)]
    if kind is not None:
        values = [one for one in values if one["type"] == kind]
    return [one for one in values if kind != "capture" or one["result"]["state"] in ENDED]
