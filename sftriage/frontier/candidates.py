"""Candidates for the suspect: ranks, hosts, cohorts and all ranks, in one stage or as a whole, each with its gain.

Only the rank that arrives last can have a gain, so that only ranks and hosts that did are examined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sftriage.decisions import Scope, Suspect
from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray, medians
from sftriage.frontier.baseline import Profile, Typical
from sftriage.frontier.course import Course, Onset, course_of, recurring_course
from sftriage.frontier.roles import Roles
from sftriage.frontier.sequential import Recurrence, UnitName
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import SegmentReplay
from sftriage.records import StageSchema


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A possible suspect.

    Attributes:
        suspect: who, in which stage, with its numbers.
        gain_N: what mending it would have saved in each step, in seconds.
        lateness_N: its lateness in the steps in which it arrived last, 0 in the others, in seconds.
        total_s: the sum of ``gain_N``.
        course: when it was present; None if the evidence of the run has not named it.
        exposed_s: the mean exposed time of the steps that it fills.
    """

    suspect: Suspect
    gain_N: FloatArray
    lateness_N: FloatArray
    total_s: float
    course: Course | None
    exposed_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One rank, or the ranks of one host, in seconds.

    Attributes:
        gain_NS: what mending each stage would have saved; the last column is of all local stages together.
        over_NS: its local time over its peers'.
        lateness_N: its lateness in the steps in which it arrived last, 0 in the others.
    """

    name: UnitName
    ranks: tuple[int, ...]
    gain_NS: FloatArray
    over_NS: FloatArray
    lateness_N: FloatArray

    @property
    def scope(self) -> Scope:
        """``rank`` or ``host``."""
        return "host" if isinstance(self.name, str) else "rank"


@dataclass(frozen=True, slots=True, eq=False)
class WindowContext:
    """What all candidates of a window are measured against.

    Attributes:
        used_N: the steps that count.
        exposed_N: the exposed time of each step, in seconds.
        present_s: a candidate is present in a step if its gain there is at least this.
        onsets: the onset of each unit that the evidence of the run has named.
        recurrences: those of units whose fault is recurring.
    """

    schema: StageSchema
    used_N: BoolArray
    exposed_N: FloatArray
    first_step: int
    present_s: float
    onsets: Mapping[UnitName, Onset]
    recurrences: Mapping[UnitName, Recurrence]
    settings: Settings


def rank_units(replays: Sequence[SegmentReplay], ranks: Sequence[int], roles: Roles, n_steps: int) -> list[Unit]:
    """The units of some ranks."""
    n_stages = replays[0].excess_MS.shape[1]
    over_NXS = np.sum([one.over_NXS(np.asarray(ranks, np.intp), roles, n_steps) for one in replays], axis=0)
    units = []
    for x, rank in enumerate(ranks):
        gain_NS, lateness_N = np.zeros((n_steps, n_stages + 1)), np.zeros(n_steps)
        for one in replays:
            mine_M = one.walk.leader_M == rank
            lateness_N += (one.lateness_M * mine_M)[:n_steps]
            gain_MS = np.column_stack([one.gain_MS, one.whole_gain_M]) * mine_M[:, None]
            gain_NS += by_step(gain_MS, one.offset_S, n_steps)
        units.append(Unit(rank, (rank,), gain_NS, over_NXS[:, x], lateness_N))
    return units


def by_step(gain_MS: FloatArray, offset_S: RankArray, n_steps: int) -> FloatArray:
    """Gains by row of a segment as gains by step: a delay after a step's last sync shows in the next step's row."""
    gain_NS = np.zeros((n_steps, gain_MS.shape[1]))
    total_S = gain_MS[:, :-1].sum(axis=0)
    # The whole belongs to the step to which most of it does.
    offsets = (*offset_S, offset_S[total_S.argmax()] if len(total_S) else 0)
    for s, offset in enumerate(offsets):
        part_M = gain_MS[offset : offset + n_steps, s]
        gain_NS[: len(part_M), s] += part_M
        if offset:
            gain_NS[0, s] += gain_MS[0, s]
        elif len(gain_MS) > n_steps:
            gain_NS[-1, s] += gain_MS[n_steps:, s].sum()
    return gain_NS


def candidates_of(unit: Unit, context: WindowContext) -> list[Candidate]:
    """A unit's candidates: each stage with a gain, and the unit as a whole where no stage dominates.

    Whether one dominates is judged by the local time over all steps. Gains would mislead: they end at the next rank's
    arrival, so that two slow stages look alike, and jitter does not cancel in the rows that a rank happened to lead.
    """
    found = []
    n_stages = len(context.schema.stages)
    whole_N = context.used_N & (unit.gain_NS[:, -1] >= context.present_s)
    course = _course(unit, whole_N, context)
    tells = one_stage_dominates(unit.over_NS[context.used_N].mean(axis=0), context.settings)
    for s in range(n_stages + 1):
        gain_N = unit.gain_NS[:, s] * context.used_N
        led_N = (gain_N >= context.present_s) & (gain_N > 0.0)
        if led_N.any() and (s < n_stages or not tells):
            stage = context.schema.stages[s] if s < n_stages else None
            found.append(_candidate(unit, stage, gain_N, led_N, course, context))
    return found


def _course(unit: Unit, present_N: BoolArray, context: WindowContext) -> Course | None:
    """The course of a unit that the evidence of the run has named; None of any other, and if it was not present."""
    recurrence = context.recurrences.get(unit.name)
    if recurrence is not None:
        back = recurring_course(recurrence, context.first_step, context.used_N)
        between_N = context.used_N & ~back.filled_N
        if 2 * (present_N & between_N).sum() <= between_N.sum():
            return back if back.filled_N.any() else None
    if unit.name not in context.onsets:
        return None
    course = course_of(present_N, context.first_step, context.onsets[unit.name], context.settings)
    filled_N = context.used_N if course is None else course.filled_N & context.used_N
    return None if course is None or not filled_N.any() else replace(course, filled_N=filled_N)


def _candidate(
    unit: Unit,
    stage: str | None,
    gain_N: FloatArray,
    present_N: BoolArray,
    course: Course | None,
    context: WindowContext,
) -> Candidate:
    filled_N = context.used_N if course is None else course.filled_N
    gain_s, exposed_s = float(gain_N[filled_N].mean()), float(context.exposed_N[filled_N].mean())
    suspect = Suspect(
        scope=unit.scope,
        ranks=unit.ranks,
        rank=unit.ranks[0] if unit.scope == "rank" else None,
        host=unit.name if isinstance(unit.name, str) else None,
        stage=stage,
        gain_s=gain_s,
        # (what comes after a step's last sync is that step's, and held up the next one)
        share=min(1.0, _added_s(unit, stage, gain_s, course, context) / exposed_s) if exposed_s > 0.0 else 0.0,
        persistence=float(present_N[context.used_N].mean()),
        pattern=course.pattern if course is not None else "one-off",
        period_steps=course.period if course is not None else None,
        onset_step=course.onset.step if course is not None else None,
        onset_range=(course.onset.earliest, course.onset.latest) if course is not None else None,
    )
    return Candidate(suspect, gain_N, unit.lateness_N, float(gain_N.sum()), course, exposed_s)


def _added_s(unit: Unit, stage: str | None, gain_s: float, course: Course | None, context: WindowContext) -> float:
    """What a suspect adds to a step that it fills, in seconds: its gain.

    The jitter of others hides part of the gain. So if the unit is steadily over its peers, this is its time over them,
    up to what is just worth a capture.
    """
    if course is None or course.pattern != "chronic":
        return gain_s
    worth_s = context.settings.min_gain_fraction * float(context.exposed_N[course.filled_N].mean())
    if not context.settings.min_seen_fraction * worth_s <= gain_s < worth_s:
        return gain_s
    over_NS = unit.over_NS[course.filled_N]
    over_N = over_NS.sum(axis=1) if stage is None else over_NS[:, context.schema.stages.index(stage)]
    return max(gain_s, min(float(medians(over_N)), worth_s))


def one_stage_dominates(over_S: FloatArray, settings: Settings) -> bool:
    """Whether one stage has nearly all of a unit's time over its peers."""
    over_S = np.clip(over_S, 0.0, None)
    return bool(over_S.max() >= settings.min_part_fraction * over_S.sum())


