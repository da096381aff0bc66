"""One window's verdict: a pure function, an early-return ladder (design §4).

Every number that decides is put into the verdict, so that it can be explained and replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sftriage.frontier.accounting import Accounting, anchored
from sftriage.frontier.arrays import FloatArray
from sftriage.frontier.baseline import Baseline, Profile, profile
from sftriage.frontier.candidates import group_candidates, rank_candidates, ranked
from sftriage.frontier.excess import Excess, excess_of
from sftriage.frontier.segments import complete_steps
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import replay
from sftriage.records import Label, Suspect, Verdict, Window

MAX_SUSPECTS = 8
"""Candidates a verdict lists at most."""

LISTED_FRACTION = 0.01
"""A candidate with a gain under this fraction of the step is not worth a line."""


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What the ladder looks at: one window, accounted and replayed.

    ``best_gains_s`` is what mending whoever came last would have saved, step by step, as a mean. ``clear_gain_R`` is
    that by rank, summed over the steps in which it stands out of jitter, and ``clear_steps_R`` how many those are.
    """

    exposed_s: float
    seen: Profile
    excess: Excess
    suspects: tuple[Suspect, ...]
    best_gains_s: float
    clear_gain_R: FloatArray
    clear_steps_R: FloatArray


def classify(window: Window, baseline: Baseline | None = None, settings: Settings | None = None) -> Verdict:
    """The verdict on one window.

    Args:
        window: durations of N steps × R ranks × S stages.
        baseline: a typical healthy step of this job, where one is known.
        settings: the thresholds.
    """
    settings = settings or Settings()
    accounting = anchored(window)
    coverage = float(np.isfinite(window.durations_NRS).all(axis=2).mean()) if window.durations_NRS.size else 0.0
    numbers = {"coverage": coverage, "complete_steps": float(accounting.n_steps)}
    if coverage < settings.min_coverage_fraction or accounting.n_steps == 0:
        numbers["min_coverage"] = settings.min_coverage_fraction
        return _verdict(window, accounting, "needs_evidence", ("low_coverage",), (), numbers)
    if window.capturing_N is not None and window.capturing_N.any():
        numbers["capturing_steps"] = float(window.capturing_N.sum())
        return _verdict(window, accounting, "needs_evidence", ("self_inflicted",), (), numbers)
    if accounting.exposed_s == 0.0:
        return _verdict(window, accounting, "healthy", (), (), numbers)
    evidence = weigh(window, accounting, baseline, settings)
    numbers |= _numbers(evidence, settings)
    suspect = _unambiguous(evidence, settings)
    if suspect is not None:
        return _verdict(window, accounting, "suspect", (), evidence.suspects[:MAX_SUSPECTS], numbers)
    reasons = _reasons(evidence, settings)
    if not reasons:
        return _verdict(window, accounting, "healthy", (), (), numbers)
    return _verdict(window, accounting, "needs_evidence", reasons, evidence.suspects[:MAX_SUSPECTS], numbers)


def weigh(window: Window, accounting: Accounting, baseline: Baseline | None, settings: Settings) -> Evidence:
    """Replay a window and put every candidate and every part of the excess beside each other."""
    valid_N = complete_steps(window)
    replays = replay(window)
    seen = profile(replays, valid_N)
    exposed_s = accounting.exposed_s / accounting.n_steps
    present_s = settings.present_fraction * settings.min_gain_fraction * exposed_s
    n_ranks = window.durations_NRS.shape[1]
    suspects = rank_candidates(replays, window.schema, n_ranks, accounting.n_steps, exposed_s, present_s)
    if baseline is not None:
        group = group_candidates(seen, baseline.typical, window.schema, tuple(range(n_ranks)), exposed_s)
        # What all ranks share is drift below its threshold, and no rival to a rank.
        suspects += [candidate for candidate in group if candidate.share >= settings.min_group_fraction]
    # (rows of all segments: a segment's gain is over its own jitter or it is not)
    leader_M = np.concatenate([segment.leader_M for segment in replays])
    gain_M = np.concatenate([segment.whole_gain_M for segment in replays])
    clear_M = gain_M >= max(present_s, settings.clear_sigmas * seen.jitter_s)
    return Evidence(
        exposed_s=exposed_s,
        seen=seen,
        excess=excess_of(seen, baseline, n_ranks, exposed_s, settings),
        suspects=ranked(suspects, LISTED_FRACTION * exposed_s),
        best_gains_s=float(gain_M.sum()) / accounting.n_steps,
        clear_gain_R=np.bincount(leader_M, gain_M * clear_M, minlength=n_ranks).astype(np.float64),
        clear_steps_R=np.bincount(leader_M, clear_M, minlength=n_ranks).astype(np.float64),
    )


