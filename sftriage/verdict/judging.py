"""Judging window after window: a verdict on each, on the right clock, and the state for the next one.

A window's verdict is a pure function, an early-return ladder (docs/verdicts.md). Every number that decides is in the
verdict, so that it can be explained and replayed. The controller, replays and `sftriage.judge` call `judge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from sftriage.model.captures import Reproduced, Trigger
from sftriage.model.verdicts import UNDECIDED, Label, Lost, Settings, SlowLink, Suspect, Verdict
from sftriage.model.windows import Window
from sftriage.verdict.accounting import (
    Accounting,
    BoolArray,
    FloatArray,
    Timed,
    Walk,
    account,
    complete_steps,
    medians,
    timed,
    walked,
)
from sftriage.verdict.candidates import Candidate
from sftriage.verdict.evidence import Past, WindowEvidence, is_named, resumed, with_next
from sftriage.verdict.links import best_rates, slow_link
from sftriage.verdict.regression import advanced, of_suspect, pauses, with_regression
from sftriage.verdict.units import stage_of, with_limits_of_all, with_system
from sftriage.verdict.whatif import JITTER_RANKS, learned, replay, replayed, roles_of


def roles_differ(window: Window, walks: Sequence[Walk], valid_N: BoolArray, evidence: WindowEvidence) -> bool:
    """Whether ranks are late because they do different work, and no cohorts are declared.

    A straggler is high in some stage and low in none. Ranks with different roles (pipeline stages, a rank that also
    evaluates) are each high in their own work, and low in that of others. Only local stages count in which ranks differ
    by what is worth a capture, and by half. Levels are medians over the steps: neither hiccups nor pulses count. Of
    many ranks, a sample is compared. If healthy steps of the job are known, they have shown that its ranks are alike.
    """
    min_s, sync = evidence.settings.min_gain_fraction * evidence.exposed_s, window.schema.sync
    if window.cohorts is not None or evidence.normal is not None or evidence.excess.late_s < min_s:
        return False
    times_NX: dict[str, FloatArray] = {}
    for walk in walks:
        for column, some_NX in zip(walk.segment.local, walk.some_KNX, strict=True):
            stage = window.schema.stages[column.stage]
            own_NX = some_NX if some_NX.size else column.values_NR
            own_NX = np.asarray(own_NX[:, :: -(-own_NX.shape[1] // JITTER_RANKS)], dtype=np.float64)[valid_N]
            times_NX[stage] = own_NX + times_NX.get(stage, 0.0)
    level_X = {stage: medians(own_NX, axis=0) for stage, own_NX in times_NX.items() if stage not in sync}
    late = evidence.candidates[0].suspect.stage if evidence.candidates else None
    if late is not None and late in level_X:
        # The late rank has the machine to itself while the others wait: its gain in speed in later stages does not
        # count, up to half of its lateness.
        after = list(level_X)[list(level_X).index(late) + 1 :]
        if sum(float(np.ptp(level_X[stage])) for stage in after) <= 0.5 * float(np.ptp(level_X[late])):
            level_X = {stage: some_X for stage, some_X in level_X.items() if stage not in after}
    if not level_X:
        return False
    level_SX = np.array(list(level_X.values()))
    low_S, high_S = level_SX.min(axis=1, initial=np.inf), level_SX.max(axis=1, initial=0.0)
    differs_S = (high_S - low_S >= min_s) & (low_S <= 0.5 * high_S)
    if differs_S.sum() < 2:
        return False
    high_SX = (level_SX > ((low_S + high_S) / 2)[:, None])[differs_S]
    return bool(high_SX.any(axis=0).all() and not high_SX.all(axis=0).any())


MAX_SUSPECTS = 8
"""Maximum candidates that a verdict lists."""


def assess_times(
    window: Window, past: Past, settings: Settings, coverage: float | None = None
) -> tuple[Verdict, WindowEvidence | None]:
    """The verdict on a window's durations, and the evidence for it; None if no evidence was gathered.

    ``coverage`` is the fraction of recorded (step, rank) vectors, if it differs from that of these durations.
    """
    roles = roles_of(window)
    replays = resumed(window, roles, past.replayed)
    walks: Sequence[Walk]
    if replays is None:
        walks, valid_N = walked(window, roles.some_X)
    else:
        walks, valid_N = replays, np.ones(len(window.durations_NRS), dtype=np.bool_)
    accounting = account(walks, valid_N, window)
    if coverage is None:
        coverage = 1.0 if valid_N.all() and valid_N.size else coverage_of(window)
    numbers = {"coverage": coverage, "complete_steps": float(accounting.n_steps)}
    if any(walk.segment.own is not None and walk.segment.own.over_NR is not None for walk in walks):
        numbers["split"] = 1.0  # (the last gradient of each step is known)
    verdict = partial(_verdict, window, accounting, numbers)
    if coverage < settings.min_coverage_fraction or accounting.n_steps == 0:
        numbers["min_coverage"] = settings.min_coverage_fraction
        return verdict("needs_evidence", ("low_coverage",)), None
    # Without any exchange between the ranks, a rank that waits looks as if it worked.
    sync = [window.schema.stages.index(name) for name in window.schema.sync]
    known = past.exchanged or window.durations_NRS.shape[1] < 2 or (window.durations_NRS[:, :, sync] > 0.0).any()
    if accounting.exposed_s > 0.0 and not known:
        return verdict("needs_evidence", ("no_sync",)), None
    replays = replays or [replay(walk, roles) for walk in walks]
    if window.capturing_N is not None and window.capturing_N.any():
        numbers["capturing_steps"] = float(window.capturing_N.sum())
        # Steps without the profiler, and not right after it, are evidence like any others.
        valid_N = valid_N & ~with_next(window.capturing_N)
        there = accounting.exposed_s > 0.0 and valid_N.any()
        evidence = WindowEvidence(window, roles, replays, accounting, valid_N, past, settings) if there else None
        return verdict("needs_evidence", ("self_inflicted",)), evidence
    if accounting.exposed_s == 0.0:
        return verdict("healthy"), None
    evidence = WindowEvidence(window, roles, replays, accounting, valid_N, past, settings)
    first = unambiguous(evidence)
    if first is not None:
        evidence.candidates.sort(key=lambda candidate: candidate is not first)
    numbers |= _numbers(evidence)
    suspects = tuple(candidate.suspect for candidate in evidence.candidates[:MAX_SUSPECTS])
    # (if one of two ranks differs from its own past, that is not its role)
    alone = first is not None and evidence.is_one_of_two(first.suspect)
    if not alone and roles_differ(window, walks, valid_N, evidence):
        return verdict("needs_evidence", ("mixed_roles",), suspects), evidence
    if first is not None:
        numbers |= {"slow_step_s": first.exposed_s, "without_s": first.exposed_s - first.suspect.gain_s}
        return verdict("suspect", (), suspects), evidence
    reasons = _reasons(evidence)
    return verdict("needs_evidence", reasons, suspects) if reasons else verdict("healthy"), evidence


def _verdict(
    window: Window,
    accounting: Accounting,
    numbers: dict[str, float],
    label: Label,
    reasons: tuple[str, ...] = (),
    suspects: tuple[Suspect, ...] = (),
) -> Verdict:
    n_steps, stages = max(1, accounting.n_steps), window.schema.stages
    return Verdict(
        first_step=window.first_step,
        last_step=window.last_step,
        label=label,
        reasons=reasons,
        suspects=suspects,
        exposed_s=accounting.exposed_s / n_steps,
        advances_s={stage: float(s) / n_steps for stage, s in zip(stages, accounting.advances_S, strict=True)},
        leaders=dict(zip(stages, accounting.leaders_S, strict=True)),
        numbers=numbers,
        sync=window.schema.sync,
        attempt=window.attempt,
    )


def coverage_of(window: Window) -> float:
    """Fraction of (step, rank) vectors that are recorded."""
    finite_NR = np.isfinite(window.durations_NRS).all(axis=2)
    return float(finite_NR.mean()) if finite_NR.size else 0.0


def unambiguous(evidence: WindowEvidence) -> Candidate | None:
    """The candidate that qualifies and has no rival; None if there is none. A fault that is over comes last.

    A rival is another named rank or host with a comparable gain: of two equal ones, chance decides which is named
    first, and ranks that take turns each recur.
    """
    qualified = [each for each in evidence.candidates if qualifies(each, evidence)]
    first = min(qualified, key=lambda each: (each.suspect.pattern == "one-off", -each.total_s), default=None)
    if first is None or first.suspect.pattern == "one-off":
        return first
    others = (each for each in evidence.candidates if not set(each.suspect.ranks) & set(first.suspect.ranks))
    rivals = [each for each in others if each.course is not None and each.suspect.pattern != "one-off"]
    second_s = max((each.total_s for each in rivals if each.suspect.is_single), default=0.0)
    if second_s >= evidence.settings.most_fraction * first.total_s:
        return None
    if first.dominant_stage is None:
        return first
    of_unit = (candidate for candidate in qualified if candidate.suspect.ranks == first.suspect.ranks)
    return next((candidate for candidate in of_unit if candidate.suspect.stage == first.dominant_stage), first)


def qualifies(candidate: Candidate, evidence: WindowEvidence) -> bool:
    """Whether a candidate is worth a capture, and explains the excess in the steps that its fault fills."""
    suspect, settings = candidate.suspect, evidence.settings
    keep = evidence.keep_fraction(suspect)
    if candidate.course is None:
        return False
    # (a rank's own note shows which of two does what the other does not)
    if evidence.is_one_of_two(suspect) and suspect.alone is None:
        pair = evidence.pair_history(candidate)
        if pair is None or pair.alone_s < settings.most_fraction * keep * suspect.gain_s:
            return False
    return all(number >= threshold for number, threshold in _requirements(candidate, evidence, keep).values())


def _requirements(
    candidate: Candidate, evidence: WindowEvidence, keep: float
) -> dict[tuple[str, str], tuple[float, float]]:
    """A candidate's requirements: numbers and their thresholds, under the names of both in a verdict.

    ``keep`` lowers the thresholds of a unit that was named before. What all ranks share must be present in most of the
    steps. The more of a unit's lateness contention for CPUs may explain, the more evidence the unit requires, and the
    more often it must be present.
    """
    suspect, settings = candidate.suspect, evidence.settings
    worth = settings.min_gain_fraction if suspect.is_single else settings.min_group_fraction
    wanted_s = settings.most_fraction * keep * _excess_to_explain_s(candidate, evidence)
    requirements = {
        ("first_share", "min_share"): (candidate.lasting_share, worth * keep),
        ("first_explained_s", "wanted_s"): (_explained_s(suspect, evidence), wanted_s),
    }
    whole = any(each.suspect.ranks == suspect.ranks and each.suspect.stage is None for each in evidence.candidates)
    counts, stage = evidence.counts.get(suspect.ranks), stage_of(suspect, evidence.measures.stages)
    fraction = None if counts is None else counts.contended_fraction(evidence.usual_queued_s, stage)
    if suspect.alone is not None:
        whole, fraction = False, None  # its own note explains its lateness
    # For a unit that is stopped, throttled, or slow by itself, the counters rule contention out.
    contended = float(whole) if fraction is None else min(1.0, fraction / settings.most_fraction)
    alike = whole and (counts is None or counts.system is None)
    if not suspect.is_single or ((whole or fraction is not None) and suspect.pattern != "recurring"):
        least = settings.min_persistence_fraction * keep * (contended if suspect.is_single else 1.0)
        requirements["first_persistence", "min_persistence"] = suspect.persistence, least
    if candidate.unit is not None:
        wanted = settings.naming_log_odds * (1.0 + (settings.whole_factor - 1.0) * max(float(alike), contended))
        requirements["first_log_odds", "min_log_odds"] = evidence.log_odds(candidate.unit), wanted * keep
    if is_named(candidate):
        # Its share of its own clear events and the next suspect's.
        own = 1.0 / (1.0 + settings.most_fraction / keep)
        requirements["first_own_fraction", "min_own_fraction"] = evidence.own_fraction(candidate), own
    return requirements


def _excess_to_explain_s(candidate: Candidate, evidence: WindowEvidence) -> float:
    """The excess that a candidate has to explain, in the steps that its fault fills.

    Lateness counts in steps in which the candidate arrived last: if its gain is little of that, another was almost as
    late, and either may be the cause. What all ranks share counts from its threshold on; below it, it is drift.
    """
    late_s, shared_s = evidence.excess.late_s, evidence.shared_s
    if candidate.course is not None and candidate.suspect.is_single:
        lateness_F = candidate.lateness_N[candidate.course.filled_N]
        late_s = max(0.0, float(lateness_F.mean()) - evidence.excess.usual_late_s * float((lateness_F > 0.0).mean()))
    return late_s + (shared_s if shared_s >= evidence.settings.min_group_fraction * evidence.exposed_s else 0.0)


def _explained_s(suspect: Suspect, evidence: WindowEvidence) -> float:
    """A suspect's gain, and the excess of sync work that goes with it.

    A rank that is slow in its local stages is slow in its part of the sync stages too, as a slow GPU is in `backward`,
    by at most the same factor.
    """
    typical, sync_excess_s = evidence.like.typical, evidence.excess.sync_s
    normal_local_s = float(typical.level_CS.sum(axis=1).max()) - evidence.excess.group_s
    normal_sync_s = float(typical.sync_S.sum()) - sync_excess_s
    if normal_local_s <= 0.0 or normal_sync_s <= 0.0:
        return suspect.gain_s
    return suspect.gain_s + min(sync_excess_s, suspect.gain_s / normal_local_s * normal_sync_s)


def _reasons(evidence: WindowEvidence) -> tuple[str, ...]:
    """Why there is excess and no suspect, the largest part first; empty if every part is under its threshold.

    The parts are what one rank or host adds, the lateness of the last rank, and what all ranks share.
    """
    settings, late_s, parts = evidence.settings, evidence.excess.late_s, []
    if evidence.shared_s >= settings.min_group_fraction * evidence.exposed_s:
        parts.append((evidence.shared_s, _shared_reason(evidence)))
        if any(map(is_named, evidence.candidates)):
            return (parts[0][1],)  # the lateness has a named unit, which explains too little of the whole
    alone = evidence.single_s >= settings.min_gain_fraction * evidence.exposed_s
    if alone or late_s >= settings.min_lateness_fraction * evidence.exposed_s:
        parts.append((late_s, _late_reason(evidence)))
    return tuple(dict.fromkeys(reason for _, reason in sorted(parts, reverse=True)))


def _late_reason(evidence: WindowEvidence) -> str:
    """Why lateness has no suspect.

    ``co_critical``: fixing the last rank of each step would save little, as another arrives almost as late.
    ``roaming``: it would save most, but the last rank changes. ``intermittent``: it is mostly one rank, but too rarely
    to rule out chance. If one of two ranks is named: ``mixed_roles`` if the other has less to do in one stage than
    ever; ``co_critical`` if both are slower than they were; ``no_baseline`` if one was slow before, or their past is
    unknown.
    """
    settings = evidence.settings
    if evidence.best_gains_s < settings.most_fraction * evidence.excess.late_s:
        return "co_critical"
    total_s = float(evidence.gain_R.sum())
    if float(evidence.gain_R.max()) < settings.min_persistence_fraction * total_s:
        return "roaming"
    named = next((candidate for candidate in evidence.candidates if candidate.course is not None), None)
    if named is None or not evidence.is_one_of_two(named.suspect) or named.suspect.rank is None:
        return "intermittent"
    pair, explained_s = evidence.pair_history(named), settings.most_fraction * named.suspect.gain_s
    if pair is None:
        return "no_baseline"
    if pair.alone_s >= explained_s:
        return "intermittent"
    if pair.others_least_s >= explained_s and named.suspect.stage is not None:
        return "mixed_roles"
    return "co_critical" if pair.rose_s >= explained_s else "no_baseline"


def _shared_reason(evidence: WindowEvidence) -> str:
    excess, settings = evidence.excess, evidence.settings
    if excess.sync_s >= excess.group_s:
        return "sync_ambiguous"
    if not excess.from_baseline:
        return "no_baseline"
    best = next((candidate.suspect for candidate in evidence.candidates if not candidate.suspect.is_single), None)
    if best is None or best.gain_s < settings.most_fraction * excess.group_s:
        return "co_critical"  # the group is slower, but not all of it in one stage
    return "intermittent" if best.persistence < settings.min_persistence_fraction else "co_critical"


def _numbers(evidence: WindowEvidence) -> dict[str, float]:
    """The numbers that decided, with the first candidate's numbers and thresholds (`_requirements`)."""
    excess, settings, exposed_s = evidence.excess, evidence.settings, evidence.exposed_s
    numbers = {
        "used_steps": float(evidence.used_N.sum()),
        "excess_s": excess.late_s + excess.group_s + excess.sync_s,
        "late_excess_s": excess.late_s,
        "group_excess_s": excess.group_s,
        "sync_excess_s": excess.sync_s,
        "lateness_s": evidence.profile.lateness_s,
        "jitter_s": evidence.profile.jitter_s,
        "best_gains_s": evidence.best_gains_s,
        "single_gain_s": evidence.single_s,
        "has_baseline": float(excess.from_baseline),
        "typical_step_s": exposed_s,
        "min_gain_s": settings.min_gain_fraction * exposed_s,
        "min_lateness_s": settings.min_lateness_fraction * exposed_s,
        "min_group_s": settings.min_group_fraction * exposed_s,
        "shared_excess_s": evidence.shared_s,
        "min_coverage": settings.min_coverage_fraction,
        "min_persistence": settings.min_persistence_fraction,
    }
    work_N = evidence.measures.work_N
    if work_N is not None and (work := float(medians(np.nan_to_num(work_N[evidence.used_N])))) > 0.0:
        numbers["work"] = work
    for first in evidence.candidates[:1]:
        for names, values in _requirements(first, evidence, evidence.keep_fraction(first.suspect)).items():
            numbers |= zip(names, values, strict=True)
    return numbers


