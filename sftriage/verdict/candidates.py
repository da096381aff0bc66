"""Candidates for the suspect: ranks, hosts, cohorts and all ranks, in one stage or as a whole, each with its gain.

What a rank does alone by its own note while the others wait (it compiles, evaluates, saves) is named by that note. A
rank that is last in the steps that it alone marked, and hardly ever in others, is so because of what it marked: that is
strong evidence, also where the steps are few and far apart. Where other ranks do the same at times of their own, no
rank is named: it is the job's work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sftriage.model.verdicts import OwnWork, Scope, Suspect
from sftriage.model.windows import StageSchema
from sftriage.verdict.accounting import BoolArray, FloatArray, RankArray, medians
from sftriage.verdict.course import Course, Onset, Track, course_of, onset_of, recurring_course
from sftriage.verdict.sequential import HISTORY_STEPS, MAX_DRIFT, Evidence, Recurrence
from sftriage.verdict.settings import Settings
from sftriage.verdict.units import Unit, UnitName
from sftriage.verdict.whatif import Profile, Roles, Typical

MIN_TIMES = 3
"""Times that a rank has held up the others with what it does alone, at least."""

MAX_RECENT = 32
"""Times that are remembered step by step."""

MAX_KNOWN = 256
"""Ranks and kinds that are remembered: those met last."""

MIN_COST_FRACTION = 0.01
"""What it costs of the time since the first time, at least, to be named for it."""

Known: TypeAlias = "Mapping[tuple[int, str], Alone]"


@dataclass(frozen=True, slots=True)
class Alone:
    """What one rank did alone, by one kind, in the run so far.

    Attributes:
        first_step: the first step in which it held up the others.
        times: the steps that it marked.
        late: those of them in which it held up the others.
        lost_s: what that has cost, in seconds.
        recent: the last steps that it marked, each with its cost.
    """

    first_step: int
    times: int = 0
    late: int = 0
    lost_s: float = 0.0
    recent: tuple[tuple[int, float], ...] = ()

    def after(self, step: int, lost_s: float) -> Alone:
        """With one more step that it marked."""
        first_step = step if lost_s and not self.late else self.first_step
        recent = (*self.recent, (step, lost_s))[-MAX_RECENT:]
        return Alone(first_step, self.times + 1, self.late + (lost_s > 0.0), self.lost_s + lost_s, recent)

    @property
    def period_steps(self) -> int | None:
        """The steps from one time to the next; None where they differ."""
        gaps = np.diff([step for step, _ in self.recent])
        usual = int(np.median(gaps)) if len(gaps) else 0
        # (of some times the steps are not known)
        times = np.maximum(np.round(gaps / max(1, usual)), 1)
        return usual if usual and (np.abs(gaps - times * usual) <= MAX_DRIFT * usual).all() else None

    @property
    def is_now_and_then(self) -> bool:
        """Whether most steps are without it: what is in every step is a fault like any other."""
        return len(self.recent) > 1 and float(np.median(np.diff([step for step, _ in self.recent]))) >= 2.0


def log_odds_of(alone: Alone, rank: int, ranks: Evidence, steps_seen: int, settings: Settings) -> float:
    """The log odds that a rank is last because of what it marked, against chance.

    By chance it is last there as often as in its other steps, by as much.
    """
    marked = {step for step, _ in alone.recent}
    usual_s = [one.share for one in ranks.events if one.unit == rank and one.step in marked]
    least = settings.most_fraction * float(np.median(usual_s)) if usual_s else 0.0
    others = sum(one.unit == rank and one.step not in marked and one.share > least for one in ranks.events)
    n_steps = max(1, min(steps_seen, HISTORY_STEPS) - len(marked))
    guilty, chance = settings.guilty_fractions[0], (others + 1.0) / (n_steps + 2.0)
    if chance >= guilty:
        return 0.0
    missed = alone.times - alone.late
    return alone.late * math.log(guilty / chance) + missed * math.log((1.0 - guilty) / (1.0 - chance))


def named_alone(
    known: Known, ranks: Evidence, steps_seen: int, usual_s: float, settings: Settings
) -> dict[int, tuple[str, Alone, float]]:
    """Of each rank that is named by its own notes: the kind, what is known of it, and the log odds."""
    found: dict[int, tuple[str, Alone, float]] = {}
    for (rank, kind), alone in known.items():
        if alone.late < MIN_TIMES or not alone.is_now_and_then:
            continue
        rivals = (one.lost_s for (other, same), one in known.items() if same == kind and other != rank)
        if max(rivals, default=0.0) >= settings.most_fraction * alone.lost_s:
            continue
        since_s = alone.lost_s + (ranks.next_step - alone.first_step) * usual_s
        log_odds = log_odds_of(alone, rank, ranks, steps_seen, settings)
        enough = log_odds >= settings.naming_log_odds and alone.lost_s >= MIN_COST_FRACTION * since_s
        if enough and (rank not in found or alone.lost_s > found[rank][1].lost_s):
            found[rank] = kind, alone, log_odds
    return found


def is_marked(noted_NR: NDArray[Any] | None, rank: int | str, gain_N: FloatArray, settings: Settings) -> bool:
    """Whether a rank marked steps in which most of what it cost was lost."""
    if noted_NR is None or isinstance(rank, str):
        return False
    marked_s = float(gain_N[noted_NR[:, rank] != ""].sum())
    return marked_s > 0.0 and marked_s >= settings.most_fraction * float(gain_N.sum())


def own_work(known: Known, rank: int, filled_N: BoolArray, noted_NR: NDArray[Any] | None) -> OwnWork | None:
    """What a rank alone did in most of the steps that its fault fills; None if it marked fewer."""
    if noted_NR is None or not filled_N.any():
        return None
    kinds: Sequence[str] = noted_NR[filled_N, rank].tolist()
    kind = max(set(kinds) - {""}, key=kinds.count, default="")
    alone = known.get((rank, kind))
    if alone is None or 2 * kinds.count(kind) < len(kinds):
        return None
    return OwnWork(kind, kinds.count(kind) / len(kinds), alone.late, alone.lost_s)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A possible suspect.

    Attributes:
        gain_N: what mending it would have saved in each step, in seconds.
        lateness_N: its lateness in the steps in which it arrived last, 0 in the others, in seconds.
        total_s: the sum of ``gain_N``.
        course: when it was present; None if the evidence of the run has not named it.
        lasting_share: what it adds to the steps from its onset to its end, as a fraction of their exposed time.
        exposed_s: the mean exposed time of the steps that it fills.
        dominant_stage: of a whole unit whose fault is recurring, the stage that has most of what comes back, if any.
    """

    suspect: Suspect
    gain_N: FloatArray
    lateness_N: FloatArray
    total_s: float
    course: Course | None
    lasting_share: float
    exposed_s: float
    dominant_stage: str | None = None


