"""Uploads: whatever stops them, what is listed there is whole, and the next look finishes what is missing."""

import hashlib
from pathlib import Path

import pytest

from sftriage.errors import IntegrityError, UsageError
from sftriage.runs.captures import upload_words
from sftriage.traces import uploading
from sftriage.traces.manifest import Findings, Manifest, StageProfile
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import LocalStore, Upload
from sftriage.traces.uploading import Uploader, UploadProgress
from tests.unit.conftest import manifest_of
from tests.unit.traces.faulty import FaultyObjects, run_of

_NUMBERS = {name: 0.0 for name in StageProfile.model_fields if name.endswith("_s") or name in ("kernels", "launches")}
_STAGE = StageProfile(source="trace", rank=2, first_step=160, last_step=164, steps=5, **_NUMBERS)
SLEPT = Findings(stage="data", suspect=_STAGE, shares=(), summary="It slept.")
URL = "s3://bucket"


@pytest.fixture
def objects() -> FaultyObjects:
    return FaultyObjects()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def uploader(root, objects, **how) -> Uploader:
    return Uploader(root, run_of(objects), URL, **how)


def turned(root, objects, **how) -> Uploader:
    sender = uploader(root, objects, **how)
    sender.turn()
    return sender


def upload_of(root, capture_id="c-1") -> Upload | None:
    return LocalStore(root).upload(capture_id)


def waited(sender, until: str) -> UploadProgress:
    standing = sender.standing
    while not getattr(standing, until):
        standing = sender.wait(standing, 10.0)
    return standing


def there(objects) -> tuple[Manifest, ...]:
    listing = RemoteStore(objects).manifests()
    assert not listing.unfit
    return listing.manifests


def test_what_is_here_is_sent_verified_and_noted(store, put, root, objects):
    # GIVEN two captures, one of them pinned
    first, second = put("c-1"), put("c-2")
    store.pin("c-2")
    # WHEN it is looked once
    sender = turned(root, objects)
    # THEN both are there as they are here, and that is on record
    assert (there(objects), RemoteStore(objects).pinned()) == ((first, second), {"resnet/run-1/c-2"})
    assert (sender.standing.done, sender.standing.stored) == (True, 2)
    upload = upload_of(root)
    assert (upload.state, upload.url, upload.pinned) == ("stored", URL, False)
    assert upload.verified_at is not None
    assert upload.manifest_sha256 == hashlib.sha256(first.to_json()).hexdigest()
    # AND the artefacts went before their manifest
    assert objects.put_so_far() == ["trace.json.gz", "manifest.json", "trace.json.gz", "pinned", "manifest.json"]
    # WHEN it is checked again, THEN nothing is sent
    sender.turn()
    turned(root, objects)
    assert objects.requests == []


@pytest.mark.parametrize(
    ("fails", "listed", "sent_again"),
    [
        ("put trace.json.gz", 0, ["trace.json.gz", "manifest.json"]),
        ("get trace.json.gz", 0, ["manifest.json"]),
        ("put manifest.json", 0, ["manifest.json"]),
        # Put, but not read back: it counts only after that.
        ("get manifest.json", 1, ["manifest.json"]),
        ("any", 0, ["trace.json.gz", "manifest.json"]),
    ],
)
def test_a_failed_upload_is_reported_and_finished_by_the_next(put, root, objects, fails, listed, sent_again):
    manifest = put("c-1")
    # WHEN a request fails
    objects.fails = {fails}
    sender = turned(root, objects)
    # THEN only whole captures are listed, and the reason is noted
    objects.fails = set()
    assert len(there(objects)) == listed
    upload = upload_of(root)
    assert (upload.state, upload.verified_at) == ("failed", None)
    assert "s3://bucket: cannot" in upload.reason
    assert sender.standing.left == {"c-1": upload.reason}
    # AND it is not tried again at once
    objects.requests.clear()
    sender.turn()
    assert objects.requests == []
    # WHEN the store is there again, THEN another process sends what is missing, and no more
    turned(root, objects)
    assert objects.put_so_far() == sent_again
    # AND once it has to finish, nothing waits any longer
    sender.release_all()
    sender.turn()
    assert sender.standing.done
    assert there(objects) == (manifest,)
    assert upload_of(root).state == "stored"


