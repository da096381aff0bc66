"""Judging window after window: a verdict on each, on the right clock, and the state that is carried to the next.

One window's verdict is a pure function, an early-return ladder (docs/verdicts.md). Every number that decides is put
into the verdict, so that it can be explained and replayed.

The host runs ahead of its device: it sees launches, and waits for the device in whatever stage it next has to. Stage
boundaries in the device's own stream do not have this problem. The device reaches one when it has finished what was
launched before, and not before the host has launched it. So a late host shows there too, in its own stage, as far as
the device had to wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from sftriage.model.captures import Reproduced, Trigger
from sftriage.model.verdicts import UNDECIDED, Clock, Label, Lost, Regression, Settings, Suspect, Verdict
from sftriage.model.windows import Window
from sftriage.verdict.accounting import (
    Accounting,
    BoolArray,
    FloatArray,
    Walk,
    account,
    complete_steps,
    medians,
    walked,
)
from sftriage.verdict.candidates import Candidate
from sftriage.verdict.evidence import Past, WindowEvidence, is_named, is_single, resumed, undisturbed_steps
from sftriage.verdict.regression import advanced, pauses
from sftriage.verdict.units import stage_of, with_system
from sftriage.verdict.whatif import JITTER_RANKS, learned, replay, roles_of


def roles_differ(window: Window, walks: Sequence[Walk], valid_N: BoolArray, evidence: WindowEvidence) -> bool:
    """Whether ranks are late because they do different work, and no cohorts are declared.

    A straggler is high in some stage and low in none, and its peers are neither. Ranks with different roles (pipeline
    stages, a rank that also evaluates) are each high in their own work, and low in that of others. Only local stages
    count in which ranks differ by what is worth a capture, and by half. Levels are medians over the steps, so that
    neither hiccups nor pulses count, which may lie in any stage. Of many ranks some are compared.

    Not if the job's healthy steps are known, for those have shown that its ranks are alike.
    """
    min_s, sync = evidence.settings.min_gain_fraction * evidence.exposed_s, window.schema.sync
    if window.cohorts is not None or evidence.normal is not None or evidence.excess.late_s < min_s:
        return False
    times_NX: dict[str, FloatArray] = {}
    for one in walks:
        for column, some_NX in zip(one.segment.local, one.some_KNX, strict=True):
            stage = window.schema.stages[column.stage]
            own_NX = some_NX if some_NX.size else column.values_NR
            own_NX = np.asarray(own_NX[:, :: -(-own_NX.shape[1] // JITTER_RANKS)], dtype=np.float64)[valid_N]
            times_NX[stage] = own_NX + times_NX.get(stage, 0.0)
    level_X = {stage: medians(own_NX, axis=0) for stage, own_NX in times_NX.items() if stage not in sync}
    late = evidence.candidates[0].suspect.stage if evidence.candidates else None
    if late is not None and late in level_X:
        # The rank that is late there has the machine to itself while the others wait: that it is faster after it does
        # not count, up to half of what it is late.
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
"""Candidates a verdict lists at most."""


def assess_times(
    window: Window, past: Past, settings: Settings, coverage: float | None = None
) -> tuple[Verdict, WindowEvidence | None]:
    """The verdict on a window's durations, and the evidence for it; None if no evidence was gathered.

    ``coverage`` is the fraction of (step, rank) vectors that are there, if it is not that of these durations.
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
    if any(one.segment.own is not None and one.segment.own.over_NR is not None for one in walks):
        numbers["split"] = 1.0  # (the last gradient of each step is known)
    verdict = partial(_verdict, window, accounting, numbers)
    if coverage < settings.min_coverage_fraction or accounting.n_steps == 0:
        numbers["min_coverage"] = settings.min_coverage_fraction
        return verdict("needs_evidence", ("low_coverage",)), None
    # Without any exchange between the ranks, one that waits looks as if it worked.
    sync = [window.schema.stages.index(name) for name in window.schema.sync]
    known = past.exchanged or window.durations_NRS.shape[1] < 2 or (window.durations_NRS[:, :, sync] > 0.0).any()
    if accounting.exposed_s > 0.0 and not known:
        return verdict("needs_evidence", ("no_sync",)), None
    replays = replays or replay(walks, roles, len(window.schema.stages))
    if window.capturing_N is not None and window.capturing_N.any():
        numbers["capturing_steps"] = float(window.capturing_N.sum())
        # The steps without it are evidence as any others.
        valid_N = undisturbed_steps(window, valid_N)
        there = accounting.exposed_s > 0.0 and valid_N.any()
        evidence = WindowEvidence(window, roles, replays, accounting, valid_N, past, settings) if there else None
        return verdict("needs_evidence", ("self_inflicted",)), evidence
    if accounting.exposed_s == 0.0:
        return verdict("healthy"), None
    evidence = WindowEvidence(window, roles, replays, accounting, valid_N, past, settings)
    first = unambiguous(evidence)
    if first is not None:
        evidence.candidates.sort(key=lambda one: one is not first)
    numbers |= _numbers(evidence)
    suspects = tuple(candidate.suspect for candidate in evidence.candidates[:MAX_SUSPECTS])
    # (that of two ranks one differs from its own past is not their roles)
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
    """Fraction of (step, rank) vectors that are there."""
    finite_NR = np.isfinite(window.durations_NRS).all(axis=2)
    return float(finite_NR.mean()) if finite_NR.size else 0.0


