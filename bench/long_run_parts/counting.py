"""What counts as a name, a wrong one and a found fault, and how sure a count is. Pure functions of what a rule said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from bench.long_run_parts.faults import Fault
from bench.long_run_parts.rules import Judged, Name

MILLION = 1_000_000


@dataclass(slots=True)
class Healthy:
    """What a rule did with healthy steps.

    Attributes:
        steps: that were judged, each once.
        seconds: that they took.
        windows: that they were judged in.
        names: false ones: as often as somebody was named anew.
        descheduled: of these, those of whom it was said that they mostly waited for a CPU.
        windows_with_name: how many windows named somebody.
        captures: false ones.
        labels: how many windows had each label with its reasons.
        whom: how often each scope was named.
    """

    steps: int = 0
    seconds: float = 0.0
    windows: int = 0
    names: int = 0
    descheduled: int = 0
    windows_with_name: int = 0
    captures: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    whom: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Healthy) -> Healthy:
        return Healthy(
            self.steps + other.steps,
            self.seconds + other.seconds,
            self.windows + other.windows,
            self.names + other.names,
            self.descheduled + other.descheduled,
            self.windows_with_name + other.windows_with_name,
            self.captures + other.captures,
            self.labels + other.labels,
            self.whom + other.whom,
        )


def episodes(judged: Iterable[Judged]) -> list[Name]:
    """Whom a rule named: once for each run of windows, one after the other, that name the same."""
    return [one.name for one in _firsts(judged) if one.name is not None]


def _firsts(judged: Iterable[Judged]) -> list[Judged]:
    """The first window of each run of windows that name the same, or nobody."""
    return [next(run) for _, run in groupby(judged, lambda one: one.name)]


def healthy_count(judged: Sequence[Judged], steps: int, seconds: float) -> Healthy:
    """What was said of a healthy job."""
    names = episodes(judged)
    return Healthy(
        steps=steps,
        seconds=seconds,
        windows=len(judged),
        names=len(names),
        descheduled=sum(one.descheduled for one in _firsts(judged)),
        windows_with_name=sum(one.name is not None for one in judged),
        captures=sum(bool(one.captured) for one in judged),
        labels=Counter(one.label for one in judged if one.label),
        whom=Counter(scope for scope, _ in names),
    )


@dataclass(frozen=True, slots=True)
class Detected:
    """What a rule did with a fault.

    Attributes:
        named_after: steps from its onset to the end of the first window that named it; None if none did.
        captured_after: the same to the first capture of a rank that has it.
        stage_right: whether the first window that named it named its stage too.
        in_part: windows that named one of the ranks of a slow host instead of the host.
        wrong_names: how often somebody in whom no fault was put was named from the onset on.
        held_up_by_load: of these, those of whom the recording shows that they held up the job and waited for a CPU.
        wrong_captures: how many captures were of ranks without it from the onset on.
        early_names: how often somebody was named before the onset.
        cost_fraction: by how much the job's steps take longer for it, from the onset on: who waits anyway loses less.
    """

    named_after: int | None
    captured_after: int | None
    stage_right: bool
    in_part: int
    wrong_names: int
    held_up_by_load: int
    wrong_captures: int
    early_names: int
    cost_fraction: float


def detected(
    judged: Sequence[Judged],
    fault: Fault,
    *,
    knows_hosts: bool,
    cost_fraction: float = 0.0,
    held_up_by_load: Callable[[Judged], bool] = lambda _: False,
) -> Detected:
    """What was said of a job with a fault. Of rules that know ranks only, any rank of a slow host is the host.

    ``held_up_by_load`` says of a window that names somebody whether it would be true in the job without the fault.
    """
    after = [one for one in judged if one.last_step >= fault.onset]
    right = [one for one in after if one.name is not None and _is(one.name, fault, knows_hosts=knows_hosts)]
    part = [one for one in after if one.name is not None and one not in right and _within(one.name, fault)]
    wrong = [one for one in _firsts(after) if one.name is not None and not _within(one.name, fault)]
    taken = [one for one in after if one.captured]
    hit = [one for one in taken if set(one.captured) <= set(fault.ranks)]
    return Detected(
        named_after=right[0].last_step - fault.onset if right else None,
        captured_after=hit[0].last_step - fault.onset if hit else None,
        stage_right=bool(right) and right[0].stage == fault.stage,
        in_part=len(part),
        wrong_names=len(wrong),
        held_up_by_load=sum(map(held_up_by_load, wrong)),
        wrong_captures=len(taken) - len(hit),
        early_names=len(episodes(one for one in judged if one.last_step < fault.onset)),
        cost_fraction=cost_fraction,
    )


def _within(name: Name, fault: Fault) -> bool:
    return set(name[1]) <= set(fault.ranks)


def _is(name: Name, fault: Fault, *, knows_hosts: bool) -> bool:
    if not knows_hosts:
        return _within(name, fault)
    return name[0] == fault.scope and set(name[1]) == set(fault.ranks)


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """The least value that so much of them do not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None


def per_million(count: int, steps: int) -> tuple[float, float, float] | None:
    """A rate per million steps with its 95 % interval; None where there are no steps."""
    if not steps:
        return None
    low, high = poisson_interval(count)
    return (count * MILLION / steps, low * MILLION / steps, high * MILLION / steps)


def poisson_interval(count: int, alpha: float = 0.05) -> tuple[float, float]:
    """The exact interval of a Poisson mean of which ``count`` was seen (Garwood 1936)."""
    low = 0.0 if count == 0 else _mean_where(count - 1, 1.0 - alpha / 2)
    return low, _mean_where(count, alpha / 2)


def _mean_where(count: int, probability: float) -> float:
    """The Poisson mean of which no more than ``count`` come with this probability."""
    reach = 10.0 * math.sqrt(count + 1.0) + 10.0
    low, high = max(0.0, count - reach), count + reach
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(count, middle) > probability else (low, middle)
    return (low + high) / 2


def _at_most(count: int, mean: float) -> float:
    """The probability of no more than ``count``, in logarithms: of thousands of names the terms are tiny."""
    if mean == 0.0:
        return 1.0
    least = max(0, int(mean - 10.0 * math.sqrt(mean) - 10.0))
    if least > count:
        return 0.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(least, count + 1)]
    most = max(logs)
    return min(1.0, math.exp(most) * math.fsum(math.exp(one - most) for one in logs))
