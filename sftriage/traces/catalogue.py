"""The catalogue: an index of manifests, to find captures by job, rank, stage, step and time.

A SQLite file beside the captures indexes one store; a PostgreSQL database may index the stores of many jobs. Both hold
only what the manifests have: a damaged or foreign file is set aside and rebuilt from the store. The database may hold
other tables, which stay as they are, and may be down or slow: no caller waits long. A catalogue replaces only rows of
its own store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import socket
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, unquote, unquote_to_bytes, urlsplit

from sftriage.base.files import refusing
from sftriage.errors import CatalogueError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.manifest import CONTROL, CauseInfo, Manifest
from sftriage.traces.store import Store

VERSION = "0001"  # version of the tables; raise it with every change to them

CONNECT_S, STATEMENT_S, TRANSACTION_S = 5, 10, 20  # timeouts of a shared database
BUSY_SECONDS = 10.0  # how long a SQLite file may be locked by another process

# SQLite's errors for a file that is damaged or has other tables.
_DAMAGE = ("no such", "has no column", "decode to UTF-8", "malformed", "unsupported file format")
_ADVISORY_LOCK = 0x5346_5452_4941_4745
_UNDEFINED = {"42P01", "42703", "42P07"}
Progress = Callable[[int, int], None]  # takes the number of manifests read, and of all
_Result = TypeVar("_Result")

_EXPLAINED_LATER, _MAX_UNEXPLAINED = timedelta(hours=1), 20
_BATCH = 500  # rows of a transaction, so that no other writer waits long; they are sorted, against deadlocks

CONTROL_LABEL = "control"  # of a rank captured for comparison, in place of the trigger's label
FOLLOW_UP_LABEL = "follow-up"  # of a capture made because an earlier one did not show why the suspect is slow


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """A capture in the catalogue; size and sha256 are those of the trace, ``created_at`` is in UTC.

    An id is unique in its run. ``label`` is the trigger's label, or `CONTROL_LABEL`, or `FOLLOW_UP_LABEL`. ``cause`` is
    why its rank was slow, as JSON, if known. ``reference`` is its name in its ``store``.
    """

    capture_id: str
    job: str
    run: str
    rank: int
    stage: str | None
    label: str
    scope: str
    window_first_step: int
    window_last_step: int
    first_step: int
    last_step: int
    gain_s: float
    size_bytes: int
    sha256: str
    profiler: str
    rule: str
    policy: str
    why: str
    created_at: str
    host: str
    reproduced: str | None
    store: str
    reference: str
    onset_step: int | None = None
    cause: str | None = None

    @property
    def why_slow(self) -> CauseInfo | None:
        """Why its rank was slow; None if it is unknown, or was written by another version of sftriage."""
        try:
            return None if self.cause is None else CauseInfo.model_validate_json(self.cause)
        except ValueError:
            return None

    @property
    def role(self) -> str:
        return "control" if self.label == CONTROL_LABEL else "suspect"

    @property
    def follows_up(self) -> bool:
        """Whether it follows up an earlier capture of the suspect."""
        return self.label == FOLLOW_UP_LABEL

    def distance_from(self, step: int) -> int:
        """The distance of the capture from a step, in steps; 0 if it or its window includes the step."""
        spans = ((self.first_step, self.last_step), (self.window_first_step, self.window_last_step))
        return min(max(first - step, step - last, 0) for first, last in spans)

    @classmethod
    def of(cls, manifest: Manifest, store: str, reference: str) -> CaptureRow:
        """The row of a manifest that a store has under a reference."""
        window, reproduced = manifest.trigger.window, manifest.reproduced
        label = FOLLOW_UP_LABEL if manifest.trigger.follows else manifest.trigger.label
        # (the other fields have the same name in some part of the manifest)
        values = {
            **dict(manifest.artefacts[0]),
            **dict(manifest.trigger),
            **dict(manifest.capture),
            **dict(manifest),
            "label": CONTROL_LABEL if manifest.capture.role == "control" else label,
            "window_first_step": window.first_step,
            "window_last_step": window.last_step,
            "created_at": _written(manifest.created_at),
            "reproduced": None if reproduced is None else reproduced.answer,
            "cause": None if manifest.cause is None else manifest.cause.model_dump_json(),
            "store": store,
            "reference": reference,
        }
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})

    @classmethod
    def read(cls, values: Sequence[Any]) -> CaptureRow | None:
        """Check a row of a database; None if it does not come from a manifest, since others may write there."""
        safe: list[Any] = [CONTROL.sub("?", value) if isinstance(value, str) else value for value in values]
        row = cls(*safe)
        return row if CAPTURE_ID.fullmatch(row.capture_id) and math.isfinite(row.gain_s) else None


@dataclass(frozen=True, slots=True)
class CaptureQuery:
    """Selects captures that meet all conditions, mostly the value of the row's field of the same name.

    ``prefix`` is the beginning of the id, ``since`` the earliest time of capture. ``steps`` (first and last) selects
    captures that measured one of these steps, or whose triggering window includes one.
    """

    job: str | None = None
    run: str | None = None
    rank: int | None = None
    stage: str | None = None
    label: str | None = None
    rule: str | None = None
    profiler: str | None = None
    host: str | None = None
    reproduced: str | None = None
    prefix: str | None = None
    steps: tuple[int, int] | None = None
    since: datetime | None = None


# Each field of the row is a column of the same name and type.
_COLUMNS = tuple(field.name for field in dataclasses.fields(CaptureRow))
_TYPES = {
    "str": "{text} NOT NULL",
    "int": "BIGINT NOT NULL",
    "float": "{real} NOT NULL",
    "str | None": "{text}",
    "int | None": "BIGINT",
}
_ROW = ", ".join(f"{field.name} {_TYPES[str(field.type)]}" for field in dataclasses.fields(CaptureRow))
# The stores in sftriage_stores are completely indexed. Deleting a row there has its store indexed again.
_TABLES = {
    "sftriage_captures": f'"key" {{text}} NOT NULL, {_ROW}, PRIMARY KEY ("key")',
    "sftriage_schema": "version_num VARCHAR(32) NOT NULL, PRIMARY KEY (version_num)",
    "sftriage_stores": '"key" {text} NOT NULL, store {text} NOT NULL, PRIMARY KEY ("key")',
}
_INDEX = "CREATE INDEX ix_sftriage_captures_created_at ON sftriage_captures (created_at)"
_EQUAL = ("job", "run", "rank", "stage", "label", "rule", "profiler", "host", "reproduced")
_Condition = tuple[str, tuple[Any, ...]]  # SQL, and its values
_NEVER: _Condition = ("1 = 0", ())


def _conditions(wanted: CaptureQuery, store: str | None) -> Iterator[_Condition]:
    if store is not None:
        yield "store = ?", (store,)
    for name in _EQUAL:
        if (value := getattr(wanted, name)) is not None:
            yield (f"{name} = ?", (value,)) if _storable(value) else _NEVER
    if (prefix := wanted.prefix) is not None:
        yield ("substr(capture_id, 1, ?) = ?", (len(prefix), prefix)) if _storable(prefix) else _NEVER
    if wanted.steps is not None:
        begin, end = wanted.steps
        inside = "(first_step <= ? AND last_step >= ? OR window_first_step <= ? AND window_last_step >= ?)"
        yield inside, (end, begin, end, begin)
    if wanted.since is not None:
        yield "created_at >= ?", (_written(wanted.since),)


def _storable(value: str | int) -> bool:
    """Whether a database can compare with the value: a number in range, or text that can be encoded."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return "\0" not in value and value == value.encode(errors="replace").decode()


