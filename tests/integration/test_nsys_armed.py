"""`sftriage run --nsys-armed`: real ranks that wait for a range, captured without anybody reaching their sessions."""

import contextlib
import sqlite3
import subprocess

import pytest

from sftriage.runtime.nsys_launch import place_in
from tests import needs
from tests.integration.killing import RANK, capture_again, come_to, end, jobs, taken_over
from tests.integration.processes import DEADLINE_S, wait_until

pytest.importorskip("torch")
pytestmark = needs.nsys


@pytest.fixture
def job(tmp_path, environment):
    with jobs(tmp_path, environment, "--nsys-armed", "--nsys-trace", "nvtx,osrt") as start:
        yield start


def steps_of(running, result, made):
    """The numbers of the steps whose ranges are in the report of a stored capture: exactly those that it promises."""
    assert result["state"] == "stored", result
    (report,) = (running.directory.path / "captures").glob(f"{result['capture_id']}/trace.nsys-rep")
    command = ["nsys", "export", "--type=sqlite", f"--output={made}", report]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=DEADLINE_S)
    with contextlib.closing(sqlite3.connect(made)) as database:
        names = database.execute(
            "SELECT coalesce(e.text, s.value) FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId"
        )
        steps = sorted(int(name[13:]) for (name,) in names if (name or "").startswith("ProfilerStep#"))
    assert steps == list(range(result["first_step"], result["last_step"] + 1))
    return steps


def test_a_rank_is_captured_twice_with_exactly_the_steps_that_it_marked(job, environment, tmp_path):
    # GIVEN a job whose ranks are armed, and an sftriage that would find no session of theirs
    running = job()
    place = place_in(running.directory)
    assert place.armed is not None
    covered = []
    for number in (1, 2):
        # WHEN a rank of it is captured, and captured again
        result = capture_again(running, environment, "nsys")
        steps = steps_of(running, result, tmp_path / f"{number}.sqlite")
        covered += steps
        # AND nsys waits for the next range
        wait_until(lambda: list(place.tmp.glob(f"range-{RANK}.0.armed")))
    assert len(set(covered)) == 6
    # AND the job ends as it would have, and nothing that was temporary is left
    end(running)
    assert not place.tmp.exists()


def test_sftriage_killed_while_a_range_is_open_is_taken_over_by_the_next(job, environment, tmp_path):
    # GIVEN a capture of an armed rank, the range of which is open
    running = job()
    come_to(running, "recording", lambda _, mailbox: mailbox.progress().state == "recording", profiler="nsys")
    # WHEN sftriage is killed, and the job is taken over
    taken_over(running, environment)
    wait_until(lambda: running.entries("capture"))
    # THEN that capture is lost, and its report does not pass for that of the next one
    (lost,) = running.entries("capture")
    assert (lost["result"]["state"], running.whole()) == ("failed", set())
    result = capture_again(running, environment, "nsys")
    steps_of(running, result, tmp_path / "again.sqlite")
    end(running)
    assert not list(running.directory.path.glob("nsys-*"))
