"""Reads the traces in a file: Kineto's JSON or an Nsight Systems export, by its first bytes.

torch.profiler writes Kineto's JSON, whose names of categories, clocks and metadata have changed since 2021. An Nsight
export is SQLite: tables exist only if they have rows, and their names change. Since such a file holds the environment
of the profiled process, only the tables named here are read, and only strings that name an event.
"""

from __future__ import annotations

import io
import json
import re
import sqlite3
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

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
    Ints,
    Trace,
    pair_halves,
)
from sftriage.traces.jsonstream import Damage, TraceReader
from sftriage.traces.manifest import CONTROL
from sftriage.traces.objects import CHUNK_BYTES
from sftriage.trainer.sampler import NAME as SAMPLES_NAME

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# Left out on purpose: the device's copy of an annotation (`gpu_user_annotation`, which would count twice), the `Trace`
# event that spans everything, the profiler's own `overhead`, and arrows between events.
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
"""If more than this fraction of events is damaged beyond repair, the file is not a trace."""

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
    # A float is exact to the nanosecond up to a hundred days, and then as exact as Kineto's own times.
    ts: float | None = None
    dur: float | None = None
    args: _Args | None = None


_EVENTS = msgspec.json.Decoder(list[_Event])


def read_kineto(stream: IO[bytes], source: str) -> Trace:
    """The trace in a document named ``source``; raises InputError with the place and reason of an error."""
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
            # (to whole nanoseconds: Kineto's decimals are finer)
            duration_ns_E = np.fromiter([event.dur or 0.0 for event in whole], np.float64, len(whole)) * 1000 + 0.5
            possible_E &= (duration_ns_E > -1) & (duration_ns_E < LIMIT_NS)
            duration_ns_E[~possible_E] = 0.0
            names = self._columns.name_ids
            name_E = np.fromiter([names[event.name] for event in whole], np.int32, len(whole))
            columns = (start_ns_E, duration_ns_E.astype(np.int64), kind_E, name_E, track_E, _links(whole))
            self._n_impossible += self._columns.add_all(possible_E, *columns)
        # (in most traces, all events are whole)
        if len(whole) < len(events) and not _NO_HALVES.issuperset({event.ph for event in events}):
            self._take_halves([event for event in events if event.ph in ("B", "E") and event.ts is not None])

    def _take_halves(self, halves: list[_Event]) -> None:
        """Take half events, including irrelevant ones, whose ends must not end the events around them."""
        if not halves:
            return
        start_ns_E, track_E, possible_E = self._placed(halves)
        names = self._columns.name_ids
        # (an end's own name is useless)
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
        # (a float of microseconds since 1970 is exact to a quarter of one; keep that)
        whole_E = np.trunc(us_E)
        start_ns_E = whole_E.astype(np.int64) * 1000 + np.rint((us_E - whole_E) * 1000).astype(np.int64)
        track_E = np.fromiter([tracks[event.pid, event.tid] for event in events], np.int32, n)
        return start_ns_E, track_E, possible_E

    def trace(self, damage: Damage) -> Trace:
        n_events = self._n_events + damage.dropped
        if damage.dropped > MAX_DROPPED_FRACTION * n_events:
            raise InputError(f"{self._source}: {damage.dropped} of {n_events} events are not JSON objects of a trace")
        notes = damage.words + tuple(
            f"{count} {problem} left out"
            for count, problem in (
                (self._n_impossible, "events at impossible times were"),
                (pair_halves(self._halves, self._columns), "begin or end events without a counterpart were"),
            )
            if count
        )
        base, about = self.values[_BASE], self.values[_DISTRIBUTED]
        about = about if isinstance(about, dict) else {}
        found = map(self.values.get, (_JOB, _CAPTURE_ID))
        job, capture_id = (value if isinstance(value, str) else None for value in found)
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
    """An event by Python's own JSON parser, which accepts more; None if it is not an event."""
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


