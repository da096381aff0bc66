"""Recordings: what others measured, and run directories, whose step logs and rings are read side by side."""

import io
import os
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sftriage.errors import InputError
from sftriage.model.windows import StageSchema, StepRecord
from sftriage.runs.recordings import load_recording
from sftriage.trainer.layout import HEADER_BYTES, RingInfo
from sftriage.windows.decoding import slot_bytes
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.steplog import StepLog
from tests.rings import write_ring
from tests.scenario import batch, info_of, of_rank, run_at

STAGES = np.array(["data", "forward", "backward", "other"])
SYNC = np.array(["backward"])
UNCLOSED = np.array(["data", "forward", "backward", "optimizer"])


def durations(steps: int = 6, ranks: int = 2, stages: int = 4) -> np.ndarray:
    return np.full((steps, ranks, stages), 0.01)


def saved(path: Path, **arrays: object) -> Path:
    np.savez(path, **{"durations_s": durations(), "stages": STAGES, "sync": SYNC, **arrays})
    return path


def changed(value: float, at: tuple[int, ...]) -> np.ndarray:
    array = durations()
    array[at] = value
    return array


@pytest.mark.parametrize(("shape", "spans"), [(Shape(3, 2, 0), [(0, 2), (2, 4)]), (Shape(50, 10, 0), [(0, 5)])])
def test_a_recording_is_cut_into_windows_and_a_short_one_is_one(tmp_path, shape, spans):
    recording = load_recording(saved(tmp_path / "job.npz"))
    assert [(w.first_step, w.last_step) for w in recording.windows(shape)] == spans


def test_optional_arrays_travel_with_their_windows(tmp_path):
    path = saved(
        tmp_path / "job.npz",
        ready_s=np.arange(12.0).reshape(6, 2) / 1000,
        hosts=np.array(["a", "b"]),
        cohorts=np.array(["pp0", "pp1"]),
        kinds=np.array(list("tttttc")),
        outside_s=np.arange(12.0).reshape(6, 2, 1),
        between_s=np.arange(12.0).reshape(6, 2),
        work=np.arange(12).reshape(6, 2),
        queued_s=np.arange(12.0).reshape(6, 2),
        preempted=np.arange(12).reshape(6, 2),
        first_step=np.array(1000),
    )
    *_, last = load_recording(path).windows(Shape(3, 3, 0))
    assert (last.first_step, last.last_step) == (1003, 1005)
    assert (last.hosts, last.cohorts, last.kinds) == (("a", "b"), ("pp0", "pp1"), ("t", "t", "c"))
    np.testing.assert_allclose(last.ready_NR[0], [0.006, 0.007])
    for values in (
        last.outside_NRG[:, :, 0],
        last.between_NR,
        last.work_NR,
        last.counted("queued_s"),
        last.counted("preempted"),
    ):
        np.testing.assert_array_equal(values, [[6, 7], [8, 9], [10, 11]])


@pytest.mark.parametrize(("declared", "on_device"), [(True, True), (False, False), (1, True)])
def test_a_recording_may_say_that_its_ranks_run_on_devices_and_never_synchronise(tmp_path, declared, on_device):
    path = saved(tmp_path / "job.npz", on_device=np.array(declared), sync=np.array([]))
    (window,) = load_recording(path).windows(Shape(6, 6, 0))
    assert (window.on_device, window.device_NRS, window.schema.sync) == (on_device, None, ())


def missing(values: np.ndarray) -> list[list[int]]:
    """The (step, rank) of every vector of which nothing is there."""
    return np.argwhere(np.isnan(values.reshape(*values.shape[:2], -1)).all(axis=2)).tolist()


