"""What every store of captures does: that of a run here, and one elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sftriage.errors import InputError, IntegrityError, UsageError
from sftriage.traces.manifest import Manifest
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import TRACE_NAME
from sftriage.traces.stores import WHOLE, Store


class Shelf(NamedTuple):
    store: Store
    place: Path
    put: Callable[[str], Manifest]

    def file(self, capture_id: str, name: str = TRACE_NAME) -> Path:
        return self.place / capture_id / name


@pytest.fixture(params=["here", "elsewhere"])
def shelf(request, store, put, tmp_path) -> Shelf:
    if request.param == "here":
        return Shelf(store, Path(store.place), put)
    remote = RemoteStore.open(str(tmp_path / "elsewhere"), job="resnet", run="run-1", create=True)

    def put_there(capture_id: str) -> Manifest:
        manifest = put(capture_id)
        remote.put_artefact(capture_id, manifest.artefacts[0], store.path(capture_id, TRACE_NAME).read_bytes())
        remote.put_manifest(manifest)
        return manifest

    return Shelf(remote, tmp_path / "elsewhere" / "resnet" / "run-1", put_there)


def test_get_copies_what_was_put_and_says_how_far_it_is(shelf, tmp_path):
    (artefact,) = shelf.put("c-1").artefacts
    store, content = shelf.store, shelf.file("c-1").read_bytes()
    (out := tmp_path / "out").mkdir()
    told: list[int] = []
    # WHEN it is copied into a directory, or to a file
    assert store.get("c-1", TRACE_NAME, out, progress=told.append) == out / TRACE_NAME
    assert told[-1] == artefact.size_bytes
    copy = store.get("c-1", TRACE_NAME, out / "copy.gz")
    assert copy.read_bytes() == content
    # THEN another file is replaced only if that is wanted
    copy.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already"):
        store.get("c-1", TRACE_NAME, copy)
    assert copy.read_bytes() == b"mine"
    store.get("c-1", TRACE_NAME, copy, force=True)
    assert copy.read_bytes() == content
    # AND a device never, nor is anything copied but artefacts
    os.mkfifo(pipe := tmp_path / "pipe")
    for force in (False, True):
        with pytest.raises(UsageError, match="not a file"):
            store.get("c-1", TRACE_NAME, pipe, force=force)
    assert pipe.is_fifo()
    with pytest.raises(InputError, match=r"no artefact '\.\./manifest\.json'"):
        store.get("c-1", "../manifest.json", tmp_path / "x")
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        store.get("c-1", TRACE_NAME, tmp_path / "nowhere" / "x")


def test_a_flipped_bit_is_found_and_nothing_is_left_behind(shelf, tmp_path):
    shelf.put("c-1")
    content = bytearray(shelf.file("c-1").read_bytes())
    content[len(content) // 2] ^= 1
    shelf.file("c-1").write_bytes(content)
    (out := tmp_path / "out").mkdir()
    (out / "kept").write_bytes(b"old")
    for name, force in (("new", False), ("kept", True)):
        with pytest.raises(IntegrityError, match="it was put as sha256"):
            shelf.store.get("c-1", TRACE_NAME, out / name, force=force)
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == {"kept": b"old"}


def of_another_version(shelf: Shelf) -> None:
    path = shelf.file("c-1", "manifest.json")
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))


@pytest.mark.parametrize(
    ("happens", "state", "said"),
    [
        (lambda shelf: None, "whole", ""),
        (lambda shelf: os.truncate(shelf.file("c-1"), 10), "damaged", "10 bytes; it had"),
        (lambda shelf: shelf.file("c-1").unlink(), "missing", TRACE_NAME),
        (lambda shelf: shelf.file("c-1", "manifest.json").write_text("{}"), "damaged", "not a manifest"),
        (of_another_version, "unreadable", "schema_version 2; this sftriage reads 1"),
    ],
)
def test_what_has_become_of_a_capture_is_said(shelf, happens, state, said):
    # GIVEN two captures that were whole WHEN something happens to one
    manifest, other = shelf.put("c-1"), shelf.put("c-2")
    assert shelf.store.manifests().manifests == (manifest, other)
    happens(shelf)
    # THEN that is what is said of it, and only what nobody gets a trace from is beyond repair
    listing = shelf.store.manifests()
    condition = listing.unfit.get("c-1", WHOLE)
    assert (condition.state, condition.beyond_repair) == (state, state in ("missing", "damaged"))
    assert said in condition.words
    assert (condition.problem == "") == condition.whole == (listing.manifests == (manifest, other))
    assert other in listing.manifests
    # AND as long as its manifest is one, that can be read
    if "manifest" not in said and state != "unreadable":
        assert shelf.store.look("c-1") == (manifest, condition)
    if not condition.whole:
        with pytest.raises((InputError, IntegrityError), match=said):
            shelf.store.manifest("c-1")


def test_pins(shelf):
    shelf.put("c-1")
    shelf.put("c-2")
    for _ in range(2):
        shelf.store.pin("c-1")
        assert shelf.store.pinned() == {"c-1"}
    for _ in range(2):
        shelf.store.unpin("c-1")
        assert shelf.store.pinned() == frozenset()


@pytest.mark.parametrize("name", ["c-3", "../c-1", "c-1/..", "", ".tmp-c", "a/b", "/etc/passwd", "a\x00", "x" * 101])
def test_what_is_not_there_is_said_and_no_name_leads_out(shelf, name, tmp_path):
    shelf.put("c-1")
    for act in (
        *(shelf.store.manifest, shelf.store.look, shelf.store.remove, shelf.store.pin, shelf.store.unpin),
        lambda one: shelf.store.get(one, TRACE_NAME, tmp_path / "out"),
    ):
        with pytest.raises(UsageError, match="no capture c-3" if name == "c-3" else "not a capture id"):
            act(name)
    assert shelf.store.ids() == {"c-1"}
