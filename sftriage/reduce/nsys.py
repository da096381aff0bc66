"""An Nsight Systems export in SQLite: tables exist only when they hold something, under names that drift.

Such a file holds the environment of the profiled process. Only the tables named here are read, and of the strings only
those that name an event.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from sftriage.errors import InputError
from sftriage.reduce.events import ANNOTATION, KERNEL, MEMCPY, MEMSET, OPERATOR, RUNTIME, EventColumns, Trace
from sftriage.traces.documents import CONTROL

_PROCESS = ~0xFFFFFF
_COPIES: Final = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
# Ranges that were pushed and popped, and those that were started and ended, maybe in different threads.
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
"""The columns that hold numbers of strings."""


def read_nsys(path: Path) -> Iterator[Trace]:
    """The traces of an export: one a process that marked ranges or used a device, in order of process.

    Raises InputError where the file is damaged or holds nothing that can be reduced.
    """
    try:
        # Nobody writes to it: neither a lock nor a journal is to appear beside somebody's file.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.text_factory = lambda value: value.decode("utf-8", "replace")
            yield from _Export(path, database).traces()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # SQLite quotes from the file, lines and all.
        said = CONTROL.sub("?", " ".join(str(error).split()))[:200]
        raise InputError(f"{path}: not a usable SQLite export: {said}") from error


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
            raise InputError(f"{self._path}: SQLite, but no Nsight export with NVTX ranges or kernels")
        self._ranges()
        for table, kind in (("KERNEL", KERNEL), ("MEMCPY", MEMCPY), ("MEMSET", MEMSET)):
            self._device(f"CUPTI_ACTIVITY_KIND_{table}", kind)
        worth = sorted(self._of_process)
        self._calls("CUPTI_ACTIVITY_KIND_RUNTIME")
        self._calls("OSRT_API")
        began_ns = self._began_ns()
        notes = (f"{self._broken} rows were not as they should be, and were left out",) if self._broken else ()
        if not worth:
            raise InputError(f"{self._path}: an Nsight export without a single range or kernel")
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
            # cudaLaunchKernel_v7000: the version of the interface is no part of the name.
            self._add(thread, start, end, RUNTIME, re.sub(r"_v\d+$", "", self._names.get(name_id, table)), link)

    def _device(self, table: str, kind: int) -> None:
        for start, end, process, device, stream, what, link in self._rows(table):
            if kind == KERNEL:
                name = self._names.get(what, "(kernel)")
            else:
                name = "Memset" if kind == MEMSET else _COPIES.get(what, "Memcpy")
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
        its_track = track or (str(owner >> 24 & 0xFFFFFF), str(owner & 0xFFFFFF))
        number = link if type(link) is int else -1
        if not columns.add(start, end - start, kind, columns.name_ids[name], columns.track_id(*its_track), number):
            self._broken += 1

    def _began_ns(self) -> int:
        if "utcEpochNs" not in self._columns("TARGET_INFO_SESSION_START_TIME"):
            return 0
        row = self._database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        return row[0] if row and type(row[0]) is int and 0 < row[0] < 2**62 else 0