def group_candidates(
    seen: Profile, normal: Typical, roles: Roles, context: WindowContext, exposed_s: float
) -> list[Candidate]:
    """Candidates of scope cohort and all: local stages that are slower than the baseline on (nearly) all their ranks.

    Levels are medians over the window's steps; ``persistence`` is the fraction of steps whose own level is nearer to
    the window's than to the baseline's. ``seen`` is the profile of the steps that can be compared with ``normal``, a
    typical healthy step of the job in the same regime.
    """
    common_CS = seen.typical.common_CS
    # A median of few steps may exceed their mean, and no more can be saved than was spent.
    mean_rise_CS = np.clip(seen.common_NCS - normal.common_CS, 0.0, None).mean(axis=0)
    rise_CS = np.minimum(np.clip(common_CS - normal.common_CS, 0.0, None), mean_rise_CS)
    min_s = context.settings.min_group_fraction * exposed_s
    slow_C = rise_CS.sum(axis=1) >= min_s / 2
    if slow_C.all():
        return _group("all", "", tuple(range(len(roles.role_R))), rise_CS.min(axis=0), seen, normal, context, exposed_s)
    found = []
    for c in np.flatnonzero(slow_C):
        # All wait for the slowest cohort: only its lead over the others can be saved.
        others_s = float(np.delete(seen.typical.level_CS.sum(axis=1), c).max())
        ahead_s = max(0.0, float(seen.typical.level_CS[c].sum()) - others_s)
        rise_S = np.minimum(rise_CS[c], ahead_s)
        ranks = tuple(int(rank) for rank in roles.members[c])
        found += _group("cohort", roles.names[c], ranks, rise_S, seen, normal, context, exposed_s, int(c))
    return found


