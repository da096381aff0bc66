"""How a job's command changes so that its ranks start under nsys."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.capture.nsys import NsysPlace
from sftriage.errors import UsageError
from sftriage.policy.loading import find
from sftriage.runs.directory import RunDirectory
from sftriage.runtime import nsys_launch as nsys
from sftriage.runtime.local import LocalRun
from sftriage.runtime.nsys_launch import NsysLaunch, place_in, remove_place, wrapped

SCRIPT = "/run/rank"
DEADLINE_S = 20.0


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("torchrun --nproc-per-node 2 train.py", False),
        ("/venv/bin/torchrun train.py", False),
        ("python -m torch.distributed.run train.py", False),
        ("python3 -m torch.distributed.launch train.py", False),
        ("accelerate launch train.py", False),
        ("python train.py", True),
        ("/venv/bin/python3.11 -m package.train", True),
        ("python -m package -m torch", True),
        ("mpirun -n 4 python train.py", False),
        ("sh job.sh", False),
        ("sh -c '$SFTRIAGE_NSYS_RANK -- python train.py'", False),
        ("torchrun --no-python $SFTRIAGE_NSYS_RANK -- python train.py", False),
    ],
)
def test_a_command_that_is_itself_the_rank_is_started_by_the_script(command, own):
    words = tuple(command.split())
    assert wrapped(words, SCRIPT) == ((SCRIPT, "--", *words) if own else words)


@pytest.mark.parametrize("flag", ["--no-python", "--no_python"])
def test_ranks_that_would_start_without_nsys_are_said_so_beforehand(flag):
    with pytest.raises(UsageError, match="SFTRIAGE_NSYS_RANK"):
        wrapped(("torchrun", flag, "python", "train.py"), SCRIPT)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An nsys on the PATH that says this."""

    def put(script):
        path = tmp_path / "bin" / "nsys"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o700)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return put


def test_a_run_that_cannot_begin_leaves_no_place_behind(fake, tmp_path):
    fake("echo NVIDIA Nsight Systems version 2022.4.2.1")
    run = (sys.executable, "-m", "torch.distributed.run", "--no-python", "train")
    with pytest.raises(UsageError, match="SFTRIAGE_NSYS_RANK"):
        LocalRun(run, "job", [find("default")], lambda _: (), out=tmp_path / "run", nsys_trace="nvtx")
    assert not list((tmp_path / "run").glob("nsys-*"))


def test_a_launch_has_a_private_place_a_script_and_is_gone_when_closed(fake, tmp_path):
    fake("echo NVIDIA Nsight Systems version 2022.4.2.1")
    launch = NsysLaunch("20260101-a", "nvtx,osrt", tmp_path)
    assert (launch.place.prefix, launch.place.traces) == ("sft-20260101-a", ("nvtx", "osrt"))
    environment = launch.environment({"PYTHON_EXEC": "/own/python"})
    script = Path(environment["PYTHON_EXEC"])
    assert script.parent == launch.place.tmp
    assert os.access(script, os.X_OK)
    assert launch.place.tmp.stat().st_mode & 0o077 == 0
    assert environment["SFTRIAGE_NSYS_PYTHON"] == "/own/python"
    assert "SFTRIAGE_NSYS_PYTHON" not in launch.environment({})
    assert "SFTRIAGE_NSYS_ARMED" not in environment
    # Whoever takes over finds the same.
    assert place_in(RunDirectory(tmp_path)) == launch.place
    remove_place(launch.place)
    assert not launch.place.tmp.exists()


def test_ranks_that_are_armed_leave_their_reports_where_only_this_run_looks(fake, tmp_path):
    fake("echo NVIDIA Nsight Systems version 2022.4.2.1")
    launch = NsysLaunch("20260101-a", "nvtx", tmp_path, armed=True)
    assert launch.place.armed is not None
    assert launch.environment({})["SFTRIAGE_NSYS_ARMED"] == str(launch.place.armed)
    assert launch.place.armed.parent == launch.place.tmp
    assert place_in(RunDirectory(tmp_path)) == launch.place
    remove_place(launch.place)


