"""Commands on runs and policies: which run is meant, and what a person who errs is told."""

import json

import pytest

from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.local import job_name
from sftriage.traces.store import LocalStore

INFO = RunInfo("20260101-000000-abcd", "job", "2026-01-01T00:00:00+00:00", ("true",), "default", "0" * 64, "/nowhere")


@pytest.fixture
def run(tmp_path):
    """A run directory in which nothing has happened yet."""
    return create(tmp_path / "run", INFO, "")


@pytest.mark.parametrize("command", [["decisions"], ["traces", "list"], ["traces", "show", "w0-9-r0-x-1"]])
def test_without_any_run_it_is_said_how_to_start_one(sftriage, command):
    outcome = sftriage(*command)
    assert outcome.code == 2
    assert "start one with `sftriage demo` or `sftriage run`" in outcome.err


@pytest.mark.parametrize("command", [["decisions"], ["traces", "list"]])
def test_a_directory_that_is_no_run_is_named(sftriage, tmp_path, command):
    outcome = sftriage(*command, "--run", tmp_path)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{tmp_path} is not a run directory" in outcome.err


def test_an_empty_run_lists_nothing(sftriage, run):
    assert json.loads(sftriage("decisions", "--run", run.path, "--json").out) == []
    assert json.loads(sftriage("traces", "list", "--run", run.path, "--json").out) == []


@pytest.mark.parametrize("capture_id", ["../../etc/passwd", "w0-9-r0-x-1", "", ".hidden", "a/b"])
def test_a_capture_that_is_not_there_or_leads_elsewhere_is_refused(sftriage, run, tmp_path, capture_id):
    for command in ("show", "get"):
        outcome = sftriage("traces", command, capture_id, "--run", run.path)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith("sftriage: ")


def test_a_second_run_in_one_directory_is_refused(sftriage, run):
    outcome = sftriage("run", "--out", run.path, "--", "true")
    assert outcome.code == 2
    assert "already holds a run" in outcome.err


def test_a_launcher_that_is_not_there_is_named(sftriage, tmp_path):
    outcome = sftriage("run", "--out", tmp_path / "new", "--", "torchrunn", "train.py")
    assert outcome.code == 2
    assert "cannot start torchrunn: no such program" in outcome.err
    # AND the directory is free for the next try
    assert not (tmp_path / "new").exists()


