"""Window after window: a verdict on each, and what it teaches about the job."""

from __future__ import annotations

from sftriage.frontier.baseline import learned
from sftriage.frontier.evidence import Evidence, Past
from sftriage.frontier.settings import Settings
from sftriage.frontier.verdicts import assess
from sftriage.records import Verdict, Window


def judge(window: Window, past: Past | None, settings: Settings) -> tuple[Verdict, Past]:
    """The verdict on a window and the past after it. A new attempt of the job starts from no past (None)."""
    past = past or Past()
    verdict, evidence = assess(window, past, settings)
    return verdict, past if evidence is None else after(past, verdict, evidence)


def after(past: Past, verdict: Verdict, evidence: Evidence) -> Past:
    """The past after one more window: its steps are looked at once, however the windows overlap."""
    return Past(
        baseline=learned(past.baseline, verdict, evidence.regime, evidence.like.typical),
        history=evidence.history,
        named=verdict.suspects[0] if verdict.label == "suspect" else None,
    )
