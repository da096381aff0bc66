"""`sftriage traces`: the captures that are wanted, each file of them, and the catalogue they are found by."""

import gzip
import hashlib
import json
import os
import re
from datetime import timedelta
from functools import partial
from pathlib import Path

import jsonschema
import msgspec
import pytest

from sftriage.errors import StoreError
from sftriage.traces.manifest import Manifest, ReproducedInfo, manifest_schema
from sftriage.traces.remote import FILE_VARIABLE, URL_VARIABLE, RemoteStore
from sftriage.traces.store import FileToStore, LocalStore
from sftriage.trainer.sampler import NAME as STACKS_NAME
from tests.unit.conftest import keep, manifest_of, run_in
from tests.unit.hanging import EVIDENCE, NEXT_STEP, SENTENCE, put_hang
from tests.unit.reduce.test_samples import document

FIRST, SECOND, THIRD = "w100-149-r2-x-1", "w900-949-r2-x-2", "w100-149-r3-x-3"
FOUND = ReproducedInfo(answer="partly", steps=5, steps_with=2, over_s=0.01, expected_s=0.02)


@pytest.fixture(autouse=True)
def no_catalogue(monkeypatch):
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)


@pytest.fixture
def run(tmp_path):
    return make(tmp_path)


@pytest.fixture(scope="module")
def shared_run(module_path):
    return make(module_path)


def make(folder):
    """A run with captures: two of one rank, one of another, which left two files."""
    directory = run_in(folder / "run")
    trace, dump = folder / "trace", folder / "dump"
    trace.write_text('{"traceEvents": []}')
    dump.write_bytes(b"dump")
    keep(directory.path, FIRST, trace, second=1)
    of_second = {"stage": "forward", "first_step": 960, "window": (900, 949), "second": 2}
    keep(directory.path, SECOND, trace, reproduced=FOUND, **of_second)
    third = manifest_of(THIRD, rank=3, second=3)
    files = [FileToStore(trace), FileToStore(dump, "dump.pickle", "application/octet-stream", compress=False)]
    LocalStore(directory.path).put_files(THIRD, files, lambda them: third.model_copy(update={"artefacts": them}))
    return directory


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ([], [FIRST, SECOND, THIRD]),
        (["--rank", 2], [FIRST, SECOND]),
        (["--stage", "forward"], [SECOND]),
        (["--step", "160..162"], [FIRST, THIRD]),
        (["--step", 947], [SECOND]),
        (["--step", 500], []),
        (["--since", "2027-01-15T08:00:02Z"], [SECOND, THIRD]),
        (["--since", "2027-01-16"], []),
        (["--reproduced", "partly"], [SECOND]),
        (["--reproduced", "yes"], []),
        (["--job", "resnet", "--run-id", "run-1", "--host", "node-1", "--profiler", "torch"], [FIRST, SECOND, THIRD]),
        (["--job", "other"], []),
        (["--profiler", "nsys"], []),
        (["--rank", 2, "--step", "100..120"], [FIRST]),
    ],
)
def test_list_shows_what_is_wanted(sftriage, shared_run, options, found):
    outcome = sftriage("traces", "list", "--run", shared_run.path, "--json", *options)
    assert (outcome.code, outcome.err) == (0, "")
    assert [row["capture_id"] for row in json.loads(outcome.out)] == found


def test_captures_on_other_hosts_say_on_which(sftriage, shared_run, monkeypatch):
    assert sftriage("traces", "list", "--run", shared_run.path).out.count("node-1") == 3
    # GIVEN that they were all made here
    monkeypatch.setattr("socket.gethostname", lambda: "node-1")
    assert "node-1" not in sftriage("traces", "list", "--run", shared_run.path).out