OnsetKey: TypeAlias = "tuple[UnitName, str | None, int | None]"
"""A unit, a stage of it or none, and the period of its fault or none."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowContext:
    """What all candidates of a window are measured against.

    Attributes:
        exposed_N: the exposed time of each step, in seconds.
        present_s: a candidate is present in a step if its gain there is at least this.
        track: the units' time over their peers in the last steps.
        events: of each unit that the evidence of the run has named, the steps of the clear events that did.
        recurrences: those of units whose fault is recurring.
        onsets: what was estimated before.
        known_alone: what ranks have done alone by their own notes, and ``noted_NR`` these notes.
        alone: of each rank that is named by its notes, which they are.
    """

    schema: StageSchema
    used_N: BoolArray
    exposed_N: FloatArray
    first_step: int
    present_s: float
    track: Track
    events: Mapping[UnitName, Sequence[int]]
    recurrences: Mapping[UnitName, Recurrence]
    onsets: Mapping[OnsetKey, Onset]
    known_alone: Known
    noted_NR: NDArray[Any] | None
    alone: Mapping[int, tuple[str, Alone, float]]
    settings: Settings


def candidates_of(unit: Unit, context: WindowContext) -> list[Candidate]:
    """A unit's candidates: each stage with a gain, and the unit as a whole where no stage dominates.

    Whether one dominates is judged by the local time over all steps that it fills. Gains would mislead: they end at the
    next rank's arrival, so that two slow stages look alike, and jitter does not cancel in the rows that a rank happened
    to lead.
    """
    found = []
    course = _course(unit, None, context)
    steady = None if course is None or course.pattern == "recurring" else course
    over_NS = unit.over_NS[context.used_N if steady is None else steady.filled_N]
    tells = one_stage_dominates(over_NS.mean(axis=0), context.settings)
    if steady is not None:
        # A few large hiccups in other stages change the mean, but not a typical step.
        typical_S, typical_s = medians(over_NS, axis=0), float(medians(over_NS.sum(axis=1)))
        enough_s = context.settings.most_fraction * max(context.present_s, typical_s)
        tells |= one_stage_dominates(typical_S, context.settings) and float(typical_S.max()) >= enough_s
    for s, stage in enumerate((*context.schema.stages, None)):
        gain_N = unit.gain_NS[:, s] * context.used_N
        led_N = (gain_N >= context.present_s) & (gain_N > 0.0)
        if led_N.any() and (stage is not None or unit.starved or not tells):
            own = course if stage is None else _course(unit, stage, context) or course
            found.append(_candidate(unit, stage, gain_N, led_N, own, context))
    return found


def _dominant_stage(unit: Unit, course: Course, context: WindowContext) -> str | None:
    """The stage that dominates what a recurring fault adds to the unit's other steps; None if none does."""
    between_N = context.used_N & ~course.filled_N
    if not between_N.any():
        return None
    added_S = unit.over_NS[course.filled_N].mean(axis=0) - medians(unit.over_NS[between_N], axis=0)
    return context.schema.stages[int(added_S.argmax())] if one_stage_dominates(added_S, context.settings) else None


