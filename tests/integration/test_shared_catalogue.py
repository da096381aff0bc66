"""A shared catalogue in a real PostgreSQL: what it answers, and that no capture is lost while it is away."""

import hashlib
import json
import logging
import multiprocessing
import shutil
import signal
from contextlib import closing
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import CatalogueError, UsageError
from sftriage.model.captures import CaptureResult
from sftriage.model.events import CaptureChanged
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.copies import SharedIndexing
from sftriage.traces import catalogue as catalogues
from sftriage.traces.catalogue import CaptureQuery, Catalogue
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from sftriage.traces.uploading import Uploader
from tests import needs
from tests.integration.postgres import PASSWORD, USER, Postgres
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.s3 import BUCKET, environment_of
from tests.unit.conftest import keep
from tests.unit.traces.manifests import QUICKLY, agrees, questions, sets_of_manifests

pytestmark = needs.postgres

FORK = multiprocessing.get_context("fork")
STORE = f"s3://{BUCKET}/team"


@pytest.fixture
def traces(sftriage, tmp_path, monkeypatch):
    """What `sftriage traces ...` prints in ``tmp_path``: its output, or messages alone where it fails."""
    monkeypatch.chdir(tmp_path)

    def traces(*arguments, code=0) -> str:
        status, out, err = sftriage("traces", *arguments)
        assert (status, out if code else "") == (code, ""), err
        return err if code else out

    return traces


def ids(catalogue: Catalogue, wanted: CaptureQuery | None = None) -> list[str]:
    return [row.capture_id for row in catalogue.find(wanted)]


def ask(url: str, statement: str) -> list[tuple]:
    with psycopg.connect(plain(url)) as connection:
        found = connection.execute(statement)
        return found.fetchall() if found.description else []


