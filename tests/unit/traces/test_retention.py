"""What is kept, and what goes: the oldest first, never what is pinned."""

from __future__ import annotations

import shutil
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.traces.catalogue import Catalogue
from sftriage.traces.remote import RemoteStore
from sftriage.traces.store import Upload
from sftriage.traces.stores import Kept, RetentionLimits, due, expired, outlook, remove
from tests.unit.traces.faulty import FaultyObjects, captured, keep

DAY_S, MIB = 86400.0, 2**20
NOW_S = 100 * DAY_S


def kept(*captures):
    """Captures a, b, …, each from (days old, MiB), or (days old, MiB, "pinned")."""
    return [
        Kept("abcdefgh"[n], NOW_S - days * DAY_S, mib * MIB, bool(pin)) for n, (days, mib, *pin) in enumerate(captures)
    ]


def limits(age_days, mib):
    return RetentionLimits(None if age_days is None else age_days * DAY_S, None if mib is None else mib * MIB)


THREE = [(3, 40), (2, 40), (1, 40)]


@pytest.mark.parametrize(
    ("captures", "age_days", "mib", "gone"),
    [
        ([(1, 10), (20, 10)], None, None, ""),
        # By age: older than it, and not as old.
        ([(1, 10), (15, 10), (14, 10)], 14, None, "b"),
        ([(15, 10, "pinned"), (16, 10)], 14, None, "b"),
        # By size: the oldest, until the rest fits.
        (THREE, None, 100, "a"),
        (THREE, None, 79, "ab"),
        (THREE[::-1], None, 79, "cb"),
        (THREE, None, 120, ""),
        # What is pinned stays, and its bytes count.
        ([(3, 40, "pinned"), (2, 40), (1, 40)], None, 80, "b"),
        ([(3, 90, "pinned"), (2, 40), (1, 40)], None, 80, "bc"),
        # One that is larger than everything may be.
        ([(1, 200)], None, 100, "a"),
        # Both: what is too old goes first, and counts no more.
        ([(20, 40), (2, 40), (1, 40)], 14, 80, "a"),
        ([(20, 40), (2, 40), (1, 40)], 14, 79, "ab"),
    ],
)
def test_what_goes(captures, age_days, mib, gone):
    assert [one.capture_id for one in expired(kept(*captures), limits(age_days, mib), NOW_S)] == list(gone)


@given(
    captures=st.lists(
        st.tuples(st.floats(0, 50), st.integers(0, 100), st.booleans()).map(lambda one: one[:2] + ("pinned",) * one[2]),
        max_size=8,
    ),
    age_days=st.none() | st.floats(0, 50),
    mib=st.none() | st.integers(0, 300),
)
@settings(deadline=None)
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
    # AND the newest that went for its size had to: with it, there would be too much
    for one in gone[-1:]:
        too_old = age_days is not None and NOW_S - one.created_s > retention.age_s
        assert too_old or total + one.size_bytes > retention.max_bytes


def test_a_capture_goes_as_one(store, put, tmp_path):
    # GIVEN three captures, one of them pinned, in store and catalogue
    catalogue = Catalogue(tmp_path / "catalogue.sqlite", store)
    for name in ("c-1", "c-2", "c-3"):
        catalogue.add(put(name))
    store.pin("c-2")
    # WHEN everything is too old
    now_s = 4e9
    captures = due(store, RetentionLimits(age_s=1.0), now_s)
    gone, problem = remove(store, catalogue, captures)
    # (and what is pinned since it was looked stays)
    put("c-4")
    late = due(store, RetentionLimits(age_s=1.0), now_s)
    store.pin("c-4")
    assert ([one.capture_id for one in late], remove(store, catalogue, late)) == (["c-4"], ((), None))
    store.pin("c-4", pinned=False)
    store.remove("c-4")
    # THEN trace, manifest and row of the others are gone, and nothing is left of them
    assert ([one.capture_id for one in gone], problem) == (["c-1", "c-3"], None)
    assert {row.capture_id for row in catalogue.find()} == store.ids() == {"c-2"}
    captures_directory = store.path("c-2", "trace.json.gz").parents[1]
    assert sorted(path.name for path in captures_directory.iterdir()) == [".lock", "c-2"]
    # AND once it is not pinned any more, it goes too
    store.pin("c-2", pinned=False)
    assert remove(store, catalogue, due(store, RetentionLimits(max_bytes=0), now_s))[0][0].capture_id == "c-2"
    assert store.ids() == frozenset()


def test_what_is_left_alone_is_said_and_what_is_beyond_repair_goes_when_it_is_to(store, put):
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
    assert kept.captures == due(store, RetentionLimits(), 4e9) == ()
    assert kept.left_alone.keys() == {"damaged", "both", "unknown", "copied"}
    gone = outlook(store, RetentionLimits(), 4e9, unfit=True)
    assert [one.capture_id for one in gone.captures] == ["damaged"]
    assert gone.left_alone.keys() == {"both", "unknown", "copied"}
    # AND when all is too old, what is pinned is said too
    old = outlook(store, RetentionLimits(age_s=1.0), 4e9)
    assert [one.capture_id for one in old.captures] == [one.capture_id for one in due(store, RetentionLimits(1.0), 4e9)]
    assert [one.capture_id for one in old.captures] == ["whole"]
    assert old.left_alone["pinned"] == "it is pinned"
    for name, said in (
        ("both", "it is pinned, and is damaged: "),
        ("unknown", "it cannot be read: "),
        ("copied", "its copy in s3://b/p was verified"),
        ("damaged", "it is damaged: "),
    ):
        assert said in old.left_alone[name]


def test_a_removal_that_a_crash_cut_short_lists_nothing_and_is_swept(store, put, monkeypatch):
    put("c-1")
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.remove("c-1")
    monkeypatch.undo()
    assert store.ids() == frozenset()
    assert store.sweep() == 1


def test_captures_of_a_store_that_many_runs_share_go_as_one_or_the_next_time(tmp_path):
    # GIVEN a store where two runs have a capture of one id each, and a third is pinned
    objects = FaultyObjects()
    store = RemoteStore(objects)
    for run in ("run-1", "run-2", "run-3"):
        keep(objects, captured(run=run))
    store.pin("resnet/run-3/c-1")
    catalogue = Catalogue(tmp_path / "catalogue.sqlite", store)
    captures = due(store, RetentionLimits(age_s=1.0), 4e9)
    assert [one.capture_id for one in captures] == ["resnet/run-1/c-1", "resnet/run-2/c-1"]
    # WHEN the store is lost while the first of them is removed
    objects.fails = {"delete trace.json.gz"}
    gone, problem = remove(store, catalogue, captures)
    # THEN that is said, and nothing is listed that is not whole
    assert (gone, problem) == ((), "s3://bucket: cannot delete trace.json.gz")
    objects.fails = set()
    assert store.manifests().problems == ()
    assert store.ids() == {"resnet/run-2/c-1", "resnet/run-3/c-1"}
    # AND the next time the rest goes
    gone, problem = remove(store, catalogue, due(store, RetentionLimits(age_s=1.0), 4e9))
    assert ([one.capture_id for one in gone], problem) == (["resnet/run-2/c-1"], None)
    assert store.ids() == {"resnet/run-3/c-1"}