def _written(moment: datetime) -> str:
    """A moment as text of fixed width, which sorts by time."""
    # (strftime writes the year 999 with three digits)
    return moment.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _key_of(store: str, reference: str = "") -> str:
    """The primary key of a row: a digest, since names may be too long for a database's index."""
    return hashlib.sha256(f"{store}\0{reference}".encode()).hexdigest()


class Catalogue:
    """The captures of a store, or of every store that shares the catalogue.

    ``at`` is a file for this store alone, the URL of a PostgreSQL database, or None for a catalogue in memory. Without
    a store, it finds the captures of all stores. ``name`` is for messages, without user and password.

    Methods raise CatalogueError if the database cannot be reached or written now, UsageError if it cannot be created or
    is of another version, and StoreError if the store cannot be reached. The constructor raises UsageError for an
    invalid URL, and without PostgreSQL's driver.
    """

    def __init__(self, at: str | os.PathLike[str] | None, store: Store | None) -> None:
        self._database = PostgresDatabase(at) if isinstance(at, str) else _SqliteFile(None if at is None else Path(at))
        self._store, self.name = store, self._database.name

    def add(self, *manifests: Manifest) -> None:
        """Index captures of the store; repeating it changes nothing."""
        rows = [CaptureRow.of(manifest, self._own_name, self._own_store.reference(manifest)) for manifest in manifests]
        values = [(_key_of(row.store, row.reference), *dataclasses.astuple(row)) for row in rows]
        for first in range(0, len(values), _BATCH):
            batch = values[first : first + _BATCH]
            self._run_query(partial(_upsert, "sftriage_captures", ("key", *_COLUMNS), batch), write=True)

    def drop(self, *references: str) -> None:
        """Drop captures from the index, by their references, as far as they are there."""
        keys = [_key_of(self._own_name, reference) for reference in sorted(references)]
        for first in range(0, len(keys), _BATCH):
            some = keys[first : first + _BATCH]
            forget = f"DELETE FROM sftriage_captures WHERE key IN ({_marks(some)})"
            self._run_query(partial(_Cursor.execute, statement=forget, values=some), write=True)

    def find(self, wanted: CaptureQuery | None = None) -> list[CaptureRow]:
        """The captures that match, oldest first; a capture in several stores comes once."""
        here = None if self._store is None else self._own_name
        conditions = [("1 = 1", ()), *_conditions(wanted or CaptureQuery(), here)]
        query = (
            f"SELECT {', '.join(_COLUMNS)} FROM sftriage_captures WHERE {' AND '.join(sql for sql, _ in conditions)}"
            " ORDER BY created_at, capture_id, job, run, store"
        )
        values = [value for _, some in conditions for value in some]
        found = self._run_query(lambda cursor: cursor.execute(query, values), indexed=here is not None)
        rows = [row for row in map(CaptureRow.read, found) if row is not None]
        return _each_once(rows) if self._store is None else [replace(row, store=self._store.place) for row in rows]

    def is_indexed(self) -> bool:
        """Whether the store has been completely indexed."""
        return self._run_query(self._has_mark)

    def refresh(self, progress: Progress | None = None) -> tuple[str, ...]:
        """Index new captures and drop removed ones, as after a crash; return descriptions of invalid captures."""
        if not self.is_indexed():
            return self.reindex(progress)[1]
        # (in this order: a capture that is added in between counts as one of the store)
        known = self._references()
        there = self._own_store.ids()
        found, problems = self._read((there - known) | (there & self._run_query(self._unexplained)), progress)
        self.add(*found)
        self.drop(*(known - there))
        return problems

    def reindex(self, progress: Progress | None = None) -> tuple[int, tuple[str, ...]]:
        """Rebuild the index, keeping captures added meanwhile; return their number, and the invalid ones in words."""
        # (before reading the store: a capture that is added from now on is kept)
        known = self._references()
        found, problems = self._read(self._own_store.ids(), progress)
        self.add(*found)
        self.drop(*(known - set(map(self._own_store.reference, found))))
        mark = [(_key_of(self._own_name), self._own_name)]
        self._run_query(partial(_upsert, "sftriage_stores", ("key", "store"), mark), write=True)
        return len(found), (*problems, *self._own_store.leftovers())

    def _read(
        self, references: Collection[str], progress: Progress | None
    ) -> tuple[tuple[Manifest, ...], tuple[str, ...]]:
        if not references:
            return (), ()
        listing = self._own_store.manifests(references, lambda done: progress and progress(done, len(references)))
        # (ignore captures that were removed meanwhile)
        still = self._own_store.ids() if listing.unfit else frozenset()
        problems = (
            f"capture {reference} {condition.words}"
            for reference, condition in listing.unfit.items()
            if reference in still
        )
        return listing.manifests, tuple(problems)

    def _references(self) -> frozenset[str]:
        query = "SELECT reference FROM sftriage_captures WHERE store = ?"
        return self._run_query(lambda cursor: frozenset(row[0] for row in cursor.execute(query, [self._own_name])))

    def _unexplained(self, cursor: _Cursor) -> frozenset[str]:
        now = datetime.now(timezone.utc)
        newest = (
            "SELECT reference FROM sftriage_captures WHERE store = ? AND cause IS NULL AND created_at >= ?"
            f" AND created_at <= ? ORDER BY created_at DESC LIMIT {_MAX_UNEXPLAINED}"
        )
        values = [self._own_name, _written(now - _EXPLAINED_LATER), _written(now)]
        return frozenset(row[0] for row in cursor.execute(newest, values))

    def _has_mark(self, cursor: _Cursor) -> bool:
        return bool(cursor.execute("SELECT 1 FROM sftriage_stores WHERE key = ?", [_key_of(self._own_name)]))

    @property
    def _own_store(self) -> Store:
        if self._store is None:
            raise UsageError(f"{self.name}: name the store to index")
        return self._store

    @property
    def _own_name(self) -> str:
        return self._database.store_name(self._own_store.place)

    def _run_query(
        self, question: Callable[[_Cursor], _Result], *, write: bool = False, indexed: bool = False
    ) -> _Result:
        problem = self.name
        while True:
            try:
                return self._run_once(question, write=write, indexed=indexed)
            except (self._database.error, _Foreign) as error:
                if problem != self.name or not self._database.set_aside(error):
                    raise CatalogueError(f"{problem}: {_reason(error)}{self._database.remedy(error)}") from error
                problem = f"{self.name} cannot be rebuilt"

    def _run_once(self, question: Callable[[_Cursor], _Result], *, write: bool, indexed: bool) -> _Result:
        with self._database.transaction(write=write) as cursor:
            if self._database.is_current(cursor) and (not indexed or self._has_mark(cursor)):
                return question(cursor)
        with self._database.transaction(write=True) as cursor:
            # (does nothing if another process was first)
            self._database.make(cursor)
            indexed = indexed and not self._has_mark(cursor)
        if indexed:
            self.reindex()
        with self._database.transaction(write=write) as cursor:
            return question(cursor)


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _upsert(table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], cursor: _Cursor) -> None:
    new = ", ".join(f"{name} = excluded.{name}" for name in columns)
    insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({_marks(columns)})"
    cursor.execute_each(f"{insert} ON CONFLICT (key) DO UPDATE SET {new}", rows)