def plain(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")


def alive(processes) -> None:
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.fixture(scope="module")
def server():
    with closing(Postgres()) as server:
        yield server


@pytest.fixture
def url(server) -> str:
    return server.database()


@pytest.fixture
def store_of(tmp_path):
    def make(run: str, *capture_ids: str) -> LocalStore:
        for number, capture_id in enumerate(capture_ids):
            keep(tmp_path / run, capture_id, second=number)
        return LocalStore(tmp_path / run)

    return make


LOSSES = {
    "its tables": lambda server, url: ask(url, "DROP TABLE sftriage_captures, sftriage_stores, sftriage_schema"),
    "the database": lambda server, url: server.drop(url),
    "its rows": lambda server, url: ask(url, "TRUNCATE sftriage_captures, sftriage_stores"),
    "the captures' rows": lambda server, url: ask(url, "DELETE FROM sftriage_captures"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_answer_comes_back_whatever_is_deleted(server, url, store_of, loss):
    # GIVEN the catalogue of a store, and what it answers
    catalogue = Catalogue(url, store_of("run", "a", "b", "c"))
    wanted = [CaptureQuery(), CaptureQuery(prefix="b"), CaptureQuery(steps=(160, 161)), CaptureQuery(rank=9)]
    before = [catalogue.find(one) for one in wanted]
    assert [len(rows) for rows in before] == [3, 1, 3, 0]
    # WHEN it is deleted, and built again
    LOSSES[loss](server, url)
    assert catalogue.reindex() == (3, ())
    # THEN it answers as before
    assert [catalogue.find(one) for one in wanted] == before


@given(stored=sets_of_manifests(), wanted=st.lists(questions(), min_size=8, max_size=12))
@settings(max_examples=25, phases=QUICKLY)
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
    with pytest.raises(CatalogueError, match="its tables were changed"):
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
    assert [catalogues.directory_here(row.store) for row in rows] == [tmp_path / "run" / "captures"] * 2
    # AND on another host, where that is not, it is the one that everybody can reach
    monkeypatch.setattr(catalogues.socket, "gethostname", lambda: "elsewhere")
    rows = Catalogue(url, None).find()
    assert [(row.capture_id, row.reference) for row in rows] == [("a", "resnet/run-1/a"), ("b", "b")]
    assert rows[0].store == f"file://{tmp_path / 'shared'}"
    assert catalogues.directory_here(rows[1].store) is None


def _index_many(url, root, number):
    catalogue = Catalogue(url, LocalStore(root))
    for one in range(10):
        catalogue.add(keep(root, f"p{number}-{one}"))
        if one % 4 == number:
            catalogue.reindex()
        catalogue.refresh()


def test_processes_that_make_it_add_and_reindex_at_once_lose_nothing(url, tmp_path):
    # GIVEN an empty database, and four processes that begin with it at once, two and two on one store
    workers = [FORK.Process(target=_index_many, args=(url, tmp_path / f"run-{one % 2}", one)) for one in range(4)]
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
    encoded = f"postgresql+psycopg://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/{name}"
    monkeypatch.delenv("PGPASSWORD")
    again = Catalogue(encoded, None)
    assert (ids(again), again.name) == (["a"], catalogue.name)


def test_whoever_may_only_read_finds_what_is_there(server, url, store_of):
    Catalogue(url, store_of("run", "a")).find()
    ask(url, "CREATE ROLE reader LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    reader = url.replace(f"{USER}@", "reader@")
    assert ids(Catalogue(reader, None)) == ["a"]
    with pytest.raises(CatalogueError, match="permission denied"):
        Catalogue(reader, store_of("other", "b")).refresh()


def test_the_command_line_asks_for_all_runs_and_fetches_from_their_stores(traces, monkeypatch, url, tmp_path):
    # GIVEN two runs that share a catalogue, each with a capture of one name
    for run in ("one", "two"):
        info = RunInfo(run, "resnet", "2026-11-20T12:00:00+00:00", ("true",), "default", "0" * 64, "/nowhere")
        create(tmp_path / run, info, "")
        for name in ("w-1", f"of-{run}"):
            keep(tmp_path / run, name, run=run)
        Catalogue(url, LocalStore(tmp_path / run)).find()
    monkeypatch.setenv("SFTRIAGE_CATALOGUE", url)

    # WHEN all captures are listed THEN those of both are there, and where each is kept
    rows = [(row["run"], row["capture_id"]) for row in json.loads(traces("list", "--json"))]
    assert sorted(rows) == [("one", "of-one"), ("one", "w-1"), ("two", "of-two"), ("two", "w-1")]
    # AND one is fetched by the beginning of its name, from wherever it is
    assert traces("get", "of-t").strip() == "of-two-trace.json.gz"
    assert (tmp_path / "of-two-trace.json.gz").stat().st_size > 0
    # AND a name that two have is said to be so, and which they are
    assert "2 captures match w-1: resnet/one/w-1, resnet/two/w-1" in traces("show", "w-1", code=2)
    assert traces("show", "resnet/two/w-1").splitlines()[1] == "job, run    resnet, two"


@pytest.fixture
def own_server(server):
    """The server, which the test may kill or stop: it is started again afterwards."""
    yield server
    server.kill()
    server.start()


def _put_and_index(url, root, begun):
    """As a run does it: into the store, and then the catalogue is told, which nobody waits for."""
    index = SharedIndexing(root, url, poll_s=0.01, retry_s=0.01)
    index.start()
    for one in range(60):
        keep(root, f"c-{one:02}")
        begun.set()
    index.finish(lambda said: None, lambda: 0.0)


def test_a_server_that_is_killed_in_mid_flight_costs_no_capture(own_server, tmp_path):
    # GIVEN a run that puts captures, and a server that dies meanwhile
    url, begun = own_server.database(), FORK.Event()
    run = FORK.Process(target=_put_and_index, args=(url, tmp_path / "run", begun))
    run.start()
    assert begun.wait(DEADLINE_S)
    own_server.kill()
    # THEN the run goes on to its end
    alive([run])
    store = LocalStore(tmp_path / "run")
    assert len(store.ids()) == 60
    with pytest.raises(CatalogueError, match=r"^postgresql://"):
        Catalogue(url, store).add(store.manifest("c-00"))
    # AND when the server is back, the catalogue is built again from the store
    own_server.start()
    Catalogue(url, store).refresh()
    assert len(ids(Catalogue(url, None))) == 60


def test_a_run_brings_a_catalogue_up_to_date_that_was_away(own_server, tmp_path, store_of, caplog):
    caplog.set_level(logging.WARNING, logger="sftriage")
    url, store = own_server.database(), store_of("run", "a")
    index = SharedIndexing(tmp_path / "run", url, poll_s=0.02, retry_s=0.05)
    index.start()
    wait_until(lambda: ids(Catalogue(url, None)) == ["a"])
    # GIVEN a server that is gone while captures are put and removed
    own_server.kill()
    keep(tmp_path / "run", "b", second=1)
    store.remove("a")
    wait_until(lambda: "not catalogued" in caplog.text)
    # WHEN it comes back THEN the catalogue is as the store is, although nobody told it again
    own_server.start()
    wait_until(lambda: ids(Catalogue(url, None)) == ["b"])
    wait_until(lambda: "up to date again" in caplog.text)
    assert caplog.text.count("not catalogued") == 1
    said = []
    index.finish(said.append)
    assert said == []


def test_a_capture_is_found_at_once_and_its_copy_where_everybody_can_reach_it(url, tmp_path, store_of):
    # GIVEN a run that tells a shared catalogue, and looks at its store once in a long while
    store, elsewhere = store_of("run", "z"), f"file://{tmp_path / 'elsewhere'}"
    everywhere = Catalogue(url, None)
    index = SharedIndexing(tmp_path / "run", url, poll_s=DEADLINE_S * 2)
    index.start()
    wait_until(lambda: ids(everywhere) == ["z"])
    # WHEN it is told of another capture THEN that is found
    store.remove("z")
    store_of("run", "a")
    index.take(CaptureChanged(1.0, CaptureResult("a", 0, "stored")))
    wait_until(lambda: ids(everywhere) == ["a"])
    index.finish(pytest.fail)
    # GIVEN a run that uploads its captures too
    remote = RemoteStore.open(elsewhere, job="resnet", run="run-1", create=True)
    index = SharedIndexing(tmp_path / "run", url, poll_s=0.02)
    index.start()
    assert catalogues.on_one_host(everywhere.find()[0].store)
    # WHEN the copy is there and verified THEN that is where the catalogue says it is
    uploader = Uploader(tmp_path / "run", remote, elsewhere)
    uploader.start()
    wait_until(lambda: uploader.standing.done)
    kept = "SELECT store, reference FROM sftriage_captures"
    wait_until(lambda: (elsewhere, "resnet/run-1/a") in ask(url, kept))
    assert RemoteStore.open(elsewhere).manifest("resnet/run-1/a") == store.manifest("a")
    # AND when the capture is removed, it is found nowhere
    store.remove("a")
    wait_until(lambda: ask(url, kept) == [])
    uploader.close(DEADLINE_S)
    index.finish(pytest.fail)


def test_a_run_tells_the_catalogue_that_is_named_and_goes_on_without_it(start, environment, url, tmp_path):
    # GIVEN a run that is to tell a catalogue WHEN it is over THEN the catalogue knows all of its captures: none
    environment["SFTRIAGE_CATALOGUE"] = url
    told = start("run", "--out", tmp_path / "told", "--", "true")
    _, err = told.communicate(timeout=DEADLINE_S)
    assert (told.returncode, "may lack" in err) == (0, False), err
    assert ask(url, "SELECT store FROM sftriage_stores") == [
        (catalogues.PostgresDatabase(url).store_name(str(tmp_path / "told" / "captures")),)
    ]
    # AND one that is not there is said, and costs the job nothing
    away = start("run", "--catalogue", "postgresql://127.0.0.1:1/db", "--out", tmp_path / "away", "--", "true")
    _, err = away.communicate(timeout=DEADLINE_S)
    assert away.returncode == 0, err
    assert "captures are stored but not catalogued: postgresql://127.0.0.1:1/db" in err
    assert "may lack captures; add them with: sftriage traces reindex" in err
    # AND one that cannot be is refused before anything starts
    refused = start("run", "--catalogue", "mysql://host/db", "--out", tmp_path / "refused", "--", "true")
    _, err = refused.communicate(timeout=DEADLINE_S)
    assert (refused.returncode, (tmp_path / "refused").exists()) == (2, False), err


def test_a_server_that_has_stopped_to_answer_is_hung_up_on(own_server, store_of, monkeypatch):
    url, store = own_server.database(), store_of("run", "a")
    catalogue = Catalogue(url, store)
    monkeypatch.setattr(catalogues, "TRANSACTION_S", 0.5)

    # GIVEN a server that stops in the middle of a question: its connections stay, and no answer comes
    def stop_while_asked(*_):
        own_server.signal(signal.SIGSTOP)

    monkeypatch.setattr(catalogues.PostgresDatabase, "is_current", stop_while_asked)
    # WHEN it is asked THEN that is said, and nobody waits for ever
    with pytest.raises(CatalogueError, match="no answer within"):
        catalogue.add(store.manifest("a"))


def test_a_statement_that_waits_for_somebody_elses_lock_is_given_up(url, store_of, monkeypatch):
    monkeypatch.setattr(catalogues, "STATEMENT_S", 0.2)
    store = store_of("run", "a")
    Catalogue(url, store).reindex()
    with psycopg.connect(plain(url)) as other:
        other.execute("LOCK TABLE sftriage_captures")
        with pytest.raises(CatalogueError, match="timeout"):
            Catalogue(url, store).find()
    assert ids(Catalogue(url, store)) == ["a"]


@pytest.fixture
def bucket(moto, monkeypatch, tmp_path):
    """A store with the captures of two runs, two each and both of the same names."""
    for name, value in environment_of(moto.url).items():
        monkeypatch.setenv(name, value)
    moto.clear()
    for number, run in enumerate(("one", "two")):
        for second, name in enumerate(("w1-r2", "w9-r3")):
            keep(tmp_path / run, name, second=10 * number + second, rank=2 + second, run=run)
            for path in sorted((tmp_path / run / "captures" / name).iterdir()):
                key = f"team/resnet/{run}/{name}/{path.name}"
                moto.client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    return moto


@pytest.mark.parametrize("shared", [False, True], ids=["a catalogue of its own", "a shared catalogue"])
def test_captures_elsewhere_are_found_fetched_and_removed(bucket, traces, monkeypatch, url, tmp_path, shared):
    if shared:
        monkeypatch.setenv("SFTRIAGE_CATALOGUE", url)

    # WHEN captures of a step are asked for THEN those of both runs are there
    found = json.loads(traces("for-step", "162", "--store", STORE, "--run-id", "two", "--json"))["captures"]
    assert [row["reference"] for row in found] == ["resnet/two/w1-r2", "resnet/two/w9-r3"]
    # AND one is fetched, byte by byte; of a shared catalogue without saying where it is
    where = [] if shared else ["--store", STORE]
    (fetched,) = json.loads(traces("get", "resnet/two/w9", *where, "--json"))["files"]
    content = (tmp_path / fetched["path"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == fetched["sha256"]
    assert content == (tmp_path / "two" / "captures" / "w9-r3" / "trace.json.gz").read_bytes()
    # WHEN what is old is removed, and one of it is pinned
    assert traces("pin", "resnet/one/w1-r2", *where) == "resnet/one/w1-r2 is pinned\n"
    gone = json.loads(traces("prune", "--store", STORE, "--bytes", "0Ki", "--json"))["captures"]
    assert [one["capture_id"] for one in gone] == ["resnet/one/w9-r3", "resnet/two/w1-r2", "resnet/two/w9-r3"]
    # THEN traces, manifests and rows are gone as one, and what is pinned is not
    assert bucket.objects().keys() == {
        f"team/resnet/one/w1-r2/{name}" for name in ("trace.json.gz", "manifest.json", "pinned")
    }
    if shared:
        assert ask(url, "SELECT reference FROM sftriage_captures") == [("resnet/one/w1-r2",)]
    assert [row["reference"] for row in json.loads(traces("list", *where, "--json"))] == ["resnet/one/w1-r2"]
