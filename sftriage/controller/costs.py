"""What captures cost the job, measured: the steps in them and just after them against what these would have taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite

import numpy as np

from sftriage.frontier.accounting import FloatArray, medians
from sftriage.model.events import CostMeasured
from sftriage.model.windows import Window

AFTER_STEPS = 10
"""Steps after a capture that may still be slower for it: its trace is exported and packed meanwhile."""

BEFORE_STEPS = 50
"""Steps before a capture that say what a step takes without one: their mean, with what comes back every few steps."""

NEAR_STEPS = 10
"""The last of them, whose median says it where that has just become more: what was slow before is no capture's cost."""

MOST_MEDIANS = 5.0
"""A step of more medians than these counts as so many in the mean: a checkpoint is not what a step takes."""

MIN_BEFORE_STEPS = 5
"""Of fewer, nothing is known of what a step takes without a capture."""

SEEN_STEPS = 500
"""Steps before a capture in which a single slow one is looked for that comes back in it."""

SLOW_FRACTION, SLOW_SPREADS = 0.25, 7.4
"""A step is a slow one by so much of a usual step, and by so many median deviations (five standard deviations)."""

KEPT_STEPS = 2048
"""Steps that are remembered: the longest capture, and what is before and after it."""


@dataclass(frozen=True, slots=True)
class CostedStep:
    """A step of the job: how long it took, its kind, and whether a profiler ran.

    ``rank`` took ``over_s`` longer than the median rank in one ``part`` that is its own, by number: nobody was further
    over its peers in any.
    """

    took_s: float
    capturing: bool
    kind: str = ""
    rank: int = 0
    part: int = 0
    over_s: float = 0.0

    @property
    def is_usual(self) -> bool:
        """Whether it is an ordinary step that nothing disturbed, as far as is known."""
        return isfinite(self.took_s) and not self.capturing and not self.kind

    def place(self, usual_s: float) -> tuple[int, int] | None:
        """Where it was longer than usual; None for what all ranks share, or nobody alone explains."""
        # (of two ranks, the median is half way between them)
        return (self.rank, self.part) if self.over_s >= 0.4 * (self.took_s - usual_s) else None


@dataclass(frozen=True, slots=True)
class Ledger:
    """The last steps of one attempt of a job, and the last of them up to which captures have been accounted for.

    ``left_R`` is what of the very last one comes after its sync stages, in seconds.
    """

    steps: Mapping[int, CostedStep] = field(default_factory=dict)
    settled: int = -1
    left_R: FloatArray | None = field(default=None, compare=False)

    def after(self, window: Window, now_s: float) -> tuple[Ledger, list[CostMeasured]]:
        """The ledger with one more window, and what has become known by it at ``now_s``, in seconds of the epoch."""
        steps = dict(self.steps)
        last = max(steps, default=-1)
        left_R = self.left_R
        if last < window.last_step:
            follows = window.first_step <= last + 1
            new = window.steps(max(window.first_step, last + 1), window.last_step)
            found, left_R = _steps(new, left_R if follows else None)
            steps |= found
        for number in list(steps)[: max(0, len(steps) - KEPT_STEPS)]:
            del steps[number]
        ledger, costs = Ledger(steps, self.settled, left_R), []
        while (touched := ledger._next()) is not None:
            costs.append(CostMeasured(now_s, window.attempt, *touched, *ledger._cost_s(*touched)))
            ledger = Ledger(steps, touched[1] + AFTER_STEPS, left_R)
        return ledger, costs

    def _next(self) -> tuple[int, int] | None:
        touched = [number for number, step in self.steps.items() if step.capturing and number > self.settled]
        if not touched:
            return None
        first = last = touched[0]
        for number in touched:
            if number - last > AFTER_STEPS:
                break
            last = number
        return (first, last) if last + AFTER_STEPS <= max(self.steps) else None

    def _cost_s(self, first: int, last: int) -> tuple[float | None, float | None]:
        """What captures in these steps cost, and what a step took before; None where nothing is known of before.

        A step is compared with those of its own kind. One of a kind that was not seen before is not charged: it may
        be as long as it is without a capture.
        """
        seen = [step for number, step in self.steps.items() if first <= number <= last + AFTER_STEPS]
        during = [step for step in seen if isfinite(step.took_s)]
        before = list(self._free(first))
        kinds = Counter(step.kind for step in seen)
        ordinary = max(kinds, key=lambda kind: kinds[kind])
        like = {kind: [step for step in before if step.kind == kind] for kind in kinds}
        if len(like[ordinary]) < MIN_BEFORE_STEPS:
            return None, None
        expected_s = {kind: _expected_s(like[kind], [step for step in during if step.kind == kind]) for kind in kinds}
        cost_s = sum(step.took_s for step in during if like[step.kind]) - sum(expected_s.values())
        return max(0.0, cost_s), _usual_s(like[ordinary])

    def _free(self, first: int) -> Iterator[CostedStep]:
        captured = -AFTER_STEPS - 1
        for number, step in self.steps.items():
            captured = number if step.capturing else captured
            if number < first and number - captured > AFTER_STEPS and isfinite(step.took_s):
                yield step


