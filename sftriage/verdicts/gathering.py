"""Gathering the evidence for a verdict: a window's replay, and the tests of the run advanced by its new steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sftriage.frontier.accounting import Accounting, advances_by_step
from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.overlap import remembered
from sftriage.frontier.profile import Profile, Typical, profile
from sftriage.frontier.roles import Roles
from sftriage.frontier.units import Unit, UnitName, host_units, last_elsewhere, places_of, rank_units
from sftriage.frontier.whatif import SegmentReplay
from sftriage.model.verdicts import Suspect
from sftriage.model.windows import Window
from sftriage.verdicts.alone import Known, is_marked, known_after, named_alone
from sftriage.verdicts.baseline import Baseline, OwnTimes, Regime, excess_of, regimes_of
from sftriage.verdicts.candidates import Candidate, OnsetKey, WindowContext, candidates_of, group_candidates
from sftriage.verdicts.clear_events import (
    MAX_EXAMINED,
    Arrivals,
    arrivals_of_hosts,
    arrivals_of_ranks,
    clear_events,
    units_to_examine,
)
from sftriage.verdicts.course import Onset, Track
from sftriage.verdicts.evidence import Past, WindowEvidence, is_named, is_single
from sftriage.verdicts.pauses import paused_steps
from sftriage.verdicts.regression import measured
from sftriage.verdicts.sequential import Evidence, Recurrence, advanced, recurrence_of
from sftriage.verdicts.settings import Settings
from sftriage.verdicts.steps import ordinary_steps, steps_of_a_kind
from sftriage.verdicts.system import HeldBack, charged, counts_of

LISTED_FRACTION = 0.01
"""A candidate whose gain is less than this fraction of the window is not listed."""


def gather_evidence(
    window: Window,
    roles: Roles,
    replays: list[SegmentReplay],
    accounting: Accounting,
    valid_N: BoolArray,
    past: Past,
    settings: Settings,
) -> WindowEvidence:
    """The evidence of a replayed window. ``valid_N`` are its complete and undisturbed steps."""
    n_steps, n_ranks, _ = window.durations_NRS.shape
    walks = [one.walk for one in replays]
    whole = profile(replays, n_steps, roles)
    # What came after a step's last sync is that step's, as in a candidate's gain.
    exposed_N = advances_by_step(walks, window).sum(axis=1)
    measures = measured(window, walks, whole, valid_N)
    used_N = ordinary_steps(steps_of_a_kind(window, valid_N), whole, exposed_N, settings)
    moved_N = used_N & ~paused_steps(measures, settings)
    used_N = moved_N if moved_N.any() else used_N
    regime, like_N = _main_regime(window, used_N)
    seen, like = whole.of(used_N), whole.of(like_N)
    normal = _normal(past.baseline, regime, like)
    exposed_s = float(medians(exposed_N[used_N])) or accounting.exposed_s / accounting.n_steps
    ranks, hosts, units, usual_s = _evidence(window, replays, roles, exposed_N, used_N, past, settings)
    known_alone = _known_alone(window, replays, valid_N, usual_s, past, settings)
    first_step = window.first_step if past.first_step is None else past.first_step
    units = _held_back(units, window, whole, normal, exposed_N, used_N, settings)
    context = WindowContext(
        schema=window.schema,
        used_N=used_N,
        exposed_N=exposed_N,
        first_step=window.first_step,
        present_s=settings.min_event_fraction * exposed_s,
        track=_track(past.track, replays, units, roles, used_N, window.first_step),
        events={unit: one.events_of(unit, settings) for one in (ranks, hosts) for unit in one.units if one.named(unit)},
        recurrences=_recurrences(units, ranks, hosts, past.recurrences, settings),
        onsets=past.onsets,
        known_alone=known_alone,
        noted_NR=window.noted_NR,
        alone=named_alone(known_alone, ranks, ranks.next_step - first_step, usual_s, settings),
        settings=settings,
    )
    candidates = _single(units, context)
    onsets = _onsets(candidates, context)
    if normal is not None:
        candidates += _shared(group_candidates(like, normal, roles, context, exposed_s), past.named, settings)
    named = {one.suspect.ranks: one.suspect for one in candidates if is_named(one)}
    return WindowEvidence(
        exposed_s=exposed_s,
        used_N=used_N,
        seen=seen,
        like=like,
        regime=regime,
        normal=normal,
        excess=excess_of(seen, like, normal, n_ranks, settings),
        candidates=_ranked(candidates, LISTED_FRACTION * exposed_s * float(used_N.sum())),
        gain_R=_gain_by_rank(replays, used_N, n_ranks),
        single_s=max((float(unit.gain_NS[used_N].mean(axis=0).max()) for unit in units), default=0.0),
        roles=roles,
        alone=context.alone,
        counts={ranks: counts_of(suspect, window) for ranks, suspect in named.items()},
        measures=measures,
        before=past,
        after=replace(
            past,
            ranks=ranks,
            hosts=hosts,
            track=context.track,
            onsets=onsets,
            recurrences=context.recurrences,
            alone=known_alone,
            first_step=first_step,
            own=_own_times(past.own, whole, regime, like_N, ranks, window.first_step, settings),
            replayed=remembered(window, roles, replays) if valid_N.all() else None,
            exchanged=True,
        ),
        settings=settings,
    )


def _known_alone(
    window: Window,
    replays: Sequence[SegmentReplay],
    valid_N: BoolArray,
    usual_s: float,
    past: Past,
    settings: Settings,
) -> Known:
    """What ranks do alone by their own notes, after the window's new steps.

    What a rank marks costs what it does, also where others make the step a special one.
    """
    if window.noted_NR is None:
        return past.alone
    n_steps, n_ranks, _ = window.durations_NRS.shape
    new_N = valid_N & (window.first_step + np.arange(n_steps) >= past.ranks.next_step)
    arrivals = arrivals_of_ranks(replays, n_ranks)
    events = clear_events(arrivals, replays, new_N, window.first_step, usual_s, settings.min_event_fraction)
    lost_s = {(one.unit, one.step): one.share * usual_s for one in events}
    return known_after(past.alone, window.noted_NR, new_N, window.first_step, lost_s)


def _held_back(
    units: Sequence[Unit],
    window: Window,
    whole: Profile,
    normal: Typical | None,
    exposed_N: FloatArray,
    used_N: BoolArray,
    settings: Settings,
) -> list[Unit]:
    """The units, each with what it adds to the sync stages while the system keeps it from running.

    How long the sync stages take by themselves is known from a baseline alone: without one, contention is left out.
    """
    held = HeldBack.of(window, limited=normal is None)
    if held is None:
        return list(units)
    longer_NS = np.clip(whole.sync_NS - (0.0 if normal is None else normal.sync_S), 0.0, None)
    healthy_s = 0.0 if normal is None else normal.total_s
    return [
        one
        if is_marked(window.noted_NR, one.name, one.gain_NS[:, -1] * used_N, settings)
        else charged(one, held, exposed_N, longer_NS, healthy_s, used_N, settings)
        for one in units
    ]


def _main_regime(window: Window, used_N: BoolArray) -> tuple[Regime, BoolArray]:
    """The most frequent regime of the steps that count, and its steps."""
    regime_N = regimes_of(window)
    regime = Counter(one for one, used in zip(regime_N, used_N, strict=True) if used).most_common(1)[0][0]
    return regime, used_N & np.asarray([one == regime for one in regime_N])


def _normal(baseline: Baseline, regime: Regime, like: Profile) -> Typical | None:
    """A typical healthy step of a regime; None if none is known, or if the cohorts have changed since."""
    normal = baseline.typical(regime)
    return None if normal is None or normal.level_CS.shape != like.level_NCS.shape[1:] else normal


def _own_times(
    before: OwnTimes,
    whole: Profile,
    regime: Regime,
    like_N: BoolArray,
    ranks: Evidence,
    first_step: int,
    settings: Settings,
) -> OwnTimes:
    """The local times of two ranks, with the steps before any fault that is likely by now."""
    likely = settings.most_fraction * settings.naming_log_odds
    began = min((one.onset for one in ranks.units.values() if max(one.log_odds) >= likely), default=None)
    step_N = first_step + np.arange(len(like_N))
    if began is not None:
        like_N = like_N & (step_N < began)
    if like_N.sum() < settings.min_away_steps:
        return before
    return before.after(regime, whole.of(like_N), int(step_N[like_N][-1]))


def _evidence(
    window: Window,
    replays: list[SegmentReplay],
    roles: Roles,
    exposed_N: FloatArray,
    used_N: BoolArray,
    past: Past,
    settings: Settings,
) -> tuple[Evidence, Evidence, list[Unit], float]:
    """The tests of ranks and of hosts after a window's steps, the units that delayed it most, and the usual step."""
    n_steps, n_ranks, _ = window.durations_NRS.shape
    held_N = np.sum([one.whole_gain_M[:n_steps] for one in replays], axis=0)
    usual_s = float(medians((exposed_N - held_N)[used_N])) or float(exposed_N[used_N].mean())

    def advance(before: Evidence, arrivals: Arrivals) -> Evidence:
        """The tests with the steps that are new to them."""
        n_units = len(arrivals.names)
        if before.n_units != n_units:
            before = Evidence(n_units, before.next_step)
        new_N = used_N & (window.first_step + np.arange(n_steps) >= before.next_step)
        least = settings.min_event_fraction
        events = clear_events(arrivals, replays, new_N, window.first_step, usual_s, least)
        return advanced(before, events, max(before.next_step, window.last_step + 1), settings)

    least_s = LISTED_FRACTION * float(exposed_N[used_N].sum())
    of_ranks = arrivals_of_ranks(replays, n_ranks)
    ranks = advance(past.ranks, of_ranks)
    units = rank_units(replays, units_to_examine(of_ranks, ranks, least_s), roles, n_steps)
    places = places_of(window.hosts)
    if places is None:
        return ranks, past.hosts, units, usual_s
    elsewhere = [last_elsewhere(one, places) for one in replays]
    of_hosts = arrivals_of_hosts(replays, elsewhere, places, settings)
    hosts = advance(past.hosts, of_hosts)
    examined = units_to_examine(of_hosts, hosts, least_s)
    alike = settings.larger_part_fraction
    units += host_units(replays, places, elsewhere, examined, roles, n_steps, alike)
    return ranks, hosts, units, usual_s


