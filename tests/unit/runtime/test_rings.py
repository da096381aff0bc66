"""Ring directories: private, and swept when nobody needs them any more."""

import json
import os
import signal
import subprocess
import sys

import pytest

from sftriage.base.notes import Note
from sftriage.base.process import Process
from sftriage.errors import UsageError
from sftriage.recorder import Monitor
from sftriage.runs.directory import RunDirectory
from sftriage.runtime.rings import make_rings_directory, note_steps, remove_rings_directory
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


@pytest.fixture
def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_it_is_private_to_its_owner(tmp_path):
    rings = make_rings_directory("run-1", tmp_path)
    assert rings.stat().st_mode & 0o077 == 0
    assert rings.parent.stat().st_mode & 0o077 == 0


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


def test_what_a_killed_run_left_is_swept_by_the_next(tmp_path, dead_pid):
    left = make_rings_directory("run-1", tmp_path)
    (left / "owner").write_text(str(dead_pid))
    make_rings_directory("run-2", tmp_path)
    assert not left.exists()


def test_the_steps_of_a_killed_run_are_kept_before_its_rings_are_swept(tmp_path, dead_pid):
    # GIVEN a run that was killed before it had kept its trainer's steps, all of which have ended since
    left, steps = make_rings_directory("run-1", tmp_path), tmp_path / "steps"
    steps.mkdir()
    note_steps(left, steps)
    (left / "owner").write_text(str(dead_pid))
    subprocess.run([sys.executable, "-c", HOLD, str(left)], input=b"", check=True, capture_output=True)
    # WHEN the next run sweeps THEN they are where it would have kept them
    make_rings_directory("run-2", tmp_path)
    assert not left.exists()
    (log,) = steps.glob("*.steps")
    assert len(LogReader(log).read()) == 1


@pytest.mark.parametrize("of", ["owner", "launcher"])
def test_a_run_is_known_to_live_by_who_watches_it_and_by_what_started_its_trainers(tmp_path, dead_pid, of):
    # GIVEN a run whose trainers are yet to make their rings, of which one of these two is there
    left = make_rings_directory("run-1", tmp_path)
    (left / "owner").write_text(str(dead_pid))
    Note(left / of, Process).save(Process.of(os.getpid()))
    # WHEN the next run sweeps THEN it is left alone
    make_rings_directory("run-2", tmp_path)
    assert left.exists()
    # AND not where the pid is another process's by now
    (left / of).write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1}))
    make_rings_directory("run-3", tmp_path)
    assert not left.exists()


def test_what_nsys_left_of_a_killed_run_goes_with_its_rings_and_nothing_of_others(tmp_path, dead_pid):
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

    killed, lives = under_nsys("run-1"), under_nsys("run-2")
    (killed[0] / "owner").write_text(str(dead_pid))
    try:
        # WHEN the next run sweeps THEN all of the one is gone, and all of the other is there
        make_rings_directory("run-3", tmp_path)
        assert killed[2].wait(30) == -signal.SIGKILL
        assert [path.exists() for path in (*killed[:2], *lives[:2])] == [False, False, True, True]
        assert lives[2].poll() is None
    finally:
        for *_, agent in (killed, lives):
            agent.kill()
            agent.communicate()


def test_the_rings_of_a_run_that_lives_are_left_alone(tmp_path):
    ours = make_rings_directory("run-1", tmp_path)
    make_rings_directory("run-2", tmp_path)
    assert ours.exists()


def test_rings_that_a_trainer_still_writes_outlive_their_run(tmp_path, dead_pid):
    # GIVEN a run that was killed while its trainer goes on
    left = make_rings_directory("run-1", tmp_path)
    (left / "owner").write_text(str(dead_pid))
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