def _expected_s(before: Sequence[CostedStep], during: Sequence[CostedStep]) -> float:
    """What some steps would have taken together without a capture, by those of their kind before; 0 where none are.

    That is what as many took before, in the mean; but single slow steps that come back in one place count as often as
    they came, rounded up, and where they are there again. A capture is laid over what comes back: its few steps hold
    more of that than the mean.
    """
    if not before or not during:
        return 0.0
    before = before[-SEEN_STEPS:]
    recent = np.asarray([step.took_s for step in before[-BEFORE_STEPS:]])
    median_s = float(np.median(recent))
    level_s, spread_s = max(median_s, _near_s(before)), float(np.median(np.abs(recent - median_s)))
    slow_s = level_s + max(SLOW_FRACTION * level_s, SLOW_SPREADS * spread_s)
    slow = [step.took_s > slow_s for step in before]
    returning: dict[tuple[int, int] | None, list[float]] = {}
    for step, *around in zip(before, slow, [False, *slow], [*slow[1:], False], strict=False):
        # (a job that was slower for a while has no single slow steps)
        if around == [True, False, False]:
            returning.setdefault(step.place(level_s), []).append(step.took_s - level_s)
    returning = {place: over for place, over in returning.items() if len(over) > 1}
    others = [
        step for step, is_slow in zip(before, slow, strict=True) if not is_slow or step.place(level_s) not in returning
    ]
    expected_s = _usual_s(others or before) * len(during)
    for place, over in returning.items():
        typical_s, due = float(np.median(over)), ceil(len(over) * len(during) / len(before))
        again = sorted(step.took_s - level_s for step in during if step.place(level_s) == place)
        expected_s += sum(min(typical_s, one) for one in again[-due:] if one >= 0.5 * typical_s)
    return expected_s


def _usual_s(before: Sequence[CostedStep]) -> float:
    recent = np.asarray([step.took_s for step in before[-BEFORE_STEPS:]])
    return max(_near_s(before), float(np.minimum(recent, MOST_MEDIANS * float(np.median(recent))).mean()))


def _near_s(before: Sequence[CostedStep]) -> float:
    return float(np.median([step.took_s for step in before[-NEAR_STEPS:]]))


def _steps(window: Window, left_R: FloatArray | None) -> tuple[dict[int, CostedStep], FloatArray]:
    """The steps of a window, by number, and what of the last one comes after its sync stages. What nobody saw took NaN.

    A step is taken from the end of the sync stages of the one before: from there on the ranks are together. What a rank
    does after them, as a checkpoint, would count twice otherwise: as its own, and as the others' wait in the next step.
    """
    durations_NRS, stages = window.durations_NRS, window.schema.stages
    synced = max((n for n, stage in enumerate(stages) if stage in window.schema.sync), default=len(stages))
    local = [n for n, stage in enumerate(stages) if stage not in window.schema.sync and n < synced]
    between_NR = (
        np.nan_to_num(window.between_NR) if window.between_NR is not None else np.zeros(durations_NRS.shape[:2])
    )
    after_NR = durations_NRS[:, :, synced + 1 :].sum(axis=2)
    if synced < len(stages) and window.outside_NRG is not None:
        after_NR = after_NR - window.outside_NRG.sum(axis=2)
    first_R = left_R if left_R is not None and left_R.shape == after_NR[0].shape else np.zeros(after_NR[0].shape)
    before_NR = np.concatenate((first_R[None], after_NR[:-1]))
    # (fmax passes over missing ranks)
    took_NR = durations_NRS.sum(axis=2) + between_NR - after_NR + np.nan_to_num(before_NR)
    took_N = np.fmax.reduce(took_NR, axis=1, initial=np.nan)
    parts_NRP = np.concatenate((durations_NRS[:, :, local], between_NR[:, :, None], before_NR[:, :, None]), axis=2)
    over_NRP = np.nan_to_num(parts_NRP - medians(parts_NRP, axis=1)[:, None], nan=-np.inf)
    steps = {}
    for n, over_RP in enumerate(over_NRP):
        rank, part = divmod(int(over_RP.argmax()), over_RP.shape[1])
        steps[window.first_step + n] = CostedStep(
            took_s=float(took_N[n]),
            capturing=window.capturing_N is not None and bool(window.capturing_N[n]),
            kind=next(iter(window.noted(n)), ""),
            rank=rank,
            part=part,
            over_s=float(over_RP[rank, part]),
        )
    return steps, after_NR[-1]