def test_a_vector_of_nan_is_a_missing_step_and_its_device_times_may_be_missing_alone(tmp_path):
    # GIVEN a recording in which rank 1 has no step 3, and what refines that step says either nothing or anything
    nowhere = changed(np.nan, (3, 1))[:, :, 0]
    path = saved(
        tmp_path / "job.npz",
        durations_s=changed(np.nan, (3, 1)),
        between_s=nowhere,
        outside_s=np.full((6, 2, 1), 0.002),
        work=nowhere * 100,
        ready_s=changed(np.nan, (0, 0))[:, :, 0],
        queued_s=changed(np.nan, (0, 0))[:, :, 0],
        device_s=2 * changed(np.nan, (4, 1)),
        device_outside_s=np.full((6, 2, 1), 0.002),
        device_between_s=changed(np.nan, (4, 1))[:, :, 0],
    )
    (window,) = load_recording(path).windows(Shape(50, 10, 0))
    # THEN it is missing in the window, with all that belongs to it, and nothing else is
    for values in (window.durations_NRS, window.outside_NRG, window.between_NR):
        assert missing(values) == [[3, 1]]
        assert np.isnan(values).sum() == values[3, 1].size
    assert window.work_NR[3].tolist() == [1, 0]
    # AND an unrecorded ready moment or wait for a CPU is unknown, in any step
    for values in (window.ready_NR, window.counted("queued_s")):
        assert np.argwhere(np.isnan(values)).tolist() == [[0, 0], [3, 1]]
    # AND device times are missing where they are, and with the step
    assert window.on_device
    for values in (window.device_NRS, window.device_outside_NRG, window.device_between_NR):
        assert [4, 1] in missing(values)
    assert (window.device_NRS[0] == 0.02).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", ">f8"])
