"""A job that climbs: it becomes slower from its start on, and so steadily that it keeps to no level.

The best that such a job has shown is where the climb began.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sftriage.frontier.arrays import FloatArray, medians
from sftriage.frontier.whatif import MAD_TO_SIGMA
from sftriage.verdicts.baseline import MAX_SAMPLES
from sftriage.verdicts.settings import Settings

FIRST_BLOCK_STEPS, LAST_BLOCK_STEPS, LEAST_BLOCKS = 4, 64, 6
"""A climb is seen in the medians of blocks of as many steps, and in no fewer blocks. A job that has not climbed in the
two thousand steps of the largest blocks has kept to a level."""

ERRORS, WANDERINGS = 8.0, 3.0
"""A climb is as high as so many standard errors of a median, and so many times what blocks come to that rise and fall
by chance: ranks that share cores differ for dozens of steps."""

LAST_STEP, STEP, WORK, SPREAD = 0, 1, -2, -1
"""What there is of a block (K): its last step, the medians of what is measured of its steps, of which the step's length
is the first one and the work the last one, and how much the lengths spread."""


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """The way of one regime's steps since the job's start, in blocks of equal length.

    Attributes:
        steps: how many steps a block has; twice as many whenever there are too many blocks, and 0 in the end.
        blocks: the blocks that are full, `MAX_SAMPLES` at most (K).
        rest: what is measured of the steps since then.
    """

    steps: int = FIRST_BLOCK_STEPS
    blocks: tuple[FloatArray, ...] = ()
    rest: tuple[FloatArray, ...] = ()

    @property
    def room(self) -> int | None:
        """How many steps there are until the next block is full; None where there is none to come."""
        return self.steps - len(self.rest) if self.steps else None

    def after(self, step: int, rows: Sequence[FloatArray], slower: bool) -> Way:
        """The way after the steps up to this one, as many as there is room for, unless the job is ``slower``."""
        rest = (*self.rest, *rows)
        if len(rest) < self.steps or not self.steps:
            return Way(self.steps, self.blocks, rest if self.steps else ())
        if slower:
            return Way(self.steps, self.blocks)
        rest_KN = np.array(rest).T.copy()
        typical = medians(rest_KN)
        spread = medians(np.abs(rest_KN[0] - typical[0])) * MAD_TO_SIGMA
        blocks = (*self.blocks, np.concatenate(([step], typical, [spread])))
        if len(blocks) < MAX_SAMPLES:
            return Way(self.steps, blocks)
        return Way(2 * self.steps, _joined(blocks)) if self.steps < LAST_BLOCK_STEPS else Way(0)

    def climb(self, settings: Settings) -> tuple[FloatArray, ...]:
        """The blocks from the best one to the last, if the job has climbed from it for most of its time."""
        blocks, steps = self.blocks, self.steps
        while not self.rest and len(blocks) >= LEAST_BLOCKS:
            best = int(np.argmin([block[STEP] for block in blocks]))
            since = blocks[best:]
            if 4 * best < len(blocks) and len(since) >= LEAST_BLOCKS and _climbs(np.array(since), steps, settings):
                return since
            blocks, steps = _joined(blocks), 2 * steps
        return ()


def more_work(work_N: FloatArray, work: float) -> FloatArray:
    """How many times as long steps may take that have more work: no training step grows faster than by its square."""
    return np.maximum(1.0, work_N / work) ** 2 if work > 0.0 else np.ones(len(work_N))


def _joined(blocks: tuple[FloatArray, ...]) -> tuple[FloatArray, ...]:
    pairs = zip(blocks[::2], blocks[1::2], strict=False)
    return tuple(np.concatenate((two[:1], (one[1:] + two[1:]) / 2)) for one, two in pairs)


def _climbs(since_NK: FloatArray, steps: int, settings: Settings) -> bool:
    """Whether blocks of so many steps rise from the first to the last by what is reported, and steadily.

    A jump that is most of it is no climb, and neither are blocks of which many fall.
    """
    best_s = since_NK[0, STEP]
    over_N = since_NK[:, STEP] / more_work(since_NK[:, WORK], since_NK[0, WORK]) / best_s - 1.0
    rises_N, height = np.diff(over_N), float(over_N[-1])
    # The standard error of a median is 1.25 σ/√n.
    error = 1.25 * float(medians(since_NK[:, SPREAD])) / best_s / math.sqrt(steps)
    wandering = float(rises_N.std(ddof=1)) * math.sqrt(len(rises_N))
    least = max(settings.min_over_best_fraction, ERRORS * error, WANDERINGS * wandering)
    jump, fallen = float(rises_N.max()), float(-rises_N.clip(max=0.0).sum())
    return bool(height >= max(least, jump / settings.most_fraction, fallen / settings.most_fraction**2))
