"""Jobs put together of recordings, judged by ours and by other rules, and what counts as a name and a found fault.

A healthy job is judged in windows side by side (stride 50): every step once, and the windows of a job do not share
steps. A job with a fault is judged every 10 steps, as a live one is, for how soon it is named. Ours is `judge`, with
the past carried from window to window; as shipped it runs through the replay of the default policy, which judges the
same way and also says what would have been captured.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from bench.recordings import Cell, Recording, by_cell
from bench.resampled import Blocks, Fault, OwnTimes, one_after_the_other, slowed, stretches
from bench.rivals import RULES, Columns, Rule, Said, columns_of
from bench.rows import STRIDE_STEPS, WINDOW_STEPS
from sftriage.controller.controller import settings_of
from sftriage.controller.replay import replay
from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import MOST_FRACTION, Window
from sftriage.policy.in_force import PolicySet, find, load

Name = tuple[str, tuple[int, ...]]
"""A scope and its ranks."""

OURS = "ours"
RIVALS = {name: rule for name, rule in RULES.items() if name != "per-stage average"}
START_S = 946684800.0
"""When a job begins, for its policy: at midnight, on a Saturday."""
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Judged:
    """What a rule says of one window."""

    last_step: int  # of the window
    name: Name | None = None  # whom it names
    stage: str | None = None  # for which stage
    label: str = ""  # of ours, its label and its reasons
    captured: tuple[int, ...] = ()  # of ours as shipped, the ranks that would have been captured for it
    descheduled: bool = False  # of ours, that the verdict says that whom it names mostly waited for a CPU
    since: int | None = None  # of ours, the step since which the verdict says so


Namer = Callable[[Iterable[Window]], Iterator[Judged]]


@cache
def shipped_policies() -> PolicySet:
    return PolicySet((load(find("default")),))


def shipped_settings() -> Settings:
    return settings_of(shipped_policies().detection)


def judged(verdict: Verdict, captured: tuple[int, ...] = ()) -> Judged:
    label = " ".join((verdict.label, *verdict.reasons))
    if verdict.label != "suspect":
        return Judged(verdict.last_step, label=label, captured=captured)
    first = verdict.suspects[0]
    name = (first.scope, first.ranks)
    return Judged(verdict.last_step, name, first.stage, label, captured, first.by_system is not None, first.onset_step)


def decided(policies: PolicySet) -> Namer:
    def say(windows: Iterable[Window]) -> Iterator[Judged]:
        for one in replay(windows, policies, START_S):
            requests = one.decision.requests
            yield judged(one.verdict, tuple(request.rank for request in requests if request.role == "suspect"))

    return say


def rival(rule: Rule) -> Namer:
    """A rule of one window as a rule of windows in order: whom it raises an alarm for."""

    def say(windows: Iterable[Window]) -> Iterator[Judged]:
        best: list[Columns] = []
        for window in windows:
            seen = columns_of(window)
            said = Said() if seen.empty else rule(seen, best)
            best = _best_of([*best, seen])
            if said.alarm and said.ranked:
                first = said.ranked[0]
                yield Judged(window.last_step, ("rank", (first.rank,)), first.stage)
            else:
                yield Judged(window.last_step)

    return say


def _best_of(windows: Sequence[Columns]) -> list[Columns]:
    """One step that has the least median of any window: all that a rule which remembers better days asks of them."""
    last = windows[-1]
    alike = [one for one in windows if (one.names, one.rank_R) == (last.names, last.rank_R) and not one.empty]
    if not alike:
        return []
    least_RK = np.min([np.median(one.values_NRK, axis=0) for one in alike], axis=0)
    return [Columns(last.names, last.local_K, least_RK[None], last.rank_R, last.sync)]


def rule_of(name: str) -> Namer:
    return decided(shipped_policies()) if name == OURS else rival(RIVALS[name])


@dataclass(slots=True)
class Healthy:
    """What a rule did with healthy steps."""

    steps: int = 0  # that were judged, each once
    seconds: float = 0.0  # that they took
    windows: int = 0  # that they were judged in
    names: int = 0  # false ones: as often as somebody was named anew
    descheduled: int = 0  # of these, those of whom it was said that they mostly waited for a CPU
    windows_with_name: int = 0  # how many windows named somebody
    captures: int = 0  # false ones
    labels: Counter[str] = field(default_factory=Counter)  # how many windows had each label with its reasons
    whom: Counter[str] = field(default_factory=Counter)  # how often each scope was named

    def __add__(self, other: Healthy) -> Healthy:
        return Healthy(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Healthy)))


def episodes(judged: Iterable[Judged]) -> list[Name]:
    """Whom a rule named: once for each run of windows, one after the other, that name the same."""
    return [one.name for one in _firsts(judged) if one.name is not None]


def _firsts(judged: Iterable[Judged]) -> list[Judged]:
    return [next(run) for _, run in groupby(judged, lambda one: one.name)]


def healthy_count(judged: Sequence[Judged], steps: int, seconds: float) -> Healthy:
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
    """What a rule did with a fault: steps from its onset, and counts from the onset on."""

    named_after: int | None  # to the end of the first window that named it; None if none did
    captured_after: int | None  # to the first capture of a rank that has it
    stage_right: bool  # the first window that named it named its stage too
    in_part: int  # windows that named one of the ranks of a slow host instead of the host
    wrong_names: int  # of ranks in which no fault was put
    held_up_by_load: int  # of these, ranks that held up the job and waited for a CPU, as the recording shows
    wrong_captures: int  # of ranks without it
    early_names: int  # before the onset
    cost_fraction: float  # by how much the job's steps take longer for it: a rank that waits anyway loses less


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


@dataclass(frozen=True, slots=True)
class Task:
    """One job: what it is resampled from, how long and wide it is, what is wrong with it, and who judges it."""

    job: int  # which job it is: with the bench's seed, all that is drawn for it comes of this
    cell: Cell  # the recordings
    n_ranks: int  # of the job
    n_steps: int  # of the job
    seed: int  # of the bench
    rules: tuple[str, ...]  # who judges it
    fault: Fault | None = None  # what slows it, or None


@dataclass(frozen=True, slots=True)
class Result:
    """What the rules did with a task's job: with a healthy one, or with the fault that it had."""

    task: Task
    healthy: dict[str, Healthy]
    detected: dict[str, Detected]


