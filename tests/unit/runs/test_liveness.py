"""Which processes of a run are alive, which one watches it, and which ranks record."""

import contextlib
import os
import subprocess
import sys

import pytest

from sftriage.base.process import locked, start_ticks
from sftriage.runs import liveness
from sftriage.trainer.layout import RingFile
from sftriage.trainer.monitor import Monitor
from sftriage.windows.steplog import StepLog
from tests.scenario import info_of

NO_PID = 2**22 + 1
"""No process: pids end before."""


@pytest.fixture
def rings(run):
    return run.directory.path / "rings"


@pytest.fixture
def trainer(rings):
    """A running trainer: this process."""
    return RingFile(rings, info_of(0, 1, pid=os.getpid(), pid_start_ticks=start_ticks(os.getpid()) or 0), 8)


@contextlib.contextmanager
def held(lock, pid: int):
    with locked(lock) as file:
        file.truncate(0)
        file.write(str(pid).encode())
        file.flush()
        yield


def test_the_holder_of_the_lock_watches_and_a_run_that_was_never_locked_is_unknown(run, rings, monkeypatch):
    assert liveness.watcher_of(run.directory, rings) == liveness.Watcher("unknown")
    with held(run.directory.lock, os.getpid()), monkeypatch.context() as patch:
        # (trying the lock would keep `sftriage attach` from it)
        patch.setattr(liveness, "is_locked", lambda lock: pytest.fail("tried"))
        assert liveness.watcher_of(run.directory, rings) == liveness.Watcher("watched", os.getpid())
    # AND so does a holder in another container
    with held(run.directory.lock, NO_PID):
        assert liveness.watcher_of(run.directory, rings) == liveness.Watcher("watched")


def test_a_running_job_without_a_watcher_is_unwatched(run, rings, trainer):
    run.directory.lock.write_text(str(NO_PID))
    assert liveness.watcher_of(run.directory, rings) == liveness.Watcher("unwatched")


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"-1", b"1e9", b"9" * 60])
def test_a_lock_may_contain_anything(run, rings, content):
    run.directory.lock.write_bytes(content)
    assert liveness.watcher_of(run.directory, rings).state == "left"


def test_the_watcher_is_checked_once_in_a_while(run, rings, monkeypatch):
    checks = []
    monkeypatch.setattr(liveness, "watcher_of", lambda *_: checks.append(1) or liveness.Watcher("watched"))
    look = liveness.WatcherLook(run.directory)
    for now_s in (0.0, 1.0, 1.9, 2.1, 3.0, 4.2):
        look.at(now_s, rings)
    assert len(checks) == 3


@pytest.mark.parametrize(
    ("ranks", "world_size", "attempt", "found"),
    [
        ([0, 1, 2, 3], 4, 0, liveness.RankCoverage(4, 4)),
        ([0, 3], 4, 0, liveness.RankCoverage(2, 4, (1, 2))),
        ([5], 1024, 0, liveness.RankCoverage(1, 1024, (0, 1, 2, 3, 4, 6, 7, 8))),
        ([0], 1, 7, liveness.RankCoverage()),
        ([], 4, 0, liveness.RankCoverage()),
    ],
)
def test_the_logs_show_which_ranks_record(run, ranks, world_size, attempt, found):
    for rank in ranks:
        StepLog(run.directory.steps, info_of(rank, world_size)).close()
    assert liveness.telemetry_of(run.directory.steps, attempt) == found
    # AND an invalid log counts as a rank without more
    (run.directory.steps / "rank-0.9.steps").write_bytes(b"x" * 5000)
    assert liveness.telemetry_of(run.directory.steps, None) == liveness.RankCoverage(1)


NOTE = '{"pid": %s, "start_ticks": 1}'


def test_a_launcher_is_known_while_it_is_alive(tmp_path):
    # GIVEN a launcher that is noted
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    liveness.note_launcher(tmp_path, launcher.pid)
    assert liveness.launcher_of(tmp_path) == launcher.pid
    # WHEN it has ended THEN it is unknown, even if its pid is used again
    launcher.communicate(timeout=60)
    assert liveness.launcher_of(tmp_path) is None


@pytest.mark.parametrize(
    "note",
    [None, "", "12", "{}", "\x00" * 200, *(NOTE % pid for pid in (os.getpid(), "null", 99999999, -1, 10**30, '"1"'))],
    ids=range(11),
)
def test_an_invalid_note_names_no_process(tmp_path, note):
    if note is not None:
        (tmp_path / "launcher").write_text(note)
    assert liveness.launcher_of(tmp_path) is None


def test_trainers_are_alive_while_one_is(tmp_path):
    assert not liveness.trainers_alive(tmp_path)
    (tmp_path / "rank-7.0.ring").write_bytes(b"no ring")
    assert not liveness.trainers_alive(tmp_path)
    monitor = Monitor(rank=0, world_size=1, rings=tmp_path)
    assert liveness.trainers_alive(tmp_path)
    monitor.close()
