"""Window after window: a verdict on each, and what it teaches about the job."""

from __future__ import annotations

from sftriage.frontier.baseline import learned
from sftriage.frontier.evidence import Evidence, Past
from sftriage.frontier.settings import Settings
from sftriage.frontier.verdicts import assess
from sftriage.records import Verdict, Window

MAX_EVENTS = 4096
"""Late arrivals that are remembered, the newest of them: enough for what comes back every thousand steps."""


def judge(window: Window, past: Past | None, settings: Settings) -> tuple[Verdict, Past]:
    """The verdict on a window and the past after it. A new attempt of the job starts from no past (None)."""
    past = past or Past()
    verdict, evidence = assess(window, past, settings)
    return verdict, past if evidence is None else after(past, verdict, evidence)


def after(past: Past, verdict: Verdict, evidence: Evidence) -> Past:
    """The past after one more window: its steps are looked at once, however the windows overlap."""
    new = tuple(event for event in evidence.events if event[0] > past.last_step)
    return Past(
        baseline=learned(past.baseline, verdict, evidence.regime, evidence.like.typical),
        events=(*past.events, *new)[-MAX_EVENTS:],
        named=verdict.suspects[0] if verdict.label == "suspect" else None,
        last_step=max(past.last_step, verdict.last_step),
    )