def _group(
    scope: Scope,
    name: str,
    ranks: tuple[int, ...],
    rise_S: FloatArray,
    seen: Profile,
    normal: Typical,
    context: WindowContext,
    exposed_s: float,
    cohort: int = 0,
) -> list[Candidate]:
    level_NS, normal_S = seen.common_NCS[:, cohort], normal.common_CS[cohort]
    found = []

    def add(stage: str | None, gain_s: float, slow_N: BoolArray) -> None:
        suspect = Suspect(
            scope,
            ranks,
            stage,
            gain_s,
            gain_s / exposed_s,
            float(slow_N.mean()),
            cohort=name or None,
            onset_step=context.first_step + (int(slow_N.argmax()) if slow_N.any() else 0),
        )
        course = Course("chronic", slow_N, Onset(*(context.first_step,) * 3))
        gain_N = np.full(len(context.used_N), gain_s)
        found.append(Candidate(suspect, gain_N, np.zeros(len(gain_N)), gain_s * len(slow_N), course, exposed_s))

    for s in np.flatnonzero(rise_S):
        half_s = (medians(level_NS[:, s]) + normal_S[s]) / 2
        add(context.schema.stages[s], float(rise_S[s]), level_NS[:, s] > half_s)
    if found and not one_stage_dominates(rise_S, context.settings):
        total_N = level_NS.sum(axis=1)
        add(None, float(rise_S.sum()), total_N > (medians(total_N) + normal_S.sum()) / 2)
    return found
