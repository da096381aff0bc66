"""Commands on a run whose disk is or was full or read-only: reading never writes, and losses are reported."""

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
    """A run of one window and one capture, not listed yet, on its own disk."""
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
def test_reading_works_on_a_disk_that_cannot_be_written(sftriage, disk, run, unwell, command):
    # GIVEN a run on a disk that accepts no writes
    UNWELL[unwell](disk)
    before = lies_in(run.path)
    # WHEN a command reads it THEN it prints the contents
    outcome = sftriage(*command, "--run", run.path)
    assert (outcome.code, "disk" in outcome.err, "space" in outcome.err) == (0, False, False)
    assert "w20-69-r2-x-1" in outcome.out or command[0] in ("explain", "decisions")
    # AND no file has changed, except for a catalogue that could not be written
    assert {path for path, _ in lies_in(run.path) - before if not path.endswith(("run", "catalogue.db"))} == set()


@pytest.mark.parametrize("unwell", [SmallDisk.fill, SmallDisk.fill_names])
def test_prune_works_on_a_full_disk(sftriage, disk, run, unwell):
    unwell(disk)
    outcome = sftriage("traces", "prune", "--bytes", "1Ki", "--run", run.path)
    assert (outcome.code, outcome.err) == (0, "")
    assert list(LocalStore(run.path).ids()) == []


def test_a_window_lost_to_a_full_disk_is_reported_as_lost(sftriage, run):
    # GIVEN a run with windows that could not be written
    journal = Recorder(run.decisions)
    journal.append(BETWEEN)
    journal.close()
    window(run, 500)
    # WHEN one is selected THEN the message has the number of lost windows and their steps
    for command in (("explain", 400), ("traces", "for-step", 400)):
        outcome = sftriage(*command, "--run", run.path)
        assert "12 windows (of steps 300 to 460)" in outcome.err + outcome.out, command
        assert "has no window" not in outcome.err
        assert "nobody watched" not in outcome.out
    # AND other steps have the usual message
    assert "has no window" in sftriage("explain", 90, "--run", run.path).err


def test_while_nothing_can_be_written_explain_says_that_windows_wait(sftriage, tmp_path):
    # GIVEN a running job whose newest windows are in memory
    rings = tmp_path / "rings"
    rings.mkdir()
    directory = run_in(tmp_path / "run", rings=str(rings))
    window(directory, 20)
    note_problem(rings / DISK, "No space left on device")
    for command in (("explain", 400), ("traces", "for-step", 400)):
        outcome = sftriage(*command, "--run", directory.path)
        assert "cannot be written (No space left on device)" in outcome.err + outcome.out, command
        assert "New records wait in memory" in outcome.err + outcome.out
    # WHEN the process with these windows is killed, or the disk recovers THEN the message is gone
    kept = (rings / "disk").read_text()
    (rings / "disk").write_text(kept.replace(str(os.getpid()), "4194305"))
    assert "has no window" in sftriage("explain", 400, "--run", directory.path).err
    note_problem(rings / DISK, None)
    assert "has no window" in sftriage("explain", 400, "--run", directory.path).err
