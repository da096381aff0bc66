"""Medians with their intervals, of figures that were taken in pairs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 4000
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, its confidence interval, and the number of pairs behind it."""

    value: float
    low: float
    high: float
    pairs: int

    def map(self, to: Callable[[float], float]) -> Estimate:
        """The estimate on another scale; ``to`` rises."""
        return Estimate(to(self.value), to(self.low), to(self.high), self.pairs)

    def words(self, digits: int) -> str:
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def median_of(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The median and its 95 % interval, by the percentile bootstrap.

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
    low, high = np.quantile(medians, [0.025, 0.975])
    value = float(np.median(sample))
    # The interval of few values may leave their median out by rounding.
    return Estimate(value, min(float(low), value), max(float(high), value), int(sample.size))


def ratio(mine: Sequence[float], base: Sequence[float]) -> Estimate:
    """The median of paired ratios: the i-th of each were taken near to one another in time."""
    return median_of([a / b for a, b in zip(mine, base, strict=True)])


def added(mine: Sequence[float], base: Sequence[float]) -> Estimate:
    return median_of([a - b for a, b in zip(mine, base, strict=True)])


def quantile(values: Iterable[float], fraction: float) -> float | None:
    """The smallest of the values that this fraction of them does not exceed; None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None


def plain(value: object) -> object:
    """As JSON has it: estimates become objects, and numbers have six digits behind the point."""
    if isinstance(value, Estimate):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return round(value, 6) if isinstance(value, float) else value
