"""Where a catalogue is kept: a SQLite file beside the captures, or a PostgreSQL database that many jobs share.

The file is one store's and private; if it is damaged or foreign it is set aside. The database may hold tables of
others, which are left alone, and may be away or slow, which makes no caller wait long. A capture is one row.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Double,
    MetaData,
    String,
    Table,
    Text,
    and_,
    create_engine,
    event,
    false,
    func,
    insert,
    inspect,
    make_url,
    or_,
    select,
)
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool, StaticPool
from sqlalchemy.types import TypeEngine

from sftriage.base.files import refusing
from sftriage.errors import CatalogueError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.manifest import CONTROL, CauseInfo, Manifest

# Compared byte by byte, as SQLite does and Python: another order than that of the database's language.
TEXT = Text().with_variant(Text(collation="C"), "postgresql")


CONTROL_LABEL = "control"
"""In place of what led to a capture, where the rank was captured to compare with."""
FOLLOW_UP_LABEL = "follow-up"
"""The same, where an earlier capture of the suspect left it open why it is slow; its manifest names that."""


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """A capture in the catalogue; the size and sha256 are those of the trace, ``created_at`` is in UTC.

    An id is unique in its run. ``label`` is what led to the capture, or `CONTROL_LABEL`, or `FOLLOW_UP_LABEL`.
    ``cause`` is why its rank was slow, as JSON, where known. ``reference`` is its name in its ``store``.
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
        """Why its rank was slow; None where that is not known, or another sftriage wrote it."""
        try:
            return None if self.cause is None else CauseInfo.model_validate_json(self.cause)
        except ValueError:
            return None

    @property
    def role(self) -> str:
        """Whether the rank was suspected, or captured to compare with."""
        return "control" if self.label == CONTROL_LABEL else "suspect"

    @property
    def follows_up(self) -> bool:
        """Whether an earlier capture of the suspect led to it."""
        return self.label == FOLLOW_UP_LABEL

    def distance_from(self, step: int) -> int:
        """How many steps the capture is from a step; 0 where it recorded it, or its window holds it."""
        spans = ((self.first_step, self.last_step), (self.window_first_step, self.window_last_step))
        return min(max(first - step, step - last, 0) for first, last in spans)

    @classmethod
    def of(cls, manifest: Manifest, store: str, reference: str) -> CaptureRow:
        """The row of a manifest that a store has under a reference."""
        window, reproduced = manifest.trigger.window, manifest.reproduced
        # A field that is not given here is called as in the part of the manifest that has it.
        values = {
            **dict(manifest.artefacts[0]),
            **dict(manifest.trigger),
            **dict(manifest.capture),
            **dict(manifest),
            "label": _label(manifest),
            "window_first_step": window.first_step,
            "window_last_step": window.last_step,
            "created_at": written(manifest.created_at),
            "reproduced": None if reproduced is None else reproduced.answer,
            "cause": None if manifest.cause is None else manifest.cause.model_dump_json(),
            "store": store,
            "reference": reference,
        }
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})

    @classmethod
    def read(cls, values: Sequence[Any]) -> CaptureRow | None:
        """A row as a database has it, or None where no manifest gave it: others may write there, and it is printed."""
        safe: list[Any] = [CONTROL.sub("?", value) if isinstance(value, str) else value for value in values]
        row = cls(*safe)
        return row if CAPTURE_ID.fullmatch(row.capture_id) and math.isfinite(row.gain_s) else None


def _label(manifest: Manifest) -> str:
    if manifest.capture.role == "control":
        return CONTROL_LABEL
    return FOLLOW_UP_LABEL if manifest.trigger.follows else manifest.trigger.label