def test_a_control_is_not_listed_as_a_suspect(sftriage, tmp_path):
    # GIVEN a capture of a suspect, and one of the healthy rank beside it
    directory = run_in(tmp_path / "run")
    for name, rank, role in (("c-1", 2, "suspect"), ("c-2", 1, "control")):
        keep(directory.path, name, rank=rank, role=role)
    # WHEN they are listed THEN each row shows its role
    table = sftriage("traces", "list", "--run", directory.path).out
    assert re.search("c-1.*data", table)
    assert re.search(r"c-2.*\(control\)", table)
    assert not re.search("c-2.*data", table)
    listed = sftriage("traces", "list", "--run", directory.path, "--json").json
    assert {one["capture_id"]: one["role"] for one in listed} == {"c-1": "suspect", "c-2": "control"}


def test_a_catalogue_that_was_deleted_gives_every_answer_again(sftriage, run):
    queries = [["--rank", 2], ["--step", "160..162"], ["--reproduced", "partly"], ["--stage", "data"], []]

    def answers():
        return [sftriage("traces", "list", "--run", run.path, "--json", *options).out for options in queries]

    before = answers()
    run.catalogue.unlink()
    found = sftriage("traces", "reindex", "--run", run.path, "--json").json
    assert (found["captures"], found["problems"]) == (3, [])
    assert found["catalogue"] == str(run.catalogue)
    assert answers() == before


@pytest.mark.parametrize(
    ("name", "reference"),
    {
        FIRST: FIRST,
        "w9": SECOND,
        "w100-149-r3": THIRD,
        f"resnet/run-1/{THIRD}": THIRD,
        "resnet/run-1/w9": SECOND,
    }.items(),
)
def test_a_capture_goes_by_its_id_or_by_its_beginning(sftriage, shared_run, name, reference):
    outcome = sftriage("traces", "show", name, "--run", shared_run.path, "--json")
    assert (outcome.code, json.loads(outcome.out)["capture_id"]) == (0, reference)


@pytest.mark.parametrize("name", ["w1", "resnet/run-1/w1"])
def test_an_ambiguous_prefix_names_the_captures(sftriage, shared_run, name):
    refusal = sftriage("traces", "show", name, "--run", shared_run.path).refusal
    assert f"2 captures match {name}: {FIRST}, {THIRD}" in refusal


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_each_file_of_a_capture_can_be_fetched(sftriage, shared_run, tmp_path):
    # GIVEN a capture of two files WHEN none is named THEN get copies the main one
    (out := tmp_path / "out").mkdir()
    got = sftriage("traces", "get", THIRD, "--run", shared_run.path, "--out", out, "--json").json
    assert [one["path"] for one in got["files"]] == [got["path"]] == [str(out / f"{THIRD}-trace.json.gz")]
    assert gzip.decompress(Path(got["path"]).read_bytes()).startswith(b'{"traceEvents"')
    # AND the other one by its name
    get = partial(sftriage, "traces", "get", THIRD, "--run", shared_run.path)
    outcome = get("--artefact", "dump.pickle", "--out", tmp_path / "mine")
    assert (outcome.code, (tmp_path / "mine").read_bytes()) == (0, b"dump")
    # AND all of them into a new directory
    files = get("--all", "--out", tmp_path / "every", "--json").json["files"]
    assert [one["path"].rpartition("/")[2] for one in files] == [f"{THIRD}-trace.json.gz", f"{THIRD}-dump.pickle"]
    manifest = LocalStore(shared_run.path).manifest(THIRD)
    for one, artefact in zip(files, manifest.artefacts, strict=True):
        assert sha256(tmp_path / "every" / f"{THIRD}-{artefact.name}") == one["sha256"] == artefact.sha256


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--artefact", "nothing"], "has no artefact 'nothing'; it has: trace.json.gz, dump.pickle"),
        (["--all", "--out", "here/a/file"], "2 files need a directory"),
        (["--out", "there"], "there exists already"),
        (["--all", "--out", "."], f"{THIRD}-dump.pickle exists already"),
    ],
)
def test_what_cannot_be_fetched_leaves_nothing_behind(sftriage, shared_run, tmp_path, monkeypatch, options, refusal):
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    for name in ("there", f"{THIRD}-dump.pickle"):
        (here / name).write_text("mine")
    assert refusal in sftriage("traces", "get", THIRD, "--run", shared_run.path, *options).refusal
    assert sorted(path.name for path in here.iterdir()) == ["there", f"{THIRD}-dump.pickle"]
    assert {path.read_text() for path in here.iterdir()} == {"mine"}