def _track(
    before: Track, replays: Sequence[SegmentReplay], units: Sequence[Unit], roles: Roles, used_N: BoolArray, first: int
) -> Track:
    """The track of all ranks of a small job, or of those examined, and of the hosts examined, with a window's steps."""
    over = {unit.name: unit.over_NS[used_N] for unit in units}
    n_ranks = len(roles.role_R)
    rest = [rank for rank in range(n_ranks) if rank not in over] if n_ranks <= MAX_EXAMINED else []
    if rest:
        over_NXS = np.sum([one.over_NXS(np.asarray(rest, np.intp), roles, len(used_N)) for one in replays], axis=0)
        over |= {rank: over_NXS[used_N, x] for x, rank in enumerate(rest)}
    return before.after(first + np.flatnonzero(used_N), over)


def _onsets(candidates: Sequence[Candidate], context: WindowContext) -> dict[OnsetKey, Onset]:
    """The onsets of what is named now, and of units that are named still but are not in the window."""
    still = context.events.keys() | context.recurrences.keys()
    found = {key: onset for key, onset in context.onsets.items() if key[0] in still}
    for one in filter(is_named, candidates):
        assert one.course is not None
        if one.course.own_steps is not None:
            continue
        name = one.suspect.host if one.suspect.rank is None else one.suspect.rank
        assert name is not None
        found[name, one.suspect.stage, one.course.period] = one.course.onset
    return found


