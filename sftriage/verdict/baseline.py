"""The job's healthy profile, the reference for a slowdown of all ranks alike.

Peers in the same step are no reference for what they all share; the job's past is. It is learned from healthy windows,
one profile for each regime (kind of step, and size of its work), as a median over windows spread evenly over the whole
past, so that a creeping slowdown does not become the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from sftriage.model.verdicts import Verdict
from sftriage.model.windows import Window
from sftriage.verdict.accounting import FloatArray, medians
from sftriage.verdict.settings import Settings
from sftriage.verdict.whatif import MAD_TO_SIGMA, Profile, Typical

MAX_SAMPLES = 32
"""Windows that are kept for a regime."""

MAX_REGIMES = 64
"""Regimes that are kept: those met last."""

BUCKETS_AN_OCTAVE = 4
"""Buckets of work size: steps whose work is within about a fifth of each other are in one regime."""

Regime = tuple[str, int | None]
"""Steps that can be compared: their kind, and the bucket of their work (None if no work was given)."""


Sampled = TypeVar("Sampled")
Key = TypeVar("Key")
Value = TypeVar("Value")


def met(known: Mapping[Key, Value], key: Key, value: Value) -> dict[Key, Value]:
    """What is known by regime, or by kind of step, with one that was met now; of `MAX_REGIMES` at most."""
    others = [one for one in known.items() if one[0] != key]
    return dict([*others, (key, value)][-MAX_REGIMES:])


@dataclass(frozen=True, slots=True, eq=False)
class Samples(Generic[Sampled]):
    """Samples spread evenly over all that was ``seen``: every ``stride``-th is ``kept``.

    Beyond `MAX_SAMPLES`, every second one is dropped and the stride doubles.
    """

    kept: tuple[Sampled, ...] = ()
    seen: int = 0
    stride: int = 1

    def after(self, one: Sampled) -> Samples[Sampled]:
        """The samples with one more."""
        kept = self.kept if self.seen % self.stride else (*self.kept, one)
        if len(kept) > MAX_SAMPLES:
            return Samples(kept[::2], self.seen + 1, 2 * self.stride)
        return Samples(kept, self.seen + 1, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class OwnTimes:
    """Each rank's local time in the past, for cohorts of two ranks, where the other rank is no reference.

    For each regime the medians of the last windows before any likely fault, healthy or not, each with its last step.
    """

    samples: Mapping[Regime, tuple[tuple[int, FloatArray], ...]] = field(default_factory=dict)

    def known(self, regime: Regime, n_ranks: int, onset: int | None = None) -> FloatArray:
        """The local times by window and rank (K × R); of no windows if none are known.

        Of those before an ``onset`` alone, if there are any: a fault is not likely at once.
        """
        known = [(last_step, one) for last_step, one in self.samples.get(regime, ()) if len(one) == n_ranks]
        before = [one for last_step, one in known if onset is None or last_step < onset]
        chosen = before or [one for _, one in known]
        return np.array(chosen).reshape(len(chosen), n_ranks)

    def after(self, regime: Regime, seen: Profile, last_step: int) -> OwnTimes:
        """The times with one more window, which ended at that step."""
        if not seen.own_NR.shape[1]:
            return self
        kept = (*self.samples.get(regime, ()), (last_step, medians(seen.own_NR, axis=0)))[-MAX_SAMPLES:]
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
            medians(np.array([getattr(one, name) for one in kept]), axis=0) for name in names
        )
        return Typical(level_CS, common_CS, sync_S, float(lateness_s))

    @property
    def n_windows(self) -> int:
        """How many windows it was learned from."""
        return sum(known.seen for known in self.known.values())


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


def learned(baseline: Baseline, verdict: Verdict, regime: Regime, seen: Typical) -> Baseline:
    """The baseline after one more window of the job: learned from healthy windows only.

    Those that are only ``roaming`` teach too: a job that jitters from its first step on gets a baseline.
    """
    if verdict.label != "healthy" and verdict.reasons != ("roaming",):
        return baseline
    return Baseline(met(baseline.known, regime, baseline.known.get(regime, Samples()).after(seen)))


@dataclass(frozen=True, slots=True)
class Excess:
    """Exposed time over what is normal, in seconds a step.

    Attributes:
        late_s: lateness of the last arrival over ``usual_late_s``.
        group_s: local stages of the median rank over the baseline, in the cohort with the most.
        sync_s: the sync stages' own work over the baseline.
        from_baseline: whether these two are against a baseline; otherwise, against the window's earlier steps.
        usual_late_s: lateness that is nobody's fault: that of jitter. (Not that of the job's healthy windows: each may
            be a little later than the one before.)
    """

    late_s: float
    group_s: float
    sync_s: float
    from_baseline: bool
    usual_late_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.late_s + self.group_s + self.sync_s


def excess_of(seen: Profile, like: Profile, normal: Typical | None, n_ranks: int, settings: Settings) -> Excess:
    """The excess of a window with the profile ``seen``, and ``like`` of its steps in the most frequent regime.

    ``normal`` is a typical healthy step of the job in that regime, if one is known.
    """
    # The largest of R normal deviations is near σ·sqrt(2 ln R).
    usual_late_s = seen.jitter_s * math.sqrt(2.0 * math.log(n_ranks))
    if normal is None:
        group_s, sync_s = _shift(like, settings)
    else:
        group_s = float(np.clip(like.typical.level_CS - normal.level_CS, 0.0, None).sum(axis=1).max())
        sync_s = float(np.clip(like.typical.sync_S - normal.sync_S, 0.0, None).sum())
    late_s = max(0.0, seen.lateness_s - usual_late_s)
    return Excess(late_s, group_s, sync_s, from_baseline=normal is not None, usual_late_s=usual_late_s)


def _shift(seen: Profile, settings: Settings) -> tuple[float, float]:
    """By how much the later part of a window is slower than its earlier part: (local level, sync work), seconds.

    The cut is the one with the largest rise between the medians of its two sides. A rise that the spread of the steps
    explains does not count, and neither does a fall: jobs warm up.
    """
    local_N, sync_N = seen.level_NCS.sum(axis=2).max(axis=1), seen.sync_NS.sum(axis=1)
    total_N = local_N + sync_N
    n_steps = len(total_N)
    edge = max(3, n_steps // 5)
    cuts = range(edge, n_steps - edge + 1, max(1, n_steps // 32))
    least, most = float(total_N.min()), float(total_N.max())
    if not cuts or most - least < settings.min_group_fraction * least:
        return 0.0, 0.0

    def step_s(values_N: FloatArray, cut: int) -> float:
        return float(medians(values_N[cut:]) - medians(values_N[:cut]))

    cut = max(cuts, key=lambda at: step_s(total_N, at))
    rise_s = step_s(total_N, cut)
    sides = (total_N[:cut], total_N[cut:])
    spread_s = max(float(medians(np.abs(side - medians(side)))) * MAD_TO_SIGMA for side in sides)
    # The standard error of a median is 1.25 σ/√n; both sides add theirs.
    error_s = 1.25 * spread_s * math.sqrt(1.0 / cut + 1.0 / (n_steps - cut))
    if rise_s < settings.min_group_fraction * float(medians(sides[0])) or rise_s < settings.shift_sigmas * error_s:
        return 0.0, 0.0
    return max(0.0, step_s(local_N, cut)), max(0.0, step_s(sync_N, cut))