def run(tasks: Sequence[Task], directory: Path, processes: int) -> Iterator[Result]:
    with multiprocessing.get_context("spawn").Pool(processes, _open, (directory,)) as pool:
        # The longest first, or one process would be busy with it after all others are done.
        longest_first = sorted(tasks, key=lambda task: -task.n_steps * (task.n_ranks + 100))
        yield from pool.imap_unordered(_run, longest_first)


_recordings: dict[Cell, list[Recording]] = {}


def _open(directory: Path) -> None:
    _recordings.update(by_cell(directory))


def as_recorded(recording: Recording) -> Healthy:
    """What ours says of a recording as it is, not resampled: too little for a rate, and a check on those that are."""
    judged = list(rule_of(OURS)(windows_of([recording.own], WINDOW_STEPS)))
    return healthy_count(judged, len(judged) * WINDOW_STEPS, float(recording.own.exposed_N().sum()))


def _run(task: Task) -> Result:
    return result_of(task, _recordings[task.cell])


def result_of(task: Task, recorded: Sequence[Recording]) -> Result:
    return _healthy(task, recorded) if task.fault is None else _faulty(task, task.fault, recorded)


def _stretches(task: Task, recorded: Sequence[Recording]) -> Iterator[OwnTimes]:
    rng = np.random.default_rng([task.seed, task.job])
    own = [one.own for one in recorded]
    return stretches(own, task.cell.period_steps, task.n_ranks, task.n_steps, Blocks(), rng)


def windows_of(parts: Iterable[OwnTimes], stride: int) -> Iterator[Window]:
    """The windows of a job that comes a stretch at a time; none lies across the border of two."""
    first, before_R = 0, None
    for part in parts:
        whole = part.window(first, before_R)
        for at in range(0, len(part) - WINDOW_STEPS + 1, stride):
            yield whole.steps(first + at, first + at + WINDOW_STEPS - 1)
        first, before_R = first + len(part), part.tail_NR[-1]


def _healthy(task: Task, recorded: Sequence[Recording]) -> Result:
    parts = list(_stretches(task, recorded))
    seconds = sum(float(part.exposed_N().sum()) for part in parts)
    found: dict[str, Healthy] = {}
    for name in task.rules:
        judged = list(rule_of(name)(windows_of(parts, WINDOW_STEPS)))
        found[name] = healthy_count(judged, len(judged) * WINDOW_STEPS, seconds)
    return Result(task, found, {})


def _faulty(task: Task, fault: Fault, recorded: Sequence[Recording]) -> Result:
    # Windows that overlap want all steps at once.
    own = one_after_the_other(list(_stretches(task, recorded)))
    step_s = float(np.median(own.exposed_N()))
    parts = [slowed(own, fault.place, fault.delay_NR(len(own), own.n_ranks, step_s))]
    healthy_s, slowed_s = (float(one.exposed_N()[fault.onset :].sum()) for one in (own, *parts))
    cost = slowed_s / healthy_s - 1.0
    least, most = shipped_settings().min_gain_fraction, MOST_FRACTION

    def held_up_by_load(said: Judged) -> bool:
        if said.name is None:
            return False
        first = said.last_step + 1 - WINDOW_STEPS if said.since is None else said.since
        led, waited = own.steps(slice(first, said.last_step + 1)).led_and_waited(said.name[1])
        return led >= least and waited >= most

    found: dict[str, Detected] = {}
    for name in task.rules:
        found[name] = detected(
            list(rule_of(name)(windows_of(parts, STRIDE_STEPS))),
            fault,
            knows_hosts=name not in RIVALS,
            cost_fraction=cost,
            held_up_by_load=held_up_by_load,
        )
    return Result(task, {}, found)
