"""A server of PostgreSQL, and stores to be indexed in it."""

from contextlib import closing
from pathlib import Path

import pytest

from sftriage.traces.store import LocalStore
from tests.integration.catalogue.asking import put
from tests.integration.postgres import Postgres


@pytest.fixture(scope="package")
def server():
    """A server, for these tests."""
    with closing(Postgres()) as server:
        yield server


@pytest.fixture
def url(server) -> str:
    """An empty database."""
    return server.database()


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "exported.json"
    path.write_text('{"traceEvents": []}')
    return path


@pytest.fixture
def store_of(tmp_path, trace):
    """The store of a run, with captures in it."""

    def make(run: str, *capture_ids: str) -> LocalStore:
        store = LocalStore(tmp_path / run)
        for number, capture_id in enumerate(capture_ids):
            put(store, trace, capture_id, number)
        return store

    return make
