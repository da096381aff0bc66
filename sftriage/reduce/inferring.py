"""What operators give away about stages that nobody marked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sftriage.reduce.events import ANNOTATION, MEMCPY, OPERATOR, RUNTIME, Trace
from sftriage.reduce.intervals import MAX_SPANS, NOTHING, Gathering, Ints, Spans, union
from sftriage.reduce.links import Links
from sftriage.reduce.naming import COLLECTIVES, COPIES, ENGINE, matching, steplike
from sftriage.reduce.packed import Chosen
from sftriage.reduce.steps import Steps

MAX_CALLS = 4_000_000
"""Calls of the autograd engine with something between them, which are put together to a few runs."""

_NEVER = np.iinfo(np.int64).max


def copies_to_device(trace: Trace, steps: Steps, taken: Spans) -> Spans:
    """Copies that the steps' thread makes, in no stage, and that bring something to the device."""
    names = np.fromiter((name.startswith("Memcpy HtoD") for name in trace.names), np.bool_, len(trace.names))
    links = Links(part.link_E for part in trace.parts(kinds=(MEMCPY,), names=names))
    if not links:
        return NOTHING
    # Calls into the driver may carry another name for their thread: they are placed by their time.
    calls = [part.start_E[links.have(part.link_E)] for part in trace.parts(kinds=(RUNTIME,))]
    called = np.sort(np.concatenate(calls)) if calls else NOTHING.start_K
    copies = gathering(trace)
    own = np.arange(len(trace.tracks)) == steps.track
    for copy in trace.parts(kinds=(OPERATOR,), names=matching(trace.names, COPIES), tracks=own):
        before_end, before_start = (
            np.searchsorted(called, moments, side="left") for moments in (copy.end_E, copy.start_E)
        )
        holds = before_end > before_start
        copies.add(copy.start_E[holds], copy.end_E[holds])
    return copies.spans().without(taken)


def backward_runs(trace: Trace, steps: Steps) -> Spans:
    """From the first to the last function of the autograd engine, with nothing of the training thread's own between.

    The engine may run in a thread of its own while the training thread waits for it. A run lasts until the collectives
    that began in it are over, as far as the host can see, unless the training thread went on before that.
    """
    process = trace.tracks[steps.track][0]
    same = np.fromiter((track[0] == process for track in trace.tracks), np.bool_, len(trace.tracks))
    engine = gathering(trace, MAX_CALLS)
    for part in trace.parts(kinds=(OPERATOR,), names=matching(trace.names, ENGINE), tracks=same):
        engine.add(part.start_E, part.end_E)
    runs = engine.spans()
    if not len(runs.start_K):
        return NOTHING
    # A run goes on over a gap in which nothing else begins.
    split_K = np.minimum(_next_own(trace, steps, runs.end_K), _first_from(steps.start_N, runs.end_K))
    until_next = split_K[:-1] < runs.start_K[1:]
    opens = np.concatenate([[True], until_next])
    closes = np.concatenate([until_next, [True]])
    start, end = runs.start_K[opens], runs.end_K[closes]
    lasts = end.copy()
    for part in trace.parts(kinds=(ANNOTATION, OPERATOR), names=matching(trace.names, COLLECTIVES), tracks=same):
        run = np.searchsorted(start, part.start_E, side="right") - 1
        within = (run >= 0) & (part.start_E < end[run])
        np.maximum.at(lasts, run[within], part.end_E[within])
    found = gathering(trace)
    found.add(start, np.maximum(end, np.minimum(lasts, split_K[closes])))
    return found.spans()


def forward_before(trace: Trace, steps: Steps, backward: Spans, ends: Ints, taken: Spans) -> Spans:
    """What the training thread did, in no stage, from the last batch, copy or backward up to the next backward.

    Args:
        trace: the trace.
        steps: its steps.
        backward: the backward passes.
        ends: the ends of whatever cannot be part of a forward pass.
        taken: the time that other stages have.
    """
    marks = np.sort(np.concatenate([ends, steps.start_N]))
    last = np.searchsorted(marks, backward.start_K, side="right") - 1
    begin = np.where(last >= 0, marks[last], backward.start_K)
    return union(_next_own(trace, steps, begin, outside=taken), backward.start_K).without(taken)


def _next_own(trace: Trace, steps: Steps, moments: Ints, outside: Spans = NOTHING) -> Ints:
    """For each moment, when the training thread next begins something of its own; or never.

    Its own is an operator other than the engine's, collectives and the steps themselves; not one that begins in the
    spans that it is to be outside of.
    """
    beside = (*ENGINE, *COLLECTIVES, "torch.distributed.ddp.reducer*")
    names = ~(steplike(trace.names) | matching(trace.names, beside))
    found = np.full(len(moments), _NEVER, dtype=np.int64)
    for began in _began(trace, names, np.arange(len(trace.tracks)) == steps.track):
        free = began[outside.before(began + 1) == outside.before(began)]
        np.minimum(found, _first_from(free, moments), out=found)
    return found


def _began(trace: Trace, names: Chosen, tracks: Chosen) -> Iterator[Ints]:
    for part in trace.parts(kinds=(OPERATOR, ANNOTATION), names=names, tracks=tracks):
        yield np.sort(part.start_E)


def _first_from(begun: Ints, moments: Ints) -> Ints:
    """For each moment the first of some others, which are in order, that is not before it; or never."""
    return np.append(begun, _NEVER)[np.searchsorted(begun, moments, side="left")]


def gathering(trace: Trace, most: int = MAX_SPANS) -> Gathering:
    """Takes the pieces of a stage, of which there are to be no more than can be worked with."""
    return Gathering(most, f"{trace.source}: its stages are in more than {most} pieces")
