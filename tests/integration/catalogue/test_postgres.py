"""A catalogue that many jobs share, in a real PostgreSQL."""

import json
import logging
import shutil
from functools import partial

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import CatalogueError, UsageError
from sftriage.runs.directory import RunInfo, create
from sftriage.traces import databases
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.databases import CaptureQuery
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from tests import needs
from tests.integration.catalogue.asking import FORK, alive, ask, asked, ids, put
from tests.integration.postgres import PASSWORD, USER
from tests.unit.traces.manifests import QUICKLY, agrees, questions, sets_of_manifests

pytestmark = needs.postgres


LOSSES = {
    "its tables dropped": lambda server, url: ask(
        url, "DROP TABLE sftriage_captures, sftriage_stores, sftriage_schema"
    ),
    "the database dropped": lambda server, url: server.drop(url),
    "its rows deleted": lambda server, url: ask(url, "TRUNCATE sftriage_captures, sftriage_stores"),
    "the captures' rows deleted": lambda server, url: ask(url, "DELETE FROM sftriage_captures"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_answer_comes_back_whatever_is_deleted(server, url, store_of, loss):
    # GIVEN the catalogue of a store, and what it answers
    catalogue = Catalogue(url, store_of("run", "a", "b", "c"))
    asked = [
        CaptureQuery(),
        CaptureQuery(rank=2),
        CaptureQuery(prefix="b"),
        CaptureQuery(steps=(160, 161)),
        CaptureQuery(rank=9),
    ]
    before = [catalogue.find(wanted) for wanted in asked]
    assert [len(rows) for rows in before] == [3, 3, 1, 3, 0]
    # WHEN it is deleted, and built again
    LOSSES[loss](server, url)
    assert catalogue.reindex().captures == 3
    # THEN it answers as before
    assert [catalogue.find(wanted) for wanted in asked] == before


@given(stored=sets_of_manifests(), wanted=st.lists(questions(), min_size=8, max_size=12))
@settings(deadline=None, max_examples=25, phases=QUICKLY)
def test_the_catalogue_answers_as_the_manifests_would(stored, wanted, shelf):
    agrees(shelf, stored, wanted)


@pytest.fixture(scope="module")
def shelf(server, tmp_path_factory) -> Catalogue:
    """The catalogue of a store of many runs, of which nothing is in it yet."""
    catalogue = Catalogue(server.database(), RemoteStore.open(f"file://{tmp_path_factory.mktemp('shelf')}"))
    catalogue.reindex()
    return catalogue


def test_what_others_have_in_the_database_is_left_alone(url, store_of):
    # GIVEN a database with a table of somebody else's, of a name that might be ours, and their migrations
    ask(url, "CREATE TABLE captures (mine TEXT); INSERT INTO captures VALUES ('kept')")
    ask(url, "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('theirs')")
    # AND captures of another store
    other = Catalogue(url, store_of("other", "a", "b"))
    other.find()
    # WHEN a store is indexed, and indexed again with nothing in it
    store = store_of("run", "a", "c")
    mine = Catalogue(url, store)
    assert ids(mine) == ["a", "c"]
    store.remove("a")
    store.remove("c")
    mine.reindex()
    # THEN its captures are gone, and nothing else is
    assert (ids(mine), ids(other)) == ([], ["a", "b"])
    assert ask(url, "SELECT mine FROM captures") == [("kept",)]
    assert ask(url, "SELECT version_num FROM alembic_version") == [("theirs",)]


def test_a_table_of_somebody_else_that_has_our_name_is_not_touched(url, store_of):
    ask(url, "CREATE TABLE sftriage_captures (mine TEXT); INSERT INTO sftriage_captures VALUES ('kept')")
    with pytest.raises(CatalogueError, match="its tables are not as they were made"):
        Catalogue(url, store_of("run", "a")).reindex()
    assert ask(url, "SELECT mine FROM sftriage_captures") == [("kept",)]


def test_what_others_write_into_the_tables_does_nothing_to_a_terminal(url, store_of):
    # GIVEN a catalogue in which somebody has written what no manifest can say
    Catalogue(url, store_of("run", "a", "b", "c")).find()
    ask(url, "UPDATE sftriage_captures SET job = E'\\x1b[31mred', stage = E'a\\nb' WHERE capture_id = 'a'")
    ask(url, "UPDATE sftriage_captures SET gain_s = 'NaN' WHERE capture_id = 'b'")
    ask(url, "UPDATE sftriage_captures SET capture_id = '../up' WHERE capture_id = 'c'")
    # THEN it is shown as text, and what cannot be is left out
    assert [(row.capture_id, row.job, row.stage) for row in Catalogue(url, None).find()] == [("a", "?[31mred", "a?b")]


def test_captures_of_all_stores_are_found_together_each_once(url, store_of, tmp_path, monkeypatch):
    # GIVEN a capture in a run's store, and the same where everybody can reach it
    store = store_of("run", "a", "b")
    Catalogue(url, store).find()
    shared = tmp_path / "shared" / "resnet" / "run-1"
    shared.mkdir(parents=True)
    shutil.copytree(tmp_path / "run" / "captures" / "a", shared / "a")
    Catalogue(url, RemoteStore.open(f"file://{tmp_path / 'shared'}")).find()
    # WHEN all stores are asked on the host of the run THEN each capture is there once, and is the one that is near
    rows = Catalogue(url, None).find()
    assert [(row.capture_id, row.reference) for row in rows] == [("a", "a"), ("b", "b")]
    assert [databases.directory_here(row.store) for row in rows] == [tmp_path / "run" / "captures"] * 2
    # AND on another host, where that is not, it is the one that everybody can reach
    monkeypatch.setattr(databases.socket, "gethostname", lambda: "elsewhere")
    rows = Catalogue(url, None).find()
    assert [(row.capture_id, row.reference) for row in rows] == [("a", "resnet/run-1/a"), ("b", "b")]
    assert rows[0].store == f"file://{tmp_path / 'shared'}"
    assert databases.directory_here(rows[1].store) is None


def _index_many(url, root, trace, number):
    store = LocalStore(root / f"run-{number % 2}")
    catalogue = Catalogue(url, store)
    for one in range(10):
        catalogue.add(put(store, trace, f"p{number}-{one}"))
        if one % 4 == number:
            catalogue.reindex()
        catalogue.refresh()


def test_processes_that_make_it_add_and_reindex_at_once_lose_nothing(url, tmp_path, trace):
    # GIVEN an empty database, and four processes that begin with it at once, two and two on one store
    workers = [FORK.Process(target=_index_many, args=(url, tmp_path, trace, number)) for number in range(4)]
    for worker in workers:
        worker.start()
    alive(workers)
    # THEN every capture is in the catalogue, without anybody asking the store again
    assert sorted(ids(Catalogue(url, None))) == sorted(f"p{number}-{one}" for number in range(4) for one in range(10))


@pytest.mark.parametrize(
    ("host", "password", "said"),
    [
        ("127.0.0.1", "not+the+p%40ssword", "password authentication failed"),
        ("127.0.0.1:1", "s3cr3t%2Fp%40ssword", "refused"),
        ("no-such-host.invalid", "s3cr3t", "no-such-host.invalid"),
        # Not written as an address wants it: the host would begin in the password.
        ("127.0.0.1:1", "s3cr3t@ssword", "write it %40"),
        ("127.0.0.1:1", "s3cr3t/ssword", "refused"),
    ],
)
def test_no_message_has_a_password_in_it(server, host, password, said, monkeypatch, caplog, store_of):
    caplog.set_level(logging.DEBUG)
    where = host if ":" in host else f"{host}:{server.port}"
    try:
        Catalogue(f"postgresql://{USER}:{password}@{where}/db", store_of("run", "a")).find()
    except (CatalogueError, UsageError) as error:
        message = str(error)
    assert said in message
    for told in (message, caplog.text):
        assert "s3cr3t" not in told
        assert "ssword@" not in told
        assert "not+the" not in told


def test_with_its_password_from_the_environment_it_is_asked_over_the_network(server, url, store_of, monkeypatch):
    name = url.rpartition("?")[0].rpartition("/")[2]
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    catalogue = Catalogue(f"postgresql://{USER}@127.0.0.1:{server.port}/{name}", store_of("run", "a"))
    assert ids(catalogue) == ["a"]
    assert catalogue.name == f"postgresql://127.0.0.1:{server.port}/{name}"
    encoded = sa.URL.create("postgresql+psycopg", USER, PASSWORD, "127.0.0.1", server.port, name)
    monkeypatch.delenv("PGPASSWORD")
    again = Catalogue(encoded.render_as_string(hide_password=False), None)
    assert (ids(again), again.name) == (["a"], catalogue.name)


def test_tables_of_another_version_are_refused_and_left_alone(url, store_of):
    store = store_of("run", "a")
    Catalogue(url, store).find()
    ask(url, "UPDATE sftriage_schema SET version_num = '0000'")
    for of in (store, None):
        with pytest.raises(UsageError, match="schema 0000; this sftriage reads 0001"):
            Catalogue(url, of).find()
    assert ask(url, "SELECT capture_id FROM sftriage_captures") == [("a",)]


def test_whoever_may_only_read_finds_what_is_there(server, url, store_of):
    Catalogue(url, store_of("run", "a")).find()
    ask(url, "CREATE ROLE reader LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    reader = url.replace(f"{USER}@", "reader@")
    assert ids(Catalogue(reader, None)) == ["a"]
    with pytest.raises(CatalogueError, match="permission denied"):
        Catalogue(reader, store_of("other", "b")).refresh()


def test_the_command_line_asks_for_all_runs_and_fetches_from_their_stores(start, environment, url, trace, tmp_path):
    # GIVEN two runs that share a catalogue, each with a capture of one name
    for run in ("one", "two"):
        info = RunInfo(run, "resnet", "2026-11-20T12:00:00+00:00", ("true",), "default", "0" * 64, "/nowhere")
        store = LocalStore(create(tmp_path / run, info, "").path)
        for name in ("w-1", f"of-{run}"):
            put(store, trace, name, run=run)
        Catalogue(url, store).find()
    environment["SFTRIAGE_CATALOGUE"] = url

    sftriage = partial(asked, start, tmp_path)
    # WHEN all captures are listed THEN those of both are there, and where each is kept
    status, out, err = sftriage("list", "--json")
    assert status == 0, err
    rows = [(row["run"], row["capture_id"]) for row in json.loads(out)]
    assert sorted(rows) == [("one", "of-one"), ("one", "w-1"), ("two", "of-two"), ("two", "w-1")]
    # AND one is fetched by the beginning of its name, from wherever it is
    status, out, err = sftriage("get", "of-t")
    assert (status, out.strip()) == (0, "of-two-trace.json.gz"), err
    assert (tmp_path / "of-two-trace.json.gz").stat().st_size > 0
    # AND a name that two have is said to be so, and which they are
    status, out, err = sftriage("show", "w-1")
    assert (status, out) == (2, "")
    assert "2 captures are called w-1: resnet/one/w-1, resnet/two/w-1" in err
    status, out, err = sftriage("show", "resnet/two/w-1")
    assert (status, out.splitlines()[1]) == (0, "job, run    resnet, two"), err