def test_every_stored_manifest_matches_the_schema(sftriage, shared_run):
    assert sftriage("traces", "schema").json == manifest_schema()
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    validator = jsonschema.Draft202012Validator(manifest_schema(), format_checker=jsonschema.FormatChecker())
    for path in sorted((shared_run.path / "captures").glob("*/manifest.json")):
        validator.validate(json.loads(path.read_text()))
    # AND so do manifests with times of any precision and with optional fields
    manifest = LocalStore(shared_run.path).manifest(FIRST)
    for change in (
        {"created_at": manifest.created_at + timedelta(microseconds=1)},
        {"reproduced": FOUND},
        {"evidence": ("hot",)},
        {"trigger": manifest.trigger.model_copy(update={"stage": None, "onset_step": 5, "period_steps": 2})},
    ):
        changed = Manifest.model_validate(manifest.model_copy(update=change))
        validator.validate(json.loads(changed.to_json()))


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"capture_id": "../up"},
        {"created_at": 5},
        {"artefacts": []},
        {"capture": {}},
        {"trigger": None},
        {"reproduced": {"answer": "perhaps", "steps": 1, "steps_with": 1, "over_s": 0, "expected_s": 0}},
        {"job": 7},
    ],
)
def test_the_schema_refuses_invalid_manifests(shared_run, change):
    values = json.loads((shared_run.path / "captures" / FIRST / "manifest.json").read_text())
    validator = jsonschema.Draft202012Validator(manifest_schema())
    assert validator.is_valid(values)
    assert not validator.is_valid(values | change)


@pytest.fixture
def share(trace, tmp_path):
    """Put captures called w-1, of runs, into a directory that they share; the options that name it."""

    def share(*runs):
        for name in runs:
            place = tmp_path / "shared" / "resnet" / name
            keep(tmp_path / name, "w-1", trace, run=name)
            place.mkdir(parents=True)
            (tmp_path / name / "captures" / "w-1").rename(place / "w-1")
        return ["--store", f"file://{tmp_path / 'shared'}"]

    return share


def test_captures_of_a_store_that_runs_share_are_found_and_each_says_its_run(sftriage, run, share):
    # GIVEN a directory that two runs have put captures of one name into
    store = share("one", "two")
    rows = sftriage("traces", "list", *store, "--json").json
    assert [(row["run"], row["reference"]) for row in rows] == [("one", "resnet/one/w-1"), ("two", "resnet/two/w-1")]
    table = sftriage("traces", "list", *store).out
    assert ("one" in table, "two" in table) == (True, True)
    # WHEN one run is selected THEN only its captures are listed
    assert len(sftriage("traces", "list", *store, "--run-id", "two", "--json").json) == 1
    assert sftriage("traces", "show", "resnet/two/w-1", *store, "--json").json["run"] == "two"
    assert "2 captures match w-1" in sftriage("traces", "get", "w-1", *store).err
    # AND a step is found in both runs, without decisions: a store has none
    found = sftriage("traces", "for-step", 162, *store, "--json").json
    assert [row["run"] for row in found["captures"]] == ["one", "two"]
    assert found["decisions"] == []
    # AND a run without captures in the store lists none
    assert sftriage("traces", "list", *store, "--run", run.path, "--json").json == []