def _each_once(rows: Sequence[CaptureRow]) -> list[CaptureRow]:
    def distance(row: CaptureRow) -> int:
        # On this host; in a bucket, which all hosts reach; on another host.
        return (0 if directory_here(row.store) else 2) if on_one_host(row.store) else 1

    nearest: dict[tuple[str, str, str], CaptureRow] = {}
    for row in sorted(rows, key=distance):
        nearest.setdefault((row.job, row.run, row.capture_id), row)
    return [row for row in rows if nearest[row.job, row.run, row.capture_id] is row]


class _Foreign(Exception):  # noqa: N818  # not an error: a finding that leads to a rebuild
    """The database is not a catalogue."""


class _Cursor:
    """Runs statements in which a ``?`` stands for each value; ``mark`` is what the database's library has for it."""

    def __init__(self, cursor: Any, mark: str = "?") -> None:
        self._cursor, self._mark = cursor, mark

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that a statement finds."""
        self._cursor.execute(statement.replace("?", self._mark), values)
        return list(self._cursor.fetchall()) if self._cursor.description else []

    def execute_each(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        self._cursor.executemany(statement.replace("?", self._mark), rows)


class _Database(ABC):
    """The database of a catalogue; ``error`` is the base of its library's errors."""

    name: str
    error: type[Exception]
    text: str  # type of text that is compared byte by byte, rather than in the order of the database's language
    real: str  # type of 64-bit numbers

    @abstractmethod
    def transaction(self, *, write: bool = False) -> AbstractContextManager[_Cursor]:
        """A cursor of a connection that commits unless the block raises."""

    @abstractmethod
    def store_name(self, place: str) -> str:
        """The name of a store in the rows."""

    @abstractmethod
    def is_current(self, cursor: _Cursor) -> bool:
        """Whether the tables exist; raises `_Foreign`, or UsageError if they are of another version."""

    def _is_of_this_version(self, cursor: _Cursor) -> bool:
        found = cursor.execute("SELECT version_num FROM sftriage_schema")
        if found and found[0][0] != VERSION:
            raise UsageError(
                f"{self.name}: schema {found[0][0]}; this sftriage reads {VERSION}: name another catalogue"
            )
        return bool(found)

    def make(self, cursor: _Cursor) -> None:
        """Create the tables, unless another process was first."""
        if self.is_current(cursor):
            return
        # (a table that exists is foreign, and an error)
        for name, columns in _TABLES.items():
            cursor.execute(f"CREATE TABLE {name} ( {columns.format(text=self.text, real=self.real)} )")
        cursor.execute(_INDEX)
        cursor.execute("INSERT INTO sftriage_schema VALUES (?)", [VERSION])

    def remedy(self, error: Exception) -> str:
        """The end of an error message, with what to do."""
        return ""

    def set_aside(self, error: Exception) -> bool:
        """Move the database away if it is ours alone and a new one would help; return whether it did."""
        return False


