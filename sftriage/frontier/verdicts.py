"""One window's verdict: a pure function, an early-return ladder (docs/verdicts.md).

Every number that decides is put into the verdict, so that it can be explained and replayed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from sftriage.frontier.accounting import account, walked
from sftriage.frontier.arrays import BoolArray
from sftriage.frontier.candidates import Candidate
from sftriage.frontier.evidence import Past, WindowEvidence, keep_fraction, weigh
from sftriage.frontier.roles import differ
from sftriage.frontier.settings import Settings
from sftriage.records import Label, Suspect, Verdict, Window

NEARLY_ALL = 0.8
"""A rank that causes this much of the lateness is the one, in however few steps it does."""

MAX_SUSPECTS = 8
"""Candidates a verdict lists at most."""


def assess_times(
    window: Window, past: Past, settings: Settings, coverage: float | None = None
) -> tuple[Verdict, WindowEvidence | None]:
    """The verdict on a window's durations, and what it was taken from; None where the window was not looked into.

    ``coverage`` is the fraction of (step, rank) vectors that are there, where it is not that of these durations.
    """
    walks, valid_N = walked(window)
    accounting = account(walks, window, int(valid_N.sum()))
    if coverage is None:
        coverage = 1.0 if valid_N.all() and valid_N.size else coverage_of(window)
    numbers = {"coverage": coverage, "complete_steps": float(accounting.n_steps)}

    def verdict(label: Label, reasons: tuple[str, ...] = (), suspects: tuple[Suspect, ...] = ()) -> Verdict:
        """Totals of the accounting as means a step; everything else as it was decided."""
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

    if coverage < settings.min_coverage_fraction or accounting.n_steps == 0:
        numbers["min_coverage"] = settings.min_coverage_fraction
        return verdict("needs_evidence", ("low_coverage",)), None
    if window.capturing_N is not None and window.capturing_N.any():
        numbers["capturing_steps"] = float(window.capturing_N.sum())
        return verdict("needs_evidence", ("self_inflicted",)), None
    if accounting.exposed_s == 0.0:
        return verdict("healthy"), None
    evidence = weigh(window, walks, accounting, valid_N, past, settings)
    first = _unambiguous(evidence, past, settings)
    if first is not None:
        others = tuple(one for one in evidence.candidates if one is not first)
        evidence = replace(evidence, candidates=(first, *others))
    numbers |= _numbers(evidence, past, settings)
    suspects = tuple(candidate.suspect for candidate in evidence.candidates[:MAX_SUSPECTS])
    if _roles_differ(window, valid_N, evidence, settings):
        return verdict("needs_evidence", ("mixed_roles",), suspects), evidence
    if first is not None:
        return verdict("suspect", (), (_since(first, past, window), *suspects[1:])), evidence
    reasons = _reasons(evidence, past, settings)
    return verdict("needs_evidence", reasons, suspects) if reasons else verdict("healthy"), evidence


def coverage_of(window: Window) -> float:
    """Fraction of (step, rank) vectors that are there."""
    finite_NR = np.isfinite(window.durations_NRS).all(axis=2)
    return float(finite_NR.mean()) if finite_NR.size else 0.0


def _roles_differ(window: Window, valid_N: BoolArray, evidence: WindowEvidence, settings: Settings) -> bool:
    """Whether the lateness of this window is that of ranks which do different work, and nobody has said so.

    A job whose healthy steps are known has shown that its ranks are alike.
    """
    min_s = settings.min_gain_fraction * evidence.exposed_s
    if window.cohorts is not None or evidence.normal is not None or evidence.excess.late_s < min_s:
        return False
    local_S = np.asarray([stage not in window.schema.sync for stage in window.schema.stages])
    return differ(window, valid_N, local_S, min_s)


def _since(first: Candidate, past: Past, window: Window) -> Suspect:
    """The suspect, which began when the windows before have seen it begin."""
    suspect, named = first.suspect, past.named
    # (a change within a window's first steps is not told from none)
    there_already = suspect.onset_step is not None and suspect.onset_step <= window.first_step + 2
    if named is None or not there_already or (named.scope, named.ranks) != (suspect.scope, suspect.ranks):
        return suspect
    return replace(suspect, onset_step=named.onset_step)


def _unambiguous(evidence: WindowEvidence, past: Past, settings: Settings) -> Candidate | None:
    """The candidate that explains the excess and is clearly ahead of everybody else; None where none is or does.

    What comes back fills too few steps to be ahead in all of them, and is judged in its own.
    """

    def qualifies(one: Candidate) -> bool:
        return _qualifies(one, evidence, settings, keep_fraction(past, one.suspect, settings))

    def comes_back(one: Candidate) -> bool:
        ahead, lead = _lead_in_its_steps(one, evidence)
        return qualifies(one) and ahead and lead >= settings.min_sparse_lead_fraction

    back = (one for one in evidence.candidates if one.suspect.pattern == "recurring")
    again = next((one for one in back if comes_back(one)), None)
    first = next(iter(evidence.candidates), None)
    if first is None or not (qualifies(first) and _leads(evidence, past, settings)):
        return again
    if again is None or again.course is None or again.suspect.ranks != first.suspect.ranks or first.total_s <= 0.0:
        return first
    # Who seems to be there throughout may be so in the steps in which it comes back, and hardly in others.
    return again if float(first.gain_N[again.course.filled_N].sum()) >= NEARLY_ALL * first.total_s else first


def _lead_in_its_steps(candidate: Candidate, evidence: WindowEvidence) -> tuple[bool, float]:
    """Whether what comes back has most in its own steps, and how far it is ahead there, as a fraction of its gain.

    What others gain in its steps as anywhere is jitter. Ranks that take turns by the clock each come back at a period.
    """
    own_s, _ = _gain_in_steps_of(candidate, candidate, evidence)
    rivals = _rivals(candidate, evidence)
    here = [_gain_in_steps_of(candidate, rival, evidence) for rival in rivals]
    again_s = [_gain_in_steps_of(one, one, evidence)[0] for one in rivals if one.suspect.pattern == "recurring"]
    second_s = max((0.0, *again_s, *(all_s - elsewhere_s for all_s, elsewhere_s in here)))
    return all(all_s < own_s for all_s, _ in here), (own_s - second_s) / own_s if own_s > 0.0 else 0.0


def _rivals(candidate: Candidate, evidence: WindowEvidence) -> list[Candidate]:
    """The candidates that have no rank in common with one: its own other stages are none."""
    return [one for one in evidence.candidates if not set(one.suspect.ranks) & set(candidate.suspect.ranks)]


def _gain_in_steps_of(filling: Candidate, one: Candidate, evidence: WindowEvidence) -> tuple[float, float]:
    """What mending ``one`` would have saved in the steps that ``filling`` fills, and would in as many of the others."""
    if filling.course is None:
        return 0.0, 0.0
    filled_N = filling.course.filled_N
    others_N = evidence.used_N & ~filled_N
    elsewhere_s = float(one.gain_N[others_N].mean()) if others_N.any() else 0.0
    return float(one.gain_N[filled_N].sum()), elsewhere_s * float(filled_N.sum())


def _leads(evidence: WindowEvidence, past: Past, settings: Settings) -> bool:
    """Whether the first is clearly ahead of the others: in gain and, among ranks, in the steps in which it is the one.

    Its own other stages are no rivals to it. Who fills few steps must have twice what the next one has.
    """
    first = evidence.candidates[0]
    lead, min_lead = _lead(evidence, settings, keep_fraction(past, first.suspect, settings))
    if lead < min_lead:
        return False
    ranks = [one for one in evidence.candidates if one.suspect.scope == "rank"]
    second = max((one.led_steps for one in ranks if one.suspect.rank != first.suspect.rank), default=0)
    if first.suspect.scope != "rank" or second == 0 or _sparse(first):
        return True
    return _ahead(first.led_steps, second, settings)


def _lead(evidence: WindowEvidence, settings: Settings, keep: float) -> tuple[float, float]:
    """How far the first is ahead of the next in what it would save, as a fraction of that, and how far it has to be."""
    first = evidence.candidates[0]
    second_s = max((rival.total_s for rival in _rivals(first, evidence)), default=0.0)
    min_lead = settings.min_sparse_lead_fraction if _sparse(first) else settings.min_lead_fraction * keep
    return (first.total_s - second_s) / first.total_s if first.total_s > 0.0 else 0.0, min_lead


def _sparse(candidate: Candidate) -> bool:
    """Whether it fills only some of the steps, so that its steps cannot be weighed against anybody's."""
    return candidate.course is not None and candidate.course.pattern != "chronic"