def _unambiguous(evidence: Evidence, settings: Settings) -> Suspect | None:
    """The first suspect, if it explains the excess and is clearly ahead of everybody else."""
    if not evidence.suspects or not _qualifies(evidence.suspects[0], evidence, settings):
        return None
    n_steps = len(evidence.seen.lateness_N)
    return evidence.suspects[0] if _leads(evidence.suspects, n_steps, settings) else None


def _leads(suspects: tuple[Suspect, ...], n_steps: int, settings: Settings) -> bool:
    """Whether the first is clearly ahead of the others: in gain and, among ranks, in the steps in which it is the one.

    Its own other stages are no rivals to it.
    """
    first = suspects[0]
    rivals = [other for other in suspects if (other.scope, other.ranks) != (first.scope, first.ranks)]
    second_s = max((rival.gain_s for rival in rivals), default=0.0)
    if first.gain_s - second_s < settings.min_lead_fraction * first.gain_s:
        return False
    second = max((rival.persistence for rival in rivals if rival.scope == "rank"), default=0.0)
    if first.scope != "rank" or second == 0.0:
        return True
    return _ahead(n_steps * first.persistence, n_steps * second, settings)


def _ahead(first_steps: float, second_steps: float, settings: Settings) -> bool:
    """Whether one rank's steps outnumber another's by more than turns taken by chance would.

    Between two that take turns a step is a coin: the difference of a and b counts has the deviation √(a + b).
    """
    return first_steps - second_steps >= settings.min_lead_sigmas * math.sqrt(first_steps + second_steps)


def _qualifies(suspect: Suspect, evidence: Evidence, settings: Settings) -> bool:
    min_share = settings.min_gain_fraction if suspect.scope == "rank" else settings.min_group_fraction
    return (
        suspect.share >= min_share
        and suspect.persistence >= settings.min_persistence_fraction
        and _explained_s(suspect, evidence) >= settings.min_explained_fraction * _weighty_s(evidence, settings)
    )


def _weighty_s(evidence: Evidence, settings: Settings) -> float:
    """The excess that wants explaining: what all ranks share counts from its threshold on, and is drift below it."""
    excess = evidence.excess
    shared_s = excess.group_s + excess.sync_s
    return excess.late_s + (shared_s if shared_s >= settings.min_group_fraction * evidence.exposed_s else 0.0)


def _explained_s(suspect: Suspect, evidence: Evidence) -> float:
    """A suspect's gain, and the sync work that goes with it.

    Who is slow in its local stages is slow in its sync stages' own part too, and holds everybody up there: a slow GPU
    is slow in `backward`. By the same factor, that is explained.
    """
    typical, sync_excess_s = evidence.seen.typical, evidence.excess.sync_s
    normal_local_s = float(typical.level_S.sum()) - evidence.excess.group_s
    normal_sync_s = float(typical.sync_S.sum()) - sync_excess_s
    if normal_local_s <= 0.0 or normal_sync_s <= 0.0:
        return suspect.gain_s
    return suspect.gain_s + min(sync_excess_s, suspect.gain_s / normal_local_s * normal_sync_s)


