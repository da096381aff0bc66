"""Recordings to analyse offline: a run directory, or an ``.npz`` of durations that somebody else measured."""

from __future__ import annotations

import heapq
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from sftriage.agent.gather import Gatherer, Shape
from sftriage.errors import InputError, RingError, SchemaError
from sftriage.recorder import RingInfo, RingReader, find_rings, read_log
from sftriage.records import StageSchema, StepRecord, Window
from sftriage.traces.rundir import RunDirectory, read_info


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recording whose windows can be cut: one array, or the steps of each rank by attempt."""

    source: Path
    whole: Window | None
    ranks: dict[int, dict[int, tuple[RingInfo, list[StepRecord]]]]

    def windows(self, shape: Shape) -> Iterator[Window]:
        """Windows in order. A recording shorter than a window is one window; one of no steps has none."""
        if self.whole is not None:
            yield from _cut(self.whole, shape)
            return
        for attempt, by_rank in sorted(self.ranks.items()):
            info = next(iter(by_rank.values()))[0]
            gatherer = Gatherer(info.schema, info.world_size, shape, attempt=attempt)
            streams = [records for _, records in by_rank.values()]
            for record in heapq.merge(*streams, key=attrgetter("step")):
                gatherer.add(record)
                yield from gatherer.ready()
            yield from gatherer.ready(ended=True)


def load_recording(path: Path) -> Recording:
    """Read a run directory or an ``.npz``.

    Raises:
        InputError: it is neither, or what is in it cannot be used; the message names what and where.
    """
    if path.is_dir():
        return _load_run(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    return Recording(path, _load_npz(path), {})


def _load_run(path: Path) -> Recording:
    run = RunDirectory(path)
    info = read_info(run)
    by_attempt: dict[int, dict[int, tuple[RingInfo, list[StepRecord]]]] = {}
    try:
        for log in sorted(run.steps.glob("rank-*.steps")):
            logged = read_log(log)
            by_attempt.setdefault(logged.info.attempt, {})[logged.info.rank] = (logged.info, list(logged.records))
        # An agent that was killed leaves steps in the rings that it had not taken yet.
        for ring in find_rings(info.rings) if Path(info.rings).is_dir() else ():
            with RingReader(ring) as reader:
                ranks = by_attempt.setdefault(reader.info.attempt, {})
                _, known = ranks.setdefault(reader.info.rank, (reader.info, []))
                last = known[-1].step if known else -1
                known.extend(record for record in reader.read().records if record.step > last)
    except RingError as error:
        raise InputError(str(error)) from error
    for ranks in by_attempt.values():
        if len({(ring.schema, ring.world_size) for ring, _ in ranks.values()}) > 1:
            raise InputError(f"{run.steps}: the ranks recorded different stages or world sizes")
    return Recording(path, None, by_attempt)


def _cut(whole: Window, shape: Shape) -> Iterator[Window]:
    n_steps = len(whole.durations_NRS)
    length = min(shape.window_steps, n_steps)
    for first in range(min(shape.warmup_steps, n_steps - length), n_steps - length + 1, shape.stride_steps):
        steps = slice(first, first + length)
        yield Window(
            schema=whole.schema,
            first_step=whole.first_step + first,
            durations_NRS=whole.durations_NRS[steps],
            ready_NR=None if whole.ready_NR is None else whole.ready_NR[steps],
            hosts=whole.hosts,
            cohorts=whole.cohorts,
            kinds=None if whole.kinds is None else whole.kinds[steps],
        )


def _load_npz(path: Path) -> Window:
    try:
        if not zipfile.is_zipfile(path):
            raise InputError(f"{path}: not a readable .npz: it is not a zip archive")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except InputError:
        raise
    except Exception as error:  # numpy, zipfile and zlib each raise what they like for a damaged file
        raise InputError(f"{path}: not a readable .npz: {error}") from error
    try:
        return _window(arrays)
    except SchemaError as error:
        raise InputError(f"{path}: stages or sync: {error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _window(arrays: dict[str, Any]) -> Window:
    missing = [name for name in ("durations_s", "stages", "sync") if name not in arrays]
    if missing:
        there = ", ".join(sorted(arrays)) or "none"
        raise InputError(f"array {' and '.join(missing)} missing (arrays there: {there})")
    schema = StageSchema(_texts(arrays, "stages"), _texts(arrays, "sync"))
    durations_NRS = _numbers(arrays, "durations_s", ("step", "rank", "stage"))
    n_steps, n_ranks, n_stages = durations_NRS.shape
    if n_stages != len(schema.stages):
        raise InputError(f"durations_s has {n_stages} stages on its last axis; stages names {len(schema.stages)}")
    if 0 in durations_NRS.shape:
        raise InputError(f"durations_s is empty: {n_steps} steps x {n_ranks} ranks x {n_stages} stages")
    ready_NR = _numbers(arrays, "ready_s", ("step", "rank")) if "ready_s" in arrays else None
    if ready_NR is not None and ready_NR.shape != (n_steps, n_ranks):
        raise InputError(f"ready_s has shape {ready_NR.shape}; durations_s says {(n_steps, n_ranks)}")
    if ready_NR is not None and not schema.sync:
        raise InputError("ready_s is given but sync names no stage that it would split")
    return Window(
        schema,
        0,
        durations_NRS,
        ready_NR=ready_NR,
        hosts=_counted(arrays, "hosts", n_ranks, "rank"),
        cohorts=_counted(arrays, "cohorts", n_ranks, "rank"),
        kinds=_counted(arrays, "kinds", n_steps, "step"),
    )


def _numbers(arrays: dict[str, Any], name: str, axes: tuple[str, ...]) -> Any:
    values = arrays[name]
    if values.ndim != len(axes):
        raise InputError(f"{name} has {values.ndim} axes, shape {values.shape}; expected {' x '.join(axes)}")
    if not (np.issubdtype(values.dtype, np.floating) or np.issubdtype(values.dtype, np.integer)):
        raise InputError(f"{name} holds {values.dtype}; expected float64 seconds")
    values = np.ascontiguousarray(values, dtype=np.float64)
    for what, bad in (("not a finite number", ~np.isfinite(values)), ("negative", values < 0)):
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=True))
            more = f" and {int(bad.sum()) - 1} more" if bad.sum() > 1 else ""
            raise InputError(f"{name} is {what} at {place} ({values[at]}){more}")
    return values


def _texts(arrays: dict[str, Any], name: str) -> tuple[str, ...]:
    values = arrays[name]
    # An empty list of names saves as an empty float array: no sync stage is a legitimate thing to say.
    if values.ndim != 1 or not (values.dtype.kind == "U" or values.size == 0):
        raise InputError(f"{name} has {values.ndim} axes of {values.dtype}; expected one axis of strings")
    return tuple(str(value) for value in values)


def _counted(arrays: dict[str, Any], name: str, count: int, axis: str) -> tuple[str, ...] | None:
    if name not in arrays:
        return None
    values = _texts(arrays, name)
    if len(values) != count:
        raise InputError(f"{name} has {len(values)} entries; durations_s has {count} on its {axis} axis")
    return values
