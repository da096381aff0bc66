"""One window's verdict: a pure function, an early-return ladder (docs/verdicts.md).

Every number that decides is put into the verdict, so that it can be explained and replayed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from sftriage.frontier.accounting import Accounting, account, walked
from sftriage.frontier.overlap import resumed
from sftriage.frontier.roles import roles_of
from sftriage.frontier.whatif import replay
from sftriage.model.verdicts import Label, Suspect, Verdict
from sftriage.model.windows import Window
from sftriage.verdicts.candidates import Candidate
from sftriage.verdicts.evidence import Past, WindowEvidence, is_named, is_single
from sftriage.verdicts.gathering import gather_evidence
from sftriage.verdicts.mixed_roles import roles_differ
from sftriage.verdicts.settings import Settings
from sftriage.verdicts.steps import undisturbed_steps

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
    if replays is None:
        walks, valid_N = walked(window, roles.some_X)
    else:
        walks, valid_N = [one.walk for one in replays], np.ones(len(window.durations_NRS), dtype=np.bool_)
    accounting = account(walks, window, int(valid_N.sum()))
    if coverage is None:
        coverage = 1.0 if valid_N.all() and valid_N.size else coverage_of(window)
    numbers = {"coverage": coverage, "complete_steps": float(accounting.n_steps)}
    if any(one.segment.own is not None and one.segment.own.over_NR is not None for one in walks):
        numbers["split"] = 1.0  # (the last gradient of each step is known)
    verdict = partial(_verdict, window, accounting, numbers)
    if coverage < settings.min_coverage_fraction or accounting.n_steps == 0:
        numbers["min_coverage"] = settings.min_coverage_fraction
        return verdict("needs_evidence", ("low_coverage",)), None
    if accounting.exposed_s > 0.0 and not (past.exchanged or exchanges(window)):
        return verdict("needs_evidence", ("no_sync",)), None
    replays = replays or replay(walks, roles, len(window.schema.stages))
    if window.capturing_N is not None and window.capturing_N.any():
        numbers["capturing_steps"] = float(window.capturing_N.sum())
        # The steps without it are evidence as any others.
        valid_N = undisturbed_steps(window, valid_N)
        there = accounting.exposed_s > 0.0 and valid_N.any()
        evidence = gather_evidence(window, roles, replays, accounting, valid_N, past, settings) if there else None
        return verdict("needs_evidence", ("self_inflicted",)), evidence
    if accounting.exposed_s == 0.0:
        return verdict("healthy"), None
    evidence = gather_evidence(window, roles, replays, accounting, valid_N, past, settings)
    first = unambiguous(evidence)
    if first is not None:
        others = tuple(one for one in evidence.candidates if one is not first)
        evidence = replace(evidence, candidates=(first, *others))
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
    """A verdict on a window, with the totals of its accounting as means a step."""
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


def exchanges(window: Window) -> bool:
    """Whether any exchange between the ranks is known: without one a rank that waits looks as if it worked."""
    stages = [window.schema.stages.index(name) for name in window.schema.sync]
    return window.durations_NRS.shape[1] < 2 or bool((window.durations_NRS[:, :, stages] > 0.0).any())


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
    fraction = evidence.contended_fraction(suspect)
    if suspect.alone is not None:
        whole, fraction = False, None  # its own note says why it is late
    # The counters say of a unit that is stopped, throttled, or slow by itself, that it was not contention.
    contended = float(whole) if fraction is None else min(1.0, fraction / settings.most_fraction)
    alike = whole and not evidence.is_held_back(suspect)
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
    """Why excess that all ranks share has no suspect."""
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
