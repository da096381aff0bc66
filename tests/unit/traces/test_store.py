from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
from pathlib import Path

import pytest

from sftriage.errors import CaptureError, IntegrityError, SftriageError, UsageError
from sftriage.traces.files import verified
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.store import TRACE_NAME, LocalStore


def stored(store: LocalStore, capture_id: str) -> Path:
    return store.path(capture_id, TRACE_NAME)


def test_a_capture_is_stored_compressed_described_and_private(store, put, trace):
    manifest = put("c-1")
    path = stored(store, "c-1")
    raw = path.read_bytes()
    assert gzip.decompress(raw) == trace.read_bytes()
    assert raw[3:8] == bytes(5)  # no name and no time: one trace always gives the same bytes
    (artefact,) = manifest.artefacts
    assert (artefact.size_bytes, artefact.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert artefact.media_type == "application/gzip"
    assert store.manifests().manifests == (manifest,)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["manifest.json", TRACE_NAME]
    for entry in (path.parents[2], path.parents[1], path.parent, path, path.parent / "manifest.json"):
        assert stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0, entry


def test_everything_is_synced_before_it_is_published(put, monkeypatch):
    """GIVEN the order of system calls THEN trace, manifest and their directory are synced before the rename, and the
    parent after it: otherwise a power cut could publish an empty file."""
    calls: list[str] = []
    sync, rename = os.fsync, Path.rename

    def note_sync(number: int) -> None:
        calls.append(Path(f"/proc/self/fd/{number}").readlink().name.split("c-2-")[0])
        sync(number)

    def note_rename(path: Path, target: Path) -> Path:
        calls.append(f"rename to {target.name}")
        return rename(path, target)

    put("c-1")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    put("c-2")
    assert calls == [TRACE_NAME, "manifest.json", ".tmp-", "rename to c-2", "captures"]


def test_a_capture_is_never_stored_over_another(store, put):
    first = put("c-1")
    with pytest.raises(CaptureError, match="capture c-1 could not be stored: it is stored already"):
        put("c-1", rank=3)
    assert store.manifests().manifests == (first,)


def test_a_put_that_fails_leaves_nothing(store, put, trace, tmp_path, make_manifest):
    put("c-1")

    def fails(_: Artefact) -> Manifest:
        raise RuntimeError("no manifest today")

    empty = tmp_path / "empty.json"
    empty.touch()
    link = tmp_path / "link.json"
    link.symlink_to(trace)
    with pytest.raises(RuntimeError, match="no manifest today"):
        store.put("c-2", trace, fails)
    with pytest.raises(CaptureError, match=r"c-2 has no valid manifest: .*rank 2147483647 in a world of 8"):
        store.put("c-2", trace, lambda artefact: make_manifest("c-2", artefact, rank=2**31 - 1))
    with pytest.raises(ValueError, match="not that of this capture"):
        store.put("c-2", trace, lambda artefact: make_manifest("c-3", artefact))
    with pytest.raises(ValueError, match="not that of this capture"):
        store.put("c-2", trace, lambda _: make_manifest("c-2"))
    for source, reason in ((empty, "the trace is empty"), (link, "symbolic links"), (tmp_path / "no", "No such file")):
        with pytest.raises(CaptureError, match=reason):
            store.put("c-2", source, lambda artefact: make_manifest("c-2", artefact))
    captures = stored(store, "c-1").parents[1]
    assert sorted(entry.name for entry in captures.iterdir()) == [".lock", "c-1"]


def test_a_forged_capture_id_never_reaches_the_file_system(store, trace, tmp_path):
    for act in (lambda: store.put("../x", trace, pytest.fail), lambda: store.path("../x", TRACE_NAME)):
        with pytest.raises(UsageError, match="is not a capture id"):
            act()
    assert not (tmp_path / "run").exists()


def test_what_is_gone_is_missing_and_has_no_path(store, put):
    put("c-1")
    assert store.seen("c-1")[1].whole
    directory = stored(store, "c-1").parent
    for happens, said in (
        ((directory / TRACE_NAME).unlink, "No such file"),
        ((directory / "manifest.json").unlink, "No such file"),
        (directory.rmdir, "no capture"),
    ):
        happens()
        assert store.seen("c-1")[1].state == "missing"
        assert said in store.seen("c-1")[1].words
        with pytest.raises(SftriageError, match=said):
            stored(store, "c-1")


def test_a_store_that_is_not_there_is_empty(store, tmp_path):
    assert store.manifests().manifests == ()
    assert store.sweep() == 0
    with pytest.raises(UsageError, match="no capture c-1"):
        store.manifest("c-1")
    assert not (tmp_path / "run").exists()


def test_whatever_lies_in_the_store_is_a_problem_and_never_an_exception(store, put, tmp_path):
    """GIVEN a hostile or broken directory of every kind THEN the good capture is listed and each bad one is named."""
    put("good")
    captures = stored(store, "good").parents[1]
    good = captures / "good"
    (captures / "stray file").touch()
    (captures / "empty").mkdir()
    (captures / "link").symlink_to(good)
    for name in ("copied", "garbage", "piped", "linked", "away"):
        shutil.copytree(good, captures / name)
    for name in ("piped", "linked"):
        (captures / name / "manifest.json").unlink()
    (captures / "garbage" / "manifest.json").write_bytes(b"{}")
    os.mkfifo(captures / "piped" / "manifest.json")
    (captures / "linked" / "manifest.json").symlink_to(good / "manifest.json")
    renamed = (good / "manifest.json").read_bytes().replace(b'"good"', b'"away"')
    (captures / "away" / "manifest.json").write_bytes(renamed)
    (captures / "away" / TRACE_NAME).unlink()
    (captures / "away" / TRACE_NAME).symlink_to("/etc/passwd")

    listing = store.manifests()
    assert [manifest.capture_id for manifest in listing.manifests] == ["good"]
    assert len(listing.problems) == 8
    said = "\n".join(listing.problems)
    for words in (
        "'stray file' is not",
        "empty/manifest.json: cannot be opened: No such",
        "no capture link",
        "manifest of good",
    ):
        assert words in said
    for words in ("garbage/manifest.json: not a manifest", "piped/manifest.json: not a regular file", "symbolic links"):
        assert words in said


def test_sweep_removes_leftovers_and_waits_for_a_put(store, put, trace):
    put("c-1")
    captures = stored(store, "c-1").parents[1]
    leftover = captures / ".tmp-c-9-abcd"
    leftover.mkdir()
    (leftover / TRACE_NAME).write_bytes(b"half")
    swept_during: list[int] = []

    def build(artefact: Artefact) -> Manifest:
        swept_during.append(LocalStore(captures.parent).sweep())
        return store.manifest("c-1").model_copy(update={"capture_id": "c-2", "artefacts": (artefact,)})

    store.put("c-2", trace, build)
    assert swept_during == [0]
    assert leftover.exists()
    assert store.sweep() == 1
    assert sorted(entry.name for entry in captures.iterdir()) == [".lock", "c-1", "c-2"]


def test_the_last_piece_is_held_back_until_the_sum_is_right():
    # GIVEN pieces of which the last has been changed
    content = b"abcdefghi"
    sha256 = hashlib.sha256(content).hexdigest()
    artefact = Artefact(name="trace", role="trace", media_type="text/plain", size_bytes=9, sha256=sha256)
    assert b"".join(verified(iter([b"abc", b"def", b"ghi"]), artefact, "wrong")) == content
    for pieces in ([b"abc", b"def", b"ghj"], [b"abc", b"def"], [b"abc", b"def", b"ghi", b"j"], [b"abcdefghij"], []):
        # WHEN they are passed on THEN what comes is never whole
        came: list[bytes] = []
        with pytest.raises(IntegrityError, match="wrong"):
            came.extend(verified(iter(pieces), artefact, "wrong"))
        assert len(b"".join(came)) < 9
