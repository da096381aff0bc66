"""Window after window: a verdict on each, on the clock that can tell, and what it teaches about the job."""

from __future__ import annotations

from dataclasses import replace

from sftriage.frontier.baseline import learned
from sftriage.frontier.clocks import Timed, on_its_clock, timed
from sftriage.frontier.evidence import Past, WindowEvidence
from sftriage.frontier.scheduling import with_scheduling
from sftriage.frontier.settings import Settings
from sftriage.frontier.verdicts import assess_times, coverage_of
from sftriage.records import Verdict, Window


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
    if evidence is None:
        return verdict, past
    verdict = with_scheduling(verdict, window, settings)
    # What was seen on one clock teaches nothing on another.
    on_device = verdict.clock == "device"
    before = past.device or Past() if on_device else past
    named = verdict.suspects[0] if verdict.label == "suspect" else None
    if "self_inflicted" in verdict.reasons:
        named = before.named
    after = replace(
        before,
        baseline=learned(before.baseline, verdict, evidence.regime, evidence.like.typical),
        ranks=evidence.ranks,
        hosts=evidence.hosts,
        onsets=evidence.onsets,
        rhythms=evidence.rhythms,
        named=named,
    )
    return verdict, replace(past, device=after) if on_device else after
