"""From the events of a trace to the coarse stages of its steps, which sum to each step to the nanosecond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sftriage.errors import SchemaError
from sftriage.records import OTHER, StageSchema
from sftriage.reduce.events import ANNOTATION, OPERATOR, PYTHON, Trace
from sftriage.reduce.inferring import backward_runs, copies_to_device, forward_before, gathering
from sftriage.reduce.intervals import NOTHING, Ints, Spans, both
from sftriage.reduce.naming import COLLECTIVES, FIELD, LOOSE, OWN, Names, matching
from sftriage.reduce.owning import owned
from sftriage.reduce.steps import Steps, find_steps

Origin = Literal["sftriage", "names", "map"]


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A trace reduced to its stages: N steps × S stages, G of them sync stages.

    Attributes:
        trace: what was reduced.
        steps: its steps.
        schema: the stages in the order of the step, ``other`` last.
        origin: whether sftriage marked the stages, a map of names did, or names that the field uses were recognised.
        spans: for each stage but ``other`` the time it takes in the trace.
        durations_ns_NS: each stage's share of each step; a step's sum to it exactly.
        outside_ns_NG: the part of ``other`` before each sync stage ended (see `records.StepRecord`).
        notes: what a reader should know about the reduction.
    """

    trace: Trace
    steps: Steps
    schema: StageSchema
    origin: Origin
    spans: Mapping[str, Spans]
    durations_ns_NS: Ints
    outside_ns_NG: Ints
    notes: tuple[str, ...]

    def without_events(self) -> Reduction:
        """The same without the events it was made from."""
        return replace(self, trace=self.trace.without_events())

    @property
    def mean_s(self) -> dict[str, float]:
        """What each stage took in the mean of the steps, in seconds."""
        return dict(zip(self.schema.stages, (self.durations_ns_NS.mean(axis=0) * 1e-9).tolist(), strict=True))

    @property
    def between_ns_N(self) -> Ints:
        """From the end of each step's predecessor to its start; of the first, or after a hole, 0."""
        gaps = self.steps.start_N[1:] - self.steps.end_N[:-1]
        follows = np.diff(self.steps.number_N) == 1
        return np.concatenate([np.zeros(1, np.int64), np.where(follows, gaps, 0)])


def reduce_trace(trace: Trace, names: Names | None = None) -> Reduction:
    """Reduce a trace to the stages of its steps.

    Raises:
        InputError: it has no steps that can be told.
    """
    names = names or Names()
    steps = find_steps(trace, names)
    origin, spans = _stages(trace, steps, names)
    inside = Spans(steps.start_N, steps.end_N)
    spans = {stage: clipped for stage, its in spans.items() if (clipped := its.clipped(inside)).total_ns}
    stages = tuple(sorted(spans, key=lambda stage: _centre(spans[stage], steps)))
    sync = _sync(trace, steps, spans, names)
    schema = StageSchema.closed(stages, tuple(stage for stage in stages if stage in sync))
    whole_N = steps.end_N - steps.start_N
    named_NS = np.array([spans[stage].within(steps.start_N, steps.end_N) for stage in stages], dtype=np.int64)
    named_NS = named_NS.reshape(len(stages), len(whole_N)).T
    durations_NS = np.concatenate([named_NS, (whole_N - named_NS.sum(axis=1))[:, None]], axis=1)
    notes = list(steps.notes)
    if not stages:
        notes.append("no stage could be told in it: a --map says which names mark them")
    if not trace.absolute:
        notes.append("its clock has no date, so it cannot be lined up with others")
    return Reduction(
        trace=trace,
        steps=steps,
        schema=schema,
        origin=origin,
        spans=spans,
        durations_ns_NS=durations_NS,
        outside_ns_NG=outside_ns(steps, spans, schema),
        notes=(*trace.notes, *notes),
    )


def _stages(trace: Trace, steps: Steps, names: Names) -> tuple[Origin, dict[str, Spans]]:
    """The time of each stage, by the best marks there are."""
    if names.stages is not None:
        return "map", _marked(trace, steps, names.stages)
    own = {
        name.removeprefix(OWN): (_literally(name),) for name in trace.names if name.startswith(OWN) and _may_be(name)
    }
    if own and (found := _marked(trace, steps, own)):
        return "sftriage", found
    return "names", _recognised(trace, steps)


