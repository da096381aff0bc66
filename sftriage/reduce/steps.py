"""Where the steps of a trace are."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from sftriage.errors import InputError
from sftriage.reduce.events import ANNOTATION, ON_HOST, OPERATOR, EventQuery, Events, Trace, gathered
from sftriage.reduce.intervals import Ints
from sftriage.reduce.naming import OWN, Names, matching, steplike

_NUMBER = re.compile(r"(\d+)\D*$")
MAX_STEPS = 250_000


@dataclass(frozen=True, slots=True, eq=False)
class TracedSteps:
    """N steps of one thread in order of time: their numbers, starts and ends; none begins before the last has ended."""

    track: int
    number_N: Ints
    start_N: Ints
    end_N: Ints
    notes: tuple[str, ...] = ()


def find_steps(trace: Trace, names: Names) -> TracedSteps:
    """The steps of a trace.

    A step's mark on a device is a copy of the host's, and does not count: only the host's events are looked at.

    Raises:
        InputError: it has none, or none that can be told apart; the message says what could mark them instead.
    """
    marks = _marked(trace, names)
    if not len(marks):
        raise InputError(f"{trace.source}: {_nothing(trace, names)}")
    tracks = np.bincount(marks.track_E)
    track = int(tracks.argmax())
    marks = marks.at(marks.track_E == track)
    marks = marks.at(np.argsort(marks.start_E, kind="stable"))
    if names.step_end is not None:
        if len(marks) < 2:
            raise InputError(f"{trace.source}: one {names.step_end!r} alone bounds no step")
        start_N, end_N = marks.end_E[:-1], marks.end_E[1:]
        number_N = np.arange(len(start_N), dtype=np.int64)
    else:
        start_N, end_N, number_N = marks.start_E, marks.end_E, _numbers(trace, marks.name_E, names)
    several = "several threads mark steps: those of the one that marks the most are taken"
    # Clocks of whole microseconds may let a step begin in the last one's end.
    start_N = np.maximum(start_N, np.concatenate([start_N[:1], np.maximum.accumulate(end_N)[:-1]]))
    real = end_N > start_N
    if not real.any():
        raise InputError(f"{trace.source}: its steps last no time")
    number_N, start_N, end_N = number_N[real], start_N[real], end_N[real]
    if len(np.unique(number_N)) < len(number_N):
        raise InputError(f"{trace.source}: a step number occurs twice: it holds more than one run of a profiler")
    return TracedSteps(track, number_N, start_N, end_N, (several,) if np.count_nonzero(tracks) > 1 else ())


def _marked(trace: Trace, names: Names) -> Events:
    if names.step is not None or names.step_end is not None:
        wanted = EventQuery(ON_HOST, matching(trace.names, [str(names.step or names.step_end)]))
    else:
        # In 2021 they were operators.
        wanted = EventQuery((ANNOTATION, OPERATOR), steplike(trace.names))
    return gathered(trace.parts(wanted), MAX_STEPS, f"{trace.source}: more than {MAX_STEPS} marks of steps")


def _numbers(trace: Trace, name_N: Ints, names: Names) -> Ints:
    said, which_N = np.unique(name_N, return_inverse=True)
    found = [_NUMBER.search(trace.names[name]) for name in said.tolist()]
    numbers = [int(match.group(1)) for match in found if match and len(match.group(1)) < 18]
    if len(numbers) < len(said) or (names.step is not None and len(set(numbers)) < len(name_N)):
        return np.arange(len(name_N), dtype=np.int64)
    return np.array(numbers, dtype=np.int64)[which_N]


def _nothing(trace: Trace, names: Names) -> str:
    if names.step is not None or names.step_end is not None:
        return f"nothing in it is called {names.step or names.step_end!r}"
    counts = np.zeros(len(trace.names), dtype=np.int64)
    for part in trace.parts(EventQuery((ANNOTATION,))):
        counts += np.bincount(part.name_E, minlength=len(counts))
    order = np.argsort(-counts, kind="stable").tolist()
    counted = ((trace.names[name], int(counts[name])) for name in order if 2 <= counts[name] <= MAX_STEPS)
    repeated = [(name, n) for name, n in counted if not name.startswith(OWN)]
    # What an optimiser does ends a step of training.
    repeated.sort(key=lambda named: not named[0].startswith("Optimizer.step"))
    said = "no steps in it (no ProfilerStep#N)"
    if not repeated:
        return f"{said}, and no range that repeats and could mark them"
    ways = ", ".join(f"{name[:60]!r} ({n} times)" for name, n in repeated[:3])
    return f"{said}; a --map with `step` or `step_end` could cut it at a range that repeats: {ways}"
