"""Window after window: a verdict on each, on the clock that can tell, and what it teaches about the job."""

from __future__ import annotations

from dataclasses import replace

from sftriage.frontier.baseline import learned
from sftriage.frontier.clocks import Timed, on_its_clock, timed
from sftriage.frontier.evidence import Past, WindowEvidence
from sftriage.frontier.settings import Settings
from sftriage.frontier.verdicts import assess_times, coverage_of
from sftriage.records import Verdict, Window


def classify(window: Window, past: Past | None = None, settings: Settings | None = None) -> Verdict:
    """The verdict on one window."""
    return assess(window, past or Past(), settings or Settings())[0]


def assess(window: Window, past: Past, settings: Settings) -> tuple[Verdict, WindowEvidence | None]:
    """The verdict on one window, and what it was taken from; None where the window was not looked into.

    It is taken on one clock, and from what the windows before have taught on that one.
    """
    seen = timed(window, settings)
    if seen.clock == "device":
        # Where ranks are missing, the host's times tell; a step without device times is no missing step.
        coverage = coverage_of(window)
        if coverage < settings.min_coverage_fraction:
            seen = Timed(window)
        else:
            verdict, evidence = assess_times(seen.window, past.device or Past(), settings, coverage)
            return on_its_clock(verdict, seen, None, settings), evidence
    verdict, evidence = assess_times(window, past, settings)
    longer_s = evidence.longer_s if seen.limited and evidence is not None else None
    return on_its_clock(verdict, seen, longer_s, settings), evidence


def judge(window: Window, past: Past | None, settings: Settings) -> tuple[Verdict, Past]:
    """The verdict on a window and the past after it. A new attempt of the job starts from no past (None)."""
    past = past or Past()
    verdict, evidence = assess(window, past, settings)
    return verdict, past if evidence is None else after(past, verdict, evidence)


def after(past: Past, verdict: Verdict, evidence: WindowEvidence) -> Past:
    """The past after one more window: its steps are looked at once, however the windows overlap.

    What was seen on one clock teaches nothing on another.
    """
    if verdict.clock == "device":
        return replace(past, device=_after(past.device or Past(), verdict, evidence))
    return _after(past, verdict, evidence)


def _after(past: Past, verdict: Verdict, evidence: WindowEvidence) -> Past:
    return replace(
        past,
        baseline=learned(past.baseline, verdict, evidence.regime, evidence.like.typical),
        history=evidence.history,
        named=verdict.suspects[0] if verdict.label == "suspect" else None,
    )
