"""A catalogue of this version is kept, another one refused."""

import sqlite3

import pytest
import sqlalchemy as sa

from sftriage.errors import UsageError
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.rows import METADATA, VERSION

# Whatever differs from these in rows.py needs another version.
COLUMNS = """
    "key" TEXT NOT NULL, capture_id TEXT NOT NULL, job TEXT NOT NULL, run TEXT NOT NULL, rank BIGINT NOT NULL,
    stage TEXT, label TEXT NOT NULL, scope TEXT NOT NULL, window_first_step BIGINT NOT NULL,
    window_last_step BIGINT NOT NULL, first_step BIGINT NOT NULL, last_step BIGINT NOT NULL, gain_s DOUBLE NOT NULL,
    size_bytes BIGINT NOT NULL, sha256 TEXT NOT NULL, profiler TEXT NOT NULL, rule TEXT NOT NULL, policy TEXT NOT NULL,
    why TEXT NOT NULL, created_at TEXT NOT NULL, host TEXT NOT NULL, reproduced TEXT, store TEXT NOT NULL,
    reference TEXT NOT NULL, onset_step BIGINT, cause TEXT, PRIMARY KEY ("key")
"""
AS_OF_0001 = f"""
CREATE TABLE sftriage_schema (
    version_num VARCHAR(32) NOT NULL, CONSTRAINT sftriage_schema_pkc PRIMARY KEY (version_num)
);
CREATE TABLE sftriage_captures ({COLUMNS});
CREATE INDEX ix_sftriage_captures_created_at ON sftriage_captures (created_at);
CREATE TABLE sftriage_stores ("key" TEXT NOT NULL, store TEXT NOT NULL, PRIMARY KEY ("key"));
INSERT INTO sftriage_schema VALUES ('0001');
PRAGMA application_id = {0x53465452};
"""


def described(path):
    with sa.create_engine(f"sqlite:///{path}").connect() as connection:
        inspector = sa.inspect(connection)
        return {
            name: (
                [(one["name"], str(one["type"]), one["nullable"]) for one in inspector.get_columns(name)],
                inspector.get_pk_constraint(name)["constrained_columns"],
                [one["column_names"] for one in inspector.get_indexes(name)],
            )
            for name in METADATA.tables
        }


def test_the_tables_are_those_of_their_version(tmp_path, store):
    (tmp_path / "run").mkdir(exist_ok=True)
    Catalogue(tmp_path / "made.db", store).find()
    with sqlite3.connect(tmp_path / "known.db") as connection:
        connection.executescript(AS_OF_0001)
    assert VERSION == "0001"
    assert described(tmp_path / "made.db") == described(tmp_path / "known.db")


def test_one_of_another_version_is_refused_and_left_alone(tmp_path, store, put):
    path = tmp_path / "catalogue.db"
    put("a")
    Catalogue(path, store).find()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE sftriage_schema SET version_num = '0003'")
    before = path.read_bytes()
    for act in (Catalogue(path, store).find, Catalogue(path, None).find, Catalogue(path, store).reindex):
        with pytest.raises(UsageError, match=r"catalogue\.db: schema 0003; this sftriage reads 0001"):
            act()
    assert path.read_bytes() == before
    assert not path.with_name("catalogue.db.damaged").exists()
