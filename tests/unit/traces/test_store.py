from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sftriage.errors import CaptureError, InputError, IntegrityError, UsageError
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.store import TRACE_NAME, LocalStore

MakeManifest = Callable[..., Manifest]
Put = Callable[..., Manifest]


def stored(store: LocalStore, capture_id: str) -> Path:
    return store.path(capture_id, TRACE_NAME)


def test_a_capture_is_stored_compressed_described_and_private(store: LocalStore, put: Put, trace: Path) -> None:
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


def test_everything_is_synced_before_it_is_published(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_capture_is_never_stored_over_another(store: LocalStore, put: Put) -> None:
    first = put("c-1")
    with pytest.raises(CaptureError, match="capture c-1 could not be stored: it is stored already"):
        put("c-1", rank=3)
    assert store.manifests().manifests == (first,)


def test_a_put_that_fails_leaves_nothing(
    store: LocalStore, put: Put, trace: Path, tmp_path: Path, make_manifest: MakeManifest
) -> None:
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


@pytest.mark.parametrize("capture_id", ["../x", "", ".tmp-c", "a/b", "/etc", "a\x00", "x" * 101])
def test_a_forged_capture_id_never_reaches_the_file_system(
    capture_id: str, store: LocalStore, trace: Path, tmp_path: Path, make_manifest: MakeManifest
) -> None:
    with pytest.raises(UsageError, match="is not a capture id"):
        store.put(capture_id, trace, lambda artefact: make_manifest("c-1", artefact))
    with pytest.raises(UsageError, match="is not a capture id"):
        store.path(capture_id, TRACE_NAME)
    with pytest.raises(UsageError, match="is not a capture id"):
        store.get(capture_id, TRACE_NAME, tmp_path / "out")
    assert not (tmp_path / "run").exists()


def test_a_store_that_is_not_there_is_empty(store: LocalStore, tmp_path: Path) -> None:
    assert store.manifests().manifests == ()
    assert store.sweep() == 0
    with pytest.raises(UsageError, match="no capture c-1"):
        store.manifest("c-1")
    assert not (tmp_path / "run").exists()


def test_get_copies_what_was_put(store: LocalStore, put: Put, tmp_path: Path) -> None:
    put("c-1")
    (tmp_path / "out").mkdir()
    assert store.get("c-1", TRACE_NAME, tmp_path / "out") == tmp_path / "out" / TRACE_NAME
    copy = store.get("c-1", TRACE_NAME, tmp_path / "copy.gz")
    assert copy.read_bytes() == stored(store, "c-1").read_bytes()
    copy.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already"):
        store.get("c-1", TRACE_NAME, copy)
    assert copy.read_bytes() == b"mine"
    store.get("c-1", TRACE_NAME, copy, force=True)
    assert copy.read_bytes() == stored(store, "c-1").read_bytes()
    with pytest.raises(InputError, match=r"no artefact '\.\./manifest\.json'"):
        store.get("c-1", "../manifest.json", tmp_path / "x")
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        store.get("c-1", TRACE_NAME, tmp_path / "nowhere" / "x")


def test_a_flipped_bit_is_found_and_nothing_is_left_behind(store: LocalStore, put: Put, tmp_path: Path) -> None:
    put("c-1")
    path = stored(store, "c-1")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_bytes(b"old")
    for name, force in (("new", False), ("kept", True)):
        with pytest.raises(IntegrityError, match="it was put as sha256"):
            store.get("c-1", TRACE_NAME, out / name, force=force)
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == {"kept": b"old"}


def test_a_trace_that_shrank_or_went_away_is_a_problem_and_not_a_capture(store: LocalStore, put: Put) -> None:
    for name in ("c-1", "c-2", "c-3"):
        put(name)
    with stored(store, "c-1").open("r+b") as file:
        file.truncate(10)
    stored(store, "c-2").unlink()
    listing = store.manifests()
    assert [manifest.capture_id for manifest in listing.manifests] == ["c-3"]
    assert ["10 bytes; it had" in problem for problem in listing.problems] == [True, False]
    assert "No such file" in listing.problems[1]
    with pytest.raises(IntegrityError):
        store.path("c-1", TRACE_NAME)


def test_what_has_become_of_a_capture_is_said(store: LocalStore, put: Put) -> None:
    def shrink(name: str) -> None:
        with stored(store, name).open("r+b") as file:
            file.truncate(10)

    def newer(name: str) -> None:
        manifest = stored(store, name).with_name("manifest.json")
        manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2'))

    for number, (happens, state, said) in enumerate(
        (
            (lambda name: None, "whole", ""),
            (shrink, "damaged", "10 bytes; it had"),
            (lambda name: stored(store, name).unlink(), "missing", "No such file"),
            (lambda name: stored(store, name).with_name("manifest.json").unlink(), "missing", "No such file"),
            (lambda name: stored(store, name).with_name("manifest.json").write_text("{}"), "damaged", "not a manifest"),
            (lambda name: shutil.rmtree(stored(store, name).parent), "missing", "no capture"),
            (newer, "newer", "written by a newer sftriage"),
        )
    ):
        # GIVEN a capture that was whole WHEN something happens to it
        put(name := f"c-{number}")
        assert store.condition(name).whole
        happens(name)
        # THEN that is what is said of it, and only what nobody gets a trace from is beyond repair
        condition = store.condition(name)
        assert (condition.state, condition.beyond_repair) == (state, state in ("missing", "damaged"))
        assert said in condition.words
        assert (condition.problem == "") == condition.whole


def test_the_manifest_of_a_capture_whose_trace_is_gone_can_be_read(store: LocalStore, put: Put) -> None:
    manifest = put("c-1")
    stored(store, "c-1").unlink()
    found, condition = store.look("c-1")
    assert (found, condition.state) == (manifest, "missing")
    with pytest.raises(IntegrityError, match="No such file"):
        store.manifest("c-1")


def test_a_device_is_not_replaced_by_a_trace(store: LocalStore, put: Put, tmp_path: Path) -> None:
    put("c-1")
    os.mkfifo(pipe := tmp_path / "pipe")
    for force in (False, True):
        with pytest.raises(UsageError, match="not a file"):
            store.get("c-1", TRACE_NAME, pipe, force=force)
    assert pipe.is_fifo()


def test_whatever_lies_in_the_store_is_a_problem_and_never_an_exception(
    store: LocalStore, put: Put, tmp_path: Path
) -> None:
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
    for words in ("'stray file' is not", "empty/manifest.json: No such", "no capture link", "manifest of good"):
        assert words in said
    for words in ("garbage/manifest.json: not a manifest", "piped/manifest.json: not a regular file", "symbolic links"):
        assert words in said


def test_sweep_removes_leftovers_and_waits_for_a_put(store: LocalStore, put: Put, trace: Path) -> None:
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
