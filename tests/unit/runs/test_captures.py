"""The captures of a run that a page shows: read again only when something has become of them."""

import pytest

from sftriage.runs.captures import CaptureShelf, Damaged
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore


@pytest.fixture
def shelf(tmp_path, trace, make_manifest):
    store = LocalStore(tmp_path)
    for name in ("c-1", "c-2"):
        store.put(name, trace, lambda artefact, it=name: make_manifest(it, artefact))
    return CaptureShelf(tmp_path)


@pytest.mark.parametrize(
    ("happens", "said"),
    [(lambda path: path.unlink(), "No such file"), (lambda path: path.write_bytes(b"short"), "5 bytes; it had")],
    ids=["gone", "shrunk"],
)
def test_a_trace_that_is_damaged_after_it_was_shown_is_no_longer_shown_as_whole(shelf, tmp_path, happens, said):
    # GIVEN captures that were shown
    assert all(isinstance(one, Manifest) for one in shelf.all())
    before, trace = shelf.signature(), tmp_path / "captures" / "c-1" / "trace.json.gz"
    whole = trace.read_bytes()
    # WHEN something becomes of one THEN the page changes, and says what
    happens(trace)
    assert shelf.signature() != before
    (other, damaged) = shelf.all()
    assert isinstance(other, Manifest)
    assert isinstance(damaged, Damaged)
    assert said in damaged.problem
    # AND once it is mended it is there again
    trace.write_bytes(whole)
    assert all(isinstance(one, Manifest) for one in shelf.all())


def test_what_has_not_changed_is_not_read_again(shelf, monkeypatch):
    first = shelf.all()
    monkeypatch.setattr(LocalStore, "look", lambda *_: pytest.fail("it was read again"))
    assert shelf.all() == first
