"""What a run has outside its directory: rings, private and swept, and how ranks start under nsys."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sftriage.agent.nsys import NsysPlace
from sftriage.base.files import Note
from sftriage.base.process import Process
from sftriage.errors import UsageError
from sftriage.policy.in_force import find
from sftriage.runs.directory import RunDirectory
from sftriage.runtime import nsys_launch as nsys
from sftriage.runtime.carrying import FOLDER, carry
from sftriage.runtime.local import LocalRun
from sftriage.runtime.nsys_launch import NsysLaunch, place_in, remove_place, wrapped
from sftriage.runtime.rings import make_rings_directory, note_steps, remove_rings_directory
from sftriage.trainer.monitor import Monitor
from sftriage.windows.logs import LogReader

HOLD = """
import sys
from sftriage import Monitor
monitor = Monitor(rings=sys.argv[1])
with monitor.step():
    pass
print("ready", flush=True)
sys.stdin.read()
"""


def killed(rings):
    """These rings, as those of a run that was killed."""
    with subprocess.Popen(["true"]) as process:
        (rings / "owner").write_text(str(process.pid))
    return rings


@pytest.fixture
def left(tmp_path):
    """The rings of a run that was killed."""
    return killed(make_rings_directory("run-1", tmp_path))


def test_it_is_private_to_its_owner(left):
    assert [path.stat().st_mode & 0o077 for path in (left, left.parent)] == [0, 0]


@pytest.mark.parametrize("link", [False, True])
def test_a_place_that_others_may_write_or_a_link_is_refused(tmp_path, link):
    place, elsewhere = tmp_path / f"sftriage-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if link:
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(UsageError, match="not a private directory"):
        make_rings_directory("run-1", tmp_path)


def test_the_steps_of_a_killed_run_are_kept_before_its_rings_are_swept(tmp_path, left):
    # GIVEN a run that was killed before it had kept its trainer's steps, all of which have ended since
    (steps := tmp_path / "steps").mkdir()
    note_steps(left, steps)
    subprocess.run([sys.executable, "-c", HOLD, str(left)], input=b"", check=True, capture_output=True)
    carry(tmp_path / FOLDER)
    # WHEN the next run sweeps THEN they are where it would have kept them, and nothing else is left
    make_rings_directory("run-2", tmp_path)
    assert not left.exists()
    assert not (tmp_path / FOLDER).exists()
    (log,) = steps.glob("*.steps")
    assert len(LogReader(log).read()) == 1


@pytest.mark.parametrize("of", ["owner", "launcher"])
def test_a_run_is_alive_with_its_watcher_or_its_launcher(tmp_path, left, of):
    # GIVEN a run whose trainers are yet to make their rings, of which one of these two is there
    Note(left / of, Process).save(Process.of(os.getpid()))
    # WHEN the next run sweeps THEN it is left alone
    make_rings_directory("run-2", tmp_path)
    assert left.exists()
    # AND not where the pid is another process's by now
    (left / of).write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1}))
    make_rings_directory("run-3", tmp_path)
    assert not left.exists()


def test_what_nsys_left_of_a_killed_run_goes_with_its_rings_and_nothing_of_others(tmp_path):
    # GIVEN two runs under nsys, each with a place and an agent: one was killed, the other lives
    def under_nsys(name):
        rings, run = make_rings_directory(name, tmp_path), RunDirectory(tmp_path / name)
        place = run.path / "nsys-1"
        for made in (run.steps, place):
            made.mkdir(parents=True)
        note = {"binary": "/usr/bin/nsys", "prefix": f"sft-{name}", "traces": ["nvtx"], "tmp": str(place)}
        run.nsys.write_text(json.dumps(note))
        note_steps(rings, run.steps)
        words = ("--start-agent", f"--session-name=sft-{name}-0.0")
        return rings, place, subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE)

    dead, lives = under_nsys("run-1"), under_nsys("run-2")
    killed(dead[0])
    try:
        # WHEN the next run sweeps THEN all of the one is gone, and all of the other is there
        make_rings_directory("run-3", tmp_path)
        assert dead[2].wait(30) == -signal.SIGKILL
        assert [path.exists() for path in (*dead[:2], *lives[:2])] == [False, False, True, True]
        assert lives[2].poll() is None
    finally:
        for *_, agent in (dead, lives):
            agent.kill()
            agent.communicate()


def test_rings_that_a_trainer_still_writes_outlive_their_run(tmp_path, left):
    # GIVEN a run that was killed while its trainer goes on
    trainer = subprocess.Popen([sys.executable, "-c", HOLD, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert trainer.stdout.readline() == b"ready\n"
        # WHEN the next run sweeps
        make_rings_directory("run-2", tmp_path)
        # THEN the trainer's ring is still there
        assert list(left.glob("*.ring"))
    finally:
        trainer.communicate(timeout=30)
    # AND once the trainer has gone, it goes too
    make_rings_directory("run-3", tmp_path)
    assert not left.exists()


def test_removing_spares_rings_in_use(tmp_path):
    rings = make_rings_directory("run-1", tmp_path)
    monitor = Monitor(rings=rings)
    remove_rings_directory(rings)
    assert rings.exists()
    del monitor


SCRIPT = "/run/rank"


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
def test_ranks_that_would_start_without_nsys_are_refused_beforehand(flag):
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
    run, nsys = (sys.executable, "-m", "torch.distributed.run", "--no-python"), partial(NsysLaunch, traces="nvtx")
    with pytest.raises(UsageError, match="SFTRIAGE_NSYS_RANK"):
        LocalRun(run, "job", [find("default")], lambda *_: (), out=tmp_path / "run", nsys=nsys)
    assert not list((tmp_path / "run").glob("nsys-*"))


@pytest.mark.parametrize("armed", [False, True])
def test_a_launch_has_a_private_place_a_script_and_is_gone_when_closed(fake, tmp_path, armed):
    fake("echo NVIDIA Nsight Systems version 2022.4.2.1")
    launch = NsysLaunch("20260101-a", tmp_path, "nvtx,osrt", armed=armed)
    assert (launch.place.prefix, launch.place.traces) == ("sft-20260101-a", ("nvtx", "osrt"))
    environment = launch.environment({"PYTHON_EXEC": "/own/python"})
    script = Path(environment["PYTHON_EXEC"])
    assert script.parent == launch.place.tmp
    assert os.access(script, os.X_OK)
    assert launch.place.tmp.stat().st_mode & 0o077 == 0
    assert environment["SFTRIAGE_NSYS_PYTHON"] == "/own/python"
    assert "SFTRIAGE_NSYS_PYTHON" not in launch.environment({})
    # AND ranks that are armed leave their reports where only this run looks
    assert environment.get("SFTRIAGE_NSYS_ARMED") == (str(launch.place.armed) if armed else None)
    assert not armed or launch.place.armed.parent == launch.place.tmp
    # Whoever takes over finds the same.
    assert place_in(RunDirectory(tmp_path)) == launch.place
    remove_place(launch.place)
    assert not launch.place.tmp.exists()


def test_a_note_that_names_another_directory_has_nothing_removed(tmp_path):
    kept = tmp_path / "mine"
    kept.mkdir()
    remove_place(NsysPlace(Path("/usr/bin/nsys"), "sft", ("nvtx",), kept))
    assert kept.exists()


@pytest.mark.parametrize(
    ("script", "traces", "reason"),
    [
        ("echo NVIDIA Nsight Systems version 2019.1", "nvtx", "too old"),
        ("echo what", "nvtx", "cannot parse the version"),
        ("exec sleep 100", "nvtx", "hung"),
        ("echo version 2022.4", "nvtx,everything", "--nsys-trace"),
        ("echo version 2022.4", "", "--nsys-trace"),
        ("echo version 2022.4", "osrt", "--nsys-armed: nsys waits for an NVTX range; add nvtx to --nsys-trace osrt"),
        (None, "nvtx", "no nsys on PATH"),
    ],
)
def test_an_unusable_nsys_is_reported_before_the_job_starts(fake, tmp_path, monkeypatch, script, traces, reason):
    monkeypatch.setattr(nsys, "_QUERY_S", 0.5)
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        fake(script)
    with pytest.raises(UsageError, match=reason):
        NsysLaunch("run", tmp_path, traces, armed=reason.startswith("--nsys-armed"))
    assert not list(tmp_path.glob("nsys-*"))


def test_where_no_program_may_run_another_directory_is_taken(fake, tmp_path, monkeypatch):
    fake("echo version 2022.4")
    real = os.statvfs

    def statvfs(path):
        found = real(path)
        return type("found", (), {"f_flag": found.f_flag | os.ST_NOEXEC}) if path == tmp_path else found

    monkeypatch.setattr(os, "statvfs", statvfs)
    launch = NsysLaunch("run", tmp_path, "nvtx")
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
        # WHEN a run is over whose note names no run's sessions, THEN no process is ended
        remove_place(NsysPlace(Path("/usr/bin/nsys"), "sft-", ("nvtx",), tmp_path))
        assert [process.poll() for process in (*ours, *others)] == [None] * 5
        # WHEN the run is over, THEN its agents are ended, and the others are not
        remove_place(NsysPlace(Path("/usr/bin/nsys"), "sft-run-1", ("nvtx",), tmp_path))
        assert [process.wait(20.0) for process in ours] == [-signal.SIGKILL] * 3
        # AND so is the shared memory that an agent leaves where it is killed
        assert not left.exists()
        assert [process.poll() for process in others] == [None] * 2
    finally:
        for process in (*ours, *others):
            process.kill()
            process.communicate()
