"""Judging window after window: a verdict on each, on the right clock, and the state that is carried to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sftriage.model.verdicts import Lost, Regression, Suspect, Verdict
from sftriage.model.windows import Window
from sftriage.verdicts.baseline import learned
from sftriage.verdicts.clocks import Timed, on_its_clock, timed
from sftriage.verdicts.evidence import Past, WindowEvidence, is_single
from sftriage.verdicts.labels import assess_times, coverage_of
from sftriage.verdicts.pauses import pauses
from sftriage.verdicts.regression import advanced
from sftriage.verdicts.settings import Settings
from sftriage.verdicts.system import with_system


def judge(window: Window, past: Past | None, settings: Settings) -> tuple[Verdict, Past]:
    """The verdict on a window, and the state after it. A new attempt of the job starts without state (None).

    Ranks that recorded none of the window are left out while more than half recorded it: how late the others are
    compared with each other stays true. But the rest cannot be called healthy without them, only held.
    """
    past = past or Past()
    n_ranks = window.durations_NRS.shape[1]
    there = tuple(np.flatnonzero(np.isfinite(window.durations_NRS).all(axis=2).any(axis=0)).tolist())
    if not 2 <= len(there) < n_ranks < 2 * len(there):
        return _judge(window, past, settings)
    held, past = _judge(window, past, settings)
    before = past.rest if past.rest is not None and past.rest_ranks == there else Past(counted_step=past.counted_step)
    verdict, rest = _judge(window.of_ranks(there), before, settings)
    past = replace(past, rest=rest, rest_ranks=there, counted_step=rest.counted_step, paused=rest.paused)
    if verdict.label != "suspect" or not is_single(verdict.suspects[0]):
        return held, past
    leaders = {stage: None if rank is None else there[rank] for stage, rank in verdict.leaders.items()}
    suspects = tuple(_renumbered(one, there) for one in verdict.suspects)
    lost = None if verdict.lost is None else replace(verdict.lost, ranks=n_ranks)
    numbers = {**verdict.numbers, "coverage": held.numbers["coverage"]}
    return replace(verdict, leaders=leaders, suspects=suspects, lost=lost, numbers=numbers, regression=None), past


def _renumbered(suspect: Suspect, ranks: Sequence[int]) -> Suspect:
    """A suspect among some ranks of the job, with the job's numbers."""
    rank = None if suspect.rank is None else ranks[suspect.rank]
    return replace(suspect, rank=rank, ranks=tuple(ranks[one] for one in suspect.ranks))


def _judge(window: Window, past: Past, settings: Settings) -> tuple[Verdict, Past]:
    """Judge a window on the right clock; each clock has a state of its own."""
    seen, coverage = timed(window, settings), None
    if seen.clock == "device":
        # Coverage is that of the host's times: a step without device times is not missing.
        coverage = coverage_of(window)
        seen = seen if coverage >= settings.min_coverage_fraction else Timed(window)
    on_device = seen.clock == "device"
    before = past.device or Past() if on_device else past
    verdict, evidence = assess_times(seen.window, before, settings, coverage)
    verdict = on_its_clock(verdict, seen, None if evidence is None else evidence.longer_s, settings)
    if evidence is None:
        known = before.own_best.reported(0, window.last_step + 1)
        return with_regression(verdict, known, {}, window), replace(past, paused=())
    named = verdict.suspects[0] if verdict.label == "suspect" else None
    verdict = replace(verdict, suspects=tuple(_placed(_by_rank(one), window.hosts) for one in verdict.suspects))
    own_best = advanced(before.own_best, evidence.measures, settings)
    verdict = with_system(verdict, seen.window, evidence.counts, evidence.usual_queued_s)
    slower = _of_suspect(own_best.reported(window.first_step, before.own_best.next_step), verdict, settings)
    baseline = before.baseline
    # The baseline is not learned from a job that is slower on all ranks. Late ranks do not change the common level.
    if slower is None or slower.scope == "some" or slower.until_step is not None:
        baseline = learned(baseline, verdict, evidence.regime, evidence.like.typical)
    if "self_inflicted" in verdict.reasons:
        named = before.named
    own = evidence.after.own
    if not len(own.known(evidence.regime, len(evidence.roles.role_R))):
        # Of two ranks that have differed from the first step on, a change is measured against these steps.
        own = own.after(evidence.regime, evidence.like, window.last_step)
    after = replace(evidence.after, own_best=own_best, baseline=baseline, own=own, named=named)
    verdict = with_regression(verdict, slower, own_best.numbers(window.first_step, settings), window)
    verdict = replace(verdict, lost=_lost(verdict, evidence, named, past.counted_step))
    counted_step = past.counted_step if verdict.lost is None else window.last_step
    after = replace(past, device=after) if on_device else after
    paused = pauses(evidence.measures, settings, before.own_best.next_step)
    return verdict, replace(after, counted_step=counted_step, paused=paused)