def unambiguous(evidence: WindowEvidence) -> Candidate | None:
    """The candidate that qualifies and has no rival; None if there is none. A fault that is over comes last.

    A rival is another rank or host that is named too, with a comparable gain: of two equal ones either may have been
    named first, and ranks that take turns are each recurring.
    """
    found = [one for one in evidence.candidates if qualifies(one, evidence)]
    first = min(found, key=lambda one: (one.suspect.pattern == "one-off", -one.total_s), default=None)
    if first is None or first.suspect.pattern == "one-off":
        return first
    rivals = (one for one in evidence.candidates if not set(one.suspect.ranks) & set(first.suspect.ranks))
    again = [one for one in rivals if one.course is not None and one.suspect.pattern != "one-off"]
    second_s = max((one.total_s for one in again if is_single(one.suspect)), default=0.0)
    if second_s >= evidence.settings.most_fraction * first.total_s:
        return None
    if first.dominant_stage is None:
        return first
    mine = (one for one in found if one.suspect.ranks == first.suspect.ranks)
    return next((one for one in mine if one.suspect.stage == first.dominant_stage), first)


def qualifies(candidate: Candidate, evidence: WindowEvidence) -> bool:
    """Whether a candidate is worth a capture, and explains the excess of the steps that it fills."""
    suspect, settings = candidate.suspect, evidence.settings
    keep = evidence.keep_fraction(suspect)
    if candidate.course is None:
        return False
    # (which of two does what the other does not, it said itself)
    if evidence.is_one_of_two(suspect) and suspect.alone is None:
        pair = evidence.pair_history(candidate)
        if pair is None or pair.alone_s < settings.most_fraction * keep * suspect.gain_s:
            return False
    return all(number >= threshold for number, threshold in _requirements(candidate, evidence, keep).values())


def _requirements(
    candidate: Candidate, evidence: WindowEvidence, keep: float
) -> dict[tuple[str, str], tuple[float, float]]:
    """What a candidate has to reach: numbers and their thresholds, under the names that both have in a verdict.

    ``keep`` lowers the thresholds of who was named before. What all ranks share must be present in most of the steps.
    The more of its lateness contention for CPUs may explain, as any unit's does for a second or two on a busy host, the
    more evidence it takes, and the more often the unit must be present.
    """
    suspect, settings = candidate.suspect, evidence.settings
    worth = settings.min_gain_fraction if is_single(suspect) else settings.min_group_fraction
    wanted_s = settings.most_fraction * keep * _excess_to_explain_s(candidate, evidence)
    asked = {
        ("first_share", "min_share"): (candidate.lasting_share, worth * keep),
        ("first_explained_s", "wanted_s"): (_explained_s(suspect, evidence), wanted_s),
    }
    whole = any(one.suspect.ranks == suspect.ranks and one.suspect.stage is None for one in evidence.candidates)
    counts, stage = evidence.counts.get(suspect.ranks), stage_of(suspect, evidence.measures.stages)
    fraction = None if counts is None else counts.contended_fraction(evidence.usual_queued_s, stage)
    if suspect.alone is not None:
        whole, fraction = False, None  # its own note says why it is late
    # The counters say of a unit that is stopped, throttled, or slow by itself, that it was not contention.
    contended = float(whole) if fraction is None else min(1.0, fraction / settings.most_fraction)
    alike = whole and (counts is None or counts.system is None)
    if not is_single(suspect) or ((whole or fraction is not None) and suspect.pattern != "recurring"):
        least = settings.min_persistence_fraction * keep * (contended if is_single(suspect) else 1.0)
        asked["first_persistence", "min_persistence"] = suspect.persistence, least
    if is_single(suspect):
        wanted = settings.naming_log_odds * (1.0 + (settings.whole_factor - 1.0) * max(float(alike), contended))
        asked["first_log_odds", "min_log_odds"] = evidence.log_odds(suspect), wanted * keep
    if is_named(candidate):
        # Of the clear events of a suspect and of the next one.
        own = 1.0 / (1.0 + settings.most_fraction / keep)
        asked["first_own_fraction", "min_own_fraction"] = evidence.own_fraction(candidate), own
    return asked