def judge(window: Window, past: Past | None, settings: Settings) -> tuple[Verdict, Past]:
    """The verdict on a window, and the state after it. A new attempt of the job starts without state (None).

    Ranks that recorded none of the window are left out while more than half recorded it: the others' lateness against
    each other stays true. But without the missing ranks the rest is never called healthy, only held.
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
    if verdict.label != "suspect" or not verdict.suspects[0].is_single:
        return held, past
    leaders = {stage: None if rank is None else there[rank] for stage, rank in verdict.leaders.items()}
    # (ranks numbered as in the job)
    suspects = tuple(
        replace(each, rank=None if each.rank is None else there[each.rank], ranks=tuple(there[r] for r in each.ranks))
        for each in verdict.suspects
    )
    lost = None if verdict.lost is None else replace(verdict.lost, ranks=n_ranks)
    numbers = {**verdict.numbers, "coverage": held.numbers["coverage"]}
    return replace(verdict, leaders=leaders, suspects=suspects, lost=lost, numbers=numbers, regression=None), past


def _judge(window: Window, past: Past, settings: Settings) -> tuple[Verdict, Past]:
    """Judge a window on the right clock; each clock has a state of its own."""
    timed_window, coverage = timed(window, settings), None
    if timed_window.clock == "device":
        # Coverage is that of the host's times: a step without device times is not missing.
        coverage = coverage_of(window)
        timed_window = timed_window if coverage >= settings.min_coverage_fraction else Timed(window)
    on_device = timed_window.clock == "device"
    before = past.device or Past() if on_device else past
    verdict, evidence = assess_times(timed_window.window, before, settings, coverage)
    verdict = on_its_clock(verdict, timed_window, None if evidence is None else evidence.longer_s, settings)
    if evidence is None:
        known = before.own_best.reported(0, window.last_step + 1)
        return with_regression(verdict, known, {}, window), replace(past, paused=())
    named = verdict.suspects[0] if verdict.label == "suspect" else None
    verdict = replace(verdict, suspects=tuple(_placed(suspect, window.hosts) for suspect in verdict.suspects))
    own_best = advanced(before.own_best, evidence.measures, settings)
    verdict = with_system(verdict, timed_window.window, evidence.counts, evidence.usual_queued_s)
    verdict = with_limits_of_all(verdict, timed_window.window)
    slower = of_suspect(own_best.reported(window.first_step, before.own_best.next_step), verdict, settings)
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
    verdict, link = _with_link(verdict, window, evidence, past)
    verdict = replace(verdict, lost=_lost(verdict, evidence, named, past.counted_step))
    counted_step = past.counted_step if verdict.lost is None else window.last_step
    after = replace(past, device=after) if on_device else after
    rates = best_rates(window.links, past.best_rates) if window.links else past.best_rates
    paused = pauses(evidence.measures, settings, before.own_best.next_step, window.attempt)
    return verdict, replace(after, counted_step=counted_step, paused=paused, best_rates=rates, link=link)


def _with_link(
    verdict: Verdict, window: Window, evidence: WindowEvidence, past: Past
) -> tuple[Verdict, SlowLink | None]:
    """The verdict with a slow link that two windows in a row show, and the one that this window shows.

    It is why the verdict is held, unless a rank or host costs about as much.
    """
    if not window.links or not UNDECIDED.isdisjoint(verdict.reasons):
        return verdict, None
    step_s, exchange_s = evidence.exposed_s, float(evidence.like.typical.sync_S.sum())
    split = bool(verdict.numbers.get("split"))
    link = slow_link(window.links, step_s, exchange_s, past.best_rates, evidence.settings, split=split)
    if link is None or past.link is None or (past.link.host, past.link.peer) != (link.host, link.peer):
        return verdict, link
    verdict = replace(verdict, link=link, numbers={**verdict.numbers, "link_cost_s": link.cost_s})
    first = verdict.suspects[0] if verdict.label == "suspect" else None
    if first is not None and first.is_single and first.gain_s >= evidence.settings.most_fraction * link.cost_s:
        return verdict, link
    # (smaller candidates may wait for the link themselves)
    return replace(verdict, label="needs_evidence", reasons=("slow_link",), suspects=()), link


def _lost(verdict: Verdict, evidence: WindowEvidence, named: Suspect | None, counted_step: int) -> Lost | None:
    """What the named suspect, or the slow link, has cost in each step after ``counted_step``; None if nothing."""
    if verdict.link is not None and "slow_link" in verdict.reasons:
        first = max(verdict.first_step, counted_step + 1)
        step_s = (round(verdict.link.cost_s, 7),) * (verdict.last_step + 1 - first)
        return Lost(first, step_s, len(evidence.roles.role_R)) if step_s else None
    if named is None or (verdict.label != "suspect" and "self_inflicted" not in verdict.reasons):
        return None

    key = named.scope, named.ranks, named.stage
    same = (each for each in evidence.candidates if (each.suspect.scope, each.suspect.ranks, each.suspect.stage) == key)
    candidate = next(same, None)
    if candidate is None or candidate.course is None:
        return None
    # What all ranks share is a level over the window, and not a step's own.
    there_N = candidate.course.filled_N if named.is_single else evidence.used_N
    lost_N = np.where(there_N, candidate.gain_N, 0.0)[max(0, counted_step + 1 - verdict.first_step) :]
    if candidate.course.own_steps is not None and named.rank is not None:
        # All steps that it marked, also before it was named.
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


def _placed(suspect: Suspect, hosts: Sequence[str] | None) -> Suspect:
    """A rank with its host, if the job has several; one that is alone on its host stands for that host.

    A cohort of one rank (a pipeline without replicas) is that rank.
    """
    if suspect.scope == "cohort" and len(suspect.ranks) == 1:
        suspect = replace(suspect, scope="rank", rank=suspect.ranks[0], cohort=None)
    if suspect.rank is None or hosts is None or len(set(hosts)) < 2:
        return suspect
    host = hosts[suspect.rank] or None
    return replace(suspect, on_host=host, host=host if hosts.count(host) == 1 else None)


MAX_EARLIER_STEPS = 4096
"""How many earlier steps that it marked are charged to a rank when its own notes name it."""


def reproduced(window: Window, trigger: Trigger, settings: Settings | None = None) -> Reproduced | None:
    """Whether the captured steps have the fault that triggered the capture.

    A captured step has the fault if the suspect is over its peers by most of the gain that led to the capture: the
    profiler slows a coarse stage by less. A recurring fault is expected as often as whole periods fit into the captured
    steps, at least once, in any of them: its phase may have drifted.

    Returns:
        None if unknown: no step is complete, or all steps in which a recurring fault was due may be missing; the
            suspect has no peers; there was no suspect; or a device's time is unknown.
    """
    settings = settings or Settings()
    # On the clock on which a window of these steps would be judged.
    timed_window = timed(window, settings)
    if timed_window.limited and trigger.stage not in HOST_STAGES:
        return None
    window = timed_window.window
    valid_N = complete_steps(window)
    over_N = _over(window, trigger)
    if over_N is None or trigger.gain_s <= 0.0 or not valid_N.any():
        return None
    there_N = valid_N & (over_N >= settings.most_fraction * trigger.gain_s) & (over_N > 0.0)
    n_steps, n_valid, n_there = len(valid_N), int(valid_N.sum()), int(there_N.sum())
    recurring = trigger.pattern == "recurring" or bool(trigger.period_steps)

    def due(n_steps: int) -> int:
        """The minimum number of captured steps in which the fault is expected."""
        return max(1, n_steps // (trigger.period_steps or n_steps)) if recurring else n_steps

    if not n_there and recurring and n_steps - n_valid >= due(n_steps):
        return None
    n_expected = max(due(n_valid), n_there)
    enough = n_there >= settings.min_persistence_fraction * n_expected
    # The steps with the fault, then the likeliest others.
    furthest_X = np.sort(over_N[valid_N])[-n_expected:]
    return Reproduced(
        answer="no" if not n_there else "yes" if enough else "partly",
        steps=n_expected,
        steps_with=n_there,
        over_s=float(furthest_X.mean()),
        expected_s=trigger.gain_s,
        fault_steps=tuple((window.first_step + np.flatnonzero(there_N)).tolist()),
    )


def _over(window: Window, trigger: Trigger) -> FloatArray | None:
    """By how much the suspect's median rank was over its peers in its stage, by step (N); None without peers."""
    stages, n_ranks = window.schema.stages, window.durations_NRS.shape[1]
    ranks = np.asarray([rank for rank in trigger.ranks if rank < n_ranks], dtype=np.intp)
    if trigger.scope not in ("rank", "host") or not 0 < len(ranks) < n_ranks:
        return None
    if trigger.stage is not None and trigger.stage not in stages:
        return None
    roles = roles_of(window)
    if not set(roles.role_R[ranks]) & set(np.delete(roles.role_R, ranks)):
        return None
    over_NXS = np.sum([segment_replay.over_NXS(ranks, roles) for segment_replay in replayed(window, roles)[0]], axis=0)
    over_NS = medians(over_NXS, axis=1)
    return np.asarray(over_NS.sum(axis=1) if trigger.stage is None else over_NS[:, stages.index(trigger.stage)])


