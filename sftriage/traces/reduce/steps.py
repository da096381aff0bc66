"""Where the steps of a trace are."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.traces.reduce.events import ANNOTATION, ON_HOST, OPERATOR, Trace
from sftriage.traces.reduce.intervals import Ints
from sftriage.traces.reduce.naming import OWN, STEP, Names, matching

_NUMBER = re.compile(r"(\d+)\D*$")
MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """N steps of one thread in order of time: their numbers, starts and ends; none begins before the last has ended."""

    track: int
    number_N: Ints
    start_N: Ints
    end_N: Ints
    notes: tuple[str, ...] = ()


def find_steps(trace: Trace, names: Names) -> Steps:
    """The steps of a trace.

    A step's mark on a device is a copy of the host's, and does not count: only the host's events are looked at.

    Raises:
        InputError: it has none, or none that can be told apart; the message says what could mark them instead.
    """
    marks = _marked(trace, names)
    if not marks.any():
        raise InputError(f"{trace.source}: {_nothing(trace, names)}")
    tracks = np.bincount(trace.track_E[marks])
    track = int(tracks.argmax())
    at = np.flatnonzero(marks & (trace.track_E == track))
    at = at[np.argsort(trace.start_E[at], kind="stable")]
    if names.step_end is not None:
        if len(at) < 2:
            raise InputError(f"{trace.source}: one {names.step_end!r} alone bounds no step")
        start_N, end_N = trace.end_E[at[:-1]], trace.end_E[at[1:]]
        number_N = np.arange(len(start_N), dtype=np.int64)
    else:
        start_N, end_N, number_N = trace.start_E[at], trace.end_E[at], _numbers(trace, at, names)
    notes = []
    if len(tracks.nonzero()[0]) > 1:
        notes.append("several threads mark steps: those of the one that marks the most are taken")
    # Clocks of whole microseconds may let a step begin in the last one's end.
    start_N = np.maximum(start_N, np.concatenate([start_N[:1], np.maximum.accumulate(end_N)[:-1]]))
    real = end_N > start_N
    if not real.any():
        raise InputError(f"{trace.source}: its steps last no time")
    number_N, start_N, end_N = number_N[real], start_N[real], end_N[real]
    if len(np.unique(number_N)) < len(number_N):
        raise InputError(f"{trace.source}: a step number occurs twice: it holds more than one run of a profiler")
    return Steps(track, number_N, start_N, end_N, tuple(notes))


def _marked(trace: Trace, names: Names) -> NDArray[np.bool_]:
    """The events that mark steps."""
    if names.step is not None or names.step_end is not None:
        return trace.of_kinds(*ON_HOST) & trace.named(matching(trace.names, [str(names.step or names.step_end)]))
    wanted = np.fromiter((STEP.fullmatch(name) is not None for name in trace.names), np.bool_, len(trace.names))
    # In 2021 they were operators.
    return trace.of_kinds(ANNOTATION, OPERATOR) & trace.named(wanted)


def _numbers(trace: Trace, at: Ints, names: Names) -> Ints:
    """The steps' own numbers; where a name has none, or all have the same name, they are counted."""
    found = [_NUMBER.search(trace.names[name]) for name in trace.name_E[at].tolist()]
    numbers = [int(match.group(1)) for match in found if match and len(match.group(1)) < 18]
    if len(numbers) < len(at) or (names.step is not None and len(set(numbers)) < len(numbers)):
        return np.arange(len(at), dtype=np.int64)
    return np.array(numbers, dtype=np.int64)


def _nothing(trace: Trace, names: Names) -> str:
    """Why there are no steps, and what could mark them."""
    if names.step is not None or names.step_end is not None:
        return f"nothing in it is called {names.step or names.step_end!r}"
    annotations = trace.name_E[trace.of_kinds(ANNOTATION)]
    counted = Counter(trace.names[name] for name in annotations.tolist())
    repeated = [(name, n) for name, n in counted.most_common() if 2 <= n <= MAX_STEPS and not name.startswith(OWN)]
    # What an optimiser does ends a step of training.
    repeated.sort(key=lambda named: not named[0].startswith("Optimizer.step"))
    said = "no steps in it (no ProfilerStep#N)"
    if not repeated:
        return f"{said}, and no range that repeats and could mark them"
    ways = ", ".join(f"{name[:60]!r} ({n} times)" for name, n in repeated[:3])
    return f"{said}; a --map with `step` or `step_end` could cut it at a range that repeats: {ways}"