def _course(unit: Unit, stage: str | None, context: WindowContext) -> Course | None:
    """The course of a unit in a stage, or in all: None if the evidence of the run has not named it, or it is not there.

    The onset is the change point in the unit's own time over its peers. Of what comes back, only its own steps count.
    """
    marked = _marked_course(unit, context)
    if marked is not None:
        return marked
    recurrence, events = context.recurrences.get(unit.name), context.events.get(unit.name)
    s = None if stage is None else context.schema.stages.index(stage)
    step_T, over_T = context.track.of(unit.name, s)
    over_N = unit.over_NS.sum(axis=1) if s is None else unit.over_NS[:, s]
    used_N, settings = context.used_N, context.settings
    if recurrence is not None:
        own_T = step_T % recurrence.period == recurrence.phase
        known = context.onsets.get((unit.name, stage, recurrence.period))
        times = step_T[own_T & (step_T >= recurrence.onset)].tolist()
        onset = onset_of(step_T[own_T], over_T[own_T], times, known, settings, over_T[~own_T])
        if onset is not None:
            there_N = used_N & (over_N >= onset.there_s)
            back = recurring_course(recurrence, there_N, context.first_step, onset, used_N)
            between_N = used_N & ~back.filled_N & (unit.gain_NS[:, -1] >= context.present_s)
            if 2 * between_N.sum() <= (used_N & ~back.filled_N).sum():
                return back if back.filled_N.any() else None
    if events is None:
        return None
    onset = onset_of(step_T, over_T, events, context.onsets.get((unit.name, stage, None)), settings)
    if onset is None:
        return None
    gain_N = unit.gain_NS[:, -1 if s is None else s]
    present_N = used_N & (gain_N >= context.present_s) & (gain_N > 0.0)
    course = course_of(present_N, used_N & (over_N >= onset.there_s), context.first_step, onset, settings)
    if course is None or not (course.filled_N & used_N).any():
        return None
    return replace(course, filled_N=course.filled_N & used_N, lasts_N=course.lasts_N & used_N)


def _marked_course(unit: Unit, context: WindowContext) -> Course | None:
    """The course of a rank that is named by its own notes: the steps that it marked; None of any other."""
    if not isinstance(unit.name, int) or unit.name not in context.alone or context.noted_NR is None:
        return None
    kind, alone, _ = context.alone[unit.name]
    filled_N = context.used_N & (context.noted_NR[:, unit.name] == kind)
    onset = Onset(*(alone.first_step,) * 3)
    own_steps = frozenset(step for step, _ in alone.recent)
    return Course("recurring", filled_N, filled_N, onset, alone.period_steps, own_steps) if filled_N.any() else None


def _candidate(
    unit: Unit, stage: str | None, gain_N: FloatArray, led_N: BoolArray, course: Course | None, context: WindowContext
) -> Candidate:
    filled_N = context.used_N if course is None else course.filled_N
    gain_s, exposed_s = float(gain_N[filled_N].mean()), float(context.exposed_N[filled_N].mean())
    # (what comes after a step's last sync is that step's, and held up the next one)
    added_s = _added_s(unit, stage, gain_s, exposed_s, course, context)
    suspect = Suspect(
        scope=unit.scope,
        ranks=unit.ranks,
        rank=unit.ranks[0] if unit.scope == "rank" else None,
        host=unit.name if isinstance(unit.name, str) else None,
        stage=stage,
        gain_s=gain_s,
        share=min(1.0, added_s / exposed_s) if exposed_s > 0.0 else 0.0,
        persistence=float(led_N[context.used_N].mean()),
        pattern="one-off",
    )
    lasting_share, dominant = suspect.share, None
    if course is not None:
        onset, rank = course.onset, suspect.rank
        suspect = replace(
            suspect,
            pattern=course.pattern,
            period_steps=course.period,
            onset_step=onset.step,
            onset_range=(onset.earliest, onset.latest),
            alone=None if rank is None else own_work(context.known_alone, rank, course.filled_N, context.noted_NR),
        )
        if course.pattern != "recurring" and onset.has_gaps:
            lasting_share = float(gain_N[course.lasts_N].sum() / context.exposed_N[course.lasts_N].sum())
        elif course.pattern == "recurring" and stage is None:
            dominant = _dominant_stage(unit, course, context)
    total_s = float(gain_N.sum())
    return Candidate(suspect, gain_N, unit.lateness_N, total_s, course, lasting_share, exposed_s, dominant)


