"""Answers to an assistant: short, with their sources, and only about the runs of the directory and the store."""

import json

import pytest

from sftriage.assistants.answers import MAX_CHARACTERS, Answers
from sftriage.errors import SftriageError, UsageError
from sftriage.policy.in_force import find
from sftriage.traces.remote import RemoteStore
from tests.scenario import held, run_at, verdict

HOSTILE = ["..", ".", "../run", "/etc", "run/../run", "run/", "\0", "a" * 5000, "run\n", "*", "~", "%2e%2e"]


@pytest.fixture
def answers(captured, tmp_path) -> Answers:
    """A directory with a captured run, a damaged one, a file, and a link to a run elsewhere."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    captured.directory.policy_file.write_text(find("default").read_text())
    (tmp_path / "notes.txt").write_text("none")
    elsewhere = run_at(tmp_path.parent / f"{tmp_path.name}-elsewhere" / "secret")
    elsewhere.decide(verdict(20, "suspect"))
    (tmp_path / "link").symlink_to(elsewhere.directory.path)
    return Answers(tmp_path)


def test_the_runs_of_the_directory_are_listed_and_no_others_and_nothing_is_written(answers):
    before = {path: path.stat().st_mtime_ns for path in answers.root.rglob("*")}
    (run,) = answers.list_runs()["runs"]
    assert (run["run"], run["job"], run["health"], run["steps"]) == ("run", "resnet", "captured", [90, 149])
    assert run["says"].startswith("Rank 2 is slow in data")
    # AND a run directory itself has one run
    assert [run.path.name for run in Answers(answers.root / "run").runs()] == ["run"]
    for tool in (answers.run_health, answers.whatif, lambda: answers.captures_of_step(162)):
        tool()
    assert answers.capture_findings("c-1")["cites"]["captures"] == ["c-1"]
    assert before == {path: path.stat().st_mtime_ns for path in answers.root.rglob("*")}


def test_an_empty_answer_says_why(answers):
    nothing = answers.captures_of_step(5000)
    assert (nothing["captures"], nothing["nearest"]["capture"], nothing["cites"]["step"]) == ([], "c-1", 5000)
    assert nothing["why_none"]
    assert answers.verdicts(5000, 6000)["why_none"]
    with pytest.raises(UsageError, match="the last one comes before the first"):
        answers.verdicts(100, 50)


@pytest.mark.parametrize("name", [*HOSTILE, "link", "broken", "notes.txt"])
def test_a_name_leads_nowhere_else(answers, name):
    tools = (
        lambda: answers.run_health(name),
        lambda: answers.verdicts(0, None, name),
        lambda: answers.explain_window("120", name),
        lambda: answers.captures_of_step(162, name),
        lambda: answers.list_captures(name, False),
        lambda: answers.capture_findings("c-1", name, False),
        lambda: answers.whatif(name),
        lambda: answers.report(name),
    )
    for tool in tools:
        with pytest.raises(UsageError, match="there is no run") as refused:
            tool()
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("name", [*HOSTILE, "../captures/c-1", "c-1/manifest.json"])
def test_a_capture_is_one_of_the_run_or_of_the_store(answers, name, tmp_path):
    with pytest.raises(UsageError):
        answers.capture_findings(name)
    with pytest.raises(UsageError):
        answers.explain_window(name)
    with pytest.raises(SftriageError):
        Answers(answers.root, str(tmp_path / "shared")).capture_findings(name, "", True)
    with pytest.raises(UsageError, match="this server has no store"):
        answers.list_captures("", True)


def test_the_captures_of_a_store_are_found_by_job_and_run(answers, captured, store, tmp_path, monkeypatch):
    # GIVEN a store elsewhere to which the capture was uploaded
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "shared").mkdir()
    url = str(tmp_path / "shared")
    manifest = store.manifest("c-1")
    remote = RemoteStore.open(url, job=manifest.job, run=manifest.run)
    for artefact in manifest.artefacts:
        file = captured.directory.path / "captures" / "c-1" / artefact.name
        remote.put_artefact("c-1", artefact, file.read_bytes())
    remote.put_manifest(manifest)
    shared = Answers(answers.root, url)
    (row,) = shared.list_captures("", True)["captures"]
    assert (row["rank"], row["steps"]) == (2, [160, 164])
    assert shared.capture_findings(row["capture"], "", True)["cites"]["captures"] == ["c-1"]


def test_an_answer_is_small_however_long_a_run_is(run, tmp_path):
    # GIVEN a run whose windows alternate, with very long texts
    for number in range(300):
        judged = verdict(10 * number, "suspect", rank=number) if number % 2 else held(10 * number, rank=number)
        run.decide(judged, "hold", "because " * 400)
    answers = Answers(tmp_path)
    found = answers.verdicts(0, None)
    assert 0 < len(found["newest_first"]) < 300
    assert len(found["newest_first"]) + found["left_out"] == 300
    for answer in (found, answers.run_health(), answers.captures_of_step(700), answers.list_runs()):
        assert len(json.dumps(answer)) <= MAX_CHARACTERS
    assert len(answers.report()) <= MAX_CHARACTERS + 100
