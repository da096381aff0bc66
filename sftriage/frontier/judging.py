"""Window after window: a verdict on each, on the clock that can tell, and what it teaches about the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sftriage.frontier.baseline import learned
from sftriage.frontier.clocks import Timed, on_its_clock, timed
from sftriage.frontier.evidence import Past, WindowEvidence, single
from sftriage.frontier.regression import advanced
from sftriage.frontier.settings import Settings
from sftriage.frontier.system import with_system
from sftriage.frontier.verdicts import assess_times, coverage_of
from sftriage.records import Lost, Regression, Suspect, Verdict, Window


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
    # What was seen on one clock teaches nothing on another.
    on_device = verdict.clock == "device"
    before = past.device or Past() if on_device else past
    if evidence is None:
        known = before.own_best.told(0, window.last_step + 1)
        return against_itself(verdict, known, {}, window), past
    named = verdict.suspects[0] if verdict.label == "suspect" else None
    verdict = with_system(replace(verdict, suspects=tuple(map(_by_rank, verdict.suspects))), window, settings)
    own_best = advanced(before.own_best, evidence.measures, settings)
    slower = own_best.told(window.first_step, before.own_best.next_step)
    baseline = before.baseline
    # Ranks that are late leave the level as it is; one that all have become slower by is no healthy one.
    if slower is None or slower.scope == "some" or slower.until_step is not None:
        baseline = learned(baseline, verdict, evidence.regime, evidence.like.typical)
    if "self_inflicted" in verdict.reasons:
        named = before.named
    own = evidence.after.own
    if not len(own.known(evidence.regime, len(evidence.roles.role_R))):
        # Where two ranks have differed from the first step on, this is what a change is held against.
        own = own.after(evidence.regime, evidence.like)
    after = replace(evidence.after, own_best=own_best, baseline=baseline, own=own, named=named)
    verdict = against_itself(verdict, slower, own_best.numbers(window.first_step, settings), window)
    verdict = replace(verdict, lost=_lost(verdict, evidence, named, past.counted_step))
    counted_step = past.counted_step if verdict.lost is None else window.last_step
    after = replace(past, device=after) if on_device else after
    return verdict, replace(after, counted_step=counted_step)


def _lost(verdict: Verdict, evidence: WindowEvidence, named: Suspect | None, counted_step: int) -> Lost | None:
    """What who is named has cost in the steps after one, step by step; None where nobody is, or it cost nothing.

    Who has just been named has cost the steps before that too, since its fault began.
    """
    if named is None or (verdict.label != "suspect" and "self_inflicted" not in verdict.reasons):
        return None

    def who(suspect: Suspect) -> tuple[object, ...]:
        return suspect.scope, suspect.ranks, suspect.stage

    one = next((one for one in evidence.candidates if who(one.suspect) == who(named)), None)
    if one is None or one.course is None:
        return None
    # What all share is a level, and no step's own.
    there_N = one.course.filled_N if single(named) else evidence.used_N
    lost_N = np.where(there_N, one.gain_N, 0.0)[max(0, counted_step + 1 - verdict.first_step) :]
    if not len(costly := np.flatnonzero(lost_N)):
        return None
    first = verdict.last_step + 1 - len(lost_N) + int(costly[0])
    step_s = tuple(round(float(lost_s), 7) for lost_s in lost_N[costly[0] :])
    return Lost(first, step_s, len(evidence.roles.role_R), None if verdict.label == "suspect" else named)


def _by_rank(suspect: Suspect) -> Suspect:
    """A cohort of one rank (a pipeline without replicas) is that rank, which only its own past is a measure of."""
    if suspect.scope != "cohort" or len(suspect.ranks) > 1:
        return suspect
    return replace(suspect, scope="rank", rank=suspect.ranks[0], cohort=None)


UNDECIDED = frozenset({"low_coverage", "self_inflicted", "mixed_roles"})
"""Reasons why a window says nothing, of the job's own speed neither."""


def against_itself(
    verdict: Verdict, slower: Regression | None, numbers: Mapping[str, float], window: Window
) -> Verdict:
    """The verdict with what is told of the job against its own best: not healthy while it is slower than that.

    Who is suspected stays so; a regression beside a suspect is told with it. Where the host's clock stands in for a
    device's, a step's length is true, and its stages are not.
    """
    verdict = replace(verdict, numbers={**verdict.numbers, **numbers})
    if slower is None:
        return verdict
    stages = () if window.on_device and verdict.clock == "host" else slower.stages
    verdict = replace(verdict, regression=replace(slower, stages=stages))
    if slower.until_step is not None or verdict.label == "suspect" or UNDECIDED & set(verdict.reasons):
        return verdict
    return replace(verdict, label="needs_evidence", reasons=(*verdict.reasons, "regressed"))
