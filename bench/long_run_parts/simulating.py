"""Jobs put together of recordings and judged, in processes of their own. Each task has its own seed.

A healthy job is judged in windows side by side (stride 50): every step once, and the windows of a job do not share
steps. A job with a fault is judged every 10 steps, as a live one is, for how soon it is named.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.long_run_parts.counting import Detected, Healthy, detected, healthy_count
from bench.long_run_parts.faults import Fault, slowed
from bench.long_run_parts.jobs import Cell
from bench.long_run_parts.recording import Recording, kept, read
from bench.long_run_parts.resampling import Blocks, stretches
from bench.long_run_parts.rules import OURS, RIVALS, Judged, rule_of, shipped_settings
from bench.long_run_parts.synchronous import OwnTimes, one_after_the_other
from sftriage.counters import MOST_FRACTION
from sftriage.records import Window

WINDOW_STEPS, STRIDE_STEPS = 50, 10


@dataclass(frozen=True, slots=True)
class Task:
    """One job: what it is resampled from, how long and wide it is, what is wrong with it, and who judges it.

    Attributes:
        job: which job it is: with the bench's seed, all that is drawn for it comes of this.
        cell: the recordings.
        n_ranks: of the job.
        n_steps: of the job.
        seed: of the bench.
        rules: who judges it.
        fault: what slows it, or None.
    """

    job: int
    cell: Cell
    n_ranks: int
    n_steps: int
    seed: int
    rules: tuple[str, ...]
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What the rules did with a task's job: with a healthy one, or with the fault that it had."""

    task: Task
    healthy: dict[str, Healthy]
    detected: dict[str, Detected]


def run(tasks: Sequence[Task], directory: Path, processes: int) -> Iterator[Result]:
    """Every task's result, as they come."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _open, (directory,)) as pool:
        # What takes longest is begun first, or one process would be busy with it after all others are done.
        longest_first = sorted(tasks, key=lambda task: -task.n_steps * (task.n_ranks + 100))
        yield from pool.imap_unordered(_run, longest_first)


_recordings: dict[Cell, list[Recording]] = {}


def _open(directory: Path) -> None:
    _recordings.update(recordings(directory))


def recordings(directory: Path) -> dict[Cell, list[Recording]]:
    """The kept recordings by what they are of."""
    found: dict[Cell, list[Recording]] = {}
    for recording in filter(None, map(read, kept(directory))):
        found.setdefault(recording.cell, []).append(recording)
    return found


def as_recorded(recording: Recording) -> Healthy:
    """What ours says of a recording as it is, not resampled: too little for a rate, and a check on those that are."""
    judged = list(rule_of(OURS)(windows_of([recording.own], WINDOW_STEPS)))
    return healthy_count(judged, len(judged) * WINDOW_STEPS, float(recording.own.exposed_N().sum()))


def _run(task: Task) -> Result:
    return result_of(task, _recordings[task.cell])


def result_of(task: Task, recorded: Sequence[Recording]) -> Result:
    """Put a task's job together, and have it judged."""
    return _healthy(task, recorded) if task.fault is None else _faulty(task, task.fault, recorded)


def _stretches(task: Task, recorded: Sequence[Recording]) -> Iterator[OwnTimes]:
    rng = np.random.default_rng([task.seed, task.job])
    own = [one.own for one in recorded]
    return stretches(own, recorded[0].period_steps, task.n_ranks, task.n_steps, Blocks(), rng)


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
        """Whether whom a window names is worth a name, and mostly waited for a CPU, before the fault was put in."""
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
