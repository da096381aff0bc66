"""Where a catalogue is kept: a SQLite file beside the captures, or a PostgreSQL database that many jobs share.

The file is one store's and private; if it is damaged or foreign it is set aside. The database may hold tables of
others, which are left alone, and may be away or slow, which makes no caller wait long. A capture is one row.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import NullPool, StaticPool

from sftriage.base.files import refusing
from sftriage.errors import CatalogueError, UsageError
from sftriage.traces.manifest import CONTROL

# Compared byte by byte, as SQLite does and Python: another order than that of the database's language.
TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
METADATA = sa.MetaData()
VERSION = "0001"  # version of these tables; raise it with every change to them

schema = sa.Table("sftriage_schema", METADATA, sa.Column("version_num", sa.String(32), primary_key=True))

CONNECT_S, STATEMENT_S, TRANSACTION_S = 5, 10, 20  # patience with a shared database

BUSY_SECONDS = 10.0  # how long a SQLite file may be locked by another process

# Written into the file, to recognise a foreign database.
_APPLICATION_ID = 0x53465452
# What SQLite says of a file that is damaged or has other tables.
_DAMAGE = ("no such", "has no column", "decode to UTF-8", "malformed", "unsupported file format")

_ADVISORY_LOCK = 0x5346_5452_4941_4745
_UNDEFINED = {"42P01", "42703", "42P07"}


class Foreign(Exception):  # noqa: N818  # not an error: a finding that leads to a rebuild
    """The database is not a catalogue."""


class Database(ABC):
    """Where a catalogue is kept."""

    name: str
    """Said in messages: no user and no password in it."""

    @abstractmethod
    def transaction(self, *, write: bool = False) -> AbstractContextManager[sa.Connection]:
        """A connection that commits when the block ends well."""

    def is_current(self, connection: sa.Connection) -> bool:
        """Whether the tables are there; raises `Foreign`, or UsageError if they are of another version."""
        return sa.inspect(connection).has_table(schema.name) and self._is_of_this_version(connection)

    def _is_of_this_version(self, connection: sa.Connection) -> bool:
        found = connection.execute(sa.select(schema.c.version_num)).scalar()
        if found is not None and found != VERSION:
            raise UsageError(f"{self.name}: schema {found}; this sftriage reads {VERSION}: name another catalogue")
        return found is not None

    def make(self, connection: sa.Connection) -> None:
        """Make the tables, unless another process was first."""
        if self.is_current(connection):
            return
        # A table that exists all the same is foreign: that is an error.
        METADATA.create_all(connection, checkfirst=False)
        connection.execute(sa.insert(schema).values(version_num=VERSION))

    @abstractmethod
    def store_name(self, place: str) -> str:
        """What a store is called in the rows."""

    def remedy(self, error: DBAPIError | Foreign) -> str:
        """What to do where it cannot be used."""
        return ""

    def set_aside(self, error: DBAPIError | Foreign) -> bool:
        """Make room for a new database where it is ours alone and that helps against the error; whether it does."""
        return False


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
        self._engine = sa.create_engine("sqlite://", creator=self._connect, poolclass=pool)

        @sa.event.listens_for(self._engine, "begin")
        def begin(connection: sa.Connection) -> None:
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
    def transaction(self, *, write: bool = False) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect().execution_options(sftriage_write=write) as connection, connection.begin():
                yield connection
        except UnicodeError as error:
            # sqlite3 raises it for a damaged schema, whose text it puts into its message.
            raise Foreign("it holds text that is not UTF-8") from error

    def is_current(self, connection: sa.Connection) -> bool:
        mark = connection.exec_driver_sql("PRAGMA application_id").scalar()
        tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars())
        if mark == _APPLICATION_ID and schema.name in tables:
            return self._is_of_this_version(connection)
        if tables or mark:
            raise Foreign("not a catalogue")
        return False

    def make(self, connection: sa.Connection) -> None:
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
        """Rename rather than delete: it may be wanted back."""
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
        # Keepalive for a server that is gone without a word.
        ours = {"connect_timeout": CONNECT_S, "application_name": "sftriage", "tcp_user_timeout": STATEMENT_S * 1000}
        options = {name: value for name, value in ours.items() if name not in parsed.query}
        # Prepared statements do not survive a pooler between us and the server.
        options["prepare_threshold"] = None
        try:
            self._engine = sa.create_engine(parsed, poolclass=NullPool, connect_args=options)
        except ModuleNotFoundError as error:
            raise UsageError("a catalogue in PostgreSQL needs psycopg; install sftriage[postgres]") from error

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[sa.Connection]:
        with self._engine.connect() as connection, self._in_time(connection), connection.begin():
            connection.exec_driver_sql(
                f"SET LOCAL statement_timeout = '{STATEMENT_S}s'; SET LOCAL lock_timeout = '{STATEMENT_S}s'"
            )
            yield connection

    @contextmanager
    def _in_time(self, connection: sa.Connection) -> Iterator[None]:
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

    def make(self, connection: sa.Connection) -> None:
        # To the end of the transaction: who comes second finds it done.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
        super().make(connection)

    def store_name(self, place: str) -> str:
        """A URL; a directory's says on which host it is."""
        if "://" in place:
            return place
        return f"{_on_this_host()}{quote(os.fsencode(Path(place).resolve()))}"


def on_one_host(store: str) -> bool:
    """Whether a store, as a shared database's rows name it, is a directory of one host."""
    return store.startswith("file://") and not store.startswith("file:///")


def on_this_host(store: str) -> bool:
    """Whether it is a directory of this host, which may have gone."""
    return store.startswith(f"{_on_this_host()}/")


def distance(store: str) -> int:
    """How far a store is from here: 0 on this host, 1 where every host reaches it, 2 on another host."""
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
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        return False
    return parsed.password is not None or not {"password", "sslpassword"}.isdisjoint(parsed.query)


def _postgres_url(text: str) -> sa.URL:
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        # Not repeated: it may hold a password.
        raise UsageError("the catalogue is not a URL such as postgresql+psycopg://USER@HOST/DATABASE") from None
    if url.drivername not in ("postgresql+psycopg", "postgresql", "postgres"):
        raise UsageError("a catalogue by URL is one of PostgreSQL: postgresql+psycopg://USER@HOST/DATABASE")
    if "@" in (url.host or ""):
        # Part of a password has been taken for part of the host.
        raise UsageError("the catalogue's URL has more than one @; in a user or password write it %40")
    return url.set(drivername="postgresql+psycopg")


def _without_secrets(url: sa.URL) -> str:
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
