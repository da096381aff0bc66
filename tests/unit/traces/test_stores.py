"""What every store of captures does, that of a run here and one elsewhere, and which captures are kept."""

import gzip
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import CaptureError, InputError, IntegrityError, SftriageError, UsageError
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.objects import verified
from sftriage.traces.remote import RemoteStore
from sftriage.traces.retention import Kept, RetentionLimits, expired, outlook, remove
from sftriage.traces.store import TRACE_NAME, WHOLE, LocalStore, Store, Upload
from tests.unit.conftest import copied
from tests.unit.traces.faulty import FaultyObjects, captured, keep


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
    place = tmp_path / "elsewhere" / "resnet" / "run-1"
    return Shelf(remote, place, lambda capture_id: copied(store, remote, put(capture_id)))


def test_get_copies_what_was_put_and_says_how_far_it_is(shelf, tmp_path):
    (artefact,) = shelf.put("c-1").artefacts
    store, content = shelf.store, shelf.file("c-1").read_bytes()
    (out := tmp_path / "out").mkdir()
    moved: list[int] = []
    # WHEN it is copied into a directory, or to a file
    assert store.get("c-1", TRACE_NAME, out, progress=moved.append) == out / TRACE_NAME
    assert moved[-1] == artefact.size_bytes
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
        with pytest.raises(UsageError, match="not a plain file"):
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
        with pytest.raises(IntegrityError, match="it was stored as sha256"):
            shelf.store.get("c-1", TRACE_NAME, out / name, force=force)
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == {"kept": b"old"}


def of_another_version(shelf: Shelf) -> None:
    path = shelf.file("c-1", "manifest.json")
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))


@pytest.mark.parametrize(
    ("happens", "state", "message"),
    [
        (lambda shelf: None, "whole", ""),
        (lambda shelf: os.truncate(shelf.file("c-1"), 10), "damaged", "10 bytes; expected"),
        (lambda shelf: shelf.file("c-1").unlink(), "missing", TRACE_NAME),
        (lambda shelf: shelf.file("c-1", "manifest.json").write_text("{}"), "damaged", "not a manifest"),
        (of_another_version, "unreadable", "schema_version 2; this sftriage reads 1"),
    ],
)
def test_the_condition_of_a_capture_is_reported(shelf, happens, state, message):
    # GIVEN two captures that were whole WHEN something happens to one
    manifest, other = shelf.put("c-1"), shelf.put("c-2")
    assert shelf.store.manifests().manifests == (manifest, other)
    happens(shelf)
    # THEN that is its condition, and only a lost trace is beyond repair
    listing = shelf.store.manifests()
    condition = listing.unfit.get("c-1", WHOLE)
    assert (condition.state, condition.beyond_repair) == (state, state in ("missing", "damaged"))
    assert message in condition.words
    assert (condition.problem == "") == condition.whole == (listing.manifests == (manifest, other))
    assert other in listing.manifests
    # AND as long as its manifest is one, that can be read
    if "manifest" not in message and state != "unreadable":
        assert shelf.store.look("c-1") == (manifest, condition)
    if not condition.whole:
        with pytest.raises((InputError, IntegrityError), match=message):
            shelf.store.manifest("c-1")


def test_pins(shelf):
    shelf.put("c-1")
    shelf.put("c-2")
    for _ in range(2):
        shelf.store.pin("c-1")
        assert shelf.store.pinned() == {"c-1"}
    for _ in range(2):
        shelf.store.pin("c-1", pinned=False)
        assert shelf.store.pinned() == frozenset()


@pytest.mark.parametrize("name", ["c-3", "../c-1", "c-1/..", "", ".tmp-c", "a/b", "/etc/passwd", "a\x00", "x" * 101])
def test_a_missing_artefact_is_reported_and_no_name_leads_out(shelf, name, trace, tmp_path):
    shelf.put("c-1")
    acts = [shelf.store.manifest, shelf.store.look, shelf.store.remove, shelf.store.pin]
    if name != "c-3" and isinstance(shelf.store, LocalStore):
        acts += [lambda one: shelf.store.put(one, trace, pytest.fail), lambda one: shelf.store.path(one, TRACE_NAME)]
    for act in (*acts, lambda one: shelf.store.get(one, TRACE_NAME, tmp_path / "out")):
        with pytest.raises(UsageError, match="no capture c-3" if name == "c-3" else "not a capture id"):
            act(name)
    assert shelf.store.ids() == {"c-1"}


def test_a_capture_is_stored_compressed_described_and_private(store, put, trace):
    manifest = put("c-1")
    path = store.path("c-1", TRACE_NAME)
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


