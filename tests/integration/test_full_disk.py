"""A run directory that fills, loses its inodes, or does not answer: the job goes on, and no window is lost."""

import contextlib
from pathlib import Path

import pytest

from sftriage.controller.controller import shape_of
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import read_journal
from sftriage.runs.recordings import detection_of, load_recording
from sftriage.trainer.layout import find_rings
from sftriage.windows.rings import Ring
from tests import needs
from tests.disks import SmallDisk, served_disk, small_disk
from tests.integration.processes import DEADLINE_S, FORKED, SLOW_DATA, ended, sftriage_process, wait_until
from tests.integration.runs import on_record

pytest.importorskip("torch")


def windows(run: Path) -> list[int]:
    found = [one["verdict"] for one in on_record(run, "window")]
    return [verdict["first_step"] for verdict in found if verdict["label"] != "stalled"]


def steps_taken(rings: Path) -> int:
    with contextlib.ExitStack() as opened:
        return min(opened.enter_context(Ring(ring)).status().published for ring in find_rings(rings))


@pytest.mark.parametrize("served", [True, pytest.param(False, marks=needs.bindfs)])
def test_a_job_whose_run_directory_takes_nothing_for_a_while_loses_nothing(tmp_path, environment, served):
    # GIVEN a job under watch, on a disk of its own
    # (new files are what a run makes at first, for its capture)
    small = [(SmallDisk.fill_names, SmallDisk.empty), (SmallDisk.fill, SmallDisk.empty)]
    make, troubles = served_disk(tmp_path), [(SmallDisk.stop, SmallDisk.go_on)]
    if served:
        make, troubles = small_disk(tmp_path / "disk", "16m"), small
    release, output = tmp_path / "release", tmp_path / "output"
    with make as disk, output.open("wb") as file:
        run = disk.path / "run"
        job = *FORKED, 2, SLOW_DATA, release
        process = sftriage_process("run", "--out", run, "--", *job, env=environment, stdout=file, stderr=file)
        with ended(process):
            for number, (begin, end) in enumerate(troubles, 1):
                judged = len(windows(run))
                wait_until(lambda judged=judged: len(windows(run)) >= judged + 2)
                rings = Path(read_info(RunDirectory(run)).rings)
                # WHEN the disk takes nothing, or no new file
                begin(disk)
                wait_until(lambda n=number: output.read_text().count("The run directory cannot be written") == n)
                # THEN training goes on
                before = steps_taken(rings)
                wait_until(lambda rings=rings, before=before: steps_taken(rings) > before + 50)
                # AND once the disk is well, that is said too
                end(disk)
                wait_until(lambda n=number: output.read_text().count("The run directory can be written again") == n)
            release.touch()
            assert process.wait(DEADLINE_S) == 0
        # AND each once, and nothing else about it
        said = output.read_text()
        lines = [line for line in said.splitlines() if "run directory can" in line]
        assert (len(lines), "Traceback" in said, "trained" in said) == (2 * len(troubles), False, True)
        assert all("Nothing is lost." in line for line in lines[1::2]), lines
        # AND every window of every step is on record, in order, as if nothing had been
        damaged: list[bytes] = []
        list(read_journal(run / "decisions.jsonl", damaged))
        again = load_recording(run).windows(shape_of(detection_of(run)))
        assert (windows(run), damaged) == ([window.first_step for window in again], [])