def _added_s(
    unit: Unit, stage: str | None, gain_s: float, exposed_s: float, course: Course | None, context: WindowContext
) -> float:
    """What a suspect adds to a step that it fills, in seconds: its gain.

    The jitter of others hides part of the gain. So if the unit is steadily over its peers, this is its time over them,
    up to what is just worth a capture.
    """
    worth_s = context.settings.min_gain_fraction * exposed_s
    hidden = context.settings.smaller_part_fraction * worth_s <= gain_s < worth_s
    if course is None or course.pattern != "chronic" or not hidden:
        return gain_s
    over_NS = unit.over_NS[course.filled_N]
    over_N = over_NS.sum(axis=1) if stage is None else over_NS[:, context.schema.stages.index(stage)]
    return max(gain_s, min(float(medians(over_N)), worth_s))


def one_stage_dominates(over_S: FloatArray, settings: Settings) -> bool:
    """Whether one stage has nearly all of a unit's time over its peers."""
    over_S = np.clip(over_S, 0.0, None)
    return bool(over_S.max() >= settings.larger_part_fraction * over_S.sum())


def group_candidates(
    seen: Profile, normal: Typical, roles: Roles, context: WindowContext, exposed_s: float
) -> list[Candidate]:
    """Candidates of scope cohort and all: local stages that are slower than the baseline on (nearly) all their ranks.

    Levels are medians over the window's steps; ``persistence`` is the fraction of steps whose own level is nearer to
    the window's than to the baseline's. ``seen`` is the profile of the steps that can be compared with ``normal``, a
    typical healthy step of the job in the same regime.
    """
    level_CS = seen.typical.level_CS
    # A median of few steps may exceed their mean, and no more can be saved than was spent.
    mean_rise_CS = np.clip(seen.common_NCS - normal.common_CS, 0.0, None).mean(axis=0)
    rise_CS = np.minimum(np.clip(seen.typical.common_CS - normal.common_CS, 0.0, None), mean_rise_CS)
    slow_C = rise_CS.sum(axis=1) >= context.settings.min_group_fraction * exposed_s / 2
    found: list[Candidate] = []

    def add(scope: Scope, c: int, ranks: RankArray, rise_S: FloatArray) -> None:
        common_NS, usual_S = seen.common_NCS[:, c], normal.common_CS[c]
        parts: list[tuple[str | None, float, FloatArray, float]] = [
            (context.schema.stages[s], float(rise_S[s]), common_NS[:, s], float(usual_S[s]))
            for s in np.flatnonzero(rise_S)
        ]
        if parts and not one_stage_dominates(rise_S, context.settings):
            parts.append((None, float(rise_S.sum()), common_NS.sum(axis=1), float(usual_S.sum())))
        for stage, gain_s, common_N, usual_s in parts:
            slow_N = common_N > (medians(common_N) + usual_s) / 2
            suspect = Suspect(
                scope,
                tuple(ranks.tolist()),
                stage,
                gain_s,
                gain_s / exposed_s,
                float(slow_N.mean()),
                cohort=roles.names[c] or None if scope == "cohort" else None,
                onset_step=context.first_step + int(slow_N.argmax()),
            )
            course = Course("chronic", slow_N, slow_N, Onset(*(context.first_step,) * 3))
            gain_N, total_s = np.full(len(context.used_N), gain_s), gain_s * len(slow_N)
            found.append(Candidate(suspect, gain_N, np.zeros(len(gain_N)), total_s, course, suspect.share, exposed_s))

    if slow_C.all():
        add("all", 0, np.arange(len(roles.role_R)), rise_CS.min(axis=0))
        return found
    for c in np.flatnonzero(slow_C).tolist():
        # All wait for the slowest cohort: only its lead over the others can be saved.
        ahead_s = float(level_CS[c].sum()) - float(np.delete(level_CS.sum(axis=1), c).max())
        add("cohort", c, roles.members[c], np.minimum(rise_CS[c], max(0.0, ahead_s)))
    return found
