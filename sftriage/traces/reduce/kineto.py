"""Kineto's JSON, as torch.profiler has written it since 2021: names of categories, clocks and metadata have drifted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from sftriage.errors import InputError
from sftriage.traces.reduce import jsonstream
from sftriage.traces.reduce.events import (
    ANNOTATION,
    KERNEL,
    LIMIT_NS,
    MEMCPY,
    MEMSET,
    OPERATOR,
    PYTHON,
    RUNTIME,
    Columns,
    Trace,
)
from sftriage.traces.reduce.sources import opened

# Left out on purpose: the device's copy of an annotation (`gpu_user_annotation`, which would count it twice), the
# `Trace` event that spans everything, the profiler's own `overhead`, and arrows between events.
KINDS: Final[Mapping[str, int]] = {
    "user_annotation": ANNOTATION,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "python_function": PYTHON,
    "runtime": RUNTIME,
    "kernel": KERNEL,
    "memcpy": MEMCPY,
    "gpu_memcpy": MEMCPY,
    "memset": MEMSET,
    "gpu_memset": MEMSET,
}

MAX_HALVES = 4_000_000
"""Begin and end events, which have to be kept until they can be paired."""

EPOCH_FROM_US = 1e15
"""A clock without a base that shows more than this counts from 1970, where this was 2001; less is time since a boot."""

MAX_BROKEN_FRACTION = 0.01

_BASE = "baseTimeNanoseconds"
_DISTRIBUTED = "distributedInfo"
_OURS = "sftriage."


class _Args(msgspec.Struct, gc=False):
    correlation: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: _Args | None = None


_EVENTS = msgspec.json.Decoder(list[_Event])
_EVENT = msgspec.json.Decoder(_Event)


def read_kineto(path: Path) -> Iterator[Trace]:
    """The traces of a file: one, or as many as are in a tar.

    Raises:
        InputError: the file, or one of its traces, cannot be read; the message says where and why.
    """
    with opened(path) as documents:
        for name, stream in documents:
            sink = _Kineto(name)
            jsonstream.read(stream, sink, name, lambda key: key in (_BASE, _DISTRIBUTED) or key.startswith(_OURS))
            yield sink.trace()


class _Kineto:
    """What one document comes to. A `jsonstream.Sink`."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._columns = Columns()
        self._values: dict[str, Any] = {}
        self._kinds: dict[str | None, int | None] = {None: OPERATOR, "": OPERATOR}
        self._tracks: dict[tuple[Any, Any], int] = {}
        self._halves: dict[int, list[tuple[int, bool, str, int | None]]] = defaultdict(list)
        self._n_events = self._n_halves = self._n_broken = self._n_impossible = 0

    def value(self, key: str, value: Any) -> None:
        """Keep a value that stands beside the events."""
        self._values[key] = value

    def events(self, piece: bytes) -> None:
        """Take a list of events (see `jsonstream.Sink`)."""
        self._take(_EVENTS.decode(piece))

    def odd_events(self, events: list[bytes]) -> None:
        """Take what can be understood of events among which something is odd."""
        understood = []
        for event in events:
            try:
                understood.append(_EVENT.decode(event))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                lenient = _leniently(event)
                if lenient is None:
                    self._n_broken += 1
                    self._n_events += 1
                else:
                    understood.append(lenient)
        self._take(understood)

    def _take(self, events: list[_Event]) -> None:
        """Take events into the columns: the one loop that runs for every event, and written for it."""
        self._n_events += len(events)
        columns, kinds, tracks, names = self._columns, self._kinds, self._tracks, self._columns.name_ids
        put_start, put_duration, put_kind = columns.start.append, columns.duration.append, columns.kind.append
        put_name, put_track, put_link = columns.name.append, columns.track.append, columns.link.append
        for event in events:
            ph = event.ph
            if ph != "X" and ph != "B" and ph != "E":
                continue
            try:
                kind = kinds[event.cat]
            except KeyError:
                kind = kinds[event.cat] = _kind(event.cat or "")
            ts = event.ts
            if ts is None or (kind is None and ph == "X"):
                continue
            try:
                track = tracks[event.pid, event.tid]
            except KeyError:
                track = tracks[event.pid, event.tid] = columns.track_id(str(event.pid), str(event.tid))
            # A float of microseconds since 1970 keeps a quarter of one: nothing of that is to be lost on the way.
            whole = int(ts)
            start_ns = whole * 1000 if whole == ts else whole * 1000 + round((ts - whole) * 1000)
            if ph != "X" or kind is None:
                # Also of what does not matter: its end must not end what is around it.
                self._half(event, start_ns, kind, track)
                continue
            duration_ns = int((event.dur or 0) * 1000 + 0.5)
            if not (-LIMIT_NS < start_ns < LIMIT_NS and 0 <= duration_ns < LIMIT_NS):
                self._n_impossible += 1
                continue
            try:
                put_name(names[event.name])
            except KeyError:
                put_name(columns.name_id(event.name))
            put_start(start_ns)
            put_duration(duration_ns)
            put_kind(kind)
            put_track(track)
            args = event.args
            link = -1 if args is None else args.correlation
            put_link(link if type(link) is int and -1 < link < LIMIT_NS else -1)

    def _half(self, event: _Event, moment_ns: int, kind: int | None, track: int) -> None:
        self._n_halves += 1
        if self._n_halves > MAX_HALVES:
            raise InputError(f"{self._source}: more than {MAX_HALVES} begin and end events")
        self._halves[track].append((moment_ns, event.ph == "E", event.name, kind))

    def _pair(self) -> int:
        """Begin and end events put together by their nesting; how many are left over."""
        left = 0
        for track, halves in self._halves.items():
            open_halves: list[tuple[int, str, int | None]] = []
            # An end comes before a beginning at the same moment.
            for moment_ns, ends, name, kind in sorted(halves, key=lambda half: (half[0], not half[1])):
                if not ends:
                    open_halves.append((moment_ns, name, kind))
                elif open_halves:
                    start_ns, its_name, its_kind = open_halves.pop()
                    if its_kind is None:
                        continue
                    name_id = self._columns.name_id(its_name)
                    self._columns.add(start_ns, moment_ns - start_ns, its_kind, name_id, track, -1)
                else:
                    left += 1
            left += len(open_halves)
        self._halves.clear()
        return left

    def trace(self) -> Trace:
        """The trace that was read.

        Raises:
            InputError: too much of it could not be understood.
        """
        if self._n_broken > MAX_BROKEN_FRACTION * self._n_events:
            raise InputError(
                f"{self._source}: {self._n_broken} of {self._n_events} events are not JSON objects of a trace"
            )
        left = self._pair()
        notes = [
            note
            for count, note in (
                (self._n_broken, f"{self._n_broken} events could not be understood, and were left out"),
                (self._n_impossible, f"{self._n_impossible} events at impossible times were left out"),
                (left, f"{left} begin or end events had no other half, and were left out"),
            )
            if count
        ]
        base = self._values.get(_BASE)
        base_ns = base if type(base) is int and 0 <= base < 2**62 else 0
        median = float(np.median(np.frombuffer(self._columns.start, dtype=np.int64))) if self._columns.start else 0.0
        absolute = base_ns > 0 or median >= EPOCH_FROM_US * 1000
        if not absolute:
            notes.append("its clock has no date")
        trace = self._columns.trace(self._source, base_ns=base_ns, absolute=absolute, notes=tuple(notes))
        return _described(trace, self._values)