def _may_be(name: str) -> bool:
    """Whether an annotation of ours names a stage: anybody may have written it."""
    try:
        StageSchema((name.removeprefix(OWN),))
    except SchemaError:
        return False
    return name != OWN + OTHER


def _literally(name: str) -> str:
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in name)


def _marked(trace: Trace, steps: Steps, stages: Mapping[str, Sequence[str]]) -> dict[str, Spans]:
    """Stages by what is marked on the steps' own thread; where marks nest, the inner one counts."""
    label = np.full(len(trace.names), -1, dtype=np.int64)
    for number, patterns in enumerate(stages.values()):
        label[(label < 0) & matching(trace.names, patterns)] = number
    own = np.arange(len(trace.tracks)) == steps.track
    found = [gathering(trace) for _ in stages]
    for _, marks, pieces in owned(trace, kinds=(ANNOTATION, OPERATOR, PYTHON), names=label >= 0, tracks=own):
        label_P = label[marks.name_E][pieces.owner_P]
        for number, its in enumerate(found):
            its.add(pieces.start_P[label_P == number], pieces.end_P[label_P == number])
    all_spans = {stage: its.spans() for stage, its in zip(stages, found, strict=True)}
    return {stage: spans for stage, spans in all_spans.items() if spans.total_ns}


def _recognised(trace: Trace, steps: Steps) -> dict[str, Spans]:
    """Stages by the names of the field, and by what operators give away where there are none."""
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


def _add(found: dict[str, Spans], taken: Spans, stage: str, spans: Spans) -> Spans:
    """Give a stage what nobody has taken yet; returns what is taken then."""
    spans = spans.without(taken)
    if spans.total_ns:
        old = found.get(stage, NOTHING)
        found[stage] = both(old, spans)
    return both(*found.values())


def _centre(spans: Spans, steps: Steps) -> float:
    """How far into its step a stage is, in the mean of its time: what the order of the stages goes by."""
    step_K = np.searchsorted(steps.start_N, spans.start_K, side="right") - 1
    middle_K = (spans.start_K + spans.end_K) / 2 - steps.start_N[step_K]
    return float(np.average(middle_K, weights=spans.end_K - spans.start_K))


def _sync(trace: Trace, steps: Steps, spans: Mapping[str, Spans], names: Names) -> frozenset[str]:
    """The stages that end in a blocking exchange: as said, or those in which most steps end a collective."""
    if names.sync is not None:
        return frozenset(names.sync)
    if trace.world_size == 1:
        return frozenset()
    ended: dict[str, set[int]] = {stage: set() for stage in spans}
    for part in trace.parts(kinds=(ANNOTATION, OPERATOR), names=matching(trace.names, COLLECTIVES)):
        ends = np.unique(part.end_E)
        for stage, its in spans.items():
            during = ends[its.before(ends) > its.before(ends - 1)]
            step = np.unique(np.searchsorted(steps.start_N, during, side="right") - 1)
            ended[stage].update(step[step >= 0].tolist())
    return frozenset(stage for stage, its_steps in ended.items() if 2 * len(its_steps) >= len(steps.number_N))


def outside_ns(steps: Steps, spans: Mapping[str, Spans], schema: StageSchema) -> Ints:
    """Of ``other``, what lies before the end of each sync stage and after that of the one before (N × G)."""
    rest = Spans(steps.start_N, steps.end_N).without(both(*spans.values()))
    claimed_N = np.zeros(len(steps.number_N), dtype=np.int64)
    outside = []
    for stage in schema.sync_in_order:
        its = spans.get(stage, NOTHING)
        if not its.total_ns:
            outside.append(np.zeros_like(claimed_N))
            continue
        last = np.searchsorted(its.start_K, steps.end_N, side="left") - 1
        left_N = np.where(last >= 0, np.minimum(its.end_K[last], steps.end_N), steps.start_N)
        before_N = np.maximum(rest.within(steps.start_N, np.maximum(left_N, steps.start_N)) - claimed_N, 0)
        outside.append(before_N)
        claimed_N = claimed_N + before_N
    return np.array(outside, dtype=np.int64).reshape(len(outside), len(claimed_N)).T