def test_numbers_of_any_width_will_do_and_the_ranks_of_a_stage_lie_side_by_side(tmp_path, dtype):
    values = (np.arange(48).reshape(6, 2, 4) % 7).astype(dtype)
    (window,) = load_recording(saved(tmp_path / "job.npz", durations_s=values)).windows(Shape(6, 6, 0))
    np.testing.assert_array_equal(window.durations_NRS, values)
    assert window.durations_NRS.dtype == np.float64
    assert all(window.durations_NRS[:, :, s].flags.c_contiguous for s in range(4))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"durations_s": changed(np.nan, (3, 1, 2))}, "durations_s is not a finite number at step 3, rank 1, stage 2"),
        ({"durations_s": changed(np.nan, (3, 1, slice(3)))}, "stage 0 (nan) and 2 more; a missing step is NaN in all"),
        ({"durations_s": np.full((6, 2, 4), np.nan)}, "durations_s is NaN everywhere"),
        ({"durations_s": changed(np.inf, (3, 1))}, "not a finite number at step 3, rank 1, stage 0 (inf) and 3 more"),
        ({"durations_s": changed(np.inf, (0, 0, 0))}, "not a finite number at step 0, rank 0, stage 0 (inf)"),
        ({"durations_s": changed(-0.5, (2, 0, 1))}, "durations_s is negative at step 2, rank 0, stage 1 (-0.5)"),
        ({"durations_s": durations(stages=3)}, "has 3 stages on its last axis, but stages names 4"),
        ({"device_s": durations(steps=5)}, "device_s has shape (5, 2, 4); durations_s requires (6, 2, 4)"),
        ({"device_s": changed(-0.5, (2, 0, 1))}, "device_s is negative at step 2, rank 0, stage 1 (-0.5)"),
        ({"device_s": changed(np.nan, (3, 1, 2))}, "device_s is not a finite number at step 3, rank 1, stage 2 (nan)"),
        ({"device_between_s": np.zeros((6, 2))}, "device_between_s is set, but device_s is missing"),
        ({"on_device": np.array("yes")}, "on_device is <U3 of shape (); expected true or false"),
        ({"durations_s": durations()[0]}, "durations_s has 2 axes, shape (2, 4); expected step x rank x stage"),
        ({"durations_s": durations(steps=0)}, "durations_s is empty: 0 steps"),
        ({"durations_s": durations().astype("U8")}, "durations_s is <U8; expected float64 seconds"),
        ({"stages": np.array([1, 2, 3, 4])}, "stages has 1 axes of int64; expected one axis of strings"),
        ({"stages": np.array(["data", "data", "backward", "other"])}, "stage listed twice: data"),
        ({"sync": np.array(["allreduce"])}, "'allreduce' is not one of the stages"),
        ({"ready_s": np.zeros((6, 3))}, "ready_s has shape (6, 3); durations_s requires (6, 2)"),
        ({"ready_s": -np.ones((6, 2))}, "ready_s is negative at step 0, rank 0 (-1.0) and 11 more"),
        ({"ready_s": np.zeros((6, 2)), "sync": np.array([])}, "sync names no stage for it to split"),
        ({"ready_s": changed(np.inf, (1, 0))[:, :, 0]}, "ready_s is not a finite number at step 1, rank 0 (inf)"),
        ({"between_s": changed(np.nan, (1, 0))[:, :, 0]}, "between_s is not a finite number at step 1, rank 0 (nan)"),
        ({"between_s": np.zeros((6, 3))}, "between_s has shape (6, 3); durations_s requires (6, 2)"),
        ({"outside_s": np.zeros((6, 2))}, "outside_s has 2 axes, shape (6, 2); expected step x rank x sync stage"),
        ({"outside_s": np.zeros((6, 2, 2))}, "outside_s has shape (6, 2, 2); durations_s and sync require (6, 2, 1)"),
        ({"outside_s": -np.ones((6, 2, 1))}, "negative at step 0, rank 0, sync stage 0 (-1.0) and 11 more"),
        ({"outside_s": np.zeros((6, 2, 1)), "stages": UNCLOSED}, "outside_s requires 'other' as the last stage"),
        ({"between_s": np.zeros((6, 2)), "stages": UNCLOSED}, "between_s requires 'other' as the last stage"),
        ({"queued_s": -np.ones((6, 2))}, "queued_s is negative at step 0, rank 0 (-1.0) and 11 more"),
        ({"preempted": np.zeros((6, 3))}, "preempted has shape (6, 3); durations_s requires (6, 2)"),
        ({"work": -np.ones((6, 2))}, "work is negative at step 0, rank 0 (-1.0) and 11 more"),
        ({"work": changed(np.inf, (1, 1))[:, :, 0]}, "work is not a finite number at step 1, rank 1 (inf)"),
        ({"work": np.full((6, 2), "many")}, "work is <U4; expected float64"),
        ({"first_step": np.array(1.5)}, "first_step is float64 of shape (); expected an integer"),
        ({"first_step": np.array([1, 2])}, "first_step is int64 of shape (2,); expected an integer"),
        ({"hosts": np.array(["a"])}, "hosts has 1 entries, but durations_s has 2 on its rank axis"),
        ({"kinds": np.array(["train"])}, "kinds has 1 entries, but durations_s has 6 on its step axis"),
    ],
)
def test_bad_arrays_are_refused_in_one_line_that_names_what_and_where(tmp_path, arrays, message):
    path = saved(tmp_path / "job.npz", **arrays)
    with pytest.raises(InputError) as caught:
        load_recording(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_objects_in_a_file_are_never_unpickled(tmp_path):
    # GIVEN an array whose unpickling would run code
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    np.savez(tmp_path / "job.npz", durations_s=np.array([Trap()], dtype=object), stages=STAGES, sync=SYNC)
    # WHEN it is read
    with pytest.raises(InputError, match="not a readable"):
        load_recording(tmp_path / "job.npz")
    # THEN it is refused and nothing has run
    assert not (tmp_path / "sprung").exists()


def packed(path: Path, **members: bytes) -> Path:
    """A recording of which some arrays are these bytes."""
    with zipfile.ZipFile(saved(path), "a", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def header(shape: tuple[int, ...], dtype: str = "<f8") -> bytes:
    """The beginning of an array that says so much of itself."""
    np.lib.format.write_array_header_2_0(file := io.BytesIO(), {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header((2**20,)) + bytes(8 * 2**20), "bytes; at most 1,048,576 are allowed"),
        (header((10**9, 10, 10)), "work.npy declares 800,000,000,000 bytes but has 0"),
        (header((2**40,), "<U1000"), "work.npy declares 4,398,046,511,104,000 bytes but has 0"),
        (header((6, 2)) + bytes(40), "work.npy declares 96 bytes but has 40"),
        (header((6, 2), "|O") + bytes(96), "work.npy contains Python objects"),
    ],
    ids=["too large", "a large shape", "long texts", "cut short", "objects"],
)
def test_the_declared_size_of_an_array_is_checked_before_it_is_unpacked(tmp_path, monkeypatch, content, message):
    # GIVEN a small file, and a bound that does not take long to reach
    monkeypatch.setattr("sftriage.windows.npz.MAX_UNPACKED_BYTES", 1 << 20)
    path = packed(tmp_path / "job.npz", work=content)
    assert path.stat().st_size < 64 << 10
    # WHEN it is read THEN it is refused, and next to no memory was taken
    tracemalloc.start()
    with pytest.raises(InputError) as caught:
        load_recording(path)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message in str(caught.value)
    assert most_bytes < 1 << 20


def saved_bytes(save=np.savez, *positional: object, **arrays: object) -> bytes:
    save(file := io.BytesIO(), *positional, **arrays)
    return file.getvalue()


ARRAYS = {"durations_s": durations(), "stages": STAGES, "sync": SYNC}
SHORT = [saved_bytes(**ARRAYS)[:size_bytes] for size_bytes in (10, 800, -1)]
NO_NPZ = [b"", b"PK\x03\x04 half a zip", b"\x93NUMPY\x01\x00garbage", b"\x00" * 4096, *SHORT]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, r"not a readable \.npz") for content in (*NO_NPZ, saved_bytes(np.save, durations()))),
        *((saved_bytes(**{k: v for k, v in ARRAYS.items() if k != name}), f"array {name} missing") for name in ARRAYS),
    ],
)
def test_files_that_are_no_npz_or_lack_an_array_are_refused(tmp_path, content, message):
    (tmp_path / "job.npz").write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_recording(tmp_path / "job.npz")