def _ahead(first_steps: float, second_steps: float, settings: Settings) -> bool:
    """Whether one rank's steps outnumber another's by more than turns taken by chance would.

    Between two that take turns a step is a coin: the difference of a and b counts has the deviation √(a + b).
    """
    return first_steps - second_steps >= settings.min_lead_sigmas * math.sqrt(first_steps + second_steps)


def _qualifies(candidate: Candidate, evidence: WindowEvidence, settings: Settings, keep: float) -> bool:
    suspect = candidate.suspect
    single = suspect.scope in ("rank", "host")
    min_share = (settings.min_gain_fraction if single else settings.min_group_fraction) * keep
    if candidate.course is None or _share(candidate, evidence, settings) < min_share:
        return False
    if not single and suspect.persistence < settings.min_persistence_fraction * keep:
        return False
    weighty_s = _weighty_s(candidate, evidence, settings)
    if single and suspect.stage is None and weighty_s < settings.min_explained_fraction * suspect.gain_s:
        # Who is a little slow in all it does, where nobody is later than in a healthy window, shares a core.
        return False
    return _explained_s(suspect, evidence) >= settings.min_explained_fraction * keep * weighty_s


def _share(candidate: Candidate, evidence: WindowEvidence, settings: Settings) -> float:
    """What a candidate is worth, as a fraction of the step as it would be without.

    That is its gain, or more where it is steadily over its peers: a delay that is always there is there in full,
    however much of it the jitter of others hides. A rank that is a little slow in all it does is what sharing a core
    looks like, and one peer is no measure of what is steady.
    """
    suspect = candidate.suspect
    if suspect.scope not in ("rank", "host") or suspect.share >= 0.5:
        return suspect.share
    share = suspect.share / (1.0 - suspect.share)
    peers = len(evidence.clear_gain_R) - len(suspect.ranks)
    enough = share >= settings.min_seen_fraction * settings.min_gain_fraction
    if suspect.pattern != "one-off" and suspect.stage is not None and peers >= 3 and enough:
        share = max(share, candidate.steady_s / max(evidence.exposed_s - suspect.gain_s, suspect.gain_s))
    return share / settings.known_fraction


