"""Captures in a store elsewhere: what has no manifest is not there, and nothing that lies there is trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sftriage.errors import InputError, IntegrityError, StoreError, UsageError
from sftriage.traces.manifest import MAX_MANIFEST_BYTES
from sftriage.traces.remote import RemoteStore
from tests.unit.traces.faulty import CONTENT, FaultyObjects, captured, keep, run_of


@pytest.fixture
def objects() -> FaultyObjects:
    return FaultyObjects()


@pytest.fixture
def whole(objects) -> RemoteStore:
    """All jobs and runs."""
    return RemoteStore(objects)


def test_a_capture_lies_where_people_find_it_and_is_there_once_its_manifest_is(objects, whole):
    # GIVEN an artefact without its manifest
    manifest = captured(job="team/größe")
    store = run_of(objects, manifest.job)
    store.put_artefact("c-1", manifest.artefacts[0], CONTENT)
    # THEN there is no capture
    assert whole.ids() == store.ids() == frozenset()
    assert whole.manifests() == store.manifests()
    assert not whole.manifests().manifests
    # (whoever builds the index again is told)
    (said,) = whole.leftovers()
    assert "team%2Fgr%C3%B6%C3%9Fe/run-1/c-1: no manifest" in said
    with pytest.raises(UsageError, match="no capture c-1"):
        store.manifest("c-1")
    # WHEN the manifest is put, THEN there is, and both lie where anybody finds them
    store.put_manifest(manifest)
    place = "team%2Fgr%C3%B6%C3%9Fe/run-1/c-1"
    assert set(objects.sizes()) == {f"{place}/trace.json.gz", f"{place}/manifest.json"}
    assert (whole.ids(), store.ids()) == ({place}, {"c-1"})
    assert whole.manifests().manifests == store.manifests().manifests == (manifest,)
    assert whole.leftovers() == store.leftovers() == ()
    assert whole.manifest(place) == store.manifest("c-1") == whole.manifest("c-1") == manifest
    assert (whole.reference(manifest), store.reference(manifest)) == (place, "c-1")


def test_one_id_in_two_runs_is_two_captures(objects, whole):
    first, second = keep(objects, captured(run="run-1")), keep(objects, captured(run="run-2"))
    assert whole.ids() == {"resnet/run-1/c-1", "resnet/run-2/c-1"}
    assert whole.manifest("resnet/run-2/c-1") == second
    with pytest.raises(UsageError, match=r"2 captures are called c-1; say which: resnet/run-1/c-1, resnet/run-2/c-1"):
        whole.manifest("c-1")
    assert run_of(objects, run="run-1").manifests().manifests == (first,)


def rewritten(**values):
    return lambda manifest: json.dumps({**json.loads(manifest.to_json()), **values}).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (rewritten(capture_id="c-2"), "is the manifest of resnet/run-1/c-2"),
        (rewritten(job="other"), "is the manifest of other/run-1/c-1"),
        (rewritten(run="../../run-9"), r"is the manifest of resnet/%2E.%2F..%2Frun-9/c-1"),
        (rewritten(run=""), "without a name"),
        (rewritten(artefacts=[{**json.loads(captured().to_json())["artefacts"][0], "name": "../x"}]), "not a manifest"),
        (rewritten(artefacts=[{**json.loads(captured().to_json())["artefacts"][0], "name": "b.gz"}]), "b.gz: missing"),
        (rewritten(schema_version=9), "schema_version 9; this sftriage reads 1"),
        (lambda _: b"{", "not a manifest"),
    ],
)
def test_a_hostile_manifest_is_a_problem_and_not_a_capture(objects, whole, content, problem):
    # GIVEN one that is as it should be, and one that is not
    good, bad = keep(objects, captured("c-0")), keep(objects, captured())
    objects.put("resnet/run-1/c-1/manifest.json", content(bad))
    # THEN the good one is listed, and of the other what is the matter, in printable text
    listing = whole.manifests()
    assert listing.manifests == (good,)
    (said,) = listing.problems
    assert problem in said
    assert said.isprintable()
    with pytest.raises((InputError, IntegrityError)):
        whole.manifest("resnet/run-1/c-1")


def test_a_manifest_that_is_too_large_is_not_even_read(objects, whole):
    keep(objects, captured())
    objects.put("resnet/run-1/c-1/manifest.json", b" " * (MAX_MANIFEST_BYTES + 1))
    objects.asked.clear()
    assert "larger than 4 MiB" in whole.manifests().problems[0]
    assert objects.asked == ["list "]


@pytest.mark.parametrize(
    ("place", "problems"),
    [
        *((place, 0) for place in ("resnet/c-1", "resnet/run-1/a/b", "manifest.json")),
        *((f"{forged}/c-1", 1) for forged in ("r%65snet/run-1", "res net/run-1")),
        *((f"resnet/run-1/{forged}", 1) for forged in ("c 1", "%2e%2e")),
    ],
)
def test_what_lies_elsewhere_is_not_looked_at_and_a_forged_place_is_a_problem(objects, whole, place, problems):
    objects.put(f"{place}/manifest.json", captured().to_json())
    assert (whole.ids(), len(whole.manifests().problems)) == (frozenset(), problems)
    with pytest.raises(UsageError):
        whole.manifest(place)


@pytest.mark.parametrize(
    "name", ["../c-1", "c-1/..", "resnet/../c-1", "/etc/passwd", "", "a/b/c/d", "resnet/run-1/../x"]
)
def test_no_reference_leads_out(objects, whole, name):
    keep(objects, captured())
    for act in (whole.manifest, whole.remove, whole.pin):
        with pytest.raises(UsageError):
            act(name)
    assert whole.ids() == {"resnet/run-1/c-1"}


@pytest.mark.parametrize("fails", ["delete trace.json.gz", "delete manifest.json"])
def test_a_removal_that_is_cut_short_lists_all_of_it_or_nothing(objects, whole, fails):
    # GIVEN a capture whose removal fails half way
    keep(objects, captured())
    objects.fails = {fails}
    with pytest.raises(StoreError):
        whole.remove("resnet/run-1/c-1")
    # THEN it is there whole, or not at all
    assert len(whole.manifests().manifests) == (fails == "delete manifest.json")
    assert whole.manifests().problems == ()
    # AND a second removal leaves nothing
    objects.fails = set()
    whole.remove("resnet/run-1/c-1")
    assert objects.sizes() == {}
    with pytest.raises(UsageError, match="no capture"):
        whole.remove("resnet/run-1/c-1")


def test_a_pin_of_one_run_is_one_of_the_store_of_all(objects, whole):
    keep(objects, captured())
    whole.pin("c-1")
    assert (whole.pinned(), run_of(objects).pinned()) == ({"resnet/run-1/c-1"}, {"c-1"})


def test_a_store_that_is_away_says_so_in_one_line(objects, whole):
    keep(objects, captured())
    objects.fails = {"any"}
    for act in (whole.ids, whole.manifests, whole.pinned, lambda: whole.manifest("resnet/run-1/c-1")):
        with pytest.raises(StoreError):
            act()


def test_a_directory_is_a_store_too(tmp_path: Path):
    # GIVEN none yet
    where = tmp_path / "our traces"
    with pytest.raises(UsageError, match="no such directory"):
        RemoteStore.open(str(where))
    # WHEN it is made and something is put there
    store = RemoteStore.open(str(where), job="resnet", run="run-1", create=True)
    store.put_artefact("c-1", captured().artefacts[0], iter([CONTENT[:9], CONTENT[9:]]))
    store.put_manifest(captured())
    # THEN it lies there in plain files, in a directory of its owner
    place = where / "resnet" / "run-1" / "c-1"
    assert (place / "trace.json.gz").read_bytes() == CONTENT
    assert where.stat().st_mode & 0o777 == 0o700
    assert RemoteStore.open(where.as_uri()).manifests().manifests == (captured(),)
    # AND goes without a trace; but what a link leads to that somebody has put there stays
    (mine := tmp_path / "mine").mkdir()
    (mine / "precious").write_text("x")
    (place / "link").symlink_to(mine)
    store.remove("c-1")
    assert (store.ids(), (mine / "precious").read_text()) == (frozenset(), "x")
    assert [path for path in where.rglob("*") if path.is_file()] == []