def _lost(verdict: Verdict, evidence: WindowEvidence, named: Suspect | None, counted_step: int) -> Lost | None:
    """What the named suspect has cost in each step after ``counted_step``; None if there is none, or no cost.

    A suspect that has just been named is charged with the steps since its onset.
    """
    if named is None or (verdict.label != "suspect" and "self_inflicted" not in verdict.reasons):
        return None

    def who(suspect: Suspect) -> tuple[object, ...]:
        return suspect.scope, suspect.ranks, suspect.stage

    one = next((one for one in evidence.candidates if who(one.suspect) == who(named)), None)
    if one is None or one.course is None:
        return None
    # What all ranks share is a level over the window, and not a step's own.
    there_N = one.course.filled_N if is_single(named) else evidence.used_N
    lost_N = np.where(there_N, one.gain_N, 0.0)[max(0, counted_step + 1 - verdict.first_step) :]
    if one.course.own_steps is not None and named.rank is not None:
        # All that it marked, also before it was named.
        first = max(counted_step + 1, verdict.first_step - MAX_EARLIER_STEPS)
        lost_N = np.zeros(verdict.last_step + 1 - min(first, verdict.last_step))
        for step, lost_s in evidence.alone[named.rank][1].recent:
            if step >= first:
                lost_N[step - verdict.last_step - 1] = lost_s
    if not len(costly := np.flatnonzero(lost_N)):
        return None
    first = verdict.last_step + 1 - len(lost_N) + int(costly[0])
    step_s = tuple(round(float(lost_s), 7) for lost_s in lost_N[costly[0] :])
    return Lost(first, step_s, len(evidence.roles.role_R), None if verdict.label == "suspect" else named)


def _by_rank(suspect: Suspect) -> Suspect:
    """A suspect of a cohort of one rank (a pipeline without replicas) as that rank."""
    if suspect.scope != "cohort" or len(suspect.ranks) > 1:
        return suspect
    return replace(suspect, scope="rank", rank=suspect.ranks[0], cohort=None)


def _placed(suspect: Suspect, hosts: Sequence[str] | None) -> Suspect:
    """A rank with the host it is on, where the job has several; one that is alone there stands for that host."""
    if suspect.rank is None or hosts is None or len(set(hosts)) < 2:
        return suspect
    host = hosts[suspect.rank] or None
    return replace(suspect, on_host=host, host=host if hosts.count(host) == 1 else None)


def _of_suspect(slower: Regression | None, verdict: Verdict, settings: Settings) -> Regression | None:
    """The regression, on some ranks where a rank or a host that the system holds back costs most of it.

    Inside the sync stages all ranks wait for it alike.
    """
    first = verdict.suspects[0] if verdict.suspects else None
    if slower is None or first is None or not is_single(first) or first.by_system is None:
        return slower
    most_s = settings.most_fraction * slower.fraction * slower.best_step_s
    return replace(slower, scope="some", stages=()) if first.gain_s >= most_s else slower


MAX_EARLIER_STEPS = 4096
"""How far back a rank that is named by its own notes is charged with what it marked."""


UNDECIDED = frozenset({"low_coverage", "self_inflicted", "mixed_roles", "no_sync"})
"""Reasons for which a window tells nothing, not even of the job's own speed."""


def with_regression(
    verdict: Verdict, slower: Regression | None, numbers: Mapping[str, float], window: Window
) -> Verdict:
    """The verdict with the regression of the job against its own best: while that lasts, the job is not healthy.

    A suspect stays the suspect, with the regression beside it. Where the host's clock stands in for a device's, the
    length of a step is right, but not its stages, which are left out.
    """
    verdict = replace(verdict, numbers={**verdict.numbers, **numbers})
    if slower is None:
        return verdict
    stages = () if window.on_device and verdict.clock == "host" else slower.stages
    verdict = replace(verdict, regression=replace(slower, stages=stages))
    if slower.until_step is not None or verdict.label == "suspect" or UNDECIDED & set(verdict.reasons):
        return verdict
    return replace(verdict, label="needs_evidence", reasons=(*verdict.reasons, "regressed"))