class _SqliteFile(_Database):
    """A file for one store; without a path a database in memory, for one thread."""

    error, text, real = sqlite3.Error, "TEXT", "DOUBLE"

    def __init__(self, path: Path | None) -> None:
        self._path, self.name = path, str(path or ":memory:")
        self._in_memory: sqlite3.Connection | None = None

    def _connect(self) -> sqlite3.Connection:
        # (SQLite creates files with the umask, but this one must be private from the start)
        if self._path is not None and not self._path.exists():
            with refusing(str(self._path)):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # (its own transactions are off, since they do not cover DDL)
        return sqlite3.connect(self.name, timeout=BUSY_SECONDS, isolation_level=None)

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[_Cursor]:
        connection = None
        try:
            # (closed after each: an open connection would keep reading a file that was set aside)
            connection = self._in_memory or self._connect()
            # (a writer locks at once: two readers that both write later would deadlock)
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            yield _Cursor(connection.cursor())
            connection.execute("COMMIT")
        except UnicodeError as error:
            # (sqlite3 puts the text of a damaged schema into its message)
            raise _Foreign("it holds text that is not UTF-8") from error
        finally:
            if connection is not None and connection.in_transaction:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            if self._path is None:
                self._in_memory = connection
            elif connection is not None:
                connection.close()

    def is_current(self, cursor: _Cursor) -> bool:
        tables = {row[0] for row in cursor.execute("SELECT name FROM sqlite_master")}
        if tables and "sftriage_schema" not in tables:
            raise _Foreign("not a catalogue")
        return bool(tables) and self._is_of_this_version(cursor)

    def store_name(self, place: str) -> str:
        return "."  # (a run directory may be moved, with its catalogue)

    def remedy(self, error: Exception) -> str:
        if "locked" in str(error):
            return ""  # (temporary)
        return "; it is only an index of the captures: move it away, then `sftriage traces reindex`"

    def set_aside(self, error: Exception) -> bool:
        # sqlite3 raises its plain DatabaseError for a malformed file only; other damage is an OperationalError like a
        # lock or a full disk, and Python 3.10 has no code to tell them apart by.
        is_damaged = (
            isinstance(error, _Foreign)
            or type(error) is sqlite3.DatabaseError
            or any(marker in str(error) for marker in _DAMAGE)
        )
        if self._path is None or not is_damaged:
            return False
        # (another process may have been first)
        with refusing(f"{self._path} cannot be set aside"), suppress(FileNotFoundError):
            # Keep it for the user. A journal may remain: SQLite drops one beside an empty file.
            self._path.replace(self._path.with_name(self._path.name + ".damaged"))
        return True