def _recurrences(
    units: Sequence[Unit], ranks: Evidence, hosts: Evidence, before: Mapping[UnitName, Recurrence], settings: Settings
) -> dict[UnitName, Recurrence]:
    """The recurrence of each unit that has one; its onset is the one that was found first."""
    found = {}
    for unit in units:
        one = recurrence_of(ranks if unit.scope == "rank" else hosts, unit.name, settings)
        if one is not None:
            known = before.get(unit.name, one)
            same = (known.period, known.phase) == (one.period, one.phase)
            found[unit.name] = replace(one, onset=known.onset) if same else one
    return found


def _single(units: list[Unit], context: WindowContext) -> list[Candidate]:
    """Candidates of scope rank and host: a host instead of its ranks where these are slow alike."""
    found: list[Candidate] = []
    # ranks come first
    for unit in units:
        here = candidates_of(unit, context)
        if unit.scope == "host":
            mine = [one for one in found if one.suspect.rank in unit.ranks]
            best_s = max((one.total_s for one in here), default=0.0)
            if max((one.total_s for one in mine), default=0.0) >= context.settings.larger_part_fraction * best_s:
                continue
            found = [one for one in found if one.suspect.rank not in unit.ranks]
        found += here
    return found


def _shared(alike: list[Candidate], named: Suspect | None, settings: Settings) -> list[Candidate]:
    """Candidates of scope cohort and all from their threshold on: below it they are drift, and no rival to a rank."""
    kept = named is not None and not is_single(named)
    least = settings.min_group_fraction * (settings.most_fraction if kept else 1.0)
    return [one for one in alike if one.suspect.share >= least]


def _gain_by_rank(replays: list[SegmentReplay], used_N: BoolArray, n_ranks: int) -> FloatArray:
    """What mending the last rank of each step would have saved, by rank."""
    leader_GN = np.stack([one.walk.leader_M[: len(used_N)] for one in replays])[:, used_N]
    gain_GN = np.stack([one.whole_gain_M[: len(used_N)] for one in replays])[:, used_N]
    return np.bincount(leader_GN.ravel(), gain_GN.ravel(), n_ranks).astype(np.float64)


def _ranked(candidates: list[Candidate], min_total_s: float) -> tuple[Candidate, ...]:
    """Candidates with the largest total gain first, and without very small ones; of equals the whole before a stage.

    Recurring ones stay in any case: what recurs in few steps gains little over all of them.
    """
    kept = [one for one in candidates if one.total_s >= min_total_s or one.suspect.pattern == "recurring"]
    return tuple(sorted(kept, key=lambda one: (-one.total_s, one.suspect.stage is not None)))