def test_a_capture_that_was_changed_here_does_not_appear_there_and_keeps_no_other_up(put, root, objects):
    whole = [put("c-1"), put("c-3")]
    sizes = {name: put(name).artefacts[0].size_bytes for name in ("c-2", "c-4")}
    for name, content in (("c-2", b"changed"), ("c-4", bytes(sizes["c-4"]))):
        (root / "captures" / name / "trace.json.gz").write_bytes(content)
    sender = turned(root, objects, tries=1)
    assert there(objects) == tuple(whole)
    assert {key.split("/")[2] for key in objects.sizes()} == {"c-1", "c-3"}
    assert (list(sender.standing.left), sender.standing.given_up) == (["c-2", "c-4"], True)
    assert "was changed here" in upload_of(root, "c-4").reason


def test_a_wrong_sum_there_is_noticed_and_not_trusted(put, root, objects):
    # GIVEN that the same number of other bytes lies there, with a manifest that promises the right ones
    manifest = put("c-1")
    turned(root, objects)
    key = "resnet/run-1/c-1/trace.json.gz"
    objects.put(key, bytes(objects.sizes()[key]))
    (root / "captures" / "c-1" / "upload.json").unlink()
    objects.requests.clear()
    # WHEN it is uploaded, and that fails just before the artefact is put
    objects.fails = {"put trace.json.gz"}
    turned(root, objects)
    # THEN it is not listed any more
    assert there(objects) == ()
    # WHEN it succeeds, THEN what lies there is right
    objects.fails = set()
    turned(root, objects)
    assert there(objects) == (manifest,)
    assert run_of(objects).holds("c-1", manifest.artefacts[0])


def test_an_unexpected_error_delays_no_other_capture_and_no_caller(put, root, objects, monkeypatch):
    monkeypatch.setattr(uploading, "POLL_S", 0.05)
    for name in ("c-1", "c-2"):
        put(name)
    objects.meanwhile["put trace.json.gz"] = lambda: 1 / 0
    sender = uploader(root, objects, tries=1)
    sender.start()
    standing = waited(sender, "given_up")
    assert [one.capture_id for one in there(objects)] == ["c-2"]
    assert standing.left == {"c-1": "division by zero"}


def test_findings_and_pins_follow_without_the_artefact(store, put, root, objects):
    put("c-1")
    sender = turned(root, objects)
    objects.put_so_far()
    # WHEN another process notes findings and pins it
    manifest = store.note("c-1", SLEPT)
    store.pin("c-1")
    # THEN the next look brings both
    sender.turn()
    assert objects.put_so_far() == ["pinned", "manifest.json"]
    assert (there(objects), RemoteStore(objects).pinned()) == ((manifest,), {"resnet/run-1/c-1"})
    # AND takes the pin away again
    store.pin("c-1", pinned=False)
    sender.turn()
    assert RemoteStore(objects).pinned() == frozenset()


def test_what_changes_while_it_is_sent_follows(store, put, root, objects):
    # GIVEN a capture that is pinned and looked into just while its manifest is put
    put("c-1")
    sender = uploader(root, objects)
    objects.meanwhile["put manifest.json"] = lambda: (store.pin("c-1"), store.note("c-1", SLEPT))
    sender.turn()
    # THEN the next look sees it
    sender.turn()
    assert there(objects) == store.manifests().manifests
    assert RemoteStore(objects).pinned() == {"resnet/run-1/c-1"}


def test_a_capture_that_comes_at_the_end_or_during_a_check_is_uploaded(put, root, objects):
    # GIVEN that all there was is there
    put("c-1")
    sender = turned(root, objects)
    assert sender.standing.done
    # WHEN another capture comes, and everything is to be there; and again while that one is sent
    put("c-2")
    sender.release_all()
    objects.meanwhile["put trace.json.gz"] = lambda: (put("c-3"), sender.release_all())
    # THEN it is not done before it has been looked again
    assert not sender.standing.done
    sender.turn()
    assert (sender.standing.stored, sender.standing.done) == (2, False)
    sender.turn()
    assert (sender.standing.stored, sender.standing.done) == (3, True)