def _excess_to_explain_s(candidate: Candidate, evidence: WindowEvidence) -> float:
    """The excess that a candidate has to explain, in the steps that it fills.

    Lateness counts where the candidate itself arrived last: if its gain is little of that, another was almost as late,
    and either may be the cause. Others' lateness in other steps does not count. What all ranks share counts from its
    threshold on, and is drift below it.
    """
    late_s, shared_s = evidence.excess.late_s, evidence.shared_s
    if candidate.course is not None and is_single(candidate.suspect):
        lateness_F = candidate.lateness_N[candidate.course.filled_N]
        late_s = max(0.0, float(lateness_F.mean()) - evidence.excess.usual_late_s * float((lateness_F > 0.0).mean()))
    return late_s + (shared_s if shared_s >= evidence.settings.min_group_fraction * evidence.exposed_s else 0.0)


def _explained_s(suspect: Suspect, evidence: WindowEvidence) -> float:
    """A suspect's gain, and the excess of sync work that goes with it.

    A rank that is slow in its local stages is slow in its part of the sync stages too, and delays everybody there: a
    slow GPU is slow in `backward`. As much as the same factor gives is explained.
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

    ``co_critical``: mending the last rank of each step would save little of the lateness, as another arrives almost as
    late. ``roaming``: it would save most, but the last rank changes. ``intermittent``: it is mostly one rank, but too
    rarely to tell that from chance. If one of two ranks is named: ``mixed_roles`` where the other has less to do in one
    stage than it ever had; ``co_critical`` where both are slower than they were; ``no_baseline`` where one was slow
    before, or their past is not known.
    """
    settings = evidence.settings
    if evidence.best_gains_s < settings.most_fraction * evidence.excess.late_s:
        return "co_critical"
    total_s = float(evidence.gain_R.sum())
    if float(evidence.gain_R.max()) < settings.min_persistence_fraction * total_s:
        return "roaming"
    named = next((one for one in evidence.candidates if one.course is not None), None)
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
    best = next((one.suspect for one in evidence.candidates if not is_single(one.suspect)), None)
    if best is None or best.gain_s < settings.most_fraction * excess.group_s:
        return "co_critical"  # the group is slower, but not all of it in one stage
    return "intermittent" if best.persistence < settings.min_persistence_fraction else "co_critical"


