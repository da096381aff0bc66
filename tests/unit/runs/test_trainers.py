"""What lies in the directory of a run's rings says who is still there."""

import os
import subprocess
import sys

import pytest

from sftriage.recorder import Monitor
from sftriage.runs.liveness import launcher_of, note_launcher, trainers_alive

NOTE = '{"pid": %s, "start_ticks": 1}'


def test_a_launcher_is_known_as_long_as_it_is_there(tmp_path):
    # GIVEN a launcher that is noted
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note_launcher(tmp_path, launcher.pid)
    assert launcher_of(tmp_path) == launcher.pid
    # WHEN it has ended, THEN it is not there, whoever has its number later
    launcher.communicate(timeout=60)
    assert launcher_of(tmp_path) is None


@pytest.mark.parametrize(
    "note",
    [None, "", "12", "{}", "\x00" * 200, *(NOTE % pid for pid in (os.getpid(), "null", 99999999, -1, 10**30, '"1"'))],
    ids=range(11),
)
def test_a_note_that_is_none_is_of_nobody(tmp_path, note):
    if note is not None:
        (tmp_path / "launcher").write_text(note)
    assert launcher_of(tmp_path) is None


def test_trainers_are_there_as_long_as_one_is(tmp_path):
    assert not trainers_alive(tmp_path)
    (tmp_path / "rank-7.0.ring").write_bytes(b"no ring")
    assert not trainers_alive(tmp_path)
    monitor = Monitor(rank=0, world_size=1, rings=tmp_path)
    assert trainers_alive(tmp_path)
    monitor.close()
