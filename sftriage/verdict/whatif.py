"""What-if replay: the exposed time that would be saved if one suspect were as its reference.

After arXiv 2505.05713: replace the suspect's durations by the median of its cohort, shrink every wait to what remains,
and compare. In a segment all ranks leave together, so the last arrival moves and the sync stage's own work stays; only
the rank that arrives last can have a gain by itself. `judging`, `evidence` and `units` call it.

Peers in the same step are no reference for what they all share; the job's past is. The baseline is a median over
healthy windows spread evenly over that past, one for each regime (kind of step, and size of its work), so that a
creeping slowdown does not become the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import Window
from sftriage.verdict.accounting import (
    BoolArray,
    FloatArray,
    RankArray,
    Segment,
    SingleArray,
    Walk,
    medians,
    walked,
)

SAMPLE_RANKS = 512
"""Ranks of a large cohort in its sample, drawn once. The error of their median is 6 % of one rank's jitter (1.25 /
√512), and numpy sorts up to this many single-precision numbers several times faster than a few more."""

ALL_SAMPLES_RANKS, LEAST_SAMPLE_RANKS = 1024, 64
"""Maximum ranks in all samples together, minimum ranks in one cohort's: with these, neither one rank more or less nor
single precision moves a median."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """The ranks that represent cohorts whose samples have the same size; ``whole``: these are all of their ranks."""

    roles_C: RankArray
    ranks_CX: RankArray
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class Roles:
    """A window's ranks grouped into cohorts or hosts: each rank's group (``role_R``), and each group's sample."""

    names: tuple[str, ...]
    role_R: RankArray
    members: tuple[RankArray, ...]
    samples: tuple[Sample, ...]

    @property
    def some_X(self) -> RankArray:
        """The ranks of the samples that are not whole, in their order."""
        parts = [sample.ranks_CX.ravel() for sample in self.samples if not sample.whole]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp)


def roles_of(window: Window) -> Roles:
    """The window's cohorts; one nameless cohort if none are declared."""
    return grouped(("",) * window.durations_NRS.shape[1] if window.cohorts is None else window.cohorts)


