"""From blocks to ratios and intervals. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
_AT_ONCE = 1 << 20
CONFIDENCE = 0.95
BEST_RATIO = 1.00004
"""What a step of 50 ms may become: the target."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, its confidence interval, and how many pairs it stands on."""

    value: float
    low: float
    high: float
    pairs: int

    def map(self, to: Callable[[float], float]) -> Estimate:
        """The estimate on another scale; ``to`` rises."""
        return Estimate(to(self.value), to(self.low), to(self.high), self.pairs)


def median_of(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The median and its percentile-bootstrap interval.

    Raises:
        ValueError: there are no values.
    """
    if not len(values):
        raise ValueError("no pairs")
    sample = np.asarray(values, dtype=float)
    draw = np.random.default_rng(seed).integers
    # A few at a time: all at once they would be gigabytes of some thousand pairs.
    at_once = max(1, min(RESAMPLES, _AT_ONCE // sample.size))
    medians = np.concatenate(
        [np.median(sample[draw(0, sample.size, (at_once, sample.size))], axis=1) for _ in range(0, RESAMPLES, at_once)]
    )
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    value = float(np.median(sample))
    # The interval of few values may leave their median out by rounding.
    return Estimate(value, min(float(low), value), max(float(high), value), int(sample.size))


def ratio(mine: Sequence[float], base: Sequence[float]) -> Estimate:
    """The median of paired ratios: the i-th of each were taken near to one another in time."""
    return median_of([a / b for a, b in zip(mine, base, strict=True)])


def added(mine: Sequence[float], base: Sequence[float]) -> Estimate:
    """The median of paired differences."""
    return median_of([a - b for a, b in zip(mine, base, strict=True)])


def reading(estimate: Estimate, most: float) -> str:
    """What an interval says about a limit: ``met``, ``missed``, or ``not resolved``."""
    if estimate.high <= most:
        return "met"
    return "missed" if estimate.low > most else "not resolved"


def clocked(blocks: Sequence[dict[str, float]], clock: str) -> list[float]:
    return [block[f"{clock}_ns"] for block in blocks]


def of_modes(blocks: dict[str, list[dict[str, float]]], clock: str) -> dict[str, Estimate]:
    """Each mode's ratio to the blocks without a tool."""
    base = clocked(blocks["off"], clock)
    return {name: ratio(clocked(taken, clock), base) for name, taken in blocks.items() if name != "off"}


def added_us(blocks: dict[str, list[dict[str, float]]], clock: str) -> dict[str, Estimate]:
    """What each mode adds to a step without a tool, in microseconds."""
    base = clocked(blocks["off"], clock)
    return {
        name: added(clocked(taken, clock), base).map(lambda ns: ns / 1e3)
        for name, taken in blocks.items()
        if name != "off"
    }


def around_captures(rounds: Sequence[dict[str, list[list[int]]]], clock: int) -> dict[str, object]:
    """Steps during and after each capture, by the median of those before it.

    ``null`` is the later two fifths of the steps before a capture against the earlier three, as ``after`` would be if a
    capture did nothing; ``positions`` are the steps after it one by one, ``worst`` the highest of them, ``next`` and
    ``second`` the first two.

    Args:
        rounds: the steps around each capture.
        clock: 0 for the wall clock, 1 for the processor time of the training thread.
    """
    before = [[times[clock] for times in one["before"]] for one in rounds]
    after = [[times[clock] for times in one["after"]] for one in rounds]
    busy = [
        [times[clock] for times, state in zip(one["during"], one["states"], strict=True) if state != "idle"]
        for one in rounds
    ]
    base = [float(np.median(one)) for one in before]
    cut = len(before[0]) * 3 // 5
    positions = [ratio([one[at] for one in after], base) for at in range(len(after[0]))]
    worst = max(range(len(positions)), key=lambda at: positions[at].value)
    return {
        "during": ratio([float(np.mean(one)) for one in busy], base),
        "during_steps": float(np.median([len(one) for one in busy])),
        "extra_ms": median_of([(sum(one) - len(one) * step) / 1e6 for one, step in zip(busy, base, strict=True)]),
        "after": ratio([float(np.median(one)) for one in after], base),
        "null": ratio([float(np.median(one[cut:])) for one in before], [float(np.median(one[:cut])) for one in before]),
        "worst_position": worst + 1,
        "worst": positions[worst],
        "positions_above": sum(one.low > 1.0 for one in positions),
        "positions": len(positions),
        "next": positions[0],
        "second": positions[1],
    }
