"""Kineto's JSON, as torch.profiler has written it since 2021: names of categories, clocks and metadata have drifted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.reduce.events import (
    ANNOTATION,
    ENDS,
    IGNORED,
    KERNEL,
    LIMIT_NS,
    MEMCPY,
    MEMSET,
    OPERATOR,
    PYTHON,
    RUNTIME,
    EventColumns,
    Trace,
    pair_halves,
)
from sftriage.reduce.intervals import Ints
from sftriage.traces.jsonstream import Damage, TraceReader

# Left out on purpose: the device's copy of an annotation (`gpu_user_annotation`, which would count it twice), the
# `Trace` event that spans everything, the profiler's own `overhead`, and arrows between events.
KINDS: Final[Mapping[str, int]] = {
    "user_annotation": ANNOTATION,
    "": OPERATOR,
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

MAX_DROPPED_FRACTION = 0.5
"""Of the events: where more are damaged beyond repair, this is no trace."""

_BASE = "baseTimeNanoseconds"
_DISTRIBUTED = "distributedInfo"
_JOB, _CAPTURE_ID = "sftriage.job", "sftriage.capture_id"
_MAX_KEPT = 20_000
_LONG = 200
_NO_HALVES: Final = frozenset({"X", "M", "s", "t", "f", "i", "I", "C", ""})


class _Args(msgspec.Struct, gc=False):
    correlation: Any = -1


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    # A float says every time that can be: to the nanosecond, up to a hundred days, and later to what Kineto writes.
    ts: float | None = None
    dur: float | None = None
    args: _Args | None = None


_EVENTS = msgspec.json.Decoder(list[_Event])


def read_kineto(stream: IO[bytes], source: str) -> Trace:
    """The trace in a document, which ``source`` names; raises InputError, saying where and why it cannot be read."""
    kineto = _Kineto(source)
    reader = TraceReader(stream, source, kineto.events, kineto.odd_event, kineto.values)
    reader.read()
    return kineto.trace(reader.damage)


class _Numbers(dict[Any, int]):
    def __init__(self, of: Callable[[Any], int]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, written: Any) -> int:
        number = self._of(written)
        if len(self) < _MAX_KEPT and len(str(written)) < _LONG:
            self[written] = number
        return number


def _kind(category: str | None) -> int:
    name = (category or "").lower()
    return RUNTIME if name.endswith(("_runtime", "_driver")) else KINDS.get(name, IGNORED)


class _Kineto:
    def __init__(self, source: str) -> None:
        self._source = source
        self._columns, self._halves = EventColumns(source), EventColumns(source)
        self.values: dict[str, Any] = dict.fromkeys((_BASE, _DISTRIBUTED, _JOB, _CAPTURE_ID))
        self._kinds, self._tracks = _Numbers(_kind), _Numbers(self._track)
        self._n_events = self._n_impossible = 0

    def _track(self, written: tuple[object, object]) -> int:
        process, thread = (str(part)[:_LONG] for part in written)
        return self._columns.track_id(process, thread)

    def events(self, piece: bytes) -> None:
        self._take(_EVENTS.decode(piece))

    def odd_event(self, event: bytes) -> bool:
        lenient = _leniently(event)
        if lenient is not None:
            self._take([lenient])
        return lenient is not None

    def _take(self, events: list[_Event]) -> None:
        self._n_events += len(events)
        kinds = self._kinds
        every = [kinds[event.cat] if event.ph == "X" and event.ts is not None else IGNORED for event in events]
        whole = [event for event, kind in zip(events, every, strict=True) if kind != IGNORED]
        if whole:
            start_ns_E, track_E, possible_E = self._placed(whole)
            kind_E = np.frombuffer(bytes(every), np.uint8)
            kind_E = kind_E[kind_E != IGNORED]
            # Down to whole nanoseconds: the decimals are Kineto's.
            duration_ns_E = np.fromiter([event.dur or 0.0 for event in whole], np.float64, len(whole)) * 1000 + 0.5
            possible_E &= (duration_ns_E > -1) & (duration_ns_E < LIMIT_NS)
            duration_ns_E[~possible_E] = 0.0
            names = self._columns.name_ids
            name_E = np.fromiter([names[event.name] for event in whole], np.int32, len(whole))
            columns = (start_ns_E, duration_ns_E.astype(np.int64), kind_E, name_E, track_E, _links(whole))
            self._n_impossible += self._columns.add_all(possible_E, *columns)
        # Of most traces that is all of them.
        if len(whole) < len(events) and not _NO_HALVES.issuperset({event.ph for event in events}):
            self._take_halves([event for event in events if event.ph in ("B", "E") and event.ts is not None])

    def _take_halves(self, halves: list[_Event]) -> None:
        """Also of what does not matter: its end must not end what is around it."""
        if not halves:
            return
        start_ns_E, track_E, possible_E = self._placed(halves)
        names = self._columns.name_ids
        # An end's own name is of no use.
        made = [
            (self._kinds[half.cat] + ENDS, 0) if half.ph == "E" else (self._kinds[half.cat], names[half.name])
            for half in halves
        ]
        kind_E, name_E = np.array(made, dtype=np.int64).T
        nothing_E = np.zeros(len(halves), dtype=np.int64)
        self._n_impossible += self._halves.add_all(
            possible_E, start_ns_E, nothing_E, kind_E, name_E, track_E, nothing_E
        )

    def _placed(self, events: list[_Event]) -> tuple[Ints, NDArray[np.int32], NDArray[np.bool_]]:
        n, tracks = len(events), self._tracks
        us_E = np.fromiter([event.ts for event in events], np.float64, n)
        possible_E = np.abs(us_E) < LIMIT_NS / 1000
        us_E[~possible_E] = 0.0
        # A float of microseconds since 1970 keeps a quarter of one: nothing of that is to be lost on the way.
        whole_E = np.trunc(us_E)
        start_ns_E = whole_E.astype(np.int64) * 1000 + np.rint((us_E - whole_E) * 1000).astype(np.int64)
        track_E = np.fromiter([tracks[event.pid, event.tid] for event in events], np.int32, n)
        return start_ns_E, track_E, possible_E

    def trace(self, damage: Damage) -> Trace:
        n_events = self._n_events + damage.dropped
        if damage.dropped > MAX_DROPPED_FRACTION * n_events:
            raise InputError(f"{self._source}: {damage.dropped} of {n_events} events are not JSON objects of a trace")
        notes = damage.words + tuple(
            f"{count} {what} left out"
            for count, what in (
                (self._n_impossible, "events at impossible times were"),
                (pair_halves(self._halves, self._columns), "begin or end events had no other half, and were"),
            )
            if count
        )
        base, about = self.values[_BASE], self.values[_DISTRIBUTED]
        about = about if isinstance(about, dict) else {}
        job, capture_id = (its if isinstance(its, str) else None for its in map(self.values.get, (_JOB, _CAPTURE_ID)))
        return replace(
            self._columns.trace(base if type(base) is int and 0 <= base < 2**62 else 0, notes),
            rank=_count(about.get("rank"), 0),
            world_size=_count(about.get("world_size"), 1),
            job=job,
            capture_id=capture_id,
        )


def _links(events: list[_Event]) -> Ints:
    links = [-1 if event.args is None else event.args.correlation for event in events]
    if not {type(link) for link in links} <= {int}:
        links = [link if type(link) is int else -1 for link in links]
    try:
        link_E = np.fromiter(links, np.int64, len(links))
    except OverflowError:
        link_E = np.fromiter([link if -1 < link < LIMIT_NS else -1 for link in links], np.int64, len(links))
    link_E[(link_E < 0) | (link_E >= LIMIT_NS)] = -1
    return link_E


def _leniently(event: bytes) -> _Event | None:
    """What Python's own reader, which takes more, makes of an event; None if it is not one."""
    try:
        values = json.loads(event)
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
    except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return None


def _number(value: Any) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, (int, float, str)) else float(value)


def _count(value: Any, least: int) -> int | None:
    return value if type(value) is int and least <= value < 2**31 else None
