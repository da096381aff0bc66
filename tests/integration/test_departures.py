"""`sftriage run` names the rank that went first, on real jobs that break."""

import re
import signal
import subprocess
import sys

import pytest

from tests.integration.processes import DEADLINE_S, FORKED, JOBS, SLOW_DATA, TORCHRUN, ended, free_port, wait_until
from tests.integration.runs import on_record

LEAVING, AT = JOBS / "leaving.py", 12
FOLLOWS = "rank 0 then failed at train (leaving.py:{}) in backward (step 12): Connection "
BACKWARD = 1 + LEAVING.read_text().splitlines().index("        loss.backward()")
RAISES = "Rank 1 went first: ValueError: no loss, at check (leaving.py:"
LEAVES = {
    # how rank 1 leaves: the beginning of the last line, and whether its launcher is torchrun, or forks ranks
    "terminated": ("Rank 1 went first: killed by SIGTERM between stages (step 12); ", False),
    "ends": ("Rank 1 went first: it ended in order (exit status 0) between stages (step 12); ", False),
    "raises": (RAISES, True),
    "sample": ("Rank 1 went first: KeyError: 'no-such-sample', at __getitem__ (leaving.py:", False),
    "worker": ("Rank 1's DataLoader worker (process ", False),
    "early": ("Rank 1 went first: FileNotFoundError: config.yaml, at train (leaving.py:", True),
}


@pytest.fixture
def watched(start, environment, tmp_path):
    """Run a job that breaks; return what sftriage prints, and the events of its run."""

    def watched(*command, options=(), status=1, **more):
        words = ("run", "--out", tmp_path / "run", *options, "--", *map(str, command))
        job = start(*words, env={**environment, **more})
        _, log = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == status, log
        said = [line.removeprefix("sftriage: ") for line in log.splitlines() if line.startswith("sftriage: ")]
        return said, on_record(tmp_path / "run", "broken")

    return watched


def started(watched, how, method):
    """The job whose ranks torch.multiprocessing starts by a method."""
    return watched(sys.executable, LEAVING, how, AT, method, MEET_AT=str(free_port()))


@pytest.mark.parametrize("how", LEAVES)
def test_the_last_line_names_the_rank_that_went_first_and_what_the_others_waited_in(watched, how):
    # WHEN rank 1 of an unedited job leaves
    last, by_torchrun = LEAVES[how]
    said, (broken,) = watched(*TORCHRUN, 2, LEAVING, how, AT) if by_torchrun else started(watched, how, "fork")
    # THEN the last line says how and where
    assert said[-1].startswith(last), said
    assert [departure["ranks"] for departure in broken["first"]] == [[1]]
    # AND what happened to the other one
    assert [departure["ranks"] for departure in broken["others"]] == [[0]]
    if how == "worker":
        assert broken["first"][0]["status"] == -signal.SIGKILL
    if how != "early":
        assert broken["first"][0]["step"] == AT
        (other,) = broken["others"]
        # (torchrun may end it before it has noticed)
        assert other["how"] in ("gave_up", "killed")
        assert other["stage"] == "backward"
        assert (other["how"] == "killed") or FOLLOWS.format(BACKWARD) in said[-1]


def test_ranks_that_torch_spawns_are_watched_by_their_parent(watched):
    said, (broken,) = started(watched, "raises", "spawn")
    assert said[-1].startswith(RAISES), said
    assert broken["first"][0]["place"]["function"] == "check"


def test_of_ranks_that_do_not_agree_the_one_that_gloo_aborts_went_first(watched):
    # WHEN rank 1 exchanges more than rank 0 expects THEN the last line names who is aborted for it, and the signal
    said, (broken,) = started(watched, "aborts", "fork")
    assert re.match(r"Rank [01] went first: killed by SIGABRT in ", said[-1]), said
    assert broken["first"][0]["status"] == -signal.SIGABRT


def test_without_seams_the_exit_status_is_unknown_but_a_monitor_still_notes_exceptions(watched, tmp_path):
    # GIVEN a job with a Monitor, whose launcher is not watched
    script = tmp_path / "noting.py"
    script.write_text(f"import sftriage\nmonitor = sftriage.Monitor()\n{MONITORED}")
    said, (broken,) = watched(*TORCHRUN, 2, script, options=("--no-auto",))
    assert said[-1].startswith("Rank 1 went first: ValueError: bad, at load (noting.py:"), said
    assert "in data (step 20)" in said[-1]
    assert broken["first"][0]["status"] is None


MONITORED = """
import time
def load(step):
    time.sleep(0.01)
    if step == 20 and monitor.info.rank == 1:
        raise ValueError("bad")
for step in range(4000):
    with monitor.step():
        with monitor.stage("data"):
            load(step)
"""


def test_an_attempt_that_broke_is_named_although_the_job_was_restarted(watched):
    # GIVEN a job whose rank is killed in its first attempt, and which is ended in order by its second
    restarting = (*TORCHRUN[:-1], "--max-restarts=1", TORCHRUN[-1])
    script = JOBS / "restarting.py"
    said, (broken,) = watched(*restarting, 2, script, status=0)
    assert said[-1].startswith("Attempt 0: Rank 1 went first: killed by SIGKILL in data (step 20)"), said
    assert said[-1].endswith("The job was restarted.")
    assert broken["restarted"]


@pytest.mark.parametrize(("signum", "launcher"), [(signal.SIGINT, FORKED), (signal.SIGTERM, TORCHRUN)])
def test_a_job_that_is_ended_names_no_rank(start, environment, tmp_path, signum, launcher):
    command = (*launcher, 2, SLOW_DATA, tmp_path / "never")
    job = start("run", "--out", tmp_path / "run", "--", *map(str, command), env=environment)
    with ended(job):
        wait_until(lambda: len([*(tmp_path / "run" / "steps").glob("*.steps")]) == 2)
        job.send_signal(signum)
        _, log = job.communicate(timeout=DEADLINE_S)
    assert "went first" not in log
    assert not on_record(tmp_path / "run", "broken")


def test_a_single_process_that_is_killed_is_named_with_its_step(watched, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, sftriage\nm = sftriage.Monitor()\nfor step in range(9):\n with m.step(): pass\nos._exit(5)\n"
    )
    said, _ = watched(sys.executable, script, status=5)
    assert said[-1] == "Rank 0 ended: exit status 5 after step 8."


def test_a_script_that_raises_prints_the_same_as_without_us(start, environment, tmp_path):
    script = tmp_path / "raises.py"
    script.write_text("import torch\ndef main():\n    raise ValueError('bad')\nmain()\n")
    words = [sys.executable, str(script)]
    alone = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    job = start("run", "--out", tmp_path / "run", "--", *words, env=environment)
    output, log = job.communicate(timeout=DEADLINE_S)
    assert (job.returncode, output) == (alone.returncode, alone.stdout)
    assert alone.stderr in log