def test_a_store_that_has_gone_is_answered_for_by_its_catalogue(sftriage, share, tmp_path, monkeypatch):
    # GIVEN a store that was listed once, and that cannot be reached now
    store = share("run-1")
    assert len(sftriage("traces", "list", *store, "--json").json) == 1

    def away(self):
        raise StoreError("no route to it")

    monkeypatch.setattr(RemoteStore, "ids", away)
    outcome = sftriage("traces", "list", *store, "--json")
    assert (outcome.code, len(json.loads(outcome.out))) == (0, 1)
    assert "no route to it; showing what its catalogue has" in outcome.err
    # AND a store that was never listed fails
    (tmp_path / "other").mkdir()
    outcome = sftriage("traces", "list", "--store", f"file://{tmp_path / 'other'}")
    assert (outcome.code, outcome.out, outcome.err) == (1, "", "sftriage: no route to it\n")


def test_the_catalogues_url_comes_from_the_environment_or_a_file_and_is_not_repeated(
    sftriage, shared_run, tmp_path, monkeypatch
):
    url = "postgresql://me:s3cr3t@127.0.0.1:1/db"
    kept = tmp_path / "url"
    kept.write_text(url + "\n")
    for name, value in ((URL_VARIABLE, url), (FILE_VARIABLE, str(kept))):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            outcome = sftriage("traces", "list")
            assert (outcome.code, outcome.out) == (1, "")
            assert outcome.err.startswith("sftriage: postgresql://127.0.0.1:1/db: ")
            assert "s3cr3t" not in outcome.err
            # AND a run uses its own catalogue, even if the shared one is unreachable
            assert sftriage("traces", "list", "--run", shared_run.path).code == 0
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "nothing"))
    assert "No such file" in sftriage("traces", "list").err


def test_a_pinned_capture_stays_and_what_goes_goes_from_the_catalogue_too(sftriage, run):
    assert sftriage("traces", "pin", "w9", "--run", run.path).out == f"{SECOND} is pinned\n"
    pruned = sftriage("traces", "prune", "--run", run.path, "--bytes", "0Ki", "--json").json["captures"]
    assert [row["capture_id"] for row in pruned] == [FIRST, THIRD]
    rows = sftriage("traces", "list", "--run", run.path, "--json").json
    assert [row["capture_id"] for row in rows] == [SECOND]


@pytest.fixture
def broken(run):
    """A run with three captures in its catalogue, two of them damaged since."""
    captures = run.path / "captures"
    (captures / FIRST / "trace.json.gz").write_bytes(b"short")
    (captures / THIRD / "dump.pickle").unlink()
    return run


@pytest.fixture
def indexed(sftriage, run):
    """The same run, listed once while its captures were whole."""
    assert len(sftriage("traces", "list", "--run", run.path, "--json").json) == 3


def test_damage_since_a_capture_was_indexed_shows_in_every_list(sftriage, indexed, broken):
    outcome = sftriage("traces", "list", "--run", broken.path, "--json")
    rows = {row["capture_id"]: row for row in json.loads(outcome.out)}
    assert outcome.code == 0
    assert {name: row["state"] for name, row in rows.items()} == {FIRST: "damaged", SECOND: "whole", THIRD: "missing"}
    assert rows[SECOND]["problem"] is None
    assert "trace.json.gz: 5 bytes; expected" in rows[FIRST]["problem"]
    for words in (f"capture {FIRST} is damaged: ", f"capture {THIRD} is incomplete: ", "traces prune --damaged"):
        assert words in outcome.err
    # AND only then the table has a column for the state
    table = sftriage("traces", "list", "--run", broken.path).out
    assert re.search(rf"{FIRST} +│ damaged", table)
    assert re.search(rf"{THIRD} +│ missing", table)
    assert "state" not in sftriage("traces", "list", "--run", broken.path, "--stage", "forward").out
    # AND the captures of a step have a state
    found = sftriage("traces", "for-step", 120, "--run", broken.path, "--json").json
    assert {row["capture_id"]: row["state"] for row in found["captures"]} == {FIRST: "damaged", THIRD: "missing"}
    nearest = sftriage("traces", "for-step", 5, "--run", broken.path, "--json").json["nearest"]
    assert nearest["state"] == "damaged"
    assert "damaged" in sftriage("traces", "for-step", 120, "--run", broken.path).out