def test_a_put_that_fails_leaves_nothing(store, put, trace, tmp_path, make_manifest):
    first = put("c-1")
    (empty := tmp_path / "empty.json").touch()
    (link := tmp_path / "link.json").symlink_to(trace)
    with pytest.raises(CaptureError, match="capture c-1 could not be stored: it is already stored"):
        put("c-1", rank=3)
    with pytest.raises(ZeroDivisionError):
        store.put("c-2", trace, lambda _: 1 / 0)
    with pytest.raises(CaptureError, match=r"c-2 has no valid manifest: .*rank 2147483647 in a world of 8"):
        store.put("c-2", trace, lambda artefact: make_manifest("c-2", artefact, rank=2**31 - 1))
    for build in (lambda artefact: make_manifest("c-3", artefact), lambda _: make_manifest("c-2")):
        with pytest.raises(ValueError, match="of another capture"):
            store.put("c-2", trace, build)
    for source, reason in ((empty, "the trace is empty"), (link, "symbolic links"), (tmp_path / "no", "No such file")):
        with pytest.raises(CaptureError, match=reason):
            store.put("c-2", source, lambda artefact: make_manifest("c-2", artefact))
    captures = store.path("c-1", TRACE_NAME).parents[1]
    assert sorted(entry.name for entry in captures.iterdir()) == [".lock", "c-1"]
    assert store.manifests().manifests == (first,)


def test_what_is_gone_is_missing_and_has_no_path(store, put):
    put("c-1")
    assert store.state("c-1")[1].whole
    directory = store.path("c-1", TRACE_NAME).parent
    for happens, message in (
        ((directory / TRACE_NAME).unlink, "trace.json.gz: missing"),
        ((directory / "manifest.json").unlink, "manifest.json: missing"),
        (directory.rmdir, "no capture"),
    ):
        happens()
        assert store.state("c-1")[1].state == "missing"
        assert message in store.state("c-1")[1].words
        with pytest.raises(SftriageError, match=message):
            store.path("c-1", TRACE_NAME)


def test_a_store_that_is_not_there_is_empty(store, tmp_path):
    assert store.manifests().manifests == ()
    assert store.sweep() == 0
    with pytest.raises(UsageError, match="no capture c-1"):
        store.manifest("c-1")
    assert not (tmp_path / "run").exists()


def test_any_file_in_the_store_is_a_problem_and_never_an_exception(store, put, tmp_path):
    put("good")
    captures = store.path("good", TRACE_NAME).parents[1]
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
    assert len(listing.unfit) == 8
    message = "\n".join(one.problem for one in listing.unfit.values())
    for words in (
        *(f"{name}/manifest.json: missing" for name in ("stray file", "empty", "piped")),
        *(f"{name}/manifest.json: is the manifest of good" for name in ("copied", "link", "linked")),
        *("garbage/manifest.json: not a manifest", f"away/{TRACE_NAME}: {Path('/etc/passwd').stat().st_size} bytes"),
    ):
        assert words in message


def test_sweep_removes_leftovers_and_waits_for_a_put(store, put, trace):
    put("c-1")
    captures = store.path("c-1", TRACE_NAME).parents[1]
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


DAY_S, MIB = 86400.0, 2**20
NOW_S = 100 * DAY_S


def kept(*captures):
    """Captures a, b, …, each from (days old, MiB), or (days old, MiB, "pinned")."""
    return [
        Kept("abcdefgh"[n], NOW_S - days * DAY_S, mib * MIB, bool(pin)) for n, (days, mib, *pin) in enumerate(captures)
    ]


def limits(age_days, mib):
    return RetentionLimits(None if age_days is None else age_days * DAY_S, None if mib is None else mib * MIB)


@given(
    captures=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()).map(lambda one: one[:2] + ("pinned",) * one[2]),
        max_size=8,
    ),
    age_days=st.none() | st.integers(0, 9),
    mib=st.none() | st.integers(0, 30),
)
def test_what_stays_is_within_the_limits_and_no_more_went_than_had_to(captures, age_days, mib):
    found = kept(*captures)
    retention = limits(age_days, mib)
    gone = expired(found, retention, NOW_S)
    stays = [one for one in found if one not in gone]
    # THEN nothing pinned went, and what stays and is not pinned is young enough, and not too much
    assert not any(one.pinned for one in gone)
    free = [one for one in stays if not one.pinned]
    assert age_days is None or all(NOW_S - one.created_s <= retention.age_s for one in free)
    total = sum(one.size_bytes for one in stays)
    assert mib is None or total <= retention.max_bytes or not free
    # AND the oldest went first, and the last of them had to: with it, there would be too much
    assert list(gone) == sorted(gone, key=lambda one: one.created_s)
    assert all(one.created_s <= other.created_s for one in gone for other in free)
    for one in gone[-1:]:
        too_old = age_days is not None and NOW_S - one.created_s > retention.age_s
        assert too_old or total + one.size_bytes > retention.max_bytes


