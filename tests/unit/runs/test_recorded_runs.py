"""Reading run directories: all ranks' step logs side by side, and what is left in the rings."""

import os
import tracemalloc

import numpy as np
import pytest

from sftriage.errors import InputError
from sftriage.model.windows import StageSchema, StepRecord
from sftriage.recorder.layout import HEADER_BYTES, RingInfo
from sftriage.runs.recordings import load_recording
from sftriage.windows.decoding import slot_bytes
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.steplog import StepLog
from tests.rings import write_ring
from tests.scenario import batch, info_of, of_rank, run_at

SCHEMA = StageSchema.closed(("data", "backward"), ("backward",))
SHAPE = Shape(window_steps=4, stride_steps=2, warmup_steps=0)


@pytest.fixture
def run(tmp_path):
    """A run directory with no steps yet, whose rings are where `rings` says."""
    made = run_at(tmp_path / "run").directory
    (made.path / "rings").mkdir()
    return made


@pytest.fixture
def rings(run):
    return run.path / "rings"


def info(rank: int, world_size: int = 2, **changes: object) -> RingInfo:
    return info_of(rank, world_size, **{"host": f"node-{rank // 2}", "schema": SCHEMA, **changes})


def step(rank: int, number: int) -> StepRecord:
    return StepRecord(rank, number, 0, 7, (number * 1000 + rank, 5, 3), (2,), True, False)


def log(run, about: RingInfo, *numbers: int):
    kept = StepLog(run.steps, about)
    kept.append(of_rank(1, *[step(about.rank, number) for number in numbers], schema=about.schema))
    kept.close()
    return kept.path


def ring(rings, about: RingInfo, *numbers: int):
    return write_ring(rings, about, *[step(about.rank, number) for number in numbers])


def present(window) -> list[list[int]]:
    """The (step, rank) of every vector that is in a window, checked to be the one that belongs there."""
    there = [[window.first_step + n, r] for n, r in np.argwhere(np.isfinite(window.between_NR))]
    for number, r in there:
        assert window.durations_NRS[number - window.first_step, r, 0] == pytest.approx((number * 1000 + r) * 1e-9)
    return there


def spans(windows) -> list[tuple[int, int]]:
    return [(window.first_step, window.last_step) for window in windows]


@pytest.mark.parametrize("shape", [SHAPE, Shape(2, 7, 1), Shape(3, 1, 0), Shape(10, 5, 0)])
def test_the_ranks_steps_are_merged_by_their_number(run, shape):
    # GIVEN two ranks whose logs begin and end at different steps, with holes
    logged = {0: (*range(3, 20), *range(25, 80, 3)), 1: (*range(5, 9), 11, *range(14, 84))}
    for rank, numbers in logged.items():
        log(run, info(rank), *numbers)
    # WHEN the run is read
    windows = list(load_recording(run.path).windows(shape))
    # THEN the windows are those of its steps taken one at a time in order
    target, expected = Gatherer(SCHEMA, 2, shape), []
    for number, rank in sorted((number, rank) for rank, numbers in logged.items() for number in numbers):
        target.add(batch(step(rank, number)))
        expected += target.ready()
    expected += target.ready(ended=True)
    assert spans(windows) == spans(expected)
    assert [present(window) for window in windows] == [present(window) for window in expected]


def test_windows_say_where_the_ranks_were_and_can_be_cut_again(run):
    for rank in range(4):
        log(run, info(rank, world_size=4, cohort=f"pp{rank % 2}"), *range(4))
    recording = load_recording(run.path)
    for _ in range(2):
        (window,) = recording.windows(SHAPE)
        assert window.hosts == ("node-0", "node-0", "node-1", "node-1")
        assert window.cohorts == ("pp0", "pp1", "pp0", "pp1")


def test_steps_that_an_agent_had_not_taken_are_read_from_the_rings(run, rings):
    # GIVEN an agent that was killed: rank 0's log ends before its ring does, and rank 1 has no log at all
    log(run, info(0), *range(7))
    ring(rings, info(0), *range(8))
    left = ring(rings, info(1), *range(8))
    recording = load_recording(run.path)
    (window,) = recording.windows(Shape(8, 8, 0))
    assert present(window) == [[n, rank] for n in range(8) for rank in (0, 1)]
    # WHEN a ring is gone in between
    left.unlink()
    # THEN the others are what there is
    (window,) = recording.windows(Shape(8, 8, 0))
    assert present(window) == [[n, 0] for n in range(8)]


def test_each_attempt_has_windows_of_its_own(run):
    for attempt in (1, 0):
        log(run, info(0, attempt=attempt), *range(4))
        log(run, info(1, attempt=attempt), *range(4))
    assert [(w.attempt, w.first_step) for w in load_recording(run.path).windows(SHAPE)] == [(0, 0), (1, 0)]


def test_a_damaged_slot_is_a_missing_step(run):
    log(run, info(0), *range(4))
    path = log(run, info(1), *range(4))
    size = slot_bytes(SCHEMA)
    # GIVEN a step that is damaged, and one whose end was never written
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + size + 80)
        file.write(b"\xff")
    os.truncate(path, HEADER_BYTES + 4 * size - 8)
    (window,) = load_recording(run.path).windows(SHAPE)
    assert [number for number, rank in present(window) if rank == 1] == [0, 2]


def test_a_run_of_no_steps_has_no_windows(run):
    assert list(load_recording(run.path).windows(SHAPE)) == []


def test_a_log_that_cannot_be_read_is_named(run):
    path = log(run, info(0), 1)
    path.write_bytes(b"something else")
    with pytest.raises(InputError, match=r"rank-0\.0\.steps: not a step log"):
        load_recording(run.path)


def test_a_log_that_goes_while_it_is_read_is_named(run):
    path = log(run, info(0), 1)
    recording = load_recording(run.path)
    path.unlink()
    with pytest.raises(InputError, match=r"rank-0\.0\.steps: cannot be opened"):
        list(recording.windows(SHAPE))


@pytest.mark.parametrize("other", [{"schema": StageSchema(("load", "other"))}, {"world_size": 3}])
def test_ranks_that_recorded_different_things_are_no_recording(run, rings, other):
    log(run, info(0), 1)
    write_ring(rings, info(1, **other))
    with pytest.raises(InputError, match="different stages or world sizes"):
        load_recording(run.path)


def test_a_long_run_is_not_held_in_memory(run):
    # GIVEN a run of 1000 steps of 4 ranks, and a window after every step
    for rank in range(4):
        log(run, info(rank, world_size=4), *range(1000))
    window_bytes = 50 * 4 * (3 + 1 + 1) * 8
    # WHEN they are looked at one by one
    tracemalloc.start()
    last = None
    for window in load_recording(run.path).windows(Shape(50, 1, 0)):
        last = window.last_step
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # THEN all of it was seen, and a few windows of it were there at any one time
    assert last == 999
    assert peak_bytes < 20 * window_bytes