def test_what_is_removed_here_is_removed_there_as_soon_as_it_can_be_reached(store, put, root, objects):
    put("c-1")
    kept = put("c-2")
    sender = turned(root, objects)
    # WHEN a capture is removed while the store is away
    objects.fails = {"any"}
    store.remove("c-1")
    sender.turn()
    # THEN it is gone here, with its artefact, and reported as still there, whole
    assert (store.ids(), store.sweep()) == ({"c-2"}, 0)
    assert list(sender.standing.removals) == ["c-1"]
    assert [path.name for path in root.rglob("trace.json.gz")] == ["trace.json.gz"]
    objects.fails = set()
    assert len(there(objects)) == 2
    # WHEN the removal stops half way, THEN it is not listed there any more
    objects.fails = {"delete trace.json.gz"}
    turned(root, objects)
    assert there(objects) == (kept,)
    # AND whoever comes next finishes it
    objects.fails = set()
    last = turned(root, objects)
    assert set(objects.sizes()) == {"resnet/run-1/c-2/manifest.json", "resnet/run-1/c-2/trace.json.gz"}
    assert (last.standing.done, list((root / "captures").glob(".removing-*"))) == (True, [])


def test_a_capture_that_is_removed_while_it_is_sent_stays_nowhere(store, put, root, objects):
    put("c-1")
    sender = uploader(root, objects)
    # GIVEN that it is removed just before its manifest is put; and one that is removed before it is sent
    put("c-2")
    store.remove("c-2")
    assert list((root / "captures").glob(".removing-*")) == []
    objects.meanwhile["put manifest.json"] = lambda: store.remove("c-1")
    sender.turn()
    # WHEN it is looked again
    sender.turn()
    # THEN nothing is left of it
    assert (store.ids(), objects.sizes(), sender.standing.done) == (frozenset(), {}, True)


def test_artefacts_go_from_here_only_once_they_are_there_and_released(store, put, root, tmp_path):
    # GIVEN a store that is a directory
    manifest = put("c-1")
    path = store.path("c-1", "trace.json.gz")
    content = path.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    remote = RemoteStore.open(str(elsewhere), job="resnet", run="run-1", create=True)
    sender = Uploader(root, remote, elsewhere.as_uri(), keep_local=False)
    # THEN the artefact stays while a reader here may need it
    sender.turn()
    assert path.exists()
    # WHEN it is released, THEN it goes, and the capture is here all the same
    sender.release("c-1")
    sender.turn()
    assert not path.exists()
    assert store.manifests().manifests == (manifest,)
    with pytest.raises(UsageError, match=f"is in {elsewhere.as_uri()}: sftriage traces get c-1"):
        store.path("c-1", "trace.json.gz")
    # AND is fetched from there, verified
    assert store.get("c-1", "trace.json.gz", tmp_path / "got").read_bytes() == content
    # AND findings still reach it
    noted = store.note("c-1", SLEPT)
    sender.turn()
    assert remote.manifests().manifests == (noted,)
    # WHEN what is there is damaged, THEN that is noticed
    (elsewhere / "resnet" / "run-1" / "c-1" / "trace.json.gz").write_bytes(bytes(len(content)))
    with pytest.raises(IntegrityError):
        store.get("c-1", "trace.json.gz", tmp_path / "again")


def test_an_artefact_that_vanishes_there_is_sent_again_or_reported_as_lost(store, put, root, objects):
    # GIVEN two captures that are there, of which one has its artefact nowhere else
    put("c-1")
    put("c-2")
    sender = uploader(root, objects, keep_local=False)
    sender.release("c-2")
    sender.turn()
    for name in ("c-1", "c-2"):
        objects.delete(f"resnet/run-1/{name}/trace.json.gz")
        store.note(name, SLEPT)
    # WHEN it is looked again
    turned(root, objects)
    # THEN the one is there again, and the other is reported as lost
    assert [one.capture_id for one in RemoteStore(objects).manifests().manifests] == ["c-1"]
    assert "is neither here nor in s3://bucket" in upload_of(root, "c-2").reason


