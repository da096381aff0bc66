"""What a rank's DataLoader workers did while its training thread waited for them. Pure.

Axes: W samples of all workers, one worker after the other.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, WorkerSamples
from sftriage.reduce.spots import Spot, spots

_WAITS = re.compile(r"torch/utils/data/dataloader\.py (\w+\.)?_(try_)?get_data$")
_IDLE = re.compile(r"/multiprocessing/queues\.py (\w+\.)?get$")
"""Where the training thread stands that waits for its workers, and where a worker does that has nothing to do."""

MAIN_FRACTION = 0.5
"""Of the time in which the workers are waited for and busy, what a place takes at least to be named."""

_WAITED_FOR = "waited for"


@dataclass(frozen=True, slots=True)
class WorkerSpot:
    """A place in the workers that the training thread waits for.

    ``step_s`` is what all of them spend there a step, waited for or not; ``control_s`` the same of the control's.
    """

    spot: Spot
    step_s: float
    control_s: float | None


def in_workers(
    sampled: StackSamples, control: StackSamples | None, stage: str, steps: Collection[int] | None = None
) -> WorkerSpot | None:
    """Where the workers are while a stage waits for them, in some steps or in all; None where no place stands out."""
    theirs = _as_one(sampled, stage)
    found = [] if theirs is None else spots(theirs, _WAITED_FOR, steps)
    if theirs is None or not found or found[0].weight_ns < MAIN_FRACTION * sum(one.weight_ns for one in found):
        return None
    beside = None if control is None else _as_one(control, stage)
    control_s = None if beside is None else _step_s(beside, found[0], None)
    return WorkerSpot(found[0], _step_s(theirs, found[0], steps), control_s)


def meanwhile(samples: StackSamples, worker: WorkerSamples) -> StackSamples:
    """A worker's samples as if it were a rank, in the steps and stages that the training thread was in meanwhile."""
    at = [bisect_left(samples.time_ns_N, time_ns) for time_ns in worker.time_ns_W]
    rows = [row for row in range(len(at)) if at[row] < len(samples.time_ns_N)]
    threads = [
        ThreadSamples(
            one.name,
            tuple(one.stacks_N[row] for row in rows) if one.stacks_N else (),
            tuple(one.run_ns_N[row] for row in rows),
            tuple(one.waited_ns_N[row] for row in rows),
        )
        for one in (*worker.threads, worker.sampler)
    ]
    return StackSamples(
        frames=samples.frames,
        period_ns=worker.period_ns,
        time_ns_N=tuple(worker.time_ns_W[row] for row in rows),
        step_N=tuple(samples.step_N[at[row]] for row in rows),
        stage_N=tuple(samples.stage_N[at[row]] for row in rows),
        since_ns_N=tuple(samples.since_ns_N[at[row]] for row in rows),
        training=threads[0],
        others=tuple(threads[1:-1]),
        sampler=threads[-1],
    )


def _step_s(theirs: StackSamples, spot: Spot, steps: Collection[int] | None) -> float:
    same = (spot.frame.function, spot.frame.file)
    found = (one for one in spots(theirs, None, steps) if (one.frame.function, one.frame.file) == same)
    n_steps = len({step for step in theirs.step_N if steps is None or step in steps})
    return sum(one.weight_ns for one in found) * 1e-9 / max(1, n_steps)


def _as_one(samples: StackSamples, stage: str) -> StackSamples | None:
    """All workers as if they were one thread, in the steps of the training thread; None where there are none.

    A sample stands for the time before it, and so for what the training thread did at its own next sample.
    """
    rows = [row for worker in samples.workers if worker.time_ns_W for row in _rows(samples, worker, stage)]
    if not rows:
        return None
    time_ns, step, at, since_ns, stack, times, own = zip(*rows, strict=True)
    return StackSamples(
        frames=samples.frames,
        period_ns=samples.period_ns,
        time_ns_N=time_ns,
        step_N=step,
        stage_N=at,
        since_ns_N=since_ns,
        training=_thread(stack, times),
        others=(),
        sampler=_thread((), own),
    )


_Row = tuple[int, int, str, int, tuple[int, ...], tuple[int, int], tuple[int, int]]


def _rows(samples: StackSamples, worker: WorkerSamples, stage: str) -> Iterator[_Row]:
    """A worker's samples, after one without a stack that keeps them from those of the worker before."""
    main, unknown = worker.threads[0], (-1, -1)
    yield worker.time_ns_W[0] - worker.period_ns, samples.step_N[0], "", 0, (), unknown, unknown
    for row, time_ns in enumerate(worker.time_ns_W):
        at = bisect_left(samples.time_ns_N, time_ns)
        if at == len(samples.time_ns_N):
            return
        waits = samples.stage_N[at] == stage and _any(samples.frames, samples.training.stacks_N[at], _WAITS)
        stack = main.stacks_N[row]
        yield (
            time_ns,
            samples.step_N[at],
            _WAITED_FOR if waits else "",
            samples.since_ns_N[at],
            # (the outermost is the worker's loop, which takes what it is to do from a queue)
            () if _any(samples.frames, stack[1:2], _IDLE) else stack,
            (main.run_ns_N[row], main.waited_ns_N[row]),
            (worker.sampler.run_ns_N[row], worker.sampler.waited_ns_N[row]),
        )


def _any(frames: Sequence[Frame], stack: Sequence[int], pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(f"{frames[one].file} {frames[one].function}") for one in stack)


def _thread(stacks: Sequence[tuple[int, ...]], times_ns: Sequence[tuple[int, int]]) -> ThreadSamples:
    run_ns, waited_ns = zip(*times_ns, strict=True)
    return ThreadSamples("", tuple(stacks), run_ns, waited_ns)
