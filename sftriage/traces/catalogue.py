"""An index of manifests, to find captures by job, rank, stage, step and time.

It holds nothing that the manifests do not: a damaged or foreign file is set aside and built again from the store. In a
shared database, only the rows of one's own store are ever replaced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import TypeEngine

from sftriage.errors import CatalogueError, UsageError
from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.databases import METADATA, TEXT, Foreign, database_at, distance, reason
from sftriage.traces.manifest import CONTROL, CauseInfo, Manifest
from sftriage.traces.stores import Store, StoreCondition

Progress = Callable[[int, int], None]  # takes the number of manifests read, and of all

_EXPLAINED_LATER = timedelta(hours=1)
_MAX_UNEXPLAINED = 20
_READERS = 8
_BATCH = 500

_Result = TypeVar("_Result")
_Value = TypeVar("_Value")

CONTROL_LABEL = "control"  # of a rank that was captured to compare with, in place of what led to the capture
FOLLOW_UP_LABEL = "follow-up"  # the same, where an earlier capture left it open why the suspect is slow


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
            "created_at": _written(manifest.created_at),
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


# One list of fields, that of the row: a column is named and typed as its field.
_TYPES: Mapping[str, TypeEngine[Any]] = {"str": TEXT, "int": sa.BigInteger(), "float": sa.Double()}
captures = sa.Table(
    "sftriage_captures",
    METADATA,
    sa.Column("key", TEXT, primary_key=True),
    *(
        sa.Column(
            field.name,
            _TYPES[str(field.type).removesuffix(" | None")],
            nullable=str(field.type).endswith("None"),
            index=field.name == "created_at",
        )
        for field in dataclasses.fields(CaptureRow)
    ),
)

# The stores whose captures are all here. Forgetting one has it indexed again.
stores = sa.Table(
    "sftriage_stores", METADATA, sa.Column("key", TEXT, primary_key=True), sa.Column("store", TEXT, nullable=False)
)
_EQUAL = ("job", "run", "rank", "stage", "label", "rule", "profiler", "host", "reproduced")


def _conditions(wanted: CaptureQuery, store: str | None) -> Iterator[sa.ColumnElement[bool]]:
    if store is not None:
        yield captures.c.store == store
    for name in _EQUAL:
        if (value := getattr(wanted, name)) is not None:
            yield captures.c[name] == value if _storable(value) else sa.false()
    if wanted.prefix is not None:
        prefix = wanted.prefix
        yield sa.func.substr(captures.c.capture_id, 1, len(prefix)) == prefix if _storable(prefix) else sa.false()
    if wanted.steps is not None:
        spans = (("first_step", "last_step"), ("window_first_step", "window_last_step"))
        begin, end = wanted.steps
        yield sa.or_(*(sa.and_(captures.c[first] <= end, captures.c[last] >= begin) for first, last in spans))
    if wanted.since is not None:
        yield captures.c.created_at >= _written(wanted.since)


def _storable(value: str | int) -> bool:
    """Whether a database can look for it: no row has a number that is too large, or text that cannot be encoded."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return "\0" not in value and value == value.encode(errors="replace").decode()


def _written(moment: datetime) -> str:
    """A moment as rows have it: of one width, so that the order of the text is the order of time."""
    # Not by strftime: it writes the year 999 with three digits.
    return moment.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _key_of(store: str, reference: str = "") -> str:
    """What one row of a table is known by; a digest, since names may be too long for a database's index."""
    return hashlib.sha256(f"{store}\0{reference}".encode()).hexdigest()


