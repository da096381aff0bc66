"""Who could be the suspect: ranks, hosts, cohorts and all, in a stage or as a whole, each with its gain.

Only who arrives last can have a gain: so the ranks and hosts that led are looked at, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sftriage.frontier.arrays import BoolArray, FloatArray, RankArray, medians
from sftriage.frontier.baseline import Profile, Typical
from sftriage.frontier.course import Course, Onset, course_of, recurring
from sftriage.frontier.roles import Roles
from sftriage.frontier.sequential import Rhythm, UnitName
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import SegmentReplay
from sftriage.records import Scope, StageSchema, Suspect


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A suspect, and when it was there.

    ``gain_N`` is what mending it would have saved, step by step, and ``total_s`` over the window; ``lateness_N`` how
    late the last of all was where it was the last. ``exposed_s`` is the mean exposed time of the steps that it fills.
    """

    suspect: Suspect
    gain_N: FloatArray
    lateness_N: FloatArray
    total_s: float
    course: Course | None
    exposed_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One rank, or the ranks of one host, and what mending it would have saved.

    ``gain_NS`` is by step and stage, and in its last column for all local stages together; ``over_NS`` is the local
    time over that of the peers; ``lateness_N`` how late the last of all was where it was the last.
    """

    name: UnitName
    ranks: tuple[int, ...]
    gain_NS: FloatArray
    over_NS: FloatArray
    lateness_N: FloatArray

    @property
    def scope(self) -> Scope:
        """What it is."""
        return "host" if isinstance(self.name, str) else "rank"


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """What every candidate of a window is measured against: names, the steps that count (``used_N``), the thresholds.

    A suspect is present in a step where its gain is at least ``present_s``. ``onsets`` are those of the units that the
    evidence of the run has named, and ``rhythms`` what comes back of them.
    """

    schema: StageSchema
    used_N: BoolArray
    exposed_N: FloatArray
    first_step: int
    present_s: float
    onsets: Mapping[UnitName, Onset]
    rhythms: Mapping[UnitName, Rhythm]
    settings: Settings


def rank_units(replays: Sequence[SegmentReplay], ranks: Sequence[int], roles: Roles, n_steps: int) -> list[Unit]:
    """Some ranks, each with its gains."""
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
    """Gains of a segment's rows as gains of steps: what came after a step's last sync held up the next step's row."""
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


def suspects_of(unit: Unit, scene: Scene) -> list[Candidate]:
    """A unit's candidates: each stage of it that gains, and the whole of it where no stage tells.

    Which it is is judged by its time over all steps: gains are cut off at the next rank's arrival, where two slow
    stages look the same, and jitter does not cancel out of the rows that a rank happened to lead.
    """
    found = []
    n_stages = len(scene.schema.stages)
    whole_N = scene.used_N & (unit.gain_NS[:, -1] >= scene.present_s)
    course = _course(unit, whole_N, scene)
    tells = stage_tells(unit.over_NS[scene.used_N].mean(axis=0), scene.settings)
    for s in range(n_stages + 1):
        gain_N = unit.gain_NS[:, s] * scene.used_N
        led_N = (gain_N >= scene.present_s) & (gain_N > 0.0)
        if led_N.any() and (s < n_stages or not tells):
            stage = scene.schema.stages[s] if s < n_stages else None
            found.append(_candidate(unit, stage, gain_N, led_N, course, scene))
    return found


def _course(unit: Unit, present_N: BoolArray, scene: Scene) -> Course | None:
    """When a unit that the evidence of the run has named was there; None of any other, and where it was not."""
    rhythm = scene.rhythms.get(unit.name)
    if rhythm is not None:
        back = recurring(rhythm, scene.first_step, scene.used_N)
        between_N = scene.used_N & ~back.filled_N
        if 2 * (present_N & between_N).sum() <= between_N.sum():
            return back if back.filled_N.any() else None
    if unit.name not in scene.onsets:
        return None
    course = course_of(present_N, scene.first_step, scene.onsets[unit.name], scene.settings)
    filled_N = scene.used_N if course is None else course.filled_N & scene.used_N
    return None if course is None or not filled_N.any() else replace(course, filled_N=filled_N)