def test_a_capture_goes_as_one(store, put):
    # GIVEN three captures, one of them pinned
    for name in ("c-1", "c-2", "c-3"):
        put(name)
    store.pin("c-2")
    # WHEN everything is too old
    now_s = 4e9
    captures = outlook(store, RetentionLimits(age_s=1.0), now_s).captures
    gone, problem = remove(store, captures)
    # (and what is pinned since it was looked stays)
    put("c-4")
    late = outlook(store, RetentionLimits(age_s=1.0), now_s).captures
    store.pin("c-4")
    assert ([one.capture_id for one in late], remove(store, late)) == (["c-4"], ((), None))
    store.pin("c-4", pinned=False)
    store.remove("c-4")
    # THEN trace and manifest of the others are gone, and nothing is left of them
    assert ([one.capture_id for one in gone], problem) == (["c-1", "c-3"], None)
    assert store.ids() == {"c-2"}
    captures_directory = store.path("c-2", TRACE_NAME).parents[1]
    assert sorted(path.name for path in captures_directory.iterdir()) == [".lock", "c-2"]
    # AND once it is not pinned any more, it goes too
    store.pin("c-2", pinned=False)
    last = outlook(store, RetentionLimits(max_bytes=0), now_s).captures
    assert [one.capture_id for one in remove(store, last)[0]] == ["c-2"]
    assert store.ids() == frozenset()


def test_kept_captures_have_reasons_and_lost_ones_are_removed_on_request(store, put):
    # GIVEN captures that are whole, pinned, damaged, both, of another version, and damaged with a verified copy
    for name in ("whole", "pinned", "damaged", "both", "unknown", "copied"):
        put(name)
    for name in ("pinned", "both"):
        store.pin(name)
    place = store.path("whole", "trace.json.gz").parents[1]
    for name in ("damaged", "both", "copied"):
        (place / name / "trace.json.gz").write_bytes(b"x")
    manifest = place / "unknown" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    upload = Upload(url="s3://b/p", state="stored", verified_at=datetime(2027, 1, 15, tzinfo=timezone.utc))
    (place / "copied" / "upload.json").write_text(upload.model_dump_json())
    # WHEN nothing is too old THEN nothing goes unless it is to, and then what is damaged and nowhere else
    kept = outlook(store, RetentionLimits(), 4e9)
    assert kept.captures == ()
    assert kept.left_alone.keys() == {"damaged", "both", "unknown", "copied"}
    gone = outlook(store, RetentionLimits(), 4e9, unfit=True)
    assert [one.capture_id for one in gone.captures] == ["damaged"]
    assert gone.left_alone.keys() == {"both", "unknown", "copied"}
    # AND when all is too old, pinned captures have a reason too
    old = outlook(store, RetentionLimits(age_s=1.0), 4e9)
    assert [one.capture_id for one in old.captures] == ["whole"]
    assert old.left_alone["pinned"] == "it is pinned"
    for name, message in (
        ("both", "it is pinned, and is damaged: "),
        ("unknown", "it cannot be read: "),
        ("copied", "its copy in s3://b/p was verified"),
        ("damaged", "it is damaged: "),
    ):
        assert message in old.left_alone[name]


def test_a_removal_that_a_crash_cut_short_lists_nothing_and_is_swept(store, put, monkeypatch):
    put("c-1")
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.remove("c-1")
    monkeypatch.undo()
    assert store.ids() == frozenset()
    assert store.sweep() == 1


def test_captures_of_a_store_that_many_runs_share_go_as_one_or_the_next_time():
    # GIVEN a store where two runs have a capture of one id each, and a third is pinned
    objects = FaultyObjects()
    store = RemoteStore(objects)
    for run in ("run-1", "run-2", "run-3"):
        keep(objects, captured(run=run))
    store.pin("resnet/run-3/c-1")
    captures = outlook(store, RetentionLimits(age_s=1.0), 4e9).captures
    assert [one.capture_id for one in captures] == ["resnet/run-1/c-1", "resnet/run-2/c-1"]
    # WHEN the store is lost while the first of them is removed
    objects.fails = {"delete trace.json.gz"}
    gone, problem = remove(store, captures)
    # THEN that is reported, and only whole captures are listed
    assert (gone, problem) == ((), "s3://bucket: cannot delete trace.json.gz")
    objects.fails = set()
    assert not store.manifests().unfit
    assert store.ids() == {"resnet/run-2/c-1", "resnet/run-3/c-1"}
    # AND the next time the rest goes
    gone, problem = remove(store, outlook(store, RetentionLimits(age_s=1.0), 4e9).captures)
    assert ([one.capture_id for one in gone], problem) == (["resnet/run-2/c-1"], None)
    assert store.ids() == {"resnet/run-3/c-1"}
