"""What operators give away about stages that nobody marked."""

from __future__ import annotations

import numpy as np

from sftriage.traces.reduce.events import ANNOTATION, MEMCPY, OPERATOR, RUNTIME, Trace
from sftriage.traces.reduce.intervals import NOTHING, Ints, Spans, union
from sftriage.traces.reduce.naming import COLLECTIVES, COPIES, ENGINE, STEP, matching
from sftriage.traces.reduce.steps import Steps


def copies_to_device(trace: Trace, steps: Steps, taken: Spans) -> Spans:
    """Copies that the steps' thread makes, in no stage, and that bring something to the device."""
    names = np.fromiter((name.startswith("Memcpy HtoD") for name in trace.names), np.bool_, len(trace.names))
    links = np.unique(trace.link_E[trace.of_kinds(MEMCPY) & trace.named(names)])
    calls = np.flatnonzero(trace.of_kinds(RUNTIME) & np.isin(trace.link_E, links[links >= 0]))
    if not len(calls):
        return NOTHING
    # Calls into the driver may carry another name for their thread: they are placed by their time.
    called = np.sort(trace.start_E[calls])
    copy = trace.of_kinds(OPERATOR) & trace.named(matching(trace.names, COPIES)) & (trace.track_E == steps.track)
    start, end = trace.start_E[copy], trace.end_E[copy]
    holds = np.searchsorted(called, end, side="left") > np.searchsorted(called, start, side="left")
    return union(start[holds], end[holds]).without(taken)


def backward_runs(trace: Trace, steps: Steps) -> Spans:
    """From the first to the last function of the autograd engine, with nothing of the training thread's own between.

    The engine may run in a thread of its own while the training thread waits for it. A run lasts until the collectives
    that began in it are over, as far as the host can see, unless the training thread went on before that.
    """
    process = trace.tracks[steps.track][0]
    same = np.fromiter((track[0] == process for track in trace.tracks), np.bool_, len(trace.tracks))[trace.track_E]
    engine = trace.of_kinds(OPERATOR) & trace.named(matching(trace.names, ENGINE)) & same
    runs = union(trace.start_E[engine], trace.end_E[engine])
    if not len(runs.start_K):
        return NOTHING
    others = _own_operators(trace, steps)
    # A run goes on over a gap in which nothing else begins.
    splits = np.unique(np.concatenate([others, steps.start_N]))
    until_next = np.searchsorted(splits, runs.start_K[1:], side="left") > np.searchsorted(
        splits, runs.end_K[:-1], side="left"
    )
    opens = np.concatenate([[True], until_next])
    closes = np.concatenate([until_next, [True]])
    start, end = runs.start_K[opens], runs.end_K[closes]
    collective = trace.of_kinds(ANNOTATION, OPERATOR) & trace.named(matching(trace.names, COLLECTIVES)) & same
    began = trace.start_E[collective]
    run = np.searchsorted(start, began, side="right") - 1
    within = (run >= 0) & (began < end[run])
    lasts = end.copy()
    np.maximum.at(lasts, run[within], trace.end_E[collective][within])
    bounds = np.concatenate([splits, np.array([np.iinfo(np.int64).max])])
    return union(start, np.maximum(end, np.minimum(lasts, bounds[np.searchsorted(splits, end, side="left")])))


def forward_before(trace: Trace, steps: Steps, backward: Spans, ends: Ints, taken: Spans) -> Spans:
    """What the training thread did, in no stage, from the last batch, copy or backward up to the next backward.

    Args:
        trace: the trace.
        steps: its steps.
        backward: the backward passes.
        ends: the ends of whatever cannot be part of a forward pass.
        taken: the time that other stages have.
    """
    others = _own_operators(trace, steps)
    others = others[taken.before(others + 1) == taken.before(others)]
    marks = np.sort(np.concatenate([ends, steps.start_N]))
    last = np.searchsorted(marks, backward.start_K, side="right") - 1
    begin = np.where(last >= 0, marks[last], backward.start_K)
    first = np.searchsorted(others, begin, side="left")
    padded = np.concatenate([others, np.array([np.iinfo(np.int64).max])])
    return union(padded[first], backward.start_K).without(taken)


def _own_operators(trace: Trace, steps: Steps) -> Ints:
    """When operators of the training thread began, other than the engine's, collectives and the steps themselves."""
    steplike = np.fromiter((STEP.fullmatch(name) is not None for name in trace.names), np.bool_, len(trace.names))
    beside = steplike | matching(trace.names, (*ENGINE, *COLLECTIVES, "torch.distributed.ddp.reducer*"))
    own = trace.of_kinds(OPERATOR, ANNOTATION) & (trace.track_E == steps.track) & ~trace.named(beside)
    return np.unique(trace.start_E[own])
