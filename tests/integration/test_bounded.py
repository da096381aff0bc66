"""Programs with a deadline."""

import os
import sys
import time

import pytest

from sftriage.base import children
from sftriage.base.children import BoundedProgram, run_bounded
from sftriage.errors import CaptureError


def ended(program):
    while (finished := program.poll()) is None:
        time.sleep(0.005)
    return finished


def test_a_program_tells_its_status_and_its_output():
    finished = ended(BoundedProgram(["sh", "-c", "echo out; echo err >&2; exit 3"], 60))
    assert (finished.status, finished.output, finished.problem()) == (3, "out\nerr\n", "err")
    assert ended(BoundedProgram(["sh", "-c", "exit 4"], 60)).problem() == "exit status 4"


def test_much_output_blocks_nobody_and_is_read_up_to_a_bound():
    command = [sys.executable, "-c", "print('x' * 3_000_000)"]
    assert len(ended(BoundedProgram(command, 60, max_output_bytes=1000)).output) == 1000


def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path):
    # GIVEN a program that hangs, and has started another one
    note = tmp_path / "pid"
    program = BoundedProgram(["sh", "-c", f"sleep 100 & echo $! > {note}.new; mv {note}.new {note}; wait"], 1.0)
    # WHEN its time is up
    with pytest.raises(CaptureError, match=r"sh hung: no answer within 1 s"):
        ended(program)
    # THEN neither of them is there
    pid = int(note.read_text(encoding="ascii"))
    end_s = time.monotonic() + 30
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:  # noqa: PTH123  # may be gone between two words
            if stat.read().split()[2] == "Z":
                break
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_one_that_cannot_be_started_is_a_reason(tmp_path):
    with pytest.raises(CaptureError, match="nsys cannot be started: No such file"):
        run_bounded([tmp_path / "nsys", "--version"], 5)


def test_a_program_that_needs_a_moment_does_not_cost_a_turn(monkeypatch):
    monkeypatch.setattr(children, "MOMENT_S", 30.0)
    with pytest.raises(StopIteration) as ended_at_once:
        next(BoundedProgram(["true"], 60).wait())
    assert ended_at_once.value.value.status == 0


def test_a_wait_that_is_given_up_kills_the_program():
    program = BoundedProgram(["sleep", "100"], 60)
    turns = program.wait()
    next(turns)
    turns.close()
    assert program._process.returncode is not None
