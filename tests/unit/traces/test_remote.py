"""Captures in a store elsewhere: where they lie, and that nothing that lies there is trusted."""

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import InputError, IntegrityError, StoreError, UsageError
from sftriage.traces.manifest import CONTROL, MAX_MANIFEST_BYTES
from sftriage.traces.objects import message_of
from sftriage.traces.remote import MAX_PART_BYTES, CaptureKey, RemoteStore, checked_url, read, written
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
    # (rebuilding the index reports it)
    (shown,) = whole.leftovers()
    assert "team%2Fgr%C3%B6%C3%9Fe/run-1/c-1: no manifest" in shown
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


def rewritten(**values):
    return lambda manifest: json.dumps({**json.loads(manifest.to_json()), **values}).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (rewritten(capture_id="c-2"), "is the manifest of resnet/run-1/c-2"),
        (rewritten(job="other"), "is the manifest of other/run-1/c-1"),
        (rewritten(run="../../run-9"), r"is the manifest of resnet/%2E.%2F..%2Frun-9/c-1"),
        (rewritten(run=""), "needs a name"),
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
    (found,) = listing.unfit.values()
    assert problem in found.problem
    assert found.problem.isprintable()
    with pytest.raises((InputError, IntegrityError)):
        whole.manifest("resnet/run-1/c-1")


def test_a_manifest_that_is_too_large_is_not_even_read(objects, whole):
    keep(objects, captured())
    objects.put("resnet/run-1/c-1/manifest.json", b" " * (MAX_MANIFEST_BYTES + 1))
    objects.requests.clear()
    assert "larger than 4 MiB" in whole.manifests().unfit["resnet/run-1/c-1"].problem
    assert objects.requests == ["list "]


@pytest.mark.parametrize(
    ("place", "problems"),
    [
        *((place, 0) for place in ("resnet/c-1", "resnet/run-1/a/b", "manifest.json")),
        *((f"{forged}/c-1", 1) for forged in ("r%65snet/run-1", "res net/run-1")),
        *((f"resnet/run-1/{forged}", 1) for forged in ("c 1", "%2e%2e")),
    ],
)
def test_other_objects_are_ignored_and_a_forged_place_is_a_problem(objects, whole, place, problems):
    objects.put(f"{place}/manifest.json", captured().to_json())
    assert (whole.ids(), len(whole.manifests().unfit)) == (frozenset(), problems)
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
    assert not whole.manifests().unfit
    # AND a second removal leaves nothing
    objects.fails = set()
    whole.remove("resnet/run-1/c-1")
    assert objects.sizes() == {}
    with pytest.raises(UsageError, match="no capture"):
        whole.remove("resnet/run-1/c-1")


def test_a_store_that_is_away_says_so_in_one_line(objects, whole):
    keep(objects, captured())
    objects.fails = {"any"}
    for act in (whole.ids, whole.manifests, whole.pinned, lambda: whole.manifest("resnet/run-1/c-1")):
        with pytest.raises(StoreError):
            act()


def test_a_directory_is_its_owners_and_what_a_link_in_it_leads_to_stays(tmp_path: Path):
    # GIVEN none yet
    where = tmp_path / "our traces"
    with pytest.raises(UsageError, match="no such directory"):
        RemoteStore.open(str(where))
    # WHEN it is created, and a capture in it is removed that has a foreign link beside it
    store = RemoteStore.open(str(where), job="resnet", run="run-1", create=True)
    store.put_artefact("c-1", captured().artefacts[0], iter([CONTENT[:9], CONTENT[9:]]))
    store.put_manifest(captured())
    (mine := tmp_path / "mine").mkdir()
    (mine / "precious").write_text("x")
    (where / "resnet" / "run-1" / "c-1" / "link").symlink_to(mine)
    assert RemoteStore.open(where.as_uri()).manifests().manifests == (captured(),)
    store.remove("c-1")
    # THEN what the link leads to is there
    assert (where.stat().st_mode & 0o777, store.ids(), (mine / "precious").read_text()) == (0o700, frozenset(), "x")
    assert [path for path in where.rglob("*") if path.is_file()] == []


SAFE = re.compile(r"[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]*")


PARTS = {
    "resnet-50_v1.5": "resnet-50_v1.5",
    "team/job": "team%2Fjob",
    "..": "%2E.",
    "größe": "gr%C3%B6%C3%9Fe",
    "a\\b\x00\n": "a%5Cb%00%0A",
}


@pytest.mark.parametrize(("name", "part"), PARTS.items())
def test_a_name_is_written_so_that_it_is_one_plain_part(name, part):
    assert (written(name), read(part)) == (part, name)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_any_name_comes_back_and_its_part_is_plain(name):
    if len(quote(name, safe="")) > MAX_PART_BYTES - 2:
        return
    part = written(name)
    assert read(part) == name
    assert SAFE.fullmatch(part)
    assert len(part) <= MAX_PART_BYTES


@given(st.text(max_size=60) | st.from_regex(r"[a-z%./]{0,12}/[a-zA-Z%0-9.]{0,9}/[a-z.0-9-]{0,9}", fullmatch=True))
def test_any_key_is_canonical_or_refused(key):
    try:
        place = CaptureKey.parse(key)
    except InputError as error:
        shown = str(error)
    else:
        shown = place.key
        assert shown == key
    assert not CONTROL.search(shown)


@pytest.mark.parametrize("name", ["", "x" * 241, "ä" * 41, "\udcff"])
def test_a_name_that_cannot_be_part_of_a_key_is_refused(name):
    with pytest.raises(UsageError):
        written(name)


@pytest.mark.parametrize(
    ("given_url", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/some/prefix/", "s3://bucket/some/prefix"),
        ("gs://bucket/p", "gs://bucket/p"),
        ("az://container/p", "az://container/p"),
        ("s3://bucket/a b/%63", "s3://bucket/a%20b/c"),
        ("file:///mnt/traces", "file:///mnt/traces"),
        ("/mnt/traces", "file:///mnt/traces"),
        ("/mnt/our traces", "file:///mnt/our%20traces"),
    ],
)
def test_a_stores_url_is_written_in_one_way(given_url, url):
    assert checked_url(given_url) == url
    assert checked_url(url) == url


NO_STORES = "http://host/x memory:/// s3:// s3:///prefix file:/// file://host/dir s3://bucket/../other"


@pytest.mark.parametrize(
    "url", ["", *NO_STORES.split(), "s3://bucket/%2E%2E/other", "s3://bucket/a\nb", "s3://bucket/a%1b%5B31m"]
)
def test_what_is_no_store_is_refused_in_one_printable_line(url):
    with pytest.raises(UsageError) as refused:
        checked_url(url)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("url", ["s3://key:SECRET@bucket/p", "az://c/p?sig=SECRET", "gs://b/p#SECRET"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(UsageError, match="environment") as refused:
        checked_url(url)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Generic S3 error: no\n\nDebug source:\nGeneric {", "Generic S3 error: no"),
        ("GET https://a.example/c?sv=1&sig=SECRET in 4 ms - refused", "GET https://a.example/c in 4 ms - refused"),
        ("404: <?xml version='1.0'?>\n<Error><Message>No such bucket</Message></Error>", "404: No such bucket"),
        ("GET http://169.254.169.254/x - 403", "no credentials in the environment or from this machine: GET"),
        ("", "Exception"),
        ("a\x1b[31mb", "a?[31mb"),
    ],
)
def test_what_a_store_says_is_one_line_without_secrets(text, line):
    answer = message_of(Exception(text))
    assert answer.startswith(line)
    assert "SECRET" not in answer
    assert len(answer) <= 300