def test_armed_ranks_have_to_trace_the_range_that_they_wait_for(fake, tmp_path):
    fake("echo NVIDIA Nsight Systems version 2022.4.2.1")
    with pytest.raises(UsageError, match="--nsys-armed: nsys waits for an NVTX range, and --nsys-trace osrt has no"):
        NsysLaunch("20260101-a", "osrt", tmp_path, armed=True)


def test_a_note_that_names_another_directory_has_nothing_removed(tmp_path):
    kept = tmp_path / "mine"
    kept.mkdir()
    remove_place(NsysPlace(Path("/usr/bin/nsys"), "sft", ("nvtx",), kept))
    assert kept.exists()


@pytest.mark.parametrize(
    ("script", "traces", "reason"),
    [
        ("echo NVIDIA Nsight Systems version 2019.1", "nvtx", "too old"),
        ("echo what", "nvtx", "no version"),
        ("exec sleep 100", "nvtx", "hung"),
        ("echo version 2022.4", "nvtx,everything", "--nsys-trace"),
        ("echo version 2022.4", "", "--nsys-trace"),
    ],
)
def test_an_nsys_that_will_not_do_is_said_before_the_job_starts(fake, tmp_path, monkeypatch, script, traces, reason):
    monkeypatch.setattr(nsys, "_ASK_S", 0.5)
    fake(script)
    with pytest.raises(UsageError, match=reason):
        NsysLaunch("run", traces, tmp_path)
    assert not list(tmp_path.glob("nsys-*"))


def test_a_missing_nsys_is_said_before_the_job_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no nsys on the PATH"):
        NsysLaunch("run", "nvtx", tmp_path)


def test_where_no_program_may_run_another_directory_is_taken(fake, tmp_path, monkeypatch):
    fake("echo version 2022.4")
    real = os.statvfs

    def statvfs(path):
        found = real(path)
        return type("found", (), {"f_flag": found.f_flag | os.ST_NOEXEC}) if path == tmp_path else found

    monkeypatch.setattr(os, "statvfs", statvfs)
    launch = NsysLaunch("run", "nvtx", tmp_path)
    assert launch.place.tmp.parent != tmp_path
    remove_place(launch.place)


def test_agents_of_nsys_that_outlive_their_ranks_are_ended_with_the_run_and_no_others(tmp_path):
    # GIVEN processes that look like agents of nsys, and what starts one: of a run's sessions, of another run's, and one
    # that is no agent
    def started(*words):
        return subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE)

    ours = [started("--start-agent", f"--session-name=sft-run-1-{rank}.0") for rank in range(2)]
    ours += [started("/usr/bin/nsys", "launch", "--session-new=sft-run-1-0.1")]
    left = Path(f"/dev/shm/quadd-agent-instance-{ours[0].pid}")
    left.touch()
    others = [
        started("--start-agent", "--session-name=sft-run-1-0-0.0"),
        started("launch", "--session-name=sft-run-1-0.0"),
    ]
    try:
        # WHEN a run is over whose note names no run's sessions, THEN nobody is ended
        remove_place(NsysPlace(Path("/usr/bin/nsys"), "sft-", ("nvtx",), tmp_path))
        assert [process.poll() for process in (*ours, *others)] == [None] * 5
        # WHEN the run is over, THEN its agents are ended, and the others are not
        remove_place(NsysPlace(Path("/usr/bin/nsys"), "sft-run-1", ("nvtx",), tmp_path))
        assert [process.wait(DEADLINE_S) for process in ours] == [-signal.SIGKILL] * 3
        # AND so is the shared memory that an agent leaves where it is killed
        assert not left.exists()
        assert [process.poll() for process in others] == [None] * 2
    finally:
        for process in (*ours, *others):
            process.kill()
            process.communicate()