def _described(trace: Trace, values: Mapping[str, Any]) -> Trace:
    """The trace with what its metadata says of its rank and job; anybody may have written them."""
    distributed = values.get(_DISTRIBUTED)
    distributed = distributed if isinstance(distributed, dict) else {}
    job, capture_id = values.get(f"{_OURS}job"), values.get(f"{_OURS}capture_id")
    return replace(
        trace,
        rank=_count(distributed.get("rank"), 0),
        world_size=_count(distributed.get("world_size"), 1),
        job=job if isinstance(job, str) else None,
        capture_id=capture_id if isinstance(capture_id, str) else None,
    )


def _kind(category: str) -> int | None:
    """What events of a category are; None if they do not matter. CUDA, HIP and others name theirs alike."""
    category = category.lower()
    if category.endswith(("_runtime", "_driver")):
        return RUNTIME
    return KINDS.get(category)


def _leniently(event: bytes) -> _Event | None:
    """What Python's own reader, which takes more, makes of an event; None if it is not one."""
    try:
        values = json.loads(event.decode("utf-8", "replace"), strict=False)
        args = values.get("args")
        return _Event(
            ph=str(values.get("ph", "")),
            name=str(values.get("name", "")),
            cat=None if values.get("cat") is None else str(values["cat"]),
            pid=str(values.get("pid")),
            tid=str(values.get("tid")),
            ts=_number(values.get("ts")),
            dur=_number(values.get("dur")),
            args=_Args(args.get("correlation")) if isinstance(args, dict) else None,
        )
    except (ValueError, AttributeError, TypeError, RecursionError):
        return None


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        return None
    return value


def _count(value: Any, least: int) -> int | None:
    return value if type(value) is int and least <= value < 2**31 else None