@dataclass(frozen=True, slots=True)
class CaptureQuery:
    """Selects captures that meet every condition given, mostly the value of the row's field of that name.

    ``prefix`` is how the id begins, ``since`` the earliest time of capture. ``steps`` (first and last): captures that
    measured one of them, or whose triggering window holds one.
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


METADATA = MetaData()

# One list of fields, that of the row: a column is named and typed as its field.
_TYPES: Mapping[str, TypeEngine[Any]] = {"str": TEXT, "int": BigInteger(), "float": Double()}
captures = Table(
    "sftriage_captures",
    METADATA,
    Column("key", TEXT, primary_key=True),
    *(
        Column(
            field.name,
            _TYPES[str(field.type).removesuffix(" | None")],
            nullable=str(field.type).endswith("None"),
            index=field.name == "created_at",
        )
        for field in dataclasses.fields(CaptureRow)
    ),
)
# The stores whose captures are all here. Forgetting one has it indexed again.
stores = Table(
    "sftriage_stores", METADATA, Column("key", TEXT, primary_key=True), Column("store", TEXT, nullable=False)
)

VERSION = "0001"
"""Version of these tables; raise it with every change to them."""
schema = Table("sftriage_schema", METADATA, Column("version_num", String(32), primary_key=True))

_EQUAL = ("job", "run", "rank", "stage", "label", "rule", "profiler", "host", "reproduced")


def conditions(wanted: CaptureQuery, store: str | None) -> Iterator[ColumnElement[bool]]:
    """What is asked for, of one store or of all, as a database is asked: all of it has to be true."""
    if store is not None:
        yield captures.c.store == store
    for name in _EQUAL:
        if (value := getattr(wanted, name)) is not None:
            yield captures.c[name] == value if _storable(value) else false()
    if wanted.prefix is not None:
        prefix = wanted.prefix
        yield func.substr(captures.c.capture_id, 1, len(prefix)) == prefix if _storable(prefix) else false()
    if wanted.steps is not None:
        spans = (("first_step", "last_step"), ("window_first_step", "window_last_step"))
        begin, end = wanted.steps
        yield or_(*(and_(captures.c[first] <= end, captures.c[last] >= begin) for first, last in spans))
    if wanted.since is not None:
        yield captures.c.created_at >= written(wanted.since)


def _storable(value: str | int) -> bool:
    """Whether a database can be asked for it: what is no text (of another encoding), or too large, is nowhere."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return "\0" not in value and value == value.encode(errors="replace").decode()


def written(moment: datetime) -> str:
    """A moment as rows have it: of one width, so that the order of the text is the order of time."""
    # Not by strftime: it writes the year 999 with three digits.
    return moment.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def key_of(store: str, reference: str = "") -> str:
    """What one row of a table is known by; a digest, since names may be too long for a database's index."""
    return hashlib.sha256(f"{store}\0{reference}".encode()).hexdigest()


CONNECT_S = 5
STATEMENT_S = 10
TRANSACTION_S = 20
"""How long a shared database may take, to be reached, for a statement, and for all of a transaction."""

BUSY_SECONDS = 10.0
"""How long a SQLite file may be locked by another process."""

# Written into the file, so that a database of somebody else is known for what it is.
_APPLICATION_ID = 0x53465452
_DAMAGE = ("no such", "has no column", "decode to UTF-8", "malformed", "unsupported file format")
"""What SQLite says of a file that is damaged or has other tables."""
_ADVISORY_LOCK = 0x5346_5452_4941_4745
_UNDEFINED = {"42P01", "42703", "42P07"}


class Foreign(Exception):  # noqa: N818  # not an error: a finding that leads to a rebuild
    """The database is not a catalogue."""


class Database(ABC):
    """Where a catalogue is kept."""

    name: str
    """Said in messages: no user and no password in it."""

    @abstractmethod
    def transaction(self, *, write: bool = False) -> AbstractContextManager[Connection]:
        """A connection that commits when the block ends well."""

    def is_current(self, connection: Connection) -> bool:
        """Whether the tables are there; raises `Foreign`, or UsageError if they are of another version."""
        return inspect(connection).has_table(schema.name) and self._is_of_this_version(connection)

    def _is_of_this_version(self, connection: Connection) -> bool:
        found = connection.execute(select(schema.c.version_num)).scalar()
        if found is not None and found != VERSION:
            raise UsageError(f"{self.name}: schema {found}; this sftriage reads {VERSION}: name another catalogue")
        return found is not None

    def make(self, connection: Connection) -> None:
        """Make the tables, unless another process was first."""
        if self.is_current(connection):
            return
        # A table that is there all the same is somebody else's: that is an error.
        METADATA.create_all(connection, checkfirst=False)
        connection.execute(insert(schema).values(version_num=VERSION))

    @abstractmethod
    def store_name(self, place: str) -> str:
        """What a store is called in the rows."""

    def remedy(self, error: DBAPIError | Foreign) -> str:
        """What to do where it cannot be used."""
        return ""

    @abstractmethod
    def set_aside(self, error: DBAPIError | Foreign) -> bool:
        """Make room for a new database where that helps against the error; whether it does."""


