"""Long jobs of many ranks out of short recordings of few, by blocks.

A block is 100 to 400 consecutive recorded steps with all ranks of the recording, so that what belongs together (a
burst of load, ranks that fight over a core, the step after a hiccup) stays together. Blocks follow one another until
there are steps enough; a job that does the same again every so many steps has blocks of whole periods, so that its
evaluations come as regularly as they did, on all ranks alike. More ranks than were recorded are several such rows of
blocks side by side, each a host of its own, all of the same sort of job and load; they wait for each other
(`synchronous`).

Within a **stretch** a rank stays who it is: if it was a little slower through all of its recording, it is so through
all of the stretch. A stretch is as long as the recording that its blocks are taken from (2,000 steps at most): were it
longer, a hiccup that a rank had once would come to it again and again, and make it guilty. Between stretches the ranks
of a host change places. So what a rank has for as long as was recorded shows (and is held against whoever names it: the
jobs are healthy), and what it would have for longer does not.

What this can show: how often the hiccups of these jobs under these loads add up to a name. What it cannot: anything
rarer than the recordings are long, and noise that hosts share, for hosts are drawn apart. Of hosts under a load that
comes and goes one is busier than the others for some hundred steps, and is named for it: that is counted as a false
name, though somebody who looked would find a busy host. The report tells names of ranks, and jobs of one host (they are
as they were recorded), apart. The intervals that are given with the counts are those of the count; the recordings' own
chance is not in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.long_run_parts.synchronous import OwnTimes, one_after_the_other, side_by_side


@dataclass(frozen=True, slots=True)
class Blocks:
    """How recordings are cut up.

    Attributes:
        least: steps of the shortest block.
        most: steps of the longest one.
        stretch: steps after which the ranks of a host change places, if the recordings are as long.
        whole: steps that a stretch is a multiple of: no window lies across the border of two.
    """

    least: int = 100
    most: int = 400
    stretch: int = 2000
    whole: int = 50


def block(recorded: OwnTimes, period: int, blocks: Blocks, rng: np.random.Generator) -> OwnTimes:
    """Some consecutive steps of a recording, whole periods of them."""
    there = len(recorded) // period
    least, most = (min(max(1, steps // period), there) for steps in (blocks.least, blocks.most))
    length = int(rng.integers(least, most + 1))
    first = int(rng.integers(0, there - length + 1))
    return recorded.steps(slice(first * period, (first + length) * period))


def row_of_blocks(recorded: OwnTimes, period: int, n_steps: int, blocks: Blocks, rng: np.random.Generator) -> OwnTimes:
    """Blocks of a recording, one after the other, as long as asked for."""
    parts: list[OwnTimes] = []
    while sum(map(len, parts)) < n_steps:
        parts.append(block(recorded, period, blocks, rng))
    return one_after_the_other(parts).steps(slice(0, n_steps))


def stretch_steps(recordings: Sequence[OwnTimes], period: int, blocks: Blocks) -> int:
    """How long a stretch is: no longer than any of the recordings, whole periods and whole windows."""
    whole = math.lcm(period, blocks.whole)
    return max(1, min(blocks.stretch, *map(len, recordings)) // whole) * whole


def stretches(
    recordings: Sequence[OwnTimes], period: int, n_ranks: int, n_steps: int, blocks: Blocks, rng: np.random.Generator
) -> Iterator[OwnTimes]:
    """A job of so many ranks and steps, a stretch at a time.

    Raises:
        ValueError: the ranks are no multiple of those recorded.
    """
    recorded_ranks = recordings[0].n_ranks
    if n_ranks % recorded_ranks:
        raise ValueError(f"{n_ranks} ranks of {recorded_ranks}")
    stretch = stretch_steps(recordings, period, blocks)
    for first in range(0, n_steps, stretch):
        parts = []
        for _ in range(n_ranks // recorded_ranks):
            # Which rank is which in two recordings is chance: a host's stretch is of one.
            recorded = recordings[int(rng.integers(len(recordings)))]
            one = row_of_blocks(recorded, period, min(stretch, n_steps - first), blocks, rng)
            parts.append(one.ranks(rng.permutation(recorded_ranks)))
        yield side_by_side(parts)