@pytest.mark.parametrize(
    ("name", "message"),
    [("", r"not a run directory: it has no run\.json"), ("nothing.npz", r"nothing\.npz: no such file")],
)
def test_an_invalid_recording_is_named(tmp_path, name, message):
    with pytest.raises(InputError, match=message):
        load_recording(tmp_path / name)


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


def test_windows_of_each_attempt_say_where_the_ranks_were_and_can_be_cut_again(run):
    for attempt in (1, 0):
        for rank in range(4):
            log(run, info(rank, world_size=4, cohort=f"pp{rank % 2}", attempt=attempt), *range(4))
    recording = load_recording(run.path)
    for _ in range(2):
        window, second = recording.windows(SHAPE)
        assert [(one.attempt, one.first_step) for one in (window, second)] == [(0, 0), (1, 0)]
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


def test_a_log_that_cannot_be_read_or_goes_while_it_is_read_is_named(run):
    assert list(load_recording(run.path).windows(SHAPE)) == []
    path = log(run, info(0), 1)
    recording = load_recording(run.path)
    path.rename(run.path / "away")
    with pytest.raises(InputError, match=r"rank-0\.0\.steps: cannot be opened"):
        list(recording.windows(SHAPE))
    path.write_bytes(b"something else")
    with pytest.raises(InputError, match=r"rank-0\.0\.steps: not a step log"):
        load_recording(run.path)


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
    # WHEN they are read one by one
    tracemalloc.start()
    last = None
    for window in load_recording(run.path).windows(Shape(50, 1, 0)):
        last = window.last_step
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # THEN all of it was seen, and a few windows of it were there at any one time
    assert last == 999
    assert peak_bytes < 20 * window_bytes
