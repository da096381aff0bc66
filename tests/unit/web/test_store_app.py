"""The page about a store of many jobs and runs."""

import hashlib
import re
import shutil
from unittest.mock import Mock
from urllib.parse import quote

import pytest

from sftriage.errors import CatalogueError, StoreError
from sftriage.runtime.reducing import Annotations
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.remote import CaptureKey, RemoteStore
from sftriage.traces.store import LocalStore
from sftriage.web.serving import Access
from sftriage.web.store_page import StorePage, StoreSource
from tests.unit.traces.faulty import FaultyObjects
from tests.unit.web.client import NASTY, SHORT_NASTY, Tags, fetch, harmless, text_of
from tests.unit.web.stored import CONTENT, Shelf
from tests.unit.web.test_charts import findings


@pytest.fixture
def stocked(shelf) -> Shelf:
    return shelf.stock()


def links(answer) -> list[str]:
    return [a["href"] for tag, a in Tags(answer.text).tags if tag == "a" and a["href"].startswith("/captures/")]


def test_a_store_is_read_beside_the_page(shelf):
    # GIVEN a store that was not read yet
    shelf.put("c-1")
    # WHEN the page is requested THEN it comes at once, and says that the store is being read
    assert "is being read" in text_of(shelf.get())
    # AND once it was read, its captures are there, and the version changes
    view = shelf.look()
    assert (len(view.rows), view.known, view.away) == (1, True, "")
    assert links(shelf.get()) == ["/captures/resnet/run-1/c-1"]
    before = view.version
    shelf.put("c-2")
    assert shelf.look().version != before


def test_a_long_list_has_pages_that_keep_the_filter(shelf):
    for n in range(120):
        shelf.put(f"c-{n:03}", second=n % 60)
    shelf.look()
    found: list[str] = []
    for number in (1, 2, 3):
        answer = shelf.get(f"/?job=resnet&page={number}")
        found += links(answer)
    assert len(found) == len(set(found)) == 120
    assert 'href="/?job=resnet&amp;page=2"' in answer.text
    for page in ("0", "-1", "x", "99", "9" * 30):
        assert shelf.get(f"/?page={page}").status == 200


def test_every_field_has_a_label_and_every_table_a_head(stocked):
    text = stocked.get().text
    assert text.count("<label>") == len(re.findall("<(?:input|select) ", text)) == 7
    assert all(a.get("scope") in ("col", "row") for tag, a in Tags(text).tags if tag == "th")


def test_a_store_that_is_away_has_a_face(tmp_path):
    # GIVEN an unreachable store that was never read
    objects = FaultyObjects()
    objects.fails.add("any")
    store = RemoteStore(objects)
    source = StoreSource(Catalogue(tmp_path / "c.db", store), store, lambda row: store)
    shelf = Shelf(tmp_path, source, StorePage(source, Access.to("127.0.0.1", None, "")).app)
    assert shelf.look().away
    text = text_of(shelf.get())
    assert "The store cannot be reached" in text
    assert "s3://bucket: cannot list" in text
    # AND a capture's page says that it is away, rather than that there is none
    answer = shelf.get("/captures/resnet/run-1/c-1")
    assert (answer.status, answer.headers["retry-after"]) == (503, "10")
    # WHEN it is there again THEN the page is
    objects.fails.clear()
    assert not shelf.look().away
    assert "No captures yet" in text_of(shelf.get())


def test_what_was_known_is_shown_while_the_store_is_away(stocked, monkeypatch):
    # GIVEN a store that was read, and is unreachable now
    errors = (StoreError(f"s3://bucket: connection refused after {number}.5 ms") for number in range(1000))
    monkeypatch.setattr(stocked.source._store._objects, "sizes", Mock(side_effect=errors))
    version = stocked.look().version
    text = text_of(stocked.get())
    # THEN the page lists its captures as before, and says so
    assert "The store is unreachable" in text
    assert "This page shows what its catalogue knew" in text
    assert len(links(stocked.get())) == 4
    # AND the version does not change with each retry
    assert stocked.look().version == version


def test_a_catalogue_that_is_away_has_a_face_too(stocked, monkeypatch):
    away = CatalogueError("postgresql://db/x: connection refused")
    monkeypatch.setattr(stocked.source._catalogue, "find", Mock(side_effect=away))
    assert "connection refused" in stocked.look().away
    assert "The store is unreachable" in text_of(stocked.get())
    assert stocked.get("/?rank=3").status == 503


def test_what_goes_wrong_unforeseen_is_tried_again(stocked, monkeypatch, caplog):
    monkeypatch.setattr(stocked.source._catalogue, "refresh", lambda progress: 1 / 0)
    assert stocked.look().away == "it could not be read"
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    assert stocked.look().away == ""