class Catalogue:
    """The captures of a store, or of every store that shares the catalogue.

    ``at`` is a file, which is this store's alone, the URL of a PostgreSQL database, or None: in memory. Without a
    store, the captures of all stores are found.

    Methods raise CatalogueError where the database cannot be reached or written now, UsageError where it cannot be made
    or is of another version, and StoreError where the store cannot be reached. So does making one of a URL that is
    none, or without PostgreSQL's driver (UsageError).
    """

    def __init__(self, at: str | os.PathLike[str] | None, store: Store | None) -> None:
        self._database = database_at(at)
        self._store = store

    @property
    def name(self) -> str:
        """What it is called in messages: nothing in it is secret."""
        return self._database.name

    def add(self, manifest: Manifest) -> None:
        """Index a capture that is in the store. Adding it again changes nothing."""
        self._insert([(self._own_store.reference(manifest), manifest)])

    def drop(self, reference: str) -> None:
        """Forget a capture, by the store's reference. One that is not there changes nothing."""
        self._delete([reference])

    def find(self, wanted: CaptureQuery | None = None) -> list[CaptureRow]:
        """The captures that are wanted, oldest first; each once, where it can be had from several stores."""
        here = None if self._store is None else self._own_name
        query = sa.select(*(captures.c[field.name] for field in dataclasses.fields(CaptureRow))).where(
            *_conditions(wanted or CaptureQuery(), here)
        )
        query = query.order_by(*(captures.c[name] for name in ("created_at", "capture_id", "job", "run", "store")))
        found = self._run_query(lambda connection: connection.execute(query).all(), indexed=True)
        rows = [row for row in map(CaptureRow.read, found) if row is not None]
        return _each_once(rows) if self._store is None else [replace(row, store=self._store.place) for row in rows]

    def is_indexed(self) -> bool:
        """Whether all that the store had was indexed once."""
        return self._run_query(self._has_mark)

    def refresh(self, progress: Progress | None = None) -> tuple[str, ...]:
        """Index what the catalogue lacks, and forget what is gone, as after a crash; what is no capture, and why."""
        if not self.is_indexed():
            return self.reindex(progress)[1]
        # In this order: what is put and added between the two is in the store, and no leftover.
        known = self._run_query(self._references)
        there = self._own_store.ids()
        found, problems = self._read((there - known) | (there & self._run_query(self._unexplained)), progress)
        self._insert(found)
        self._delete(known - there)
        return problems

    def reindex(self, progress: Progress | None = None) -> tuple[int, tuple[str, ...]]:
        """Build the index again, keeping what is added meanwhile; the number of captures, and what is none, and why."""
        # Before the store is read: what is added from now on is no leftover.
        known = self._run_query(self._references)
        found, problems = self._read(self._own_store.ids(), progress)
        self._insert(found)
        self._delete(known - {reference for reference, _ in found})
        mark = {"key": _key_of(self._own_name), "store": self._own_name}
        self._run_query(partial(_upsert, stores, [mark]), write=True)
        return len(found), (*problems, *self._own_store.leftovers())

    def _read(
        self, references: Collection[str], progress: Progress | None
    ) -> tuple[list[tuple[str, Manifest]], tuple[str, ...]]:
        found: list[tuple[str, Manifest]] = []
        unfit: dict[str, StoreCondition] = {}
        with ThreadPoolExecutor(_READERS) as readers:
            found_all = readers.map(self._own_store.seen, ordered := sorted(references))
            for done, (reference, (manifest, condition)) in enumerate(zip(ordered, found_all, strict=True), 1):
                if manifest is not None and condition.whole:
                    found.append((reference, manifest))
                else:
                    unfit[reference] = condition
                if progress is not None:
                    progress(done, len(ordered))
        # What was removed meanwhile is no problem.
        still = self._own_store.ids() if unfit else frozenset()
        return found, tuple(f"capture {one} {condition.words}" for one, condition in unfit.items() if one in still)

    def _insert(self, found: Sequence[tuple[str, Manifest]]) -> None:
        rows = [CaptureRow.of(manifest, self._own_name, reference) for reference, manifest in found]
        values = [{"key": _key_of(row.store, row.reference), **dataclasses.asdict(row)} for row in rows]
        for batch in _batches(values):
            self._run_query(partial(_upsert, captures, batch), write=True)

    def _delete(self, references: Collection[str]) -> None:
        for keys in _batches([_key_of(self._own_name, reference) for reference in sorted(references)]):
            self._run_query(partial(_forget, keys), write=True)

    def _references(self, connection: sa.Connection) -> frozenset[str]:
        query = sa.select(captures.c.reference).where(captures.c.store == self._own_name)
        return frozenset(connection.execute(query).scalars())

    def _unexplained(self, connection: sa.Connection) -> frozenset[str]:
        now = datetime.now(timezone.utc)
        at = captures.c.created_at
        lately = at >= _written(now - _EXPLAINED_LATER), at <= _written(now)
        its = captures.c.store == self._own_name, captures.c.cause.is_(None), *lately
        newest = sa.select(captures.c.reference).where(*its).order_by(captures.c.created_at.desc())
        return frozenset(connection.execute(newest.limit(_MAX_UNEXPLAINED)).scalars())

    def _has_mark(self, connection: sa.Connection) -> bool:
        query = sa.select(stores.c.key).where(stores.c.key == _key_of(self._own_name))
        return connection.execute(query).first() is not None

    @property
    def _own_store(self) -> Store:
        if self._store is None:
            raise UsageError(f"{self.name}: say which store is to be indexed")
        return self._store

    @property
    def _own_name(self) -> str:
        return self._database.store_name(self._own_store.place)

    def _run_query(
        self, question: Callable[[sa.Connection], _Result], *, write: bool = False, indexed: bool = False
    ) -> _Result:
        what = self.name
        while True:
            try:
                return self._run_once(question, write=write, indexed=indexed)
            except (DBAPIError, Foreign) as error:
                if what != self.name or not self._database.set_aside(error):
                    raise CatalogueError(f"{what}: {reason(error)}{self._database.remedy(error)}") from error
                what = f"{self.name} cannot be built again"

    def _run_once(self, question: Callable[[sa.Connection], _Result], *, write: bool, indexed: bool) -> _Result:
        indexed = indexed and self._store is not None
        with self._database.transaction(write=write) as connection:
            if self._database.is_current(connection) and (not indexed or self._has_mark(connection)):
                return question(connection)
        with self._database.transaction(write=True) as connection:
            # Another process may have been first; then there is nothing to do.
            self._database.make(connection)
            indexed = indexed and not self._has_mark(connection)
        if indexed:
            self.reindex()
        with self._database.transaction(write=write) as connection:
            return question(connection)


def _upsert(table: sa.Table, rows: Sequence[dict[str, Any]], connection: sa.Connection) -> None:
    # Each dialect has an insert of its own, which are spelt alike.
    statement: Any = import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert(table)
    connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_=dict(statement.excluded)), rows)


def _forget(keys: Sequence[str], connection: sa.Connection) -> None:
    connection.execute(sa.delete(captures).where(captures.c.key.in_(keys)))


def _batches(values: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """Small enough that no other writer waits long, and in order, so that two writers do not lock each other out."""
    for first in range(0, len(values), _BATCH):
        yield values[first : first + _BATCH]


def _each_once(rows: Sequence[CaptureRow]) -> list[CaptureRow]:
    nearest: dict[tuple[str, str, str], CaptureRow] = {}
    for row in sorted(rows, key=lambda row: distance(row.store)):
        nearest.setdefault((row.job, row.run, row.capture_id), row)
    return [row for row in rows if nearest[row.job, row.run, row.capture_id] is row]
