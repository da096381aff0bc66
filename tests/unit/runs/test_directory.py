"""A run directory says what was run, to its owner alone, and is never half written."""

import dataclasses
import json
from pathlib import Path

import pytest

from sftriage.errors import InputError, UsageError
from sftriage.model.windows import plain
from sftriage.runs.directory import RunDirectory, RunInfo, create, find_run, read_info, remember
from sftriage.web.report import run_named

INFO = RunInfo(
    "20260101-000000-abcd", "job", "2026-01-01T00:00:00+00:00", ("torchrun", "x.py"), "p", "0" * 64, "/rings"
)
NONSENSE = {"rings": 5}, {"job": {"a": 1}}, {"command": [1]}, {"command": 5}, {"policy": None}, {"store": 5}


def test_what_was_run_can_be_read_again(tmp_path):
    # GIVEN a job named by bytes that are no UTF-8, as a command line gives them
    info = dataclasses.replace(INFO, job="a\udcff")
    run = create(tmp_path / "run", info, "the: policy\n")
    assert read_info(run) == info
    assert run.policy_file.read_text() == "the: policy\n"


def test_it_is_private_even_in_a_directory_that_others_may_enter(tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    run = create(tmp_path / "run", INFO, "")
    for path in run.path.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_second_run_is_not_written_over_the_first(tmp_path):
    create(tmp_path / "run", INFO, "")
    with pytest.raises(UsageError, match="already holds a run"):
        create(tmp_path / "run", dataclasses.replace(INFO, job="other"), "")
    assert read_info(RunDirectory(tmp_path / "run")).job == "job"


def test_a_place_where_nothing_can_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the run directory .*file/run"):
        create(tmp_path / "file" / "run", INFO, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a run's record"),
        ("[]", "not a run's record"),
        ("{}", "not a run's record: 'version'"),
        (json.dumps({"version": 99}), "version 99 is newer"),
        (json.dumps({"version": "one"}), "not a run's record"),
        *((json.dumps({**plain(INFO), **change}), "not a run's record") for change in NONSENSE),
    ],
)
def test_an_invalid_record_is_refused_in_words(tmp_path, content, message):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match=message):
        read_info(RunDirectory(tmp_path))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Two runs of this machine, in two directories; that of the second is the newest."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = []
    for name in ("mine", "others"):
        (tmp_path / name).mkdir()
        runs.append(create(tmp_path / name / "sftriage-runs" / f"{name}-1", INFO, ""))
        remember(runs[-1])
    return runs


def test_the_newest_run_is_that_of_the_directory_one_stands_in(tmp_path, monkeypatch, started):
    mine, others = started
    for place, found in (("mine", mine), ("others", others), (".", others), (mine.path, mine)):
        monkeypatch.chdir(tmp_path / place)
        assert find_run(None).path == found.path


def test_a_run_goes_by_its_path_from_here_or_by_its_name(tmp_path, monkeypatch, started):
    mine, _ = started
    monkeypatch.chdir(tmp_path / "others")
    assert find_run(Path("../mine/sftriage-runs/mine-1")).info_file.samefile(mine.info_file)
    assert find_run(Path("mine-1")).path == mine.path
    with pytest.raises(UsageError, match="no such directory"):
        find_run(Path("mine-2"))
    # AND where no run was started, the newest of the machine is named and not taken
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"no run was started in .*elsewhere; the newest .* is .*others-1"):
        find_run(None)


def test_the_name_that_a_report_prints_finds_its_run_from_there(tmp_path, monkeypatch, started):
    for place in (".", "mine", "others", "mine/sftriage-runs", started[0].path):
        monkeypatch.chdir(tmp_path / place)
        for run in started:
            assert find_run(Path(run_named(run.path))).info_file.samefile(run.info_file)