def test_captures_of_any_store_that_shares_a_catalogue(tmp_path, stocked, trace, make_manifest):
    # GIVEN a catalogue of a run on this host, and of a shared store
    runs = LocalStore(tmp_path / "run")
    runs.put("c-9", trace, lambda artefact: make_manifest("c-9", artefact, second=30))
    stores = {runs.place: runs, stocked.source.place: stocked.source._store}
    catalogue = _Both([Catalogue(tmp_path / "a.db", runs), stocked.source._catalogue])
    source = StoreSource(catalogue, None, lambda row: stores[row.store])
    shelf = Shelf(tmp_path, source, StorePage(source, Access.to("127.0.0.1", None, "")).app)
    shelf.look()
    # WHEN it is shown THEN captures of both are there, each with its page and its file
    assert len(links(shelf.get())) == 5
    for capture_id in ("c-9", "c-2"):
        address = f"/captures/resnet/run-1/{capture_id}"
        assert shelf.get(address).status == 200
        manifest = shelf.source.capture(CaptureKey("resnet", "run-1", capture_id))[0]
        body = shelf.get(f"{address}/files/trace.json.gz").body
        assert hashlib.sha256(body).hexdigest() == manifest.artefacts[0].sha256
    assert shelf.get("/captures/resnet/run-7/c-9").status == 404


class _Both:
    name = "postgresql://db/x"

    def __init__(self, parts):
        self._parts = parts

    def find(self, wanted=None):
        return sorted((row for part in self._parts for row in part.find(wanted)), key=lambda row: row.created_at)


def test_findings_are_drawn_beside_a_control(shelf):
    shelf.put("c-1", update={"findings": findings()})
    shelf.look()
    answer = shelf.get("/captures/resnet/run-1/c-1")
    assert "What filled data" in text_of(answer)
    assert sum(a.get("role") == "img" for tag, a in Tags(answer.text).tags if tag == "svg") == 2


def test_the_store_shows_the_same_steps_as_the_run_did(shelf, captured, store):
    # GIVEN a capture of a run, whose manifest has gone to a store with the steps in it
    Annotations(captured.directory).stored("c-1", None)
    shelf.put("c-1", update={"recorded": store.manifest("c-1").recorded})
    shelf.look()
    # THEN its page in the store has the picture that the page of the run has, and its table
    of_run, of_store = (
        answer.text.partition('<section id="tracks"')[2].partition("</section>")[0]
        for answer in (captured.get("/captures/c-1"), shelf.get("/captures/resnet/run-1/c-1"))
    )
    assert of_run.count("<rect") == 2 * 5 * 3
    assert of_store == of_run
    # AND the page of the run has it still when the steps have gone
    for log in captured.directory.steps.iterdir():
        log.unlink()
    assert of_run in captured.get("/captures/c-1").text


# Hostile stores.


def test_markup_in_names_is_text(shelf):
    # GIVEN captures whose job, run, stage and rule are markup
    manifest = shelf.put("c-1", job=NASTY, run="'\"><script>alert(1)</script>", stage=SHORT_NASTY, rule=NASTY)
    shelf.look()
    address = f"/captures/{quote(CaptureKey.of(manifest).key)}"
    # WHEN the pages are read THEN none of it has become markup, and the links lead there
    overview = shelf.get()
    assert links(overview) == [address]
    assert shelf.get(f"{address}/files/trace.json.gz").body == CONTENT
    for answer in (overview, shelf.get(address), shelf.get(f"/?job={quote(NASTY)}&run={quote(NASTY)}")):
        assert answer.status == 200
        assert "&lt;img src=x" in answer.text
        harmless(answer)


def test_markup_in_a_filter_is_text(stocked):
    answer = stocked.get(f"/?job={quote(NASTY)}&since={quote(NASTY)}&rank={quote(NASTY)}&reproduced={quote(NASTY)}")
    assert answer.status == 200
    assert "<img src=x" not in answer.text


def test_what_is_no_capture_is_listed_as_that(stocked):
    hostile = stocked.root / "resnet" / "run-9" / "c-9"
    hostile.mkdir(parents=True)
    (hostile / "manifest.json").write_text('{"<script>": 1}')
    stocked.look()
    answer = stocked.get()
    assert "1 thing in the store is not a capture" in text_of(answer)
    assert "run-9/c-9" in text_of(answer)
    assert len(links(answer)) == 4


def test_a_manifest_that_belongs_elsewhere_is_refused(stocked):
    # GIVEN a capture that was copied to another run's place
    shutil.copytree(stocked.root / "resnet" / "run-1" / "c-2", stocked.root / "resnet" / "run-2" / "c-2")
    assert stocked.get("/captures/resnet/run-2/c-2").status == 422


@pytest.mark.parametrize("what", ["file", "capture", "run"])
def test_a_link_in_a_shared_directory_does_not_lead_out(stocked, tmp_path, what):
    # GIVEN an attacker who can write to the store, and links a file outside whose size and checksum they know
    outside = tmp_path / "outside"
    secret = stocked.root / "resnet" / {"run": "run-1", "capture": "run-1/c-1", "file": "run-1/c-1/trace.json.gz"}[what]
    secret.rename(outside)
    secret.symlink_to(outside)
    # WHEN it is requested THEN it is refused
    answer = fetch(stocked.app, "/captures/resnet/run-1/c-1/files/trace.json.gz")
    assert answer.status in (404, 422)
    assert CONTENT not in answer.body