class PostgresDatabase(_Database):
    """A shared database on a server."""

    text, real = 'TEXT COLLATE "C"', "DOUBLE PRECISION"

    def __init__(self, url: str) -> None:
        server, credentials = _parts_of(url)
        try:
            import psycopg
            from psycopg.conninfo import conninfo_to_dict
        except ModuleNotFoundError as error:
            raise UsageError("a catalogue in PostgreSQL needs psycopg: pip install 'sftriage[postgres]'") from error
        self._connect, self.error = psycopg.connect, psycopg.Error
        try:
            named = conninfo_to_dict(f"postgresql://{server}")
        except psycopg.ProgrammingError:
            raise UsageError(_NO_URL) from None
        self.name = _without_secrets(named)
        # (keepalive detects a server that has vanished)
        ours = {"connect_timeout": CONNECT_S, "application_name": "sftriage", "tcp_user_timeout": STATEMENT_S * 1000}
        # (prepared statements fail behind a connection pooler)
        self._options: dict[str, Any] = {**ours, **credentials, **named, "prepare_threshold": None}

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[_Cursor]:
        with self._connect(**self._options) as connection, self._in_time(connection):
            connection.execute(
                f"SET LOCAL statement_timeout = '{STATEMENT_S}s'; SET LOCAL lock_timeout = '{STATEMENT_S}s'"
            )
            yield _Cursor(connection.cursor(), "%s")
            connection.commit()

    @contextmanager
    def _in_time(self, connection: Any) -> Iterator[None]:
        """Close the connection to a server that hangs: a stopped one keeps its connections but never answers."""
        late = threading.Event()
        with socket.socket(fileno=os.dup(connection.fileno())) as line:

            def hang_up() -> None:
                late.set()
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

            timer = threading.Timer(TRANSACTION_S, hang_up)
            timer.daemon = True
            timer.start()
            try:
                yield
            except self.error as error:
                if late.is_set():
                    raise CatalogueError(f"{self.name}: no answer within {TRANSACTION_S} s") from error
                raise
            finally:
                timer.cancel()
                timer.join()

    def is_current(self, cursor: _Cursor) -> bool:
        found = cursor.execute("SELECT to_regclass('sftriage_schema') IS NOT NULL")
        return bool(found[0][0]) and self._is_of_this_version(cursor)

    def make(self, cursor: _Cursor) -> None:
        # (held to the end of the transaction, so that a second process finds the tables)
        cursor.execute(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
        super().make(cursor)

    def store_name(self, place: str) -> str:
        """The URL of a store; that of a directory names its host."""
        return place if "://" in place else f"{_on_this_host()}{quote(os.fsencode(Path(place).resolve()))}"


def on_one_host(store: str) -> bool:
    """Whether a store, as named in rows of a shared database, is a directory of one host."""
    return store.startswith("file://") and not store.startswith("file:///")


def on_this_host(store: str) -> bool:
    """Whether such a store is a directory of this host, which may have been removed."""
    return store.startswith(f"{_on_this_host()}/")


def directory_here(store: str) -> Path | None:
    """The directory of such a store, if it exists on this host."""
    path = store.removeprefix(_on_this_host())
    directory = Path(os.fsdecode(unquote_to_bytes(path)))
    return directory if path != store and directory.is_dir() else None


def _on_this_host() -> str:
    return f"file://{socket.gethostname()}"


def has_password(url: str) -> bool:
    """Whether a URL contains a password; False for an invalid URL, which fails when it is opened."""
    try:
        parsed = urlsplit(url)
    except ValueError:
        return False
    return parsed.password is not None or not {"password", "sslpassword"}.isdisjoint(parse_qs(parsed.query))


# (not quoted: it may contain a password)
_NO_URL = "the catalogue is not a URL such as postgresql+psycopg://USER@HOST/DATABASE"


def _parts_of(text: str) -> tuple[str, dict[str, str]]:
    """The URL without scheme and credentials; and these, whose password may have a / in it."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise UsageError(_NO_URL)
    if scheme not in ("postgresql+psycopg", "postgresql", "postgres"):
        raise UsageError("a catalogue by URL is one of PostgreSQL: postgresql+psycopg://USER@HOST/DATABASE")
    named, mark, options = rest.partition("?")
    credentials, _, server = named.rpartition("@")
    if "@" in credentials:
        raise UsageError("the catalogue's URL has more than one @; in a user or password write it %40")
    user, _, password = map(unquote, credentials.partition(":"))
    given = {"user": user, "password": password}
    return f"{server}{mark}{options}", {name: value for name, value in given.items() if value}


def _without_secrets(named: Mapping[str, Any]) -> str:
    host, port = named.get("host") or "localhost", f":{named['port']}" if "port" in named else ""
    return CONTROL.sub("?", f"postgresql://{host}{port}/{named.get('dbname', '')}")


def _reason(error: Exception) -> str:
    """The database's error, on one line."""
    if isinstance(error, _Foreign):
        return str(error)
    lines = [line.strip(" \t-") for line in str(error).splitlines() if line.strip()]
    reason = CONTROL.sub("?", "; ".join(lines)[:500]) or type(error).__name__
    if getattr(error, "sqlstate", None) not in _UNDEFINED:
        return reason
    return f"its tables were changed ({reason}); drop {', '.join(_TABLES)}, then `sftriage traces reindex`"