def test_a_copy_that_was_removed_there_is_sent_again_only_on_request(store, put, root, objects):
    # GIVEN a capture that was there, and was deleted there
    put("c-1")
    turned(root, objects)
    run_of(objects).remove("c-1")
    # WHEN its cause is added during the run THEN it stays away, and nothing is left to do
    store.note("c-1", SLEPT)
    sender = turned(root, objects, resend=False)
    assert (there(objects), objects.sizes(None), sender.standing.left) == ((), {}, {})
    assert upload_words(upload_of(root)) == f"removed: from {upload_of(root).url}"
    # WHEN a person uploads it THEN it is there again
    turned(root, objects)
    assert ([one.capture_id for one in there(objects)], upload_of(root).state) == (["c-1"], "stored")


def test_what_was_there_once_is_verified_anew_when_it_is_sent_again(store, put, root, objects):
    # GIVEN a capture that was there, and of which the artefact has vanished
    manifest = put("c-1")
    turned(root, objects)
    objects.delete("resnet/run-1/c-1/trace.json.gz")
    store.note("c-1", SLEPT)
    # WHEN it is sent again, and the store keeps as many other bytes
    with pytest.MonkeyPatch.context() as patch:
        kept = objects.put
        patch.setattr(objects, "put", lambda key, all_: kept(key, bytes(len(all_)) if "trace" in key else all_))
        turned(root, objects)
    # THEN that is noticed, now and by the next look
    assert (there(objects), upload_of(root).verified_at) == ((), None)
    turned(root, objects)
    assert len(there(objects)) == 1
    assert run_of(objects).holds("c-1", manifest.artefacts[0])


def test_no_run_overwrites_anothers_capture(store, put, trace, root, objects):
    # GIVEN that another run of the same name has put a capture of the same id
    other = manifest_of("c-1", second=7)
    run_of(objects).put_artefact("c-1", other.artefacts[0], b"1234567")
    run_of(objects).put_manifest(other)
    # WHEN ours is uploaded
    put("c-1")
    turned(root, objects)
    # THEN the other one stays as it is, and that is reported
    assert there(objects) == (other,)
    assert "has a different capture c-1" in upload_of(root).reason
    # AND a capture of another run goes nowhere
    store.put("c-9", trace, lambda artefact: manifest_of("c-9", artefact).model_copy(update={"run": "run-9"}))
    turned(root, objects)
    assert there(objects) == (other,)
    assert "is of resnet/run-9, not of resnet/run-1" in upload_of(root, "c-9").reason


def test_changes_alone_send_no_capture_for_the_first_time(store, put, root, objects):
    put("c-1")
    turned(root, objects)
    put("c-2")
    store.pin("c-1")
    changes = turned(root, objects, changes_only=True, tries=1)
    assert [one.capture_id for one in there(objects)] == ["c-1"]
    assert RemoteStore(objects).pinned() == {"resnet/run-1/c-1"}
    assert changes.standing.done


def test_of_two_uploaders_one_uploads_and_the_other_takes_over(put, root, objects, monkeypatch):
    monkeypatch.setattr(uploading, "POLL_S", 0.05)
    put("c-1")
    second = uploader(root, objects)
    with LocalStore(root).uploading() as ours:
        assert ours
        assert LocalStore(root).busy
        # WHEN a second one starts, THEN it waits
        second.start()
        waited(second, "taken")
        assert objects.sizes() == {}
    # UNTIL the first has ended
    standing = waited(second, "done")
    assert (standing.stored, second.close(10.0), LocalStore(root).busy) == (1, True, False)
    assert len(there(objects)) == 1


def test_what_died_on_its_way_is_waiting(put, root):
    put("c-1")
    store = LocalStore(root)
    assert store.note_upload("c-1", Upload(url=URL, state="uploading"))
    with store.uploading():
        assert store.upload("c-1").state == "uploading"
    assert store.upload("c-1").state == "waiting"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"state": "stored"}', b"\xff", b"0" * 100_000])
def test_a_note_that_makes_no_sense_is_none(put, root, objects, content):
    put("c-1")
    path = root / "captures" / "c-1" / "upload.json"
    path.write_bytes(content)
    assert upload_of(root) is None
    turned(root, objects)
    assert len(there(objects)) == 1