def _numbers(evidence: WindowEvidence) -> dict[str, float]:
    """What decided, with the first candidate's numbers and thresholds (`_requirements`)."""
    excess, settings, exposed_s = evidence.excess, evidence.settings, evidence.exposed_s
    numbers = {
        "used_steps": float(evidence.used_N.sum()),
        "excess_s": excess.total_s,
        "late_excess_s": excess.late_s,
        "group_excess_s": excess.group_s,
        "sync_excess_s": excess.sync_s,
        "lateness_s": evidence.seen.lateness_s,
        "jitter_s": evidence.seen.jitter_s,
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
    for first in evidence.candidates[:1]:
        for names, values in _requirements(first, evidence, evidence.keep_fraction(first.suspect)).items():
            numbers |= zip(names, values, strict=True)
    return numbers


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
    # (with the job's numbers)
    suspects = tuple(
        replace(one, rank=None if one.rank is None else there[one.rank], ranks=tuple(there[rank] for rank in one.ranks))
        for one in verdict.suspects
    )
    lost = None if verdict.lost is None else replace(verdict.lost, ranks=n_ranks)
    numbers = {**verdict.numbers, "coverage": held.numbers["coverage"]}
    return replace(verdict, leaders=leaders, suspects=suspects, lost=lost, numbers=numbers, regression=None), past


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
    verdict = replace(verdict, suspects=tuple(_placed(one, window.hosts) for one in verdict.suspects))
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
    paused = pauses(evidence.measures, settings, before.own_best.next_step, window.attempt)
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


def _placed(suspect: Suspect, hosts: Sequence[str] | None) -> Suspect:
    """A rank with the host it is on, where the job has several; one that is alone there stands for that host.

    A cohort of one rank (a pipeline without replicas) is that rank.
    """
    if suspect.scope == "cohort" and len(suspect.ranks) == 1:
        suspect = replace(suspect, scope="rank", rank=suspect.ranks[0], cohort=None)
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


def reproduced(window: Window, trigger: Trigger, settings: Settings | None = None) -> Reproduced | None:
    """Whether the captured steps have the fault that the capture was triggered by.

    Each captured step is looked at: it has the fault if the suspect is over its peers by most of the gain that led to
    the capture. A recurring fault is expected as often as whole periods fit into the captured steps, once at least, in
    any of them: its phase may have drifted.

    The profiler slows the rank itself, but a coarse stage by less than half of the gain; the numbers are returned.

    Returns:
        None if it cannot be told: no step is complete, or all steps in which a recurring fault was due may be missing;
        the suspect has no peers (a cohort, all ranks); nothing was suspected; or a device's time is not known.
    """
    settings = settings or Settings()
    # On the clock that a window of these steps would be judged on.
    seen = timed(window, settings)
    if seen.limited and trigger.stage not in HOST_STAGES:
        return None
    window = seen.window
    valid_N = complete_steps(window)
    over_N = _over(window, trigger)
    if over_N is None or trigger.gain_s <= 0.0 or not valid_N.any():
        return None
    there_N = valid_N & (over_N >= settings.most_fraction * trigger.gain_s) & (over_N > 0.0)
    n_steps, n_valid, n_there = len(valid_N), int(valid_N.sum()), int(there_N.sum())
    recurring = trigger.pattern == "recurring" or bool(trigger.period_steps)

    def due(n_steps: int) -> int:
        """In how many captured steps the fault is expected at least."""
        return max(1, n_steps // (trigger.period_steps or n_steps)) if recurring else n_steps

    if not n_there and recurring and n_steps - n_valid >= due(n_steps):
        return None
    n_expected = max(due(n_valid), n_there)
    enough = n_there >= settings.min_persistence_fraction * n_expected
    # Those with the fault, and after them the likeliest others.
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
    """By how much the suspect was over its peers in its stage, by step (N); the median one of several ranks.

    None if it has no peers.
    """
    stages, n_ranks = window.schema.stages, window.durations_NRS.shape[1]
    ranks = np.asarray([rank for rank in trigger.ranks if rank < n_ranks], dtype=np.intp)
    if trigger.scope not in ("rank", "host") or not 0 < len(ranks) < n_ranks:
        return None
    if trigger.stage is not None and trigger.stage not in stages:
        return None
    roles = roles_of(window)
    if not set(roles.role_R[ranks]) & set(np.delete(roles.role_R, ranks)):
        return None
    walks, complete_N = walked(window, roles.some_X)
    replays = replay(walks, roles, len(stages))
    over_NXS = np.sum([one.over_NXS(ranks, roles, len(complete_N)) for one in replays], axis=0)
    over_NS = medians(over_NXS, axis=1)
    return np.asarray(over_NS.sum(axis=1) if trigger.stage is None else over_NS[:, stages.index(trigger.stage)])


HOST_STAGES = frozenset({"data"})
"""Stages of the host's own work. In all others, the host's time is launches or waiting for the device."""


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """A window with the times of the clock that it is judged on.

    Attributes:
        window: with that clock's times as durations.
        limited: whether it is the host's though the device's would be needed.
        agree: whether the clocks do not contradict each other.
    """

    window: Window
    clock: Clock = "host"
    limited: bool = False
    agree: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict)


def timed(window: Window, settings: Settings) -> Timed:
    """The window on the clock that it is judged on: the device's if it is known in enough steps, else the host's."""
    if window.device_NRS is None:
        if not window.on_device:
            return Timed(window)
        return Timed(window, limited=True, numbers=_coverage(0.0, settings))
    device = on_device(window)
    host_N, both_N = complete_steps(window), complete_steps(device)
    both_N &= host_N
    numbers = _coverage(float(both_N.sum()) / max(1.0, float(host_N.sum())), settings)
    if not both_N.any() or numbers["device_coverage"] < settings.most_fraction:
        return Timed(window, limited=True, numbers=numbers)
    steps_s = {"host_step_s": _step_s(window, both_N), "device_step_s": _step_s(device, both_N)}
    shorter_s, longer_s = sorted(steps_s.values())
    agreement = shorter_s / longer_s if longer_s > 0.0 else 1.0
    numbers |= steps_s | {"clock_agreement": agreement, "min_clock_agreement": settings.most_fraction}
    if agreement < settings.most_fraction:
        return Timed(window, limited=True, agree=False, numbers=numbers)
    return Timed(device, clock="device", numbers=numbers)


def on_its_clock(verdict: Verdict, seen: Timed, longer_s: float | None, settings: Settings) -> Verdict:
    """The verdict with its clock: held if that is the host's and cannot show it.

    On the host's clock, ``healthy`` stands, and so does a rank or host that is late in a stage of the host's own work.
    What all ranks share does not: it may be waiting for the devices. Devices that have enough to do can also hide the
    delay of one host; if a healthy step is known, the step is then no longer than that (``longer_s``).
    """
    if seen.clock == "host" and not seen.limited:
        return verdict
    verdict = replace(verdict, clock=seen.clock, numbers={**verdict.numbers, **seen.numbers})
    if not seen.limited or (verdict.reasons and set(verdict.reasons) <= UNDECIDED):
        return verdict
    if seen.agree and verdict.label == "healthy":
        return verdict
    first = next(iter(verdict.suspects), None)
    of_the_host = first is not None and first.scope in ("rank", "host") and first.stage in HOST_STAGES
    if seen.agree and verdict.label == "suspect" and first is not None and of_the_host:
        wanted_s = settings.most_fraction * first.gain_s * first.persistence
        if longer_s is None or longer_s >= wanted_s:
            return verdict
        numbers = {**verdict.numbers, "longer_s": longer_s, "min_longer_s": wanted_s}
        verdict = replace(verdict, numbers=numbers)
    return replace(verdict, label="needs_evidence", reasons=("clock_limited",))


def on_device(window: Window) -> Window:
    """The window with the devices' times as durations.

    The host's ready moments are those of the last gradient's launch, and are not used. The time before a step is
    unknown if the step before is, and a step without it is not complete: no row of the accounting is half there.
    """
    assert window.device_NRS is not None
    between_NR = window.device_between_NR
    if between_NR is not None:
        after_gap_NR = np.zeros(between_NR.shape, dtype=np.bool_)
        after_gap_NR[1:] = ~np.isfinite(window.device_NRS[:-1]).all(axis=2)
        if after_gap_NR.any():
            between_NR = np.where(after_gap_NR, np.nan, between_NR)
    return replace(
        window,
        durations_NRS=window.device_NRS,
        outside_NRG=window.device_outside_NRG,
        between_NR=between_NR,
        ready_NR=window.device_ready_NR,
    )


def _step_s(window: Window, steps_N: BoolArray) -> float:
    """The mean length of some steps over the ranks, with the time between steps."""
    total_NR = window.durations_NRS[steps_N].sum(axis=2)
    return float((total_NR if window.between_NR is None else total_NR + window.between_NR[steps_N]).mean())


def _coverage(fraction: float, settings: Settings) -> dict[str, float]:
    return {"device_coverage": fraction, "min_device_coverage": settings.most_fraction}
