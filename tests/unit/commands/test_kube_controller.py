"""Which run a job's controller resumes; `tests/integration/test_kube_controllers.py` runs one."""

from dataclasses import replace

import pytest

from sftriage.commands.cluster_controllers import KEPT_RUNS, _directory
from sftriage.runs.directory import RunInfo, create, write_info

INFO = RunInfo("run-1", "resnet", "2026-03-01T00:00:00+00:00", (), "default", "0" * 64, "/nowhere", ended_at="")


def run(path, *, ended: bool, begun: bool = True):
    directory = create(path, INFO, "")
    if begun:
        directory.hub.write_text("{}")
    if ended:
        write_info(directory, replace(INFO, ended_at="2026-03-01T01:00:00+00:00"))
    return directory


CASES = {
    "no run": ([], "run", False),
    "one that runs": ([{"ended": False}], "run", True),
    "one that has ended": ([{"ended": True}], "run-2", False),
    "one that runs, after others": ([{"ended": True}, {"ended": False}], "run-2", True),
    "one that never began": ([{"ended": False, "begun": False}], "run-2", False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_which_run_is_resumed(tmp_path, case):
    runs, name, resumes = case
    for number, about in enumerate(runs, start=1):
        run(tmp_path / ("run" if number == 1 else f"run-{number}"), **about)
    assert _directory(tmp_path) == (tmp_path / name, resumes)


def test_only_the_last_few_runs_keep_their_steps(tmp_path):
    made = [run(tmp_path / name, ended=True) for name in ("run", *(f"run-{n}" for n in range(2, KEPT_RUNS + 3)))]
    assert _directory(tmp_path) == (tmp_path / f"run-{KEPT_RUNS + 3}", False)
    assert [directory.steps.exists() for directory in made] == [False, False, *[True] * KEPT_RUNS]
    assert all(directory.info_file.exists() for directory in made)