def _candidate(
    unit: Unit,
    stage: str | None,
    gain_N: FloatArray,
    present_N: BoolArray,
    course: Course | None,
    scene: Scene,
) -> Candidate:
    filled_N = scene.used_N if course is None else course.filled_N
    gain_s, exposed_s = float(gain_N[filled_N].mean()), float(scene.exposed_N[filled_N].mean())
    suspect = Suspect(
        scope=unit.scope,
        ranks=unit.ranks,
        rank=unit.ranks[0] if unit.scope == "rank" else None,
        host=unit.name if isinstance(unit.name, str) else None,
        stage=stage,
        gain_s=gain_s,
        # (what comes after a step's last sync is that step's, and held up the next one)
        share=min(1.0, _added_s(unit, stage, gain_s, course, scene) / exposed_s) if exposed_s > 0.0 else 0.0,
        persistence=float(present_N[scene.used_N].mean()),
        pattern=course.pattern if course is not None else "one-off",
        period_steps=course.period if course is not None else None,
        onset_step=course.onset.step if course is not None else None,
        onset_range=(course.onset.earliest, course.onset.latest) if course is not None else None,
    )
    return Candidate(suspect, gain_N, unit.lateness_N, float(gain_N.sum()), course, exposed_s)


def _added_s(unit: Unit, stage: str | None, gain_s: float, course: Course | None, scene: Scene) -> float:
    """What a suspect adds to a step that it fills, in seconds: its gain.

    Where it is steadily over its peers, up to what is just worth a capture, that is added however much of its gain the
    jitter of others hides.
    """
    if course is None or course.pattern != "chronic":
        return gain_s
    worth_s = scene.settings.min_gain_fraction * float(scene.exposed_N[course.filled_N].mean())
    if not scene.settings.min_seen_fraction * worth_s <= gain_s < worth_s:
        return gain_s
    over_NS = unit.over_NS[course.filled_N]
    over_N = over_NS.sum(axis=1) if stage is None else over_NS[:, scene.schema.stages.index(stage)]
    return max(gain_s, min(float(medians(over_N)), worth_s))


def stage_tells(over_S: FloatArray, settings: Settings) -> bool:
    """Whether one stage has nearly all of what a scope is over its peers."""
    over_S = np.clip(over_S, 0.0, None)
    return bool(over_S.max() >= settings.min_part_fraction * over_S.sum())


def group_candidates(seen: Profile, normal: Typical, roles: Roles, scene: Scene, exposed_s: float) -> list[Candidate]:
    """Local stages slower on (nearly) every rank of a cohort, or of all of them, than the baseline, and all together.

    Levels are medians over the window's steps, so what is found here is in most of them; ``persistence`` is the
    fraction of steps whose own level is nearer to the window's than to the baseline's. ``seen`` are the steps that can
    be compared with ``normal``, a typical healthy step of the job in the same regime.
    """
    common_CS = seen.typical.common_CS
    # A median of few steps may be over their mean, and what is saved is no more than what was spent.
    mean_rise_CS = np.clip(seen.common_NCS - normal.common_CS, 0.0, None).mean(axis=0)
    rise_CS = np.minimum(np.clip(common_CS - normal.common_CS, 0.0, None), mean_rise_CS)
    min_s = scene.settings.min_group_fraction * exposed_s
    slow_C = rise_CS.sum(axis=1) >= min_s / 2
    if slow_C.all():
        return _group("all", "", tuple(range(len(roles.role_R))), rise_CS.min(axis=0), seen, normal, scene, exposed_s)
    found = []
    for c in np.flatnonzero(slow_C):
        # Only what it has over the other cohorts' total can be saved: they all wait for the slowest.
        others_s = float(np.delete(seen.typical.level_CS.sum(axis=1), c).max())
        ahead_s = max(0.0, float(seen.typical.level_CS[c].sum()) - others_s)
        rise_S = np.minimum(rise_CS[c], ahead_s)
        ranks = tuple(int(rank) for rank in roles.members[c])
        found += _group("cohort", roles.names[c], ranks, rise_S, seen, normal, scene, exposed_s, int(c))
    return found


def _group(
    scope: Scope,
    name: str,
    ranks: tuple[int, ...],
    rise_S: FloatArray,
    seen: Profile,
    normal: Typical,
    scene: Scene,
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
            onset_step=scene.first_step + (int(slow_N.argmax()) if slow_N.any() else 0),
        )
        course = Course("chronic", slow_N, Onset(*(scene.first_step,) * 3))
        gain_N = np.full(len(scene.used_N), gain_s)
        found.append(Candidate(suspect, gain_N, np.zeros(len(gain_N)), gain_s * len(slow_N), course, exposed_s))

    for s in np.flatnonzero(rise_S):
        half_s = (medians(level_NS[:, s]) + normal_S[s]) / 2
        add(scene.schema.stages[s], float(rise_S[s]), level_NS[:, s] > half_s)
    if found and not stage_tells(rise_S, scene.settings):
        total_N = level_NS.sum(axis=1)
        add(None, float(rise_S.sum()), total_N > (medians(total_N) + normal_S.sum()) / 2)
    return found
