"""What commands say of a run whose disk is full, read-only, or was: reading never writes, and what is lost is told."""

import os
from pathlib import Path

import pytest

from sftriage.model.events import DiskRecovered
from sftriage.runs.directory import RunDirectory
from sftriage.runs.liveness import DISK, note_problem
from sftriage.traces.store import LocalStore
from tests.disks import SmallDisk, small_disk
from tests.scenario import Recorder, decision, verdict
from tests.unit.conftest import manifest_of, run_in

BETWEEN = DiskRecovered(
    time_s=1_800_000_072.0,
    since_s=1_800_000_060.0,
    problem="No space left on device",
    late={"windows": 31, "steps": 620},
    lost={"windows": 12, "readings": 4},
    lost_steps=(300, 460),
)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.fixture
def run(disk, tmp_path) -> RunDirectory:
    """A run of one window and one capture, which nobody has listed yet, on a disk of its own."""
    directory, trace = run_in(disk.path / "run"), tmp_path / "trace.json"
    trace.write_bytes(os.urandom(8192))
    LocalStore(directory.path).put("w20-69-r2-x-1", trace, lambda artefact: manifest_of("w20-69-r2-x-1", artefact))
    window(directory, 20)
    return directory


def window(directory: RunDirectory, first: int) -> None:
    journal = Recorder(directory.decisions)
    journal.window(verdict(first), decision(verdict(first)))
    journal.close()


def lies_in(directory: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in directory.rglob("*")}


READING = (
    ("traces", "list"),
    ("traces", "show", "w20-69-r2-x-1"),
    ("traces", "for-step", 160),
    ("explain", 30),
    ("decisions",),
)
UNWELL = {
    "without a byte left": SmallDisk.fill,
    "without a name left": SmallDisk.fill_names,
    "read-only": lambda disk: disk.remount("ro"),
}


@pytest.mark.parametrize("command", READING, ids=lambda words: " ".join(map(str, words)))
@pytest.mark.parametrize("unwell", UNWELL)
def test_what_only_reads_works_whatever_the_disk_takes(sftriage, disk, run, unwell, command):
    # GIVEN a run on a disk that takes nothing
    UNWELL[unwell](disk)
    before = lies_in(run.path)
    # WHEN somebody reads it THEN they get what is there
    outcome = sftriage(*command, "--run", run.path)
    assert (outcome.code, "disk" in outcome.err, "space" in outcome.err) == (0, False, False)
    assert "w20-69-r2-x-1" in outcome.out or command[0] in ("explain", "decisions")
    # AND nothing there has changed, but for a catalogue that could not be made
    assert {path for path, _ in lies_in(run.path) - before if not path.endswith(("run", "catalogue.db"))} == set()


@pytest.mark.parametrize("unwell", [SmallDisk.fill, SmallDisk.fill_names])
def test_room_can_be_made_on_a_disk_that_is_full(sftriage, disk, run, unwell):
    unwell(disk)
    outcome = sftriage("traces", "prune", "--bytes", "1Ki", "--run", run.path)
    assert (outcome.code, outcome.err) == (0, "")
    assert list(LocalStore(run.path).ids()) == []


def test_a_window_that_a_full_disk_has_cost_is_said_to_be_lost_and_not_never_to_have_been(sftriage, run):
    # GIVEN a run of which some windows could not be written
    journal = Recorder(run.decisions)
    journal.append(BETWEEN)
    journal.close()
    window(run, 500)
    # WHEN one is asked for THEN that is said, with what became of the others
    for command in (("explain", 400), ("traces", "for-step", 400)):
        outcome = sftriage(*command, "--run", run.path)
        assert "12 windows (of steps 300 to 460)" in outcome.err + outcome.out, command
        assert "has no window" not in outcome.err
        assert "nobody watched" not in outcome.out
    # AND of steps that lie elsewhere it is as ever
    assert "has no window" in sftriage("explain", 90, "--run", run.path).err


def test_while_nothing_can_be_written_explain_says_that_windows_wait(sftriage, tmp_path):
    # GIVEN a run that goes on, and whose newest windows are in memory
    rings = tmp_path / "rings"
    rings.mkdir()
    directory = run_in(tmp_path / "run", rings=str(rings))
    window(directory, 20)
    note_problem(rings / DISK, "No space left on device")
    for command in (("explain", 400), ("traces", "for-step", 400)):
        outcome = sftriage(*command, "--run", directory.path)
        assert "cannot be written (No space left on device)" in outcome.err + outcome.out, command
        assert "New records wait in memory" in outcome.err + outcome.out
    # WHEN whoever has them in memory is killed, or it can be written again THEN there is no such word
    kept = (rings / "disk").read_text()
    (rings / "disk").write_text(kept.replace(str(os.getpid()), "4194305"))
    assert "has no window" in sftriage("explain", 400, "--run", directory.path).err
    note_problem(rings / DISK, None)
    assert "has no window" in sftriage("explain", 400, "--run", directory.path).err