def test_an_unknown_policy_lists_those_there_are(sftriage, tmp_path):
    outcome = sftriage("run", "--policy", "defualt", "--", "true")
    assert outcome.code == 2
    assert "default" in outcome.err


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("data:2", "not STAGE:RANK:MS"),
        ("data:9:40", "no rank 9 among 4"),
        ("loader:1:40", "a stage of data, forward"),
        ("data:-1:40", "a rank from 0"),
        ("data:1:-4", "0 to 60000 ms"),
        ("data:1:nan", "0 to 60000 ms"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_before_anything_starts(sftriage, tmp_path, fault, said):
    outcome = sftriage("demo", "--fault", fault, "--out", tmp_path / "new")
    assert (outcome.code, (tmp_path / "new").exists()) == (2, False)
    assert said in outcome.err


def test_none_beside_a_fault_is_refused(sftriage, tmp_path):
    outcome = sftriage("demo", "--fault", "none", "--fault", "data:1:5", "--out", tmp_path / "new")
    assert outcome.code == 2


def test_policy_mistakes_are_shown_with_file_line_and_field(sftriage, tmp_path):
    policy = tmp_path / "mine.yaml"
    policy.write_text(
        "apiVersion: sftriage.dev/v1alpha1\nkind: TriagePolicy\nmetadata: {name: x}\n"
        "spec:\n  rules:\n    - name: a\n      match: {gain: '>= 5'}\n      capture: {stepz: 3}\n",
        encoding="utf-8",
    )
    outcome = sftriage("policy", "validate", policy)
    assert outcome.code == 2
    assert f"{policy}:7:" in outcome.err
    assert 'stepz: unknown field; did you mean "steps"?' in outcome.err


def test_the_policies_that_ship_are_valid_and_listed(sftriage):
    assert sftriage("policy", "validate", "default", "observe-only").out == "2 valid\n"
    assert "observe-only" in sftriage("policy", "list").out


@pytest.mark.parametrize(
    ("command", "job"),
    [
        (["torchrun", "--nproc-per-node", "8", "jobs/train.py", "--lr", "1"], "train"),
        (["python", "-m", "my.package.train", "--steps", "3"], "train"),
        (["/usr/bin/launch", "--all"], "launch"),
    ],
)
def test_a_job_is_called_after_its_script(command, job):
    assert job_name(None, command) == job


def test_a_capture_that_a_crash_left_uncatalogued_is_listed_all_the_same(sftriage, run, trace, make_manifest):
    # GIVEN a capture in the store of which the catalogue does not know
    LocalStore(run.path).put("w100-149-r2-x-1", trace, lambda artefact: make_manifest("w100-149-r2-x-1", artefact))
    # WHEN the captures are listed
    rows = json.loads(sftriage("traces", "list", "--run", run.path, "--json").out)
    # THEN it is there, and can be shown and fetched
    assert [(row["capture_id"], row["rank"], row["stage"]) for row in rows] == [("w100-149-r2-x-1", 2, "data")]
    assert "rank 2 in data" in sftriage("traces", "show", "w100-149-r2-x-1", "--run", run.path).out
    target = run.path / "mine.gz"
    got = sftriage("traces", "get", "w100-149-r2-x-1", "--run", run.path, "--out", target, "--json")
    assert json.loads(got.out)["path"] == str(target)
    # AND it is not overwritten unasked, and a byte that changed is noticed
    assert sftriage("traces", "get", "w100-149-r2-x-1", "--run", run.path, "--out", target).code == 2
    stored = run.path / "captures" / "w100-149-r2-x-1" / "trace.json.gz"
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 1
    stored.write_bytes(content)
    damaged = sftriage("traces", "get", "w100-149-r2-x-1", "--run", run.path, "--out", target, "--force")
    assert damaged.code == 1
    assert "sha256" in damaged.err


def test_a_damaged_capture_is_reported_and_the_others_listed(sftriage, run, trace, make_manifest):
    for capture_id in ("w0-9-r1-x-1", "w0-9-r2-x-2"):
        LocalStore(run.path).put(capture_id, trace, lambda artefact, it=capture_id: make_manifest(it, artefact))
    (run.path / "captures" / "w0-9-r1-x-1" / "manifest.json").write_text("{}", encoding="utf-8")
    listed = sftriage("traces", "list", "--run", run.path, "--json")
    assert [row["capture_id"] for row in json.loads(listed.out)] == ["w0-9-r2-x-2"]
    assert "w0-9-r1-x-1" in listed.err


def test_a_run_with_nothing_but_damage_does_not_send_people_to_its_decisions(sftriage, run, trace, make_manifest):
    # GIVEN a run without any capture THEN its decisions say why, and the command for that is said
    assert f"`sftriage decisions --run {run.path}` says why" in sftriage("traces", "list", "--run", run.path).err
    # WHEN there is one, and it is damaged THEN that is why, and is said
    LocalStore(run.path).put("w0-9-r1-x-1", trace, lambda artefact: make_manifest("w0-9-r1-x-1", artefact))
    (run.path / "captures" / "w0-9-r1-x-1" / "manifest.json").write_text("{}", encoding="utf-8")
    listed = sftriage("traces", "list", "--run", run.path)
    assert listed.out == ""
    assert "capture w0-9-r1-x-1 is damaged" in listed.err
    assert f"No capture in {run.path / 'captures'} can be used." in listed.err
    assert "decisions" not in listed.err