@pytest.mark.parametrize("reindexed", [False, True])
def test_what_a_damaged_capture_was_can_still_be_shown_and_its_good_files_fetched(
    sftriage, indexed, broken, tmp_path, reindexed
):
    if reindexed:
        sftriage("traces", "reindex", "--run", broken.path)
    # WHEN it is shown, also by a prefix, THEN its manifest and the damage are printed
    for name, state in ((FIRST, "damaged"), (THIRD[:12], "missing")):
        shown = sftriage("traces", "show", name, "--run", broken.path)
        assert shown.code == 0
        assert f"state       {state}: " in shown.out
        assert "because     " in shown.out
        values = sftriage("traces", "show", name, "--run", broken.path, "--json").json
        assert (values["state"], bool(values["problem"]), values["upload"]) == (state, True, None)
    # AND a missing or altered file is refused, but the intact file beside it is copied
    out = tmp_path / "out"
    for words in (["get", FIRST, "--out", out], ["open", FIRST, "--no-browser"], ["open", FIRST, "--offline"]):
        outcome = sftriage("traces", *words, "--run", broken.path)
        assert (outcome.code, outcome.out, out.exists()) == (1, "", False)
        assert "5 bytes" in outcome.err
    dump = sftriage("traces", "get", THIRD, "--artefact", "dump.pickle", "--out", out, "--run", broken.path)
    assert (dump.code, out.exists()) == (1, False)
    assert sftriage("traces", "get", THIRD, "--out", out, "--run", broken.path).code == 0


def test_reindex_forgets_what_is_damaged_and_prune_removes_it_when_it_is_to(sftriage, indexed, broken):
    outcome = sftriage("traces", "reindex", "--run", broken.path)
    assert "Indexed 1 capture of" in outcome.err
    assert "; 2 cannot be used" in outcome.err
    assert f"capture {FIRST} is damaged: " in outcome.err
    # GIVEN that no capture is too old, prune removes none without --damaged, and reports those it skipped
    left = sftriage("traces", "prune", "--age", "9999d", "--run", broken.path, "--json").json
    assert (left["captures"], [one["capture_id"] for one in left["left_alone"]]) == ([], [FIRST, THIRD])
    tried = sftriage("traces", "prune", "--damaged", "--dry-run", "--run", broken.path)
    assert tried.out.splitlines() == [f"{FIRST}  damaged", f"{THIRD}  damaged"]
    assert sftriage("traces", "prune", "--damaged", "--run", broken.path).code == 0
    # THEN they are gone, and no message mentions them
    outcome = sftriage("traces", "list", "--run", broken.path, "--json")
    assert ([row["capture_id"] for row in json.loads(outcome.out)], outcome.err) == ([SECOND], "")


def test_a_damaged_capture_is_fetched_from_where_its_verified_copy_is(sftriage, run, tmp_path):
    assert sftriage("traces", "upload", "--run", run.path, "--store", tmp_path / "elsewhere").code == 0
    wanted = LocalStore(run.path).manifest(FIRST).artefacts[0]
    (run.path / "captures" / FIRST / "trace.json.gz").write_bytes(b"short")
    outcome = sftriage("traces", "get", FIRST, "--run", run.path, "--out", tmp_path / "got")
    assert (outcome.code, sha256(tmp_path / "got")) == (0, wanted.sha256)
    # AND prune keeps it: removing it would remove the copy too
    assert "was verified" in sftriage("traces", "prune", "--damaged", "--run", run.path).err
    assert LocalStore(run.path).ids() == {FIRST, SECOND, THIRD}


def test_a_read_only_run_can_be_read(sftriage, run, monkeypatch, tmp_path):
    # GIVEN a run directory without a catalogue, in which nothing may be written
    access = os.access

    def refused(path, mode):
        return access(path, mode) and not (mode == os.W_OK and Path(path).is_relative_to(run.path))

    monkeypatch.setattr(os, "access", refused)
    for words in (["list", "--json"], ["show", FIRST], ["for-step", 162], ["get", FIRST, "--out", tmp_path / "got"]):
        assert sftriage("traces", *words, "--run", run.path).code == 0
    # THEN its catalogue is elsewhere
    assert not run.catalogue.exists()
    assert len(list((tmp_path / "cache" / "sftriage" / "catalogues").glob("*.db"))) == 1