HOST_STAGES = frozenset({"data"})
"""Stages of the host's own work. In all others, the host launches or waits for the device."""


def on_its_clock(verdict: Verdict, timed_window: Timed, longer_s: float | None, settings: Settings) -> Verdict:
    """The verdict with its clock; held if that is the host's, and the host's clock cannot show the fault.

    On the host's clock, ``healthy`` stands, and so does a rank or host that is late in a stage of the host's own work.
    What all ranks share does not: it may be waiting for the devices. Devices that have enough to do can hide the delay
    of one host; then the step is no longer than a healthy one, if one is known (``longer_s``).
    """
    if timed_window.clock == "host" and not timed_window.limited:
        return verdict
    verdict = replace(verdict, clock=timed_window.clock, numbers={**verdict.numbers, **timed_window.numbers})
    if not timed_window.limited or (verdict.reasons and set(verdict.reasons) <= UNDECIDED):
        return verdict
    if timed_window.agree and verdict.label == "healthy":
        return verdict
    first = next(iter(verdict.suspects), None)
    of_the_host = first is not None and first.is_single and first.stage in HOST_STAGES
    if timed_window.agree and verdict.label == "suspect" and first is not None and of_the_host:
        wanted_s = settings.most_fraction * first.gain_s * first.persistence
        if longer_s is None or longer_s >= wanted_s:
            return verdict
        numbers = {**verdict.numbers, "longer_s": longer_s, "min_longer_s": wanted_s}
        verdict = replace(verdict, numbers=numbers)
    return replace(verdict, label="needs_evidence", reasons=("clock_limited",))