@lru_cache(maxsize=8)
def grouped(names: tuple[str, ...]) -> Roles:
    """The ranks grouped by name, in the order of the names; cached, as all windows of a job have the same."""
    number: dict[str, int] = {}
    role_R = np.asarray([number.setdefault(name, len(number)) for name in names], dtype=np.intp)
    by_role_R = np.argsort(role_R, kind="stable")
    ends = np.cumsum(np.bincount(role_R, minlength=len(number)))
    members = tuple(np.split(by_role_R, ends[:-1])[: len(number)])
    at_most = min(SAMPLE_RANKS, max(LEAST_SAMPLE_RANKS, ALL_SAMPLES_RANKS // max(1, len(members))))
    of_size: dict[tuple[int, bool], list[int]] = {}
    for c, ranks in enumerate(members):
        of_size.setdefault((min(len(ranks), at_most), len(ranks) <= at_most), []).append(c)
    samples = tuple(
        Sample(np.asarray(cohorts), np.stack([sampled(members[c], at_most) for c in cohorts]), whole)
        for (_, whole), cohorts in of_size.items()
    )
    for shared in (role_R, *members, *(sample.ranks_CX for sample in samples)):
        shared.setflags(write=False)
    return Roles(tuple(number), role_R, members, samples)


def sampled(ranks: RankArray, at_most: int = SAMPLE_RANKS) -> RankArray:
    """At most this many of the ranks: always the same random ones, so that they do not align with the hosts."""
    return ranks if len(ranks) <= at_most else ranks[_sample(len(ranks), at_most)]


@lru_cache(maxsize=64)
def _sample(count: int, size: int) -> RankArray:
    return np.sort(np.random.default_rng(0).choice(count, size, replace=False))


MAD_TO_SIGMA = 1.4826
"""Standard deviations in one median absolute deviation, for normal noise."""

JITTER_RANKS = 128
"""Ranks from which jitter, and whether ranks have different roles, is estimated: some thousand times."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentReplay(Walk):
    """A walk through one kind of segment with its replay, row by row, in seconds.

    Attributes:
        lateness_M: the last arrival less the median arrival of the leader's peers.
        reference_KMC: for each local column, the median of each cohort, the leader left out.
        common_KMC: the time that at least three quarters of each cohort's ranks take: it rises only if the whole group
            is slower.
        excess_KM, excess_MS: the leader's time over its peers' median, by local column and by stage.
        offset_S: the row offset of each stage: 1 for what came after the last sync.
    """

    lateness_M: FloatArray
    reference_KMC: FloatArray
    common_KMC: FloatArray
    excess_KM: FloatArray
    excess_MS: FloatArray
    offset_S: RankArray

    @property
    def margin_M(self) -> FloatArray:
        """The last arrival less the second last: no single rank can save more."""
        return self.last_M - self.second_M

    @property
    def gain_MS(self) -> FloatArray:
        """What fixing one stage of the leader alone would have saved."""
        return np.clip(np.minimum(self.margin_M[:, None], self.excess_MS), 0.0, None)

    @property
    def whole_gain_M(self) -> FloatArray:
        """What fixing all local stages of the leader would have saved."""
        return np.asarray(np.clip(np.minimum(self.margin_M, self.excess_MS.sum(axis=1)), 0.0, None))

    @property
    def references(self) -> list[FloatArray]:
        """The medians of each local column's steps, by cohort (N × C)."""
        columns = zip(self.segment.local, self.reference_KMC, strict=True)
        return [reference_MC[column.offset : column.offset + column.n_steps] for column, reference_MC in columns]

    def over_NXS(self, ranks: RankArray, roles: Roles, references: Sequence[FloatArray] | None = None) -> FloatArray:
        """Time of some ranks over the references of their cohorts, by step, rank and stage."""
        references = self.references if references is None else references
        over_NXS = np.zeros((self.segment.n_steps, len(ranks), self.segment.n_stages))
        for column, reference_NC in zip(self.segment.local, references, strict=True):
            over_NXS[:, :, column.stage] += column.of(ranks) - reference_NC[:, roles.role_R[ranks]]
        return over_NXS


def replayed(window: Window, roles: Roles) -> tuple[list[SegmentReplay], BoolArray]:
    """The replay of each segment of a window, in the order of a step, and the window's complete steps (N)."""
    walks, complete_N = walked(window, roles.some_X)
    return [replay(walk, roles) for walk in walks], complete_N


def replay(walk: Walk, roles: Roles) -> SegmentReplay:
    """Replay one segment of a window."""
    segment, leader_M = walk.segment, walk.leader_M
    rows = np.arange(segment.n_rows)
    excess_KM = np.zeros((len(segment.local), len(rows)))
    reference_KMC, common_KMC = np.zeros((2, *excess_KM.shape, len(roles.members)))
    for k, (column, some_NX) in enumerate(zip(segment.local, walk.some_KNX, strict=True)):
        at = slice(column.offset, column.offset + column.n_steps)
        own_N = column.at((np.arange(column.n_steps), leader_M[at]))
        by_sample = _by_sample(column.of, some_NX, roles)
        reference_KMC[k, at], common_KMC[k, at] = _levels(by_sample, own_N, leader_M[at], roles)
        excess_KM[k, at] = own_N
    excess_KM -= reference_KMC[:, rows, roles.role_R[leader_M]]
    arrival_MC, _ = _levels(arrivals(walk, roles), walk.last_M, leader_M, roles)
    lateness_M = walk.last_M - arrival_MC[rows, roles.role_R[leader_M]]
    whole = {attribute.name: getattr(walk, attribute.name) for attribute in fields(walk)}
    by_stage = _by_stage(segment, excess_KM)
    return SegmentReplay(**whole, **by_stage, lateness_M=lateness_M, reference_KMC=reference_KMC, common_KMC=common_KMC)


def joined(parts: Sequence[tuple[SegmentReplay, slice]], segment: Segment) -> SegmentReplay:
    """The replay of a segment, joined from rows of other replays, in order."""
    names = ("leader_M", "last_M", "runner_up_M", "second_M", "end_M", "advance_KM", "ahead_KM", "lateness_M")
    whole = {
        name: np.concatenate([getattr(source, name)[..., rows] for source, rows in parts], axis=-1)
        for name in (*names, "excess_KM")
    }
    for name in ("reference_KMC", "common_KMC"):
        whole[name] = np.concatenate([getattr(source, name)[:, rows] for source, rows in parts], axis=1)
    some_KNX = []
    for k, column in enumerate(segment.local):
        # A column's steps are ``offset`` rows later.
        steps = [slice(*(max(0, row - column.offset) for row in (rows.start, rows.stop))) for _, rows in parts]
        some_KNX.append(np.concatenate([source.some_KNX[k][at] for (source, _), at in zip(parts, steps, strict=True)]))
    arrivals_M = tuple(arrival_R for source, rows in parts for arrival_R in source.arrivals_M[rows])
    by_stage = _by_stage(segment, whole.pop("excess_KM"))
    return SegmentReplay(segment=segment, arrivals_M=arrivals_M, some_KNX=tuple(some_KNX), **whole, **by_stage)


def _by_stage(segment: Segment, excess_KM: FloatArray) -> dict[str, Any]:
    """The leader's excess of a replay. A stage may have two columns; its offset is that of the larger one."""
    excess_MS = np.zeros((segment.n_rows, segment.n_stages))
    weight_S, offset_S = np.zeros(segment.n_stages), np.zeros(segment.n_stages, dtype=np.intp)
    for column, excess_M in zip(segment.local, excess_KM, strict=True):
        excess_MS[:, column.stage] += excess_M
        weight = float(np.abs(excess_M).sum())
        if weight > weight_S[column.stage]:
            weight_S[column.stage], offset_S[column.stage] = weight, column.offset
    return {"excess_KM": excess_KM, "excess_MS": excess_MS, "offset_S": offset_S}


SampleTimes = list[NDArray[Any]]
"""For each of `Roles.samples`, the times of its ranks by row, cohort and rank."""


def _by_sample(take: Callable[[RankArray], FloatArray], some_NX: SingleArray, roles: Roles) -> SampleTimes:
    """Times by sample: ``take`` returns those of whole cohorts; ``some_NX`` has the others."""
    by_sample: SampleTimes = []
    begin = 0
    for sample in roles.samples:
        if sample.whole:
            times: NDArray[Any] = take(sample.ranks_CX.ravel())
        else:
            times = some_NX[:, begin : begin + sample.ranks_CX.size]
            begin += sample.ranks_CX.size
        by_sample.append(times.reshape(len(times), *sample.ranks_CX.shape))
    return by_sample


def arrivals(walk: Walk, roles: Roles) -> SampleTimes:
    """Arrivals by sample."""
    some_MX = np.zeros((walk.segment.n_rows, len(roles.some_X)), np.float32)
    for column, some_NX in zip(walk.segment.local, walk.some_KNX, strict=True):
        some_MX[column.offset : column.offset + column.n_steps] += some_NX
    return _by_sample(lambda ranks: walk.arrival_MR.take(ranks, axis=1), some_MX, roles)


def _levels(times: SampleTimes, own_N: FloatArray, leader_N: RankArray, roles: Roles) -> tuple[FloatArray, FloatArray]:
    """For each step and cohort, the median without the leader, and the time that three quarters take (N × C each).

    ``own_N`` is the leader's time. A sampled cohort has its lower median, with the leader.
    """
    median_NC, common_NC = (np.empty((len(own_N), len(roles.members))) for _ in range(2))
    for sample, times_NCX in zip(roles.samples, times, strict=True):
        sorted_NCX = np.sort(times_NCX, axis=2)
        n_ranks = sorted_NCX.shape[2]
        if sample.whole:
            leads_NC = roles.role_R[leader_N][:, None] == sample.roles_C
            median_NC[:, sample.roles_C] = median_without(sorted_NCX, own_N[:, None], leads_NC)
        else:
            median_NC[:, sample.roles_C] = sorted_NCX[:, :, (n_ranks - 1) // 2]
        common_NC[:, sample.roles_C] = sorted_NCX[:, :, (n_ranks - 1) // 4]
    return median_NC, common_NC


def median_without(sorted_X: FloatArray, own: FloatArray, leave_out: BoolArray) -> FloatArray:
    """The medians along the last axis; where ``leave_out``, without the value ``own`` (unless there is no other).

    The median of two ranks would be half the straggler.
    """
    n_ranks = sorted_X.shape[-1]
    if n_ranks == 1:
        return sorted_X[..., 0].copy()
    all_ = (sorted_X[..., (n_ranks - 1) // 2] + sorted_X[..., n_ranks // 2]) / 2
    # Removing a value from a sorted row moves the values above it down by one place.
    medians = [
        np.where(own <= sorted_X[..., index], sorted_X[..., min(index + 1, n_ranks - 1)], sorted_X[..., index])
        for index in ((n_ranks - 2) // 2, (n_ranks - 1) // 2)
    ]
    return np.asarray(np.where(leave_out, (medians[0] + medians[1]) / 2, all_))


def jitter_s(times: SampleTimes) -> float:
    """Scale (σ) of arrivals less each step's and each rank's level; rare delays and empty rows do not count."""
    residuals = []
    for arrival_MCX in times:
        _, n_cohorts, n_ranks = arrival_MCX.shape
        part_MCX = arrival_MCX[:, :, :: -(-n_ranks // max(2, JITTER_RANKS // n_cohorts))]
        part_MCX = part_MCX[part_MCX.any(axis=(1, 2))]
        if part_MCX.size:
            late_MCX = part_MCX - medians(part_MCX)[:, :, None]
            late_MCX -= medians(late_MCX, axis=0)
            residuals.append(np.abs(late_MCX, out=late_MCX).ravel())
    return float(MAD_TO_SIGMA * medians(np.concatenate(residuals))) if residuals else 0.0


@dataclass(frozen=True, eq=False)
class Profile:
    """The times of a window's steps, in seconds; N steps, C cohorts, S stages. Without slots, for `typical`.

    Attributes:
        level_NCS: local time by stage of the median rank, without the one that arrived last.
        common_NCS: local time by stage that at least three quarters of the ranks take.
        sync_NS: the sync stages' own work, past the last arrival.
        lateness_N: the last arrival past the median one, summed over the step's segments.
        jitter_s: scale of a rank's ordinary jitter in arrival, summed over the segments too.
        own_NR: each rank's local time if there is a cohort of two ranks; otherwise R is 0.
    """

    level_NCS: FloatArray
    common_NCS: FloatArray
    sync_NS: FloatArray
    lateness_N: FloatArray
    jitter_s: float
    own_NR: FloatArray

    def of(self, steps_N: BoolArray) -> Profile:
        names = ("level_NCS", "common_NCS", "sync_NS", "lateness_N", "own_NR")
        return replace(self, **{name: getattr(self, name)[steps_N] for name in names})

    @cached_property
    def typical(self) -> Typical:
        """Medians over the steps; the mean of lateness, in which rare delays count."""
        by_step = self.level_NCS, self.common_NCS, self.sync_NS
        level_CS, common_CS, sync_S = (medians(values, axis=0) for values in by_step)
        return Typical(level_CS, common_CS, sync_S, self.lateness_s)

    @property
    def lateness_s(self) -> float:
        return float(self.lateness_N.mean())


@dataclass(frozen=True, slots=True, eq=False)
class Typical:
    """A typical step, in seconds (see `Profile`)."""

    level_CS: FloatArray
    common_CS: FloatArray
    sync_S: FloatArray
    lateness_s: float

    @property
    def total_s(self) -> float:
        """Its length; cohorts run in parallel."""
        return float(self.level_CS.sum(axis=1).max() + self.sync_S.sum()) + self.lateness_s


def profile(replays: list[SegmentReplay], roles: Roles) -> Profile:
    """The profile of a window's steps from its replay. Time after a step's last sync belongs to that step."""
    n_steps, n_stages = replays[0].segment.n_steps, replays[0].segment.n_stages
    level_NCS, common_NCS = (np.zeros((n_steps, len(roles.members), n_stages)) for _ in range(2))
    sync_NS, lateness_N = np.zeros((n_steps, n_stages)), np.zeros(n_steps)
    for segment_replay in replays:
        for k, column in enumerate(segment_replay.segment.local):
            rows = slice(column.offset, column.offset + n_steps)
            level_NCS[:, :, column.stage] += segment_replay.reference_KMC[k][rows]
            common_NCS[:, :, column.stage] += segment_replay.common_KMC[k][rows]
        lateness_N += segment_replay.lateness_M[:n_steps]
        own = segment_replay.segment.own
        if own is not None:
            sync_NS[:, own.stage] += (segment_replay.end_M - segment_replay.last_M)[:n_steps]
    pairs = any(len(ranks) == 2 for ranks in roles.members)
    own_NR = sum(segment_replay.arrival_MR[:n_steps] for segment_replay in replays) if pairs else np.zeros((n_steps, 0))
    jitter_total_s = sum(jitter_s(arrivals(segment_replay, roles)) for segment_replay in replays)
    return Profile(level_NCS, common_NCS, sync_NS, lateness_N, jitter_total_s, np.asarray(own_NR))


MAX_SAMPLES = 32
"""Windows kept for a regime."""

MAX_REGIMES = 64
"""Regimes kept: the most recent ones."""

BUCKETS_AN_OCTAVE = 4
"""Steps whose work is within about a fifth of each other are in one regime."""

Regime = tuple[str, int | None]
"""Steps that can be compared: their kind, and the bucket of their work (None if they note no work)."""


Sampled = TypeVar("Sampled")
Key = TypeVar("Key")
Value = TypeVar("Value")


def met(known: Mapping[Key, Value], key: Key, value: Value) -> dict[Key, Value]:
    """Values by regime, or by kind of step, with the latest one added; at most `MAX_REGIMES`."""
    others = [item for item in known.items() if item[0] != key]
    return dict([*others, (key, value)][-MAX_REGIMES:])


@dataclass(frozen=True, slots=True, eq=False)
class Samples(Generic[Sampled]):
    """Samples spread evenly over all ``n_offered``: every ``stride``-th is ``kept``, at most `MAX_SAMPLES`."""

    kept: tuple[Sampled, ...] = ()
    n_offered: int = 0
    stride: int = 1

    def after(self, sample: Sampled) -> Samples[Sampled]:
        kept = self.kept if self.n_offered % self.stride else (*self.kept, sample)
        if len(kept) > MAX_SAMPLES:
            return Samples(kept[::2], self.n_offered + 1, 2 * self.stride)
        return Samples(kept, self.n_offered + 1, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class OwnTimes:
    """Each rank's local time in the past, for cohorts of two ranks, where the other rank is no reference.

    For each regime, the medians of the last windows before any likely fault, healthy or not, each with its last step.
    """

    samples: Mapping[Regime, tuple[tuple[int, FloatArray], ...]] = field(default_factory=dict)

    def known(self, regime: Regime, n_ranks: int, onset: int | None = None) -> FloatArray:
        """The local times by window and rank (K × R); K is 0 if none are known.

        If there are windows before an ``onset``, only these: a fault is not recognized at once.
        """
        known = [(last_step, local_R) for last_step, local_R in self.samples.get(regime, ()) if len(local_R) == n_ranks]
        before = [local_R for last_step, local_R in known if onset is None or last_step < onset]
        chosen = before or [local_R for _, local_R in known]
        return np.array(chosen).reshape(len(chosen), n_ranks)

    def after(self, regime: Regime, observed: Profile, last_step: int) -> OwnTimes:
        if not observed.own_NR.shape[1]:
            return self
        kept = (*self.samples.get(regime, ()), (last_step, medians(observed.own_NR, axis=0)))[-MAX_SAMPLES:]
        return OwnTimes(met(self.samples, regime, kept))


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """The job's typical healthy steps, by regime."""

    known: Mapping[Regime, Samples[Typical]] = field(default_factory=dict)

    def typical(self, regime: Regime) -> Typical | None:
        """The median over the samples of a regime; None if it has none."""
        if regime not in self.known:
            return None
        kept = self.known[regime].kept
        names = ("level_CS", "common_CS", "sync_S", "lateness_s")
        level_CS, common_CS, sync_S, lateness_s = (
            medians(np.array([getattr(typical, name) for typical in kept]), axis=0) for name in names
        )
        return Typical(level_CS, common_CS, sync_S, float(lateness_s))

    @property
    def n_windows(self) -> int:
        return sum(known.n_offered for known in self.known.values())


def regimes_of(window: Window) -> tuple[Regime, ...]:
    """The regime of each step of a window."""
    n_steps = len(window.durations_NRS)
    kinds = window.kinds or ("",) * n_steps
    if window.work_NR is None:
        return tuple((kind, None) for kind in kinds)
    work_N = window.work_NR.mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bucket_N = np.round(np.log2(work_N) * BUCKETS_AN_OCTAVE)
    return tuple((kind, int(b) if np.isfinite(b) else None) for kind, b in zip(kinds, bucket_N, strict=True))


def learned(baseline: Baseline, verdict: Verdict, regime: Regime, typical: Typical) -> Baseline:
    """The baseline with one more window, if that is healthy.

    Windows that only roam count too, so that a job that jitters from its first step on gets a baseline.
    """
    if verdict.label != "healthy" and verdict.reasons != ("roaming",):
        return baseline
    return Baseline(met(baseline.known, regime, baseline.known.get(regime, Samples()).after(typical)))


@dataclass(frozen=True, slots=True)
class Excess:
    """Exposed time over what is normal, in seconds a step.

    Attributes:
        late_s: lateness of the last arrival over ``usual_late_s``.
        group_s: local stages of the median rank over the baseline, in the cohort with the most.
        sync_s: the sync stages' own work over the baseline.
        from_baseline: whether a baseline is the reference of these two; otherwise, the window's earlier steps are.
        usual_late_s: lateness that jitter explains; not that of healthy windows, which may creep up.
    """

    late_s: float
    group_s: float
    sync_s: float
    from_baseline: bool
    usual_late_s: float


def excess_of(observed: Profile, like: Profile, normal: Typical | None, n_ranks: int, settings: Settings) -> Excess:
    """The excess of a window.

    ``observed`` is the profile of its steps, ``like`` that of its steps in the most frequent regime, and ``normal`` a
    typical healthy step of the job in that regime, if known.
    """
    # The largest of R normal deviations is near σ·sqrt(2 ln R).
    usual_late_s = observed.jitter_s * math.sqrt(2.0 * math.log(n_ranks))
    if normal is None:
        group_s, sync_s = _shift(like, settings)
    else:
        group_s = float(np.clip(like.typical.level_CS - normal.level_CS, 0.0, None).sum(axis=1).max())
        sync_s = float(np.clip(like.typical.sync_S - normal.sync_S, 0.0, None).sum())
    late_s = max(0.0, observed.lateness_s - usual_late_s)
    return Excess(late_s, group_s, sync_s, from_baseline=normal is not None, usual_late_s=usual_late_s)


def _shift(observed: Profile, settings: Settings) -> tuple[float, float]:
    """By how much the later part of a window is slower than its earlier part, in seconds: local level, sync work.

    The cut has the largest rise between the medians of its sides. A rise within the spread of the steps does not count,
    and neither does a fall: jobs warm up.
    """
    local_N, sync_N = observed.level_NCS.sum(axis=2).max(axis=1), observed.sync_NS.sum(axis=1)
    total_N = local_N + sync_N
    n_steps = len(total_N)
    edge = max(3, n_steps // 5)
    cuts = range(edge, n_steps - edge + 1, max(1, n_steps // 32))
    least, most = float(total_N.min()), float(total_N.max())
    if not cuts or most - least < settings.min_group_fraction * least:
        return 0.0, 0.0

    def step_s(values_N: FloatArray, cut: int) -> float:
        return float(medians(values_N[cut:]) - medians(values_N[:cut]))

    cut = max(cuts, key=lambda index: step_s(total_N, index))
    rise_s = step_s(total_N, cut)
    sides = (total_N[:cut], total_N[cut:])
    spread_s = max(float(medians(np.abs(side - medians(side)))) * MAD_TO_SIGMA for side in sides)
    # The standard error of a median is 1.25 σ/√n; both sides add theirs.
    error_s = 1.25 * spread_s * math.sqrt(1.0 / cut + 1.0 / (n_steps - cut))
    if rise_s < settings.min_group_fraction * float(medians(sides[0])) or rise_s < settings.shift_sigmas * error_s:
        return 0.0, 0.0
    return max(0.0, step_s(local_N, cut)), max(0.0, step_s(sync_N, cut))