def _weighty_s(candidate: Candidate, evidence: WindowEvidence, settings: Settings) -> float:
    """The excess that wants explaining in the steps that the candidate fills.

    What all ranks share counts from its threshold on, and is drift below it.
    """
    excess = evidence.excess
    late_s = excess.late_s
    if candidate.course is not None and candidate.suspect.scope in ("rank", "host"):
        filled_s = evidence.seen.lateness_N[candidate.course.filled_N[evidence.used_N]].mean()
        late_s = max(0.0, float(filled_s) - evidence.normal_late_s)
    shared_s = excess.group_s + excess.sync_s
    return late_s + (shared_s if shared_s >= settings.min_group_fraction * evidence.exposed_s else 0.0)


def _explained_s(suspect: Suspect, evidence: WindowEvidence) -> float:
    """A suspect's gain, and the sync work that goes with it.

    Who is slow in its local stages is slow in its sync stages' own part too, and holds everybody up there: a slow GPU
    is slow in `backward`. By the same factor, that is explained.
    """
    typical, sync_excess_s = evidence.like.typical, evidence.excess.sync_s
    normal_local_s = float(typical.level_CS.sum(axis=1).max()) - evidence.excess.group_s
    normal_sync_s = float(typical.sync_S.sum()) - sync_excess_s
    if normal_local_s <= 0.0 or normal_sync_s <= 0.0:
        return suspect.gain_s
    return suspect.gain_s + min(sync_excess_s, suspect.gain_s / normal_local_s * normal_sync_s)


def _reasons(evidence: WindowEvidence, past: Past, settings: Settings) -> tuple[str, ...]:
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
    if not parts and evidence.candidates:
        first = evidence.candidates[0]
        if _qualifies(first, evidence, settings, keep_fraction(past, first.suspect, settings)):
            # a good suspect, and another as good
            return ("co_critical",) if first.suspect.pattern == "chronic" else ("intermittent",)
    return tuple(dict.fromkeys(reason for _, reason in sorted(parts, reverse=True)))