_PROCESS = ~0xFFFFFF
_COPIES: Final = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
# Ranges that were pushed and popped; and those that were started and ended, perhaps in different threads.
_RANGES: Final = (59, 60)
_NVTX_ARGUMENTS = re.compile(r", (?:op_id|seq|sizes) = .*", re.DOTALL)
_OPERATOR = re.compile(r"[a-z][a-z0-9_]*::\S+|record_param_comms")
_TABLES: Final = {
    "NVTX_EVENTS": ("start", "end", "eventType", "globalTid", "text", "textId"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "globalTid", "nameId", "correlationId"),
    "OSRT_API": ("start", "end", "globalTid", "nameId", "NULL"),
    "CUPTI_ACTIVITY_KIND_KERNEL": ("start", "end", "globalPid", "deviceId", "streamId", "shortName", "correlationId"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("start", "end", "globalPid", "deviceId", "streamId", "copyKind", "correlationId"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("start", "end", "globalPid", "deviceId", "streamId", "NULL", "correlationId"),
}
_NAMING: Final = {"textId", "nameId", "shortName"}
"""The columns with indices of strings."""


def read_nsys(path: Path) -> Iterator[Trace]:
    """The traces of an export, one for each process with ranges or device work, in order of process; InputError."""
    try:
        # (read-only: neither a lock nor a journal may appear beside the file)
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.text_factory = lambda value: value.decode("utf-8", "replace")
            yield from _Export(path, database).traces()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # (SQLite's message may quote lines of the file)
        problem = CONTROL.sub("?", " ".join(str(error).split()))[:200]
        raise InputError(f"{path}: not a usable SQLite export: {problem}") from error


class _Export:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path = path
        self._database = database
        self._columns_of = {table: self._columns(table) for table in (*_TABLES, "StringIds")}
        self._names = self._strings()
        self._of_process: dict[int, EventColumns] = {}
        self._broken = 0

    def traces(self) -> Iterator[Trace]:
        if not self._columns_of["NVTX_EVENTS"] and not self._columns_of["CUPTI_ACTIVITY_KIND_KERNEL"]:
            raise InputError(f"{self._path}: SQLite, but not an Nsight export with NVTX ranges or kernels")
        self._ranges()
        for table, kind in (("KERNEL", KERNEL), ("MEMCPY", MEMCPY), ("MEMSET", MEMSET)):
            self._device(f"CUPTI_ACTIVITY_KIND_{table}", kind)
        worth = sorted(self._of_process)
        self._calls("CUPTI_ACTIVITY_KIND_RUNTIME")
        self._calls("OSRT_API")
        began_ns = self._began_ns()
        notes = (f"skipped {self._broken} malformed rows",) if self._broken else ()
        if not worth:
            raise InputError(f"{self._path}: an Nsight export without ranges or kernels")
        for process in worth:
            yield self._of_process.pop(process).trace(began_ns, notes)

    def _columns(self, table: str) -> frozenset[str]:
        return frozenset(row[1] for row in self._database.execute(f"PRAGMA table_info({table})"))

    def _rows(self, table: str) -> Iterator[tuple[Any, ...]]:
        there = self._columns_of[table]
        if not there >= {"start", "end"}:
            return iter(())
        columns = ", ".join(f'"{name}"' if name in there else "NULL" for name in _TABLES[table])
        return iter(self._database.execute(f"SELECT {columns} FROM {table}"))

    def _strings(self) -> dict[int, str]:
        used = [
            f"SELECT {column} FROM {table}"
            for table, columns in _TABLES.items()
            for column in sorted(_NAMING.intersection(columns) & self._columns_of[table])
        ]
        if not used or not self._columns_of["StringIds"] >= {"id", "value"}:
            return {}
        rows = self._database.execute(f"SELECT id, value FROM StringIds WHERE id IN ({' UNION '.join(used)})")
        return {number: str(value) for number, value in rows}

    def _ranges(self) -> None:
        for start, end, kind, thread, text, text_id in self._rows("NVTX_EVENTS"):
            if kind not in _RANGES or end is None:
                continue
            name = _NVTX_ARGUMENTS.sub("", str(text) if text is not None else self._names.get(text_id, ""))
            self._add(thread, start, end, OPERATOR if _OPERATOR.fullmatch(name) else ANNOTATION, name)

    def _calls(self, table: str) -> None:
        for start, end, thread, name_id, link in self._rows(table):
            # (without the version of the interface, as in cudaLaunchKernel_v7000)
            self._add(thread, start, end, RUNTIME, re.sub(r"_v\d+$", "", self._names.get(name_id, table)), link)

    def _device(self, table: str, kind: int) -> None:
        for start, end, process, device, stream, name_id, link in self._rows(table):
            if kind == KERNEL:
                name = self._names.get(name_id, "(kernel)")
            else:
                name = "Memset" if kind == MEMSET else _COPIES.get(name_id, "Memcpy")
            self._add(process, start, end, kind, name, link, (f"device {device}", f"stream {stream}"))

    def _add(
        self,
        owner: Any,
        start: Any,
        end: Any,
        kind: int,
        name: str,
        link: Any = None,
        track: tuple[str, str] | None = None,
    ) -> None:
        if type(owner) is not int or type(start) is not int or type(end) is not int:
            self._broken += 1
            return
        columns = self._of_process.get(owner & _PROCESS)
        if columns is None:
            columns = self._of_process[owner & _PROCESS] = EventColumns(f"{self._path}!pid {owner >> 24 & 0xFFFFFF}")
        own_track = track or (str(owner >> 24 & 0xFFFFFF), str(owner & 0xFFFFFF))
        number = link if type(link) is int else -1
        if not columns.add(start, end - start, kind, columns.name_ids[name], columns.track_id(*own_track), number):
            self._broken += 1

    def _began_ns(self) -> int:
        if "utcEpochNs" not in self._columns("TARGET_INFO_SESSION_START_TIME"):
            return 0
        row = self._database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        return row[0] if row and type(row[0]) is int and 0 < row[0] < 2**62 else 0


_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\x00"
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_BYTES = 512
_REPORT = "an Nsight report; export it with `nsys export --type sqlite`"
_FOREIGN = (
    (b"PAR1", "a Parquet file"),
    (b"(\xb5/\xfd", "compressed with zstd; unpack it first"),
    (b"\xfd7zXZ", "compressed with xz; unpack it first"),
    (b"BZh", "compressed with bzip2; unpack it first"),
    (b"PK\x03\x04", "a zip archive; unpack it first"),
    (b"NVIDIA ", _REPORT),
)


def read_traces(path: Path) -> Iterator[Trace]:
    """The traces of a file: one, or several from an archive or an export; raises InputError with place and reason."""
    return read_nsys(path) if _is_sqlite(path) else _documents(path)


def _is_sqlite(path: Path) -> bool:
    try:
        if path.is_dir():
            raise InputError(f"{path}: a directory; name the trace files themselves")
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if not head:
        raise InputError(f"{path}: the file is empty")
    if head.startswith(_SQLITE):
        return True
    for magic, kind in _FOREIGN:
        if head.startswith(magic):
            raise InputError(f"{path}: {kind}, not a trace that can be read here")
    if path.name == SAMPLES_NAME:
        raise InputError(f"{path}: sampled stacks, not a trace: use `sftriage traces show`")
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise InputError(f"{path}: {_REPORT}")
    return False


def _documents(path: Path) -> Iterator[Trace]:
    with path.open("rb") as file:
        packed = _Unpacked(file) if file.peek(len(_GZIP)).startswith(_GZIP) else None
        stream: IO[bytes] = file if packed is None else io.BufferedReader(packed, _HEAD_BYTES)
        try:
            if not stream.peek(_HEAD_BYTES).startswith(_TAR, _TAR_AT):  # type: ignore[attr-defined]  # both are buffered
                trace = read_kineto(stream, str(path))
                yield trace if packed is None else replace(trace, notes=(*packed.notes, *trace.notes))
                return
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    # (skip directories, links and devices, and the shadow files of macOS)
                    shadow = member.name.rpartition("/")[2].startswith(".")
                    content = archive.extractfile(member) if member.isfile() and not shadow else None
                    if content is not None:
                        yield read_kineto(content, f"{path}!{CONTROL.sub('?', member.name)}")
        except (EOFError, tarfile.ReadError) as error:
            raise InputError(f"{path}: cut short: {error}") from error
        except (OSError, zlib.error, tarfile.TarError) as error:
            raise InputError(f"{path}: {error}") from error


class _Unpacked(io.RawIOBase):
    """The content of a gzip file, member by member. Data after the last whole member is noted, but not an error."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member = zlib.decompressobj(wbits=31)
        self._packed = b""
        self._begins = 0
        self.notes: tuple[str, ...] = ()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        while not self.notes:
            self._packed = self._packed or self._file.read(CHUNK_BYTES)
            if self._member.eof:
                if not self._packed:
                    return 0
                self._member, self._begins = zlib.decompressobj(wbits=31), self._file.tell() - len(self._packed)
            try:
                if not self._packed:
                    raise EOFError("its compressed data has no end")
                piece = self._member.decompress(self._packed, len(into))
            except (EOFError, zlib.error):
                if not self._begins:
                    raise
                self.notes = (f"ignored what follows its compressed data, from byte {self._begins}",)
                return 0
            self._packed = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if piece:
                into[: len(piece)] = piece
                return len(piece)
        return 0