def _reasons(evidence: Evidence, settings: Settings) -> tuple[str, ...]:
    """Why there is excess and no suspect, the largest part of it first; nothing where it is under its thresholds.

    What all ranks share is one part: a level that rises with the sync work is no finding about either.
    """
    excess = evidence.excess
    parts = []
    late = _late_reason(evidence, settings)
    if late is not None:
        parts.append((excess.late_s, late))
    shared_s = excess.group_s + excess.sync_s
    if shared_s >= settings.min_group_fraction * evidence.exposed_s:
        parts.append((shared_s, _shared_reason(evidence, settings)))
    if not parts and evidence.suspects and _qualifies(evidence.suspects[0], evidence, settings):
        return ("co_critical",)  # a good suspect, and another as good
    return tuple(dict.fromkeys(reason for _, reason in sorted(parts, reverse=True)))


def _late_reason(evidence: Evidence, settings: Settings) -> str | None:
    """Why lateness has no suspect; None where it is too little, or where it has one and other excess has none.

    ``co_critical``: step by step, mending whoever came last would save little of the lateness, for another comes almost
    as late. ``intermittent``: it would save most, and mostly it is one suspect, but in too few of the steps.
    ``roaming``: it would save most, but who comes last changes.
    """
    late_s, exposed_s = evidence.excess.late_s, evidence.exposed_s
    if late_s < settings.min_gain_fraction * exposed_s:
        return None
    if evidence.best_gains_s < settings.min_explained_fraction * late_s:
        return "co_critical"
    one = _mostly(evidence, settings)
    if one is not None:
        its = [suspect for suspect in evidence.suspects if suspect.rank == one]
        if max((suspect.persistence for suspect in its), default=0.0) < settings.min_persistence_fraction:
            return "intermittent"
        if max(suspect.share for suspect in its) >= settings.min_gain_fraction:
            return None
    return "roaming" if late_s >= settings.min_roaming_fraction * exposed_s else None


def _mostly(evidence: Evidence, settings: Settings) -> int | None:
    """The rank that causes most of the lateness beyond jitter, and not by chance; None where no rank does."""
    gain_R, steps_R = evidence.clear_gain_R, evidence.clear_steps_R
    one = int(gain_R.argmax())
    others = float(np.delete(steps_R, one).max(initial=0.0))
    if gain_R[one] <= settings.min_explained_fraction * gain_R.sum() or not _ahead(
        float(steps_R[one]), others, settings
    ):
        return None
    return one


def _shared_reason(evidence: Evidence, settings: Settings) -> str:
    """Why what all ranks share has no suspect."""
    excess = evidence.excess
    if excess.sync_s >= excess.group_s:
        return "sync_ambiguous"
    if not excess.from_baseline:
        return "no_baseline"
    best = next((suspect for suspect in evidence.suspects if suspect.scope == "all"), None)
    if best is None or best.gain_s < settings.min_explained_fraction * excess.group_s:
        return "co_critical"  # the group is slower, but not all of it in one stage
    return "intermittent" if best.persistence < settings.min_persistence_fraction else "co_critical"


def _numbers(evidence: Evidence, settings: Settings) -> dict[str, float]:
    return {
        "excess_s": evidence.excess.total_s,
        "late_excess_s": evidence.excess.late_s,
        "group_excess_s": evidence.excess.group_s,
        "sync_excess_s": evidence.excess.sync_s,
        "lateness_s": evidence.seen.typical.lateness_s,
        "jitter_s": evidence.seen.jitter_s,
        "best_gains_s": evidence.best_gains_s,
        "has_baseline": float(evidence.excess.from_baseline),
        "min_gain_s": settings.min_gain_fraction * evidence.exposed_s,
        "min_roaming_s": settings.min_roaming_fraction * evidence.exposed_s,
        "min_group_s": settings.min_group_fraction * evidence.exposed_s,
        "min_persistence": settings.min_persistence_fraction,
    }


def _verdict(
    window: Window,
    accounting: Accounting,
    label: Label,
    reasons: tuple[str, ...],
    suspects: tuple[Suspect, ...],
    numbers: dict[str, float],
) -> Verdict:
    """Totals of the accounting as means a step; everything else as it was decided."""
    n_steps = max(1, accounting.n_steps)
    stages = window.schema.stages
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