def database_at(at: str | os.PathLike[str] | None) -> Database:
    """The database in a file, at a URL (text), or in memory (None).

    Raises UsageError where the URL is not PostgreSQL's, or its driver is not installed.
    """
    return PostgresDatabase(at) if isinstance(at, str) else SqliteFile(None if at is None else Path(at))


class SqliteFile(Database):
    """A file of one store's; without a path it is in memory, for one thread of this process."""

    def __init__(self, path: Path | None) -> None:
        self._path, self.name = path, str(path or ":memory:")
        # No pool for a file: a connection kept open would go on reading one that was set aside.
        pool = StaticPool if path is None else NullPool
        self._engine = create_engine("sqlite://", creator=self._connect, poolclass=pool)

        @event.listens_for(self._engine, "begin")
        def begin(connection: Connection) -> None:
            write = connection.get_execution_options().get("sftriage_write")
            # A writer takes its lock at once: two readers that both want to write later would wait for each other.
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    def _connect(self) -> sqlite3.Connection:
        # The file must be private from its first byte on, which SQLite leaves to the umask.
        if self._path is not None and not self._path.exists():
            with refusing(str(self._path)):
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # Without its own idea of transactions: it starts none before DDL.
        return sqlite3.connect(self.name, timeout=BUSY_SECONDS, isolation_level=None)

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[Connection]:
        try:
            with self._engine.connect().execution_options(sftriage_write=write) as connection, connection.begin():
                yield connection
        except UnicodeError as error:
            # sqlite3 raises it for a damaged schema, whose text it puts into its message.
            raise Foreign("it holds text that is not UTF-8") from error

    def is_current(self, connection: Connection) -> bool:
        mark = connection.exec_driver_sql("PRAGMA application_id").scalar()
        tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars())
        if mark == _APPLICATION_ID and schema.name in tables:
            return self._is_of_this_version(connection)
        if tables or mark:
            raise Foreign("not a catalogue")
        return False

    def make(self, connection: Connection) -> None:
        super().make(connection)
        connection.exec_driver_sql(f"PRAGMA application_id = {_APPLICATION_ID}")

    def store_name(self, place: str) -> str:
        """Wherever it lies: a run directory is moved with its catalogue."""
        return "."

    def remedy(self, error: DBAPIError | Foreign) -> str:
        """What to do where it cannot be used: a lock goes by itself."""
        if "locked" in str(error):
            return ""
        return "; it is only an index of the captures: move it away, then `sftriage traces reindex`"

    def set_aside(self, error: DBAPIError | Foreign) -> bool:
        """Rename rather than delete: whatever it is, somebody may want it back."""
        if self._path is None or not _is_damage(error):
            return False
        # Another process may have done it.
        with refusing(f"{self._path} cannot be set aside"), suppress(FileNotFoundError):
            # A journal may stay behind: SQLite drops one that it finds beside an empty file.
            self._path.replace(self._path.with_name(self._path.name + ".damaged"))
        return True


def _is_damage(error: DBAPIError | Foreign) -> bool:
    """Whether building again may help: not when the database is locked, or the disk full or read-only."""
    if isinstance(error, Foreign):
        return True
    # sqlite3 raises its plain DatabaseError for a malformed file only; other damage is an OperationalError like a lock,
    # and Python 3.10 has no code to tell them apart by.
    return type(error.orig) is sqlite3.DatabaseError or any(one in str(error.orig) for one in _DAMAGE)


