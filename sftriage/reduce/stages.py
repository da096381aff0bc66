"""From the events of a trace to its steps and their coarse stages, which sum to each step to the nanosecond.

Names mark steps and stages: sftriage's own, those the field uses, or those of a map.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache
from glob import escape
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sftriage.errors import InputError, SchemaError
from sftriage.model.windows import OTHER, StageSchema
from sftriage.reduce.events import (
    ANNOTATION,
    MEMCPY,
    NOTHING,
    ON_HOST,
    OPERATOR,
    OWN,
    PYTHON,
    RUNTIME,
    EventQuery,
    Events,
    IntervalCollector,
    Intervals,
    Ints,
    Links,
    Trace,
    both,
    gathered,
    self_time_slices,
    union,
)
from sftriage.traces.manifest import first_problem

_STEP: Final = re.compile(r"ProfilerStep#(\d+)")

# (before 2022 the engine's functions had no prefix)
_ENGINES = "autograd::engine::evaluate_function*", "torch::autograd::AccumulateGrad"
ENGINE: Final = (*_ENGINES, "*Backward", "*Backward[0-9]")
_BACKENDS = ("nccl", "gloo", "mpi", "ucc")
COLLECTIVES: Final = (
    *(f"{backend}:*" for backend in _BACKENDS),
    *("c10d::*", "record_param_comms", "ncclKernel*", "ncclDevKernel*"),
)
WAITS: Final = (*COLLECTIVES, "MPI_[BRW]*", "cuda*Synchronize*", "hip*Synchronize*", "*_MultiProcessingDataLoaderIter*")
"""Waits for the device or for other processes; they count in any thread."""

IDLES: Final = (
    *("*run_backward*", "<built-in * sleep>", "threading.py(*): wait*", "queue.py(*): get"),
    *(f"<built-in * {call}*" for call in ("acquire of", "poll of", "select", "recv", "wait of")),
    # The operating system's own, as nsys names them.
    *("*sleep", "*poll", "epoll_wait*", "futex*", "select", "sem_*wait"),
    *("pthread_cond_*wait*", "pthread_mutex_lock", "pthread_join*"),
)
"""Waits for something in this process or in the system. Idle threads spend their time there, so they count only in the
thread of the steps."""

OURS: Final = ("*sftriage/trainer/*.py(*",)
"""Python functions of sftriage that record and capture steps, and are not part of the program."""

COPIES: Final = ("aten::to", "aten::copy_", "aten::_to_copy")

FIELD: Final[Mapping[str, tuple[str, ...]]] = {
    "data": ("enumerate(DataLoader)*", "## load_batch ##", "data", "dataloader", "data_loading"),
    # (TorchRec distributes the next batch's sparse features here)
    "input_dist": ("## sparse_data_dist ##", "## start_sparse_data_dist*"),
    "h2d": ("## copy_batch_to_gpu ##", "## wait_for_batch ##", "h2d"),
    "forward": ("## forward ##", "forward", "DistributedDataParallel.forward", "FullyShardedDataParallel.forward"),
    "backward": ("## backward ##", "backward", "torch/_tensor.py(*): backward"),
    "optimizer": ("## optimizer ##", "## zero_grad ##", "optimizer", "Optimizer.step#*", "Optimizer.zero_grad#*"),
}
"""Annotations that mark a stage anywhere; the innermost counts."""

LOOSE: Final[Mapping[str, tuple[str, ...]]] = {"forward": ("nn.Module: *",), "sync": COLLECTIVES}
"""Names that mark a stage only outside other stages."""


class Names(BaseModel):
    """How names mark steps and stages; patterns are those of a shell (``*``, ``?``, ``[abc]``).

    Attributes:
        stages: for each stage the names that mark it; None for the usual names.
        sync: the sync stages; None for those with collectives in them.
        step: the names of steps; None for ``ProfilerStep#N``.
        step_end: names that end a step, if steps have no range of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stages: Annotated[dict[str, list[str]], Field(max_length=31)] | None = None
    sync: list[str] | None = None
    step: str | None = None
    step_end: str | None = None


def matching(names: Sequence[str], patterns: Sequence[str]) -> NDArray[np.bool_]:
    """For each name, whether it matches a pattern."""
    return _fitting(names, _compiled(tuple(patterns)))


