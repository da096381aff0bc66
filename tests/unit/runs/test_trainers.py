"""What lies in the directory of a run's rings says who is still there."""

import os
import subprocess
import sys

import pytest

from sftriage.recorder import Monitor
from sftriage.runs.liveness import launcher_of, note_launcher, trainers_alive


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
    [None, "", "12", f"{os.getpid()} 1", f"{os.getpid()} None", "99999999 None", "-1 1", "1e3 1", "\x00" * 200],
    ids=range(9),
)
def test_a_note_that_is_none_is_of_nobody(tmp_path, note):
    if note is not None:
        (tmp_path / "launcher").write_text(note)
    assert launcher_of(tmp_path) is None


def test_a_note_that_leads_elsewhere_is_not_followed(tmp_path):
    note_launcher(tmp_path, os.getpid())
    (tmp_path / "launcher").rename(tmp_path / "mine")
    (tmp_path / "launcher").symlink_to(tmp_path / "mine")
    assert launcher_of(tmp_path) is None


def test_trainers_are_there_as_long_as_one_is(tmp_path):
    assert not trainers_alive(tmp_path)
    (tmp_path / "rank-7.0.ring").write_bytes(b"no ring")
    assert not trainers_alive(tmp_path)
    monitor = Monitor(rank=0, world_size=1, rings=tmp_path)
    assert trainers_alive(tmp_path)
    monitor.close()