def _late_reason(evidence: WindowEvidence, settings: Settings) -> str | None:
    """Why lateness has no suspect; None where it is too little, or where it has one and other excess has none.

    ``co_critical``: step by step, mending whoever came last would save little of the lateness, for another comes almost
    as late. ``intermittent``: it would save most, and mostly it is one suspect, but in too few of the steps, and in no
    order. ``roaming``: it would save most, but who comes last changes.
    """
    late_s, exposed_s = evidence.excess.late_s, evidence.exposed_s
    if late_s < settings.min_gain_fraction * exposed_s:
        return None
    if evidence.best_gains_s < settings.min_explained_fraction * late_s:
        return "co_critical"
    one = _mostly(evidence, settings)
    if one is not None:
        its = [candidate for candidate in evidence.candidates if candidate.suspect.rank == one]
        if all(candidate.course is None for candidate in its):
            return "intermittent"
        if max(candidate.suspect.share for candidate in its) >= settings.min_gain_fraction:
            return None
    return "roaming" if late_s >= settings.min_roaming_fraction * exposed_s else None


def _mostly(evidence: WindowEvidence, settings: Settings) -> int | None:
    """The rank that causes most of the lateness beyond jitter, and not by chance; None where no rank does."""
    gain_R, steps_R = evidence.clear_gain_R, evidence.clear_steps_R
    one = int(gain_R.argmax())
    others = float(np.delete(steps_R, one).max(initial=0.0))
    part = gain_R[one] / gain_R.sum() if gain_R[one] > 0.0 else 0.0
    if part >= NEARLY_ALL or (part > settings.min_explained_fraction and _ahead(float(steps_R[one]), others, settings)):
        return one
    return None


def _shared_reason(evidence: WindowEvidence, settings: Settings) -> str:
    """Why what all ranks share has no suspect."""
    excess = evidence.excess
    if excess.sync_s >= excess.group_s:
        return "sync_ambiguous"
    if not excess.from_baseline:
        return "no_baseline"
    best = next((one.suspect for one in evidence.candidates if one.suspect.scope in ("all", "cohort")), None)
    if best is None or best.gain_s < settings.min_explained_fraction * excess.group_s:
        return "co_critical"  # the group is slower, but not all of it in one stage
    return "intermittent" if best.persistence < settings.min_persistence_fraction else "co_critical"


def _numbers(evidence: WindowEvidence, past: Past, settings: Settings) -> dict[str, float]:
    excess = evidence.excess
    return {
        "used_steps": float(evidence.used_N.sum()),
        "excess_s": excess.total_s,
        "late_excess_s": excess.late_s,
        "group_excess_s": excess.group_s,
        "sync_excess_s": excess.sync_s,
        "lateness_s": evidence.seen.typical.lateness_s,
        "jitter_s": evidence.seen.jitter_s,
        "best_gains_s": evidence.best_gains_s,
        "has_baseline": float(excess.from_baseline),
        "min_gain_s": settings.min_gain_fraction * evidence.exposed_s,
        "min_roaming_s": settings.min_roaming_fraction * evidence.exposed_s,
        "min_group_s": settings.min_group_fraction * evidence.exposed_s,
        "shared_excess_s": excess.group_s + excess.sync_s,
        "min_coverage": settings.min_coverage_fraction,
        "min_persistence": settings.min_persistence_fraction,
        **(_numbers_of_first(evidence, past, settings) if evidence.candidates else {}),
    }


def _numbers_of_first(evidence: WindowEvidence, past: Past, settings: Settings) -> dict[str, float]:
    """What the first candidate was asked, see `_qualifies` and `_leads`."""
    first = evidence.candidates[0]
    keep = keep_fraction(past, first.suspect, settings)
    single = first.suspect.scope in ("rank", "host")
    lead, min_lead = _lead(evidence, settings, keep)
    if first.suspect.pattern == "recurring":
        _, lead = _lead_in_its_steps(first, evidence)
    return {
        "first_share": _share(first, evidence, settings),
        "min_share": (settings.min_gain_fraction if single else settings.min_group_fraction) * keep,
        "first_explained_s": _explained_s(first.suspect, evidence),
        "wanted_s": settings.min_explained_fraction * keep * _weighty_s(first, evidence, settings),
        "first_lead": lead,
        "min_lead": min_lead,
        "first_pattern": float(first.course is not None),
        "min_pattern": 1.0,
    }