class PostgresDatabase(Database):
    """A database on a server, shared with others."""

    def __init__(self, url: str) -> None:
        parsed = _postgres_url(url)
        self.name = _without_secrets(parsed)
        ours = {
            "connect_timeout": CONNECT_S,
            "application_name": "sftriage",
            # A server that is gone without a word.
            "tcp_user_timeout": STATEMENT_S * 1000,
        }
        try:
            self._engine = create_engine(
                parsed,
                poolclass=NullPool,
                # Prepared statements do not survive a pooler between us and the server.
                connect_args={"prepare_threshold": None}
                | {name: value for name, value in ours.items() if name not in parsed.query},
            )
        except ModuleNotFoundError as error:
            raise UsageError("a catalogue in PostgreSQL needs psycopg; install sftriage[postgres]") from error

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[Connection]:
        with self._engine.connect() as connection, self._in_time(connection), connection.begin():
            connection.exec_driver_sql(
                f"SET LOCAL statement_timeout = '{STATEMENT_S}s'; SET LOCAL lock_timeout = '{STATEMENT_S}s'"
            )
            yield connection

    @contextmanager
    def _in_time(self, connection: Connection) -> Iterator[None]:
        """Hang up on a server that has gone silent: one that is stopped keeps its connections and never answers."""
        late = threading.Event()
        driver: Any = connection.connection.driver_connection  # psycopg's, whose type SQLAlchemy does not know
        with socket.socket(fileno=os.dup(driver.fileno())) as line:

            def hang_up() -> None:
                late.set()
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

            timer = threading.Timer(TRANSACTION_S, hang_up)
            timer.daemon = True
            timer.start()
            try:
                yield
            except DBAPIError as error:
                if late.is_set():
                    raise CatalogueError(f"{self.name}: no answer within {TRANSACTION_S} s") from error
                raise
            finally:
                timer.cancel()
                timer.join()

    def make(self, connection: Connection) -> None:
        # To the end of the transaction: who comes second finds it done.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
        super().make(connection)

    def store_name(self, place: str) -> str:
        """A URL; a directory's says on which host it is."""
        if "://" in place:
            return place
        return f"{_on_this_host()}{quote(os.fsencode(Path(place).resolve()))}"

    def set_aside(self, error: DBAPIError | Foreign) -> bool:
        """Never: it is not ours alone."""
        return False


def on_one_host(store: str) -> bool:
    """Whether a store, as a shared database's rows name it, is a directory of one host."""
    return store.startswith("file://") and not store.startswith("file:///")


def on_this_host(store: str) -> bool:
    """Whether it is a directory of the host that asks, which may have gone."""
    return store.startswith(f"{_on_this_host()}/")


def distance(store: str) -> int:
    """How far a store is from whoever asks: 0 on this host, 1 where everybody reaches it, 2 on another host."""
    if not on_one_host(store):
        return 1
    return 0 if directory_here(store) else 2


def directory_here(store: str) -> Path | None:
    """The directory that a shared database's rows mean, if it is one on this host."""
    path = store.removeprefix(_on_this_host())
    directory = Path(os.fsdecode(unquote_to_bytes(path)))
    return directory if path != store and directory.is_dir() else None


def _on_this_host() -> str:
    return f"file://{socket.gethostname()}"


def has_password(url: str) -> bool:
    """Whether a secret is written into a URL. What is no URL is refused by whoever opens it."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return False
    return parsed.password is not None or not {"password", "sslpassword"}.isdisjoint(parsed.query)


def _postgres_url(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Not repeated: what cannot be told apart may be a password.
        raise UsageError("the catalogue is not a URL such as postgresql+psycopg://USER@HOST/DATABASE") from None
    if url.drivername not in ("postgresql+psycopg", "postgresql", "postgres"):
        raise UsageError("a catalogue by URL is one of PostgreSQL: postgresql+psycopg://USER@HOST/DATABASE")
    if "@" in (url.host or ""):
        # Part of a password has been taken for part of the host.
        raise UsageError("the catalogue's URL has more than one @; in a user or password write it %40")
    return url.set(drivername="postgresql+psycopg")


def _without_secrets(url: URL) -> str:
    host = url.host or url.query.get("host") or "localhost"
    port = f":{url.port}" if url.port else ""
    hosts = host if isinstance(host, str) else ",".join(host)
    return CONTROL.sub("?", f"postgresql://{hosts}{port}/{url.database or ''}")


def reason(error: DBAPIError | Foreign) -> str:
    """What a database says is the matter, on one line."""
    if isinstance(error, Foreign):
        return str(error)
    if getattr(error.orig, "sqlstate", None) in _UNDEFINED:
        ours = ", ".join(sorted(METADATA.tables))
        return f"its tables are not as they were made ({_line(error)}); drop {ours}, then `sftriage traces reindex`"
    return _line(error)


def _line(error: DBAPIError) -> str:
    lines = [line.strip(" \t-") for line in str(error.orig).splitlines() if line.strip()]
    return CONTROL.sub("?", "; ".join(lines)[:500]) or type(error.orig).__name__
