"""A shared catalogue that is away, slow, or gone for good: no capture is lost, and nobody waits."""

import logging
import signal
from contextlib import closing

import pytest
import sqlalchemy as sa
from tests.integration.catalogue.asking import FORK, alive, ask, ids, put

from sftriage.errors import CatalogueError
from sftriage.model.captures import CaptureResult
from sftriage.model.events import CaptureChanged
from sftriage.runtime.copies import SharedIndexing
from sftriage.traces import databases
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore
from sftriage.traces.uploading import Uploader
from tests import needs
from tests.integration.postgres import Postgres
from tests.integration.processes import DEADLINE_S, wait_until

pytestmark = needs.postgres


@pytest.fixture
def own_server():
    """A server that the test may kill."""
    with closing(Postgres()) as server:
        yield server


def _put_and_index(url, root, trace, begun):
    """As a run does it: into the store, and then the catalogue is told, which nobody waits for."""
    store, index = LocalStore(root), SharedIndexing(root, url, look_s=0.01, retry_s=0.01)
    index.start()
    for one in range(60):
        put(store, trace, f"c-{one:02}")
        begun.set()
    index.finish(lambda said: None, lambda: 0.0)


def test_a_server_that_is_killed_in_mid_flight_costs_no_capture(own_server, tmp_path, trace):
    # GIVEN a run that puts captures, and a server that dies meanwhile
    url, begun = own_server.database(), FORK.Event()
    run = FORK.Process(target=_put_and_index, args=(url, tmp_path / "run", trace, begun))
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


def test_a_run_brings_a_catalogue_up_to_date_that_was_away(own_server, tmp_path, trace, store_of, caplog):
    caplog.set_level(logging.WARNING, logger="sftriage")
    url, store = own_server.database(), store_of("run", "a")
    index = SharedIndexing(tmp_path / "run", url, look_s=0.02, retry_s=0.05)
    index.start()
    wait_until(lambda: ids(Catalogue(url, None)) == ["a"])
    # GIVEN a server that is gone while captures are put and removed
    own_server.kill()
    put(store, trace, "b", 1)
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


def test_a_capture_that_is_stored_is_catalogued_at_once(url, tmp_path, trace, store_of):
    # GIVEN a run whose store is looked at once in a long while
    store = store_of("run", "a")
    index = SharedIndexing(tmp_path / "run", url, look_s=DEADLINE_S * 2)
    index.start()
    everywhere = Catalogue(url, None)
    wait_until(lambda: ids(everywhere) == ["a"])
    # WHEN it is told of another capture THEN that is found
    put(store, trace, "b", 1)
    index.take(CaptureChanged(1.0, CaptureResult("b", 0, "stored")))
    wait_until(lambda: sorted(ids(everywhere)) == ["a", "b"])
    index.finish(pytest.fail)


def test_a_copy_that_was_uploaded_is_found_where_everybody_can_reach_it(url, tmp_path, trace, store_of):
    # GIVEN a run that uploads its captures, and tells a shared catalogue
    store, elsewhere = store_of("run", "a"), f"file://{tmp_path / 'elsewhere'}"
    remote = RemoteStore.open(elsewhere, job="resnet", run="run-1", create=True)
    index = SharedIndexing(tmp_path / "run", url, look_s=0.02)
    index.start()
    everywhere = Catalogue(url, None)
    wait_until(lambda: ids(everywhere) == ["a"])
    assert databases.on_one_host(everywhere.find()[0].store)
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
        (databases.PostgresDatabase(url).store_name(str(tmp_path / "told" / "captures")),)
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
    monkeypatch.setattr(databases, "TRANSACTION_S", 0.5)

    # GIVEN a server that stops in the middle of a question: its connections stay, and no answer comes
    def stop_while_asked(connection, *_):
        own_server.signal(signal.SIGSTOP)

    sa.event.listen(catalogue._database._engine, "before_cursor_execute", stop_while_asked)
    # WHEN it is asked THEN that is said, and nobody waits for ever
    with pytest.raises(CatalogueError, match="no answer within"):
        catalogue.add(store.manifest("a"))


def test_a_statement_that_waits_for_somebody_elses_lock_is_given_up(url, store_of, monkeypatch):
    monkeypatch.setattr(databases, "STATEMENT_S", 0.2)
    store = store_of("run", "a")
    Catalogue(url, store).reindex()
    with sa.create_engine(url).begin() as other:
        other.execute(sa.text("LOCK TABLE sftriage_captures"))
        with pytest.raises(CatalogueError, match="timeout"):
            Catalogue(url, store).find()
    assert ids(Catalogue(url, store)) == ["a"]
