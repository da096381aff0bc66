"""What a verdict is taken from: one window accounted, replayed, and put beside what is known of the job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sftriage.frontier.accounting import Accounting, Walk
from sftriage.frontier.arrays import BoolArray, FloatArray
from sftriage.frontier.baseline import (
    Baseline,
    Excess,
    Profile,
    Regime,
    Typical,
    excess_of,
    normal_lateness_s,
    profile,
    regimes_of,
)
from sftriage.frontier.candidates import Candidate, Scene, Unit, group_candidates, rank_units, suspects_of
from sftriage.frontier.hosts import host_units
from sftriage.frontier.measuring import measured
from sftriage.frontier.recurrence import History, recurrences
from sftriage.frontier.regression import OwnBest, StepMeasures
from sftriage.frontier.roles import roles_of
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import replay
from sftriage.records import Suspect, Window

LISTED_FRACTION = 0.01
"""A candidate that would save less than this fraction of the window is not worth a line."""

RANK_TELLS_FRACTION = 0.7
"""A rank with this much of its host's gain is the better name for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What the windows before have taught: all that a verdict needs to know besides the window itself.

    ``named`` is the suspect of the window before, ``own_best`` what the job's steps are held against, ``device`` the
    same of the windows that were judged on the device's clock; the rest is on the host's.
    """

    baseline: Baseline = field(default_factory=Baseline)
    history: History = field(default_factory=History)
    named: Suspect | None = None
    own_best: OwnBest = field(default_factory=OwnBest)
    device: Past | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WindowEvidence:
    """What the ladder looks at.

    ``used_N`` are the steps that count: complete, and of the kind that most of them are. ``like`` is the profile of
    those in the regime that most of them are in. ``best_gains_s`` is what mending whoever came last would have saved,
    step by step, as a mean. ``clear_gain_R`` is that by rank, summed over the steps in which it stands out of jitter,
    and ``clear_steps_R`` how many those are; ``history`` is that of the past with this window. ``measures`` are all
    its steps, as the job is tested against itself.
    """

    exposed_s: float
    used_N: BoolArray
    seen: Profile
    like: Profile
    regime: Regime
    normal: Typical | None
    normal_late_s: float
    excess: Excess
    candidates: tuple[Candidate, ...]
    best_gains_s: float
    clear_gain_R: FloatArray
    clear_steps_R: FloatArray
    history: History
    measures: StepMeasures

    @property
    def longer_s(self) -> float | None:
        """By how much a typical step is longer than a healthy one; None where none is known."""
        return None if self.normal is None else self.like.typical.total_s - self.normal.total_s


def used_steps(window: Window, valid_N: BoolArray) -> BoolArray:
    """The complete steps of the kind that most of them are; what a step of another kind leaves behind is left out too.

    A checkpoint is no slow training step, and the rank that wrote it arrives late in the step after it.
    """
    if window.kinds is None or len(set(window.kinds)) == 1:
        return valid_N
    kinds_N = np.asarray(window.kinds)
    main = Counter(kinds_N[valid_N].tolist()).most_common(1)[0][0]
    same_N: BoolArray = np.asarray(kinds_N == main)
    after_same_N = np.concatenate([[True], same_N[:-1]])
    used_N: BoolArray = valid_N & same_N & after_same_N
    return used_N if used_N.any() else valid_N & same_N


def weigh(
    window: Window, walks: list[Walk], accounting: Accounting, valid_N: BoolArray, past: Past, settings: Settings
) -> WindowEvidence:
    """Replay a window and put every candidate and every part of the excess beside each other."""
    n_steps, n_ranks, n_stages = window.durations_NRS.shape
    roles, used_N = roles_of(window), used_steps(window, valid_N)
    replays = replay(walks, roles, n_stages)
    whole = profile(replays, n_steps, roles)
    regime_N = regimes_of(window)
    regime = Counter(one for one, used in zip(regime_N, used_N, strict=True) if used).most_common(1)[0][0]
    seen, like = whole.of(used_N), whole.of(used_N & np.asarray([one == regime for one in regime_N]))
    normal = past.baseline.typical(regime)
    if normal is not None and normal.level_CS.shape != like.level_NCS.shape[1:]:
        normal = None  # the job has other cohorts than it had
    exposed_N = np.sum([one.end_M[:n_steps] for one in walks], axis=0)
    exposed_N[-1] += sum(float(one.end_M[n_steps:].sum()) for one in walks)
    exposed_s = float(exposed_N[used_N].mean()) or accounting.exposed_s / accounting.n_steps
    present_s = settings.present_fraction * settings.min_gain_fraction * exposed_s
    clear_s = max(present_s, settings.clear_sigmas * whole.jitter_s)
    units = rank_units(replays, roles, n_steps) + host_units(replays, window.hosts, roles, n_steps)
    late_s = {unit.ranks: np.where(used_N[:, None], unit.late_NS, np.nan) for unit in units}
    history = past.history.with_window(window.first_step, n_steps, late_s)
    scene = Scene(
        schema=window.schema,
        used_N=used_N,
        exposed_N=exposed_N,
        first_step=window.first_step,
        present_s=present_s,
        clear_s=clear_s,
        recurring=recurrences(history, list(late_s), n_steps, present_s),
        settings=settings,
    )
    candidates = _single(units, scene, past)
    if normal is not None:
        group = group_candidates(like, normal, roles, scene, exposed_s)
        # What all ranks share is drift below its threshold, and no rival to a rank.
        kept = past.named is not None and past.named.scope in ("all", "cohort")
        least = settings.min_group_fraction * (settings.keep_fraction if kept else 1.0)
        candidates += [candidate for candidate in group if candidate.suspect.share >= least]
    leader_NG = np.stack([one.walk.leader_M[:n_steps] for one in replays])[:, used_N]
    gain_NG = np.stack([one.whole_gain_M[:n_steps] for one in replays])[:, used_N]
    clear_NG = gain_NG >= clear_s
    counts = [
        np.bincount(leader_NG.ravel(), weights.ravel(), minlength=n_ranks).astype(np.float64)
        for weights in (gain_NG * clear_NG, clear_NG)
    ]
    return WindowEvidence(
        exposed_s=exposed_s,
        used_N=used_N,
        seen=seen,
        like=like,
        regime=regime,
        normal=normal,
        normal_late_s=normal_lateness_s(seen, normal, n_ranks, exposed_s, settings),
        excess=excess_of(seen, like, normal, n_ranks, exposed_s, settings),
        candidates=_ranked(candidates, LISTED_FRACTION * exposed_s * float(used_N.sum())),
        best_gains_s=float(gain_NG.sum()) / float(used_N.sum()),
        clear_gain_R=counts[0],
        clear_steps_R=counts[1],
        history=history,
        measures=measured(window, walks, whole, valid_N),
    )


def _single(units: list[Unit], scene: Scene, past: Past) -> list[Candidate]:
    """Ranks and hosts: the host where its ranks are slow alike, and otherwise the ranks."""
    found: list[Candidate] = []
    # ranks come first
    for unit in units:
        here = suspects_of(unit, scene, keep_fraction(past, unit, scene.settings))
        if unit.scope == "host":
            mine = [one for one in found if one.suspect.rank in unit.ranks]
            best_s = max((one.total_s for one in here), default=0.0)
            if max((one.total_s for one in mine), default=0.0) >= RANK_TELLS_FRACTION * best_s:
                continue
            found = [one for one in found if one.suspect.rank not in unit.ranks]
        found += here
    return found


def keep_fraction(past: Past, whose: Suspect | Unit, settings: Settings) -> float:
    """By how much the thresholds are lower for a suspect because the window before named it."""
    same = past.named is not None and (past.named.scope, past.named.ranks) == (whose.scope, whose.ranks)
    return settings.keep_fraction if same else 1.0


def _ranked(candidates: list[Candidate], min_total_s: float) -> tuple[Candidate, ...]:
    """What would have saved most first, without those that would hardly; of equals a whole scope before its stages.

    What comes back in few steps saves little over all of them.
    """
    kept = [one for one in candidates if one.total_s >= min_total_s or one.suspect.pattern == "recurring"]
    return tuple(sorted(kept, key=lambda one: (-one.total_s, one.suspect.stage is not None)))
