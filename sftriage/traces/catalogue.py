"""The catalogue: a SQLite index of a store's manifests, to be asked by rank, stage or step.

It holds nothing that the manifests do not. A missing, damaged or foreign database is therefore no error: it is set
aside and built again from the store.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Integer,
    MetaData,
    Table,
    Text,
    and_,
    create_engine,
    event,
    or_,
    select,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from sftriage.errors import UsageError
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import Listing, LocalStore

# Written into the file, so that a database of somebody else, or of an older layout, is known for what it is.
_APPLICATION_ID = 0x53465452
_LAYOUT = 2

_BUSY_SECONDS = 10.0

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """One capture as the catalogue knows it; the size and sha256 are those of the trace. ``created_at`` is in UTC."""

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

    @classmethod
    def of(cls, manifest: Manifest) -> CaptureRow:
        """The row of a manifest."""
        trigger, capture, trace = manifest.trigger, manifest.capture, manifest.artefacts[0]
        return cls(
            capture_id=manifest.capture_id,
            job=manifest.job,
            run=manifest.run,
            rank=capture.rank,
            stage=trigger.stage,
            label=trigger.label,
            scope=trigger.scope,
            window_first_step=trigger.window.first_step,
            window_last_step=trigger.window.last_step,
            first_step=capture.first_step,
            last_step=capture.last_step,
            gain_s=trigger.gain_s,
            size_bytes=trace.size_bytes,
            sha256=trace.sha256,
            profiler=capture.profiler,
            rule=trigger.rule,
            policy=trigger.policy,
            why=trigger.why,
            # Of one width, so that the order of the text is the order of time.
            created_at=manifest.created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        )


# One list of fields, that of the row: a column is named and typed as its field.
_TYPES = {"str": Text, "int": Integer, "float": Float}
_captures = Table(
    "captures",
    MetaData(),
    *(
        Column(
            field.name,
            _TYPES[str(field.type).removesuffix(" | None")],
            primary_key=field.name == "capture_id",
            nullable=str(field.type).endswith("None"),
        )
        for field in dataclasses.fields(CaptureRow)
    ),
)


class _Foreign(Exception):  # noqa: N818  # not an error: a finding that leads to a rebuild
    """The database is not a catalogue of this layout."""


class Catalogue:
    """The captures of a store, by rank, stage and step."""

    def __init__(self, path: str | os.PathLike[str], store: LocalStore) -> None:
        self._path = Path(path)
        self._store = store
        self._engine = _engine(self._path)

    def add(self, manifest: Manifest) -> None:
        """Index a capture that is in the store. Adding it again changes nothing.

        Raises:
            UsageError: the database cannot be opened or written.
        """
        self._ask(lambda connection: _insert(connection, manifest), write=True)

    def drop(self, capture_id: str) -> None:
        """Forget a capture. One that is not there changes nothing.

        Raises:
            UsageError: the database cannot be opened or written.
        """
        statement = _captures.delete().where(_captures.c.capture_id == capture_id)
        self._ask(lambda connection: connection.execute(statement), write=True)

    def find(
        self,
        *,
        rank: int | None = None,
        stage: str | None = None,
        label: str | None = None,
        rule: str | None = None,
        steps: tuple[int, int] | None = None,
    ) -> list[CaptureRow]:
        """The captures that meet every condition given, oldest first.

        Args:
            rank: the captured rank.
            stage: the stage the suspect was in.
            label: the label of the verdict that led to the capture.
            rule: the rule that asked for it.
            steps: first and last step, inclusive: captures that measured one of these steps, or whose triggering window
                holds one.

        Raises:
            UsageError: the database cannot be opened.
        """
        wanted = {"rank": rank, "stage": stage, "label": label, "rule": rule}
        conditions: list[ColumnElement[bool]] = [
            _captures.c[name] == value for name, value in wanted.items() if value is not None
        ]
        if steps is not None:
            conditions.append(or_(_overlaps("first_step", "last_step", steps), _window_overlaps(steps)))
        query = select(_captures).where(and_(True, *conditions))
        query = query.order_by(_captures.c.created_at, _captures.c.capture_id)
        return self._ask(lambda connection: [CaptureRow(**row._mapping) for row in connection.execute(query)])

    def show(self, capture_id: str) -> CaptureRow:
        """One capture.

        Raises:
            UsageError: the catalogue has no such capture, or cannot be opened.
        """
        query = select(_captures).where(_captures.c.capture_id == capture_id)
        row = self._ask(lambda connection: connection.execute(query).first())
        if row is None:
            raise UsageError(f"no capture {capture_id!r}")
        return CaptureRow(**row._mapping)

    def reindex(self) -> Listing:
        """Build the index again from the store; what was found there, with its problems.

        Raises:
            UsageError: the database cannot be opened or written.
        """
        return self._ask(self._fill, write=True)

    def _fill(self, connection: Connection) -> Listing:
        _captures.create(connection, checkfirst=True)
        connection.execute(_captures.delete())
        # Listed inside the transaction: a capture put before this is listed, and one put later waits to be added.
        listing = self._store.manifests()
        for manifest in listing.manifests:
            _insert(connection, manifest)
        connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version = {_LAYOUT}")
        return listing

    def _ask(self, question: Callable[[Connection], _Answer], *, write: bool = False) -> _Answer:
        """Answer from the database; if it is not one, from a new one."""
        try:
            return self._answer(question, write=write)
        except (DBAPIError, _Foreign) as error:
            if not _is_damage(error):
                raise UsageError(f"{self._path}: {_reason(error)}") from error
        self._set_aside()
        try:
            return self._answer(question, write=write)
        except (DBAPIError, _Foreign) as error:
            raise UsageError(f"{self._path} cannot be built again: {_reason(error)}") from error

    def _answer(self, question: Callable[[Connection], _Answer], *, write: bool) -> _Answer:
        with self._transaction(write=write) as connection:
            empty = _is_empty(connection)
            if not empty:
                return question(connection)
        with self._transaction(write=True) as connection:
            # Another process may have been first; then there is nothing to do.
            if _is_empty(connection):
                self._fill(connection)
            return question(connection)

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Connection]:
        with self._engine.connect().execution_options(sftriage_write=write) as connection, connection.begin():
            yield connection

    def _set_aside(self) -> None:
        """Rename rather than delete: whatever it is, somebody may want it back."""
        try:
            # A journal may stay behind: SQLite drops one that it finds beside an empty file.
            self._path.replace(self._path.with_name(self._path.name + ".damaged"))
        except FileNotFoundError:
            pass  # another process has done it
        except OSError as error:
            raise UsageError(f"{self._path} cannot be set aside: {error.strerror}") from error


def _engine(path: Path) -> Engine:
    def connect() -> sqlite3.Connection:
        # The file must be private from its first byte on, which SQLite leaves to the umask.
        if not path.exists():
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            except OSError as error:
                raise UsageError(f"{path}: {error.strerror}") from error
        # Without its own idea of transactions: it starts none before DDL.
        return sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)

    # No pool: a connection kept open would go on reading a file that was set aside.
    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("sftriage_write")
        # A writer takes its lock at once: two readers that both want to write later would wait for each other.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _is_empty(connection: Connection) -> bool:
    """Whether the database is new.

    Raises:
        _Foreign: it is neither new nor a catalogue of this layout.
    """
    marks = tuple(connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("application_id", "user_version"))
    if marks == (_APPLICATION_ID, _LAYOUT):
        return False
    if marks == (0, 0) and not connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar():
        return True
    raise _Foreign("not a catalogue of this version")


def _is_damage(error: DBAPIError | _Foreign) -> bool:
    """Whether building again may help: not when the database is locked, or the disk full or read-only."""
    if isinstance(error, _Foreign):
        return True
    # sqlite3 raises its plain DatabaseError for a malformed file only; a table or column that somebody removed is an
    # OperationalError like a lock, and Python 3.10 has no code to tell them apart by.
    return type(error.orig) is sqlite3.DatabaseError or "no such" in str(error.orig)


def _reason(error: DBAPIError | _Foreign) -> str:
    return str(error.orig) if isinstance(error, DBAPIError) else str(error)


def _insert(connection: Connection, manifest: Manifest) -> None:
    row: dict[str, Any] = dataclasses.asdict(CaptureRow.of(manifest))
    statement = insert(_captures).values(row)
    connection.execute(statement.on_conflict_do_update(index_elements=["capture_id"], set_=row))


def _overlaps(first: str, last: str, steps: tuple[int, int]) -> ColumnElement[bool]:
    return and_(_captures.c[first] <= steps[1], _captures.c[last] >= steps[0])


def _window_overlaps(steps: tuple[int, int]) -> ColumnElement[bool]:
    return _overlaps("window_first_step", "window_last_step", steps)
