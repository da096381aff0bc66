"""An index of manifests, to find captures by job, rank, stage, step and time.

It holds nothing that the manifests do not: a damaged or foreign file is set aside and built again from the store. In a
shared database, only the rows of one's own store are ever replaced.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, delete, select
from sqlalchemy.exc import DBAPIError

from sftriage.errors import CatalogueError, UsageError
from sftriage.traces.databases import (
    CaptureQuery,
    CaptureRow,
    Foreign,
    captures,
    conditions,
    database_at,
    distance,
    key_of,
    reason,
    stores,
    written,
)
from sftriage.traces.manifest import Manifest
from sftriage.traces.stores import Store, StoreCondition

Progress = Callable[[int, int], None]
"""Told how many manifests have been read, and of how many."""

_EXPLAINED_LATER = timedelta(hours=1)
_MAX_UNEXPLAINED = 20
_READERS = 8
_BATCH = 500

_Result = TypeVar("_Result")
_Value = TypeVar("_Value")
_COLUMNS = tuple(field.name for field in dataclasses.fields(CaptureRow))


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
        query = select(*(captures.c[name] for name in _COLUMNS)).where(*conditions(wanted or CaptureQuery(), here))
        query = query.order_by(*(captures.c[name] for name in ("created_at", "capture_id", "job", "run", "store")))
        found = self._run_query(lambda connection: connection.execute(query).all(), indexed=True)
        rows = [row for row in map(CaptureRow.read, found) if row is not None]
        return _each_once(rows) if self._store is None else [replace(row, store=self._store.place) for row in rows]

    def is_indexed(self) -> bool:
        """Whether all that the store had was indexed once."""
        return self._run_query(self._has_mark)

    def refresh(self, progress: Progress | None = None) -> tuple[str, ...]:
        """Index what the catalogue lacks, and forget what is gone; what in the store is no capture, and why.

        This makes good a crash between storing and indexing, or a catalogue that was away.
        """
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
        """Build the index of the store again: the number of captures, and what is none, and why.

        What is added meanwhile stays.
        """
        # Before the store is read: what is added from now on is no leftover.
        known = self._run_query(self._references)
        found, problems = self._read(self._own_store.ids(), progress)
        self._insert(found)
        self._delete(known - {reference for reference, _ in found})
        mark = {"key": key_of(self._own_name), "store": self._own_name}
        self._run_query(partial(_upsert, stores, [mark]), write=True)
        return len(found), (*problems, *self._own_store.leftovers())

    def _read(
        self, references: Collection[str], progress: Progress | None
    ) -> tuple[list[tuple[str, Manifest]], tuple[str, ...]]:
        found: list[tuple[str, Manifest]] = []
        unfit: dict[str, StoreCondition] = {}
        with ThreadPoolExecutor(_READERS) as readers:
            seen = readers.map(self._own_store.seen, ordered := sorted(references))
            for done, (reference, (manifest, condition)) in enumerate(zip(ordered, seen, strict=True), 1):
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
        values = [{"key": key_of(row.store, row.reference), **dataclasses.asdict(row)} for row in rows]
        for batch in _batches(values):
            self._run_query(partial(_upsert, captures, batch), write=True)

    def _delete(self, references: Collection[str]) -> None:
        for keys in _batches([key_of(self._own_name, reference) for reference in sorted(references)]):
            self._run_query(partial(_forget, keys), write=True)

    def _references(self, connection: Connection) -> frozenset[str]:
        query = select(captures.c.reference).where(captures.c.store == self._own_name)
        return frozenset(connection.execute(query).scalars())

    def _unexplained(self, connection: Connection) -> frozenset[str]:
        now = datetime.now(timezone.utc)
        at = captures.c.created_at
        lately = at >= written(now - _EXPLAINED_LATER), at <= written(now)
        its = captures.c.store == self._own_name, captures.c.cause.is_(None), *lately
        newest = select(captures.c.reference).where(*its).order_by(captures.c.created_at.desc())
        return frozenset(connection.execute(newest.limit(_MAX_UNEXPLAINED)).scalars())

    def _has_mark(self, connection: Connection) -> bool:
        query = select(stores.c.key).where(stores.c.key == key_of(self._own_name))
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
        self, question: Callable[[Connection], _Result], *, write: bool = False, indexed: bool = False
    ) -> _Result:
        try:
            return self._run_once(question, write=write, indexed=indexed)
        except (DBAPIError, Foreign) as error:
            if not self._database.set_aside(error):
                raise CatalogueError(f"{self.name}: {reason(error)}{self._database.remedy(error)}") from error
        try:
            return self._run_once(question, write=write, indexed=indexed)
        except (DBAPIError, Foreign) as error:
            words = f"{self.name} cannot be built again: {reason(error)}{self._database.remedy(error)}"
            raise CatalogueError(words) from error

    def _run_once(self, question: Callable[[Connection], _Result], *, write: bool, indexed: bool) -> _Result:
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


def _upsert(table: Table, rows: Sequence[dict[str, Any]], connection: Connection) -> None:
    # Each dialect has an insert of its own, which are spelt alike.
    statement: Any = import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert(table)
    connection.execute(statement.on_conflict_do_update(index_elements=["key"], set_=dict(statement.excluded)), rows)


def _forget(keys: Sequence[str], connection: Connection) -> None:
    connection.execute(delete(captures).where(captures.c.key.in_(keys)))


def _batches(values: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    """Few enough at a time that nobody waits for long. In order: two that write the same do not lock each other out."""
    for first in range(0, len(values), _BATCH):
        yield values[first : first + _BATCH]


def _each_once(rows: Sequence[CaptureRow]) -> list[CaptureRow]:
    nearest: dict[tuple[str, str, str], CaptureRow] = {}
    for row in sorted(rows, key=lambda row: distance(row.store)):
        nearest.setdefault((row.job, row.run, row.capture_id), row)
    return [row for row in rows if nearest[row.job, row.run, row.capture_id] is row]