@pytest.mark.parametrize("columns", [40, 60, 72, 80, 100, 120, 200])
def test_a_list_of_captures_fits_into_a_line_and_breaks_no_id(sftriage, shared_run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = sftriage("traces", "list", "--run", shared_run.path)
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= columns
    # THEN every row is whole, and has the captured steps
    for name in (FIRST, SECOND, THIRD):
        assert [line for line in lines if name in line]
    assert "960 to 964" in outcome.out
    if columns >= 60:
        assert all(line.endswith(("┓", "┃", "┩", "│", "┘")) for line in lines[1:])


def test_collapsed_stacks_are_made_of_those_that_were_sampled(sftriage, run, tmp_path):
    # GIVEN a capture with stacks, and others without
    path = tmp_path / "stacks.json"
    path.write_text(json.dumps(document()))
    files = [FileToStore(path, STACKS_NAME, "application/json", compress=False)]
    manifest = manifest_of("w300-349-r1-x-1")
    LocalStore(run.path).put_files(
        manifest.capture_id, files, lambda artefacts: manifest.model_copy(update={"artefacts": artefacts})
    )
    options = "--run", run.path, "--artefact", "stacks.folded", "--out", tmp_path, "--json"
    get = partial(sftriage, "traces", "get", *options)
    # WHEN they are fetched THEN each stack is a line, with the size and checksum of the file
    code, out, _ = get("w300")
    fetched = json.loads(out)
    folded = Path(fetched["path"])
    assert (code, folded.name) == (0, "w300-349-r1-x-1-stacks.folded")
    assert folded.read_text() == "MainThread;data;f?[2J (a.py:3) 5000\n"
    assert fetched["sha256"] == hashlib.sha256(folded.read_bytes()).hexdigest()
    # AND an existing file stays, and a capture without stacks has none to collapse
    assert get("w300").code == 2
    assert "has no artefact 'stacks.speedscope.json'" in get(SECOND).err


def test_GIVEN_the_capture_of_a_hang_THEN_show_has_its_reason_and_where_each_rank_is(sftriage, tmp_path):
    directory = run_in(tmp_path / "run")
    put_hang(directory.path)
    shown = sftriage("traces", "show", "c-9", "--run", directory.path)
    lines = shown.out.splitlines()
    assert (shown.code, lines[0], lines[1], shown.out.count(SENTENCE)) == (0, SENTENCE, NEXT_STEP, 1)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in cells] == ["2", "0, 1 and 3"]
    assert cells[0][3:5] == ["validate (train.py:52)", "all_gather of 3 floats, #126 of the default group"]
    assert "captured    step 60 of every rank" in shown.out
    assert "of rank 2" not in shown.out
    # AND all of it is in its values, its kind in the list, and the document opens as text
    values = sftriage("traces", "show", "c-9", "--run", directory.path, "--json").json
    assert values["hang"] == json.loads(msgspec.json.encode(EVIDENCE))
    assert values["cause"]["code"] == "different_collective"
    assert "different collective" in sftriage("traces", "list", "--run", directory.path).out
    opened = sftriage("traces", "open", "c-9", "--run", directory.path, "--json").json
    assert (opened["opens_with"], opened["content"]["step"]) == ("text", 60)


def test_GIVEN_a_damaged_capture_of_a_hang_THEN_show_has_what_the_manifest_has(sftriage, tmp_path):
    directory = run_in(tmp_path / "run")
    put_hang(directory.path, damaged=True)
    shown = sftriage("traces", "show", "c-9", "--run", directory.path)
    assert (shown.code, f"found       {SENTENCE}" in shown.out, "│" in shown.out) == (0, True, False)