def steplike(names: Sequence[str]) -> NDArray[np.bool_]:
    """For each name, whether it is that of a step."""
    return _fitting(names, _STEP)


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


def _fitting(names: Sequence[str], pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    return np.fromiter((pattern.fullmatch(name) is not None for name in names), dtype=np.bool_, count=len(names))


def load_names(path: Path) -> Names:
    """Read `Names` from YAML; raises InputError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        read = Names.model_validate(values if values is not None else {})
        if read.stages is not None:
            StageSchema.closed(tuple(read.stages), tuple(read.sync or ()))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise InputError(f"{path}: not a map of names: {first_problem(error)}") from None
    except SchemaError as error:
        raise InputError(f"{path}: {error}") from error
    if read.step is not None and read.step_end is not None:
        raise InputError(f"{path}: step and step_end: give only one of them")
    return read


_NUMBER = re.compile(r"(\d+)\D*$")
MAX_STEPS = 250_000


@dataclass(frozen=True, slots=True, eq=False)
class TracedSteps:
    """N steps of one thread, by time: their numbers, starts and ends; they do not overlap."""

    track: int
    number_N: Ints
    start_N: Ints
    end_N: Ints
    notes: tuple[str, ...] = ()


def find_steps(trace: Trace, names: Names) -> TracedSteps:
    """The steps of a trace, by the host's events only; InputError, with names that could mark them, if it has none."""
    marks = _step_marks(trace, names)
    if not len(marks):
        raise InputError(f"{trace.source}: {_no_steps_words(trace, names)}")
    tracks = np.bincount(marks.track_E)
    track = int(tracks.argmax())
    marks = marks.at(marks.track_E == track)
    marks = marks.at(np.argsort(marks.start_E, kind="stable"))
    if names.step_end is not None:
        if len(marks) < 2:
            raise InputError(f"{trace.source}: one {names.step_end!r} alone does not bound a step")
        start_N, end_N = marks.end_E[:-1], marks.end_E[1:]
        number_N = np.arange(len(start_N), dtype=np.int64)
    else:
        start_N, end_N, number_N = marks.start_E, marks.end_E, _numbers(trace, marks.name_E, names)
    several = "several threads mark steps: using the one that marks the most"
    # (on a clock of whole microseconds, a step may begin before the previous one ends)
    start_N = np.maximum(start_N, np.concatenate([start_N[:1], np.maximum.accumulate(end_N)[:-1]]))
    real = end_N > start_N
    if not real.any():
        raise InputError(f"{trace.source}: its steps have no duration")
    number_N, start_N, end_N = number_N[real], start_N[real], end_N[real]
    if len(np.unique(number_N)) < len(number_N):
        raise InputError(f"{trace.source}: a step number occurs twice: it holds more than one run of a profiler")
    return TracedSteps(track, number_N, start_N, end_N, (several,) if np.count_nonzero(tracks) > 1 else ())


def _step_marks(trace: Trace, names: Names) -> Events:
    if names.step is not None or names.step_end is not None:
        query = EventQuery(ON_HOST, matching(trace.names, [str(names.step or names.step_end)]))
    else:
        # (in 2021 they were operators)
        query = EventQuery((ANNOTATION, OPERATOR), steplike(trace.names))
    return gathered(trace.parts(query), MAX_STEPS, f"{trace.source}: more than {MAX_STEPS} marks of steps")


def _numbers(trace: Trace, name_N: Ints, names: Names) -> Ints:
    used, which_N = np.unique(name_N, return_inverse=True)
    found = [_NUMBER.search(trace.names[name]) for name in used.tolist()]
    numbers = [int(match.group(1)) for match in found if match and len(match.group(1)) < 18]
    if len(numbers) < len(used) or (names.step is not None and len(set(numbers)) < len(name_N)):
        return np.arange(len(name_N), dtype=np.int64)
    return np.array(numbers, dtype=np.int64)[which_N]


def _no_steps_words(trace: Trace, names: Names) -> str:
    if names.step is not None or names.step_end is not None:
        return f"it has no {names.step or names.step_end!r}"
    counts = np.zeros(len(trace.names), dtype=np.int64)
    for part in trace.parts(EventQuery((ANNOTATION,))):
        counts += np.bincount(part.name_E, minlength=len(counts))
    order = np.argsort(-counts, kind="stable").tolist()
    counted = ((trace.names[name], int(counts[name])) for name in order if 2 <= counts[name] <= MAX_STEPS)
    repeated = [(name, n) for name, n in counted if not name.startswith(OWN)]
    # (an optimizer's step ends a training step)
    repeated.sort(key=lambda named: not named[0].startswith("Optimizer.step"))
    words = "no steps in it (no ProfilerStep#N)"
    if not repeated:
        return f"{words}, and no repeated range that could mark them"
    ways = ", ".join(f"{name[:60]!r} ({n} times)" for name, n in repeated[:3])
    return f"{words}; a --map with `step` or `step_end` could cut it at a repeated range: {ways}"


MAX_CALLS = 4_000_000
"""Maximum number of separate calls of the autograd engine, which are joined into a few runs."""

_NEVER = np.iinfo(np.int64).max


def copies_to_device(trace: Trace, steps: TracedSteps, taken: Intervals) -> Intervals:
    """Copies to the device that the steps' thread makes outside the stages."""
    links = Links(part.link_E for part in trace.parts(EventQuery((MEMCPY,), matching(trace.names, ("Memcpy HtoD*",)))))
    if not links:
        return NOTHING
    # (calls into the driver may have another name for their thread, so place them by time)
    calls = [part.start_E[links.have(part.link_E)] for part in trace.parts(EventQuery((RUNTIME,)))]
    called = np.sort(np.concatenate(calls)) if calls else NOTHING.start_K
    copies = IntervalCollector(trace.source)
    for copy in trace.parts(EventQuery((OPERATOR,), matching(trace.names, COPIES), trace.thread(steps.track))):
        holds = np.searchsorted(called, copy.end_E) > np.searchsorted(called, copy.start_E)
        copies.add(copy.start_E[holds], copy.end_E[holds])
    return copies.spans().without(taken)


def backward_runs(trace: Trace, steps: TracedSteps) -> Intervals:
    """Runs of functions of the autograd engine, without other work of the training thread in between.

    The engine may have a thread of its own. A run lasts until the collectives that began in it are over, as far as the
    host can see, unless the training thread continues before that.
    """
    same = trace.process(steps.track)
    engine = IntervalCollector(trace.source, MAX_CALLS)
    for part in trace.parts(EventQuery((OPERATOR,), matching(trace.names, ENGINE), same)):
        engine.add(part.start_E, part.end_E)
    runs = engine.spans()
    if not len(runs.start_K):
        return NOTHING
    # (a run continues over a gap in which nothing else begins)
    split_K = np.minimum(_next_own(trace, steps, runs.end_K), _first_from(steps.start_N, runs.end_K))
    until_next = split_K[:-1] < runs.start_K[1:]
    opens = np.concatenate([[True], until_next])
    closes = np.concatenate([until_next, [True]])
    start, end = runs.start_K[opens], runs.end_K[closes]
    lasts = end.copy()
    for part in trace.parts(EventQuery((ANNOTATION, OPERATOR), matching(trace.names, COLLECTIVES), same)):
        run = np.searchsorted(start, part.start_E, side="right") - 1
        within = (run >= 0) & (part.start_E < end[run])
        np.maximum.at(lasts, run[within], part.end_E[within])
    found = IntervalCollector(trace.source)
    found.add(start, np.maximum(end, np.minimum(lasts, split_K[closes])))
    return found.spans()


def forward_before(trace: Trace, steps: TracedSteps, backward: Intervals, ends: Ints, taken: Intervals) -> Intervals:
    """What the training thread did outside stages from the last batch, copy or backward to the next backward."""
    marks = np.sort(np.concatenate([ends, steps.start_N]))
    last = np.searchsorted(marks, backward.start_K, side="right") - 1
    begin = np.where(last >= 0, marks[last], backward.start_K)
    return union(_next_own(trace, steps, begin, outside=taken), backward.start_K).without(taken)


def _next_own(trace: Trace, steps: TracedSteps, moments: Ints, outside: Intervals = NOTHING) -> Ints:
    """For each moment, when the training thread next begins work of its own; or never.

    That is an operator, other than the engine's, collectives and steps, that does not begin in ``outside``.
    """
    beside = (*ENGINE, *COLLECTIVES, "torch.distributed.ddp.reducer*")
    names = ~(steplike(trace.names) | matching(trace.names, beside))
    found = np.full(len(moments), _NEVER, dtype=np.int64)
    for part in trace.parts(EventQuery((OPERATOR, ANNOTATION), names, trace.thread(steps.track))):
        free = np.sort(part.start_E[~outside.hold(part.start_E)])
        np.minimum(found, _first_from(free, moments), out=found)
    return found


def _first_from(begun: Ints, moments: Ints) -> Ints:
    """For each moment, the first of some sorted others that is not before it; or never."""
    return np.append(begun, _NEVER)[np.searchsorted(begun, moments, side="left")]


Origin = Literal["sftriage", "names", "map"]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A trace reduced to its stages: N steps × S stages, G of them sync stages.

    Attributes:
        schema: the stages in the order of the step, ``other`` last.
        origin: the source of the stages: sftriage, a map of names, or the usual names.
        spans: the time of each stage but ``other`` in the trace.
        durations_ns_NS: each stage's share of each step; they sum exactly to the step.
        notes: remarks for the reader.
    """

    trace: Trace
    steps: TracedSteps
    schema: StageSchema
    origin: Origin
    spans: Mapping[str, Intervals]
    durations_ns_NS: Ints
    notes: tuple[str, ...]
    has_collectives: bool = True

    def without_events(self) -> Reduction:
        """The reduction without its events, which take nearly all of its memory."""
        return replace(self, trace=replace(self.trace, blocks=(), names=()))

    @property
    def mean_s(self) -> dict[str, float]:
        """The mean time of each stage, in seconds."""
        return dict(zip(self.schema.stages, (self.durations_ns_NS.mean(axis=0) * 1e-9).tolist(), strict=True))

    @property
    def between_ns_N(self) -> Ints:
        """The time from the end of the previous step to each step's start; 0 for the first, and after a gap."""
        gaps = self.steps.start_N[1:] - self.steps.end_N[:-1]
        follows = np.diff(self.steps.number_N) == 1
        return np.concatenate([np.zeros(1, np.int64), np.where(follows, gaps, 0)])


def reduce_trace(trace: Trace, names: Names | None = None) -> Reduction:
    """Reduce a trace to the stages of its steps; raises InputError if it has no steps."""
    names = names or Names()
    steps = find_steps(trace, names)
    origin, spans = _stages(trace, steps, names)
    inside = Intervals(steps.start_N, steps.end_N)
    spans = {stage: clipped for stage, found in spans.items() if (clipped := found.clipped(inside)).total_ns}
    stages = tuple(sorted(spans, key=lambda stage: _centre(spans[stage], steps)))
    sync = _sync(trace, steps, spans, names)
    schema = StageSchema.closed(stages, tuple(stage for stage in stages if stage in sync))
    whole_N = steps.end_N - steps.start_N
    named_NS = np.array([spans[stage].within(steps.start_N, steps.end_N) for stage in stages], dtype=np.int64)
    named_NS = named_NS.reshape(len(stages), len(whole_N)).T
    durations_NS = np.concatenate([named_NS, (whole_N - named_NS.sum(axis=1))[:, None]], axis=1)
    notes = list(steps.notes)
    if not stages:
        notes.append("no stages found in it: name the ranges that mark them with --map")
    if not trace.absolute:
        notes.append("its clock has no date, so it cannot be lined up with others")
    return Reduction(
        trace=trace,
        steps=steps,
        schema=schema,
        origin=origin,
        spans=spans,
        durations_ns_NS=durations_NS,
        notes=(*trace.notes, *notes),
        has_collectives=bool(matching(trace.names, COLLECTIVES).any()),
    )


def _stages(trace: Trace, steps: TracedSteps, names: Names) -> tuple[Origin, dict[str, Intervals]]:
    if names.stages is not None:
        return "map", _marked(trace, steps, names.stages)
    own = {name.removeprefix(OWN): (escape(name),) for name in trace.names if name.startswith(OWN) and _may_be(name)}
    if own and (found := _marked(trace, steps, own)):
        return "sftriage", found
    return "names", _recognised(trace, steps)


def _may_be(name: str) -> bool:
    """Whether an annotation with our prefix is a valid name of a stage: any program may write one."""
    try:
        StageSchema((name.removeprefix(OWN),))
    except SchemaError:
        return False
    return name != OWN + OTHER


def _marked(trace: Trace, steps: TracedSteps, stages: Mapping[str, Sequence[str]]) -> dict[str, Intervals]:
    """Stages by the marks on the steps' own thread; of nested marks the inner one counts."""
    label = np.full(len(trace.names), -1, dtype=np.int64)
    for number, patterns in enumerate(stages.values()):
        label[(label < 0) & matching(trace.names, patterns)] = number
    found = [IntervalCollector(trace.source) for _ in stages]
    query = EventQuery((ANNOTATION, OPERATOR, PYTHON), label >= 0, trace.thread(steps.track))
    for _, marks, pieces in self_time_slices(trace, query):
        label_P = label[marks.name_E][pieces.owner_P]
        for number, spans in enumerate(found):
            spans.add(pieces.start_P[label_P == number], pieces.end_P[label_P == number])
    all_spans = {stage: collector.spans() for stage, collector in zip(stages, found, strict=True)}
    return {stage: spans for stage, spans in all_spans.items() if spans.total_ns}


def _recognised(trace: Trace, steps: TracedSteps) -> dict[str, Intervals]:
    found = _marked(trace, steps, FIELD)
    taken = both(*found.values())
    if "h2d" not in found:
        taken = _add(found, taken, "h2d", copies_to_device(trace, steps, taken))
    if "backward" not in found:
        taken = _add(found, taken, "backward", backward_runs(trace, steps))
    for stage, spans in _marked(trace, steps, LOOSE).items():
        taken = _add(found, taken, stage, spans)
    if "forward" not in found and "backward" in found:
        ends = [found[stage].end_K for stage in ("data", "h2d", "backward") if stage in found]
        _add(found, taken, "forward", forward_before(trace, steps, found["backward"], np.concatenate(ends), taken))
    return found


def _add(found: dict[str, Intervals], taken: Intervals, stage: str, spans: Intervals) -> Intervals:
    spans = spans.without(taken)
    if spans.total_ns:
        found[stage] = both(found.get(stage, NOTHING), spans)
    return both(*found.values())


def _centre(spans: Intervals, steps: TracedSteps) -> float:
    step_K = np.searchsorted(steps.start_N, spans.start_K, side="right") - 1
    middle_K = (spans.start_K + spans.end_K) / 2 - steps.start_N[step_K]
    return float(np.average(middle_K, weights=spans.end_K - spans.start_K))


def _sync(trace: Trace, steps: TracedSteps, spans: Mapping[str, Intervals], names: Names) -> frozenset[str]:
    """The stages that end in a blocking exchange: as in ``names``, or those in which most steps end a collective."""
    if names.sync is not None:
        return frozenset(names.sync)
    if trace.world_size == 1:
        return frozenset()
    ended: dict[str, set[int]] = {stage: set() for stage in spans}
    for part in trace.parts(EventQuery((ANNOTATION, OPERATOR), matching(trace.names, COLLECTIVES))):
        ends = np.unique(part.end_E)
        for stage, own in spans.items():
            during = ends[own.hold(ends - 1)]
            step = np.unique(np.searchsorted(steps.start_N, during, side="right") - 1)
            ended[stage].update(step[step >= 0].tolist())
    return frozenset(stage for stage, own_steps in ended.items() if 2 * len(own_steps) >= len(steps.number_N))


def outside_ns(steps: TracedSteps, spans: Mapping[str, Intervals], schema: StageSchema) -> Ints:
    """The part of ``other`` before the end of each sync stage and after the end of the previous one (N × G)."""
    rest = Intervals(steps.start_N, steps.end_N).without(both(*spans.values()))
    claimed_N = np.zeros(len(steps.number_N), dtype=np.int64)
    outside = []
    for stage in schema.sync_in_order:
        own = spans.get(stage, NOTHING)
        if not own.total_ns:
            outside.append(np.zeros_like(claimed_N))
            continue
        last = np.searchsorted(own.start_K, steps.end_N, side="left") - 1
        left_N = np.where(last >= 0, np.minimum(own.end_K[last], steps.end_N), steps.start_N)
        before_N = np.maximum(rest.within(steps.start_N, np.maximum(left_N, steps.start_N)) - claimed_N, 0)
        outside.append(before_N)
        claimed_N = claimed_N + before_N
    return np.array(outside, dtype=np.int64).reshape(len(outside), len(claimed_N)).T
