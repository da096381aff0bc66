"""Logs: what is kept of them, whatever happens to who writes them, and how steps are found in them."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.model.windows import COUNTERS, PLACE
from sftriage.trainer.layout import HEADER_BYTES, WORD_BYTES, RingInfo
from sftriage.windows import steplog
from sftriage.windows.decoding import CAPTURING, FLAGS, INCOMPLETE, START, UNKNOWN, StepArrays, slot_bytes, together
from sftriage.windows.log_files import find_logs, find_segments, segment_name
from sftriage.windows.logs import LogReader, StepLogs, windows
from sftriage.windows.steplog import CountersLog, KeptSteps, StepLog
from tests.scenario import info_of, kept_of, slots
from tests.scenario import steps_of as recorded

INFO = info_of(0, 1)
KEPT = KeptSteps(max_bytes=4 * steplog.SEGMENTS * steplog.MIN_SEGMENT_BYTES, age_s=1e6)
SEGMENT_STEPS = (steplog.MIN_SEGMENT_BYTES - HEADER_BYTES) // slot_bytes(INFO.schema)


def took(step: int) -> dict[str, float]:
    return {"data": 10.0 + step % 7, "forward": 30.0, "backward": 60.0}


STEPS = recorded(INFO, range(6000), took)


def write(
    folder: Path, steps: StepArrays, kept: KeptSteps | None = KEPT, info: RingInfo = INFO, blocks: Iterable[int] = ()
) -> None:
    log = StepLog(folder, info, kept=kept)
    for start in range(0, len(steps), 50):
        log.append(steps[start : start + 50], frozenset(blocks))
    log.close()


def write_rank(folder: Path, rank: int, numbers: Iterable[int]) -> Path:
    write(folder, recorded(info_of(rank), numbers, took), None, info_of(rank))
    return folder / info_of(rank).file_name("steps")


def read(folder: Path) -> StepArrays:
    (log,) = find_logs(folder)
    reader, parts = LogReader(log), []
    while len(steps := reader.read(100)):
        parts.append(steps)
    assert reader.skipped == 0
    return together(parts)


@pytest.fixture
def logs(tmp_path) -> StepLogs:
    return StepLogs(tmp_path)


def test_the_newest_steps_are_whole_and_older_ones_thinned(tmp_path, logs):
    # GIVEN a log of 6,000 steps with room for a tenth of them
    write(tmp_path, STEPS)
    logs.refresh()
    thinned = logs.thinning(0)
    steps = read(tmp_path)
    # THEN all of its newest are there, as many as fill three quarters of the room at least
    whole_from = thinned.whole_from_step
    assert 3 * SEGMENT_STEPS <= 6000 - whole_from <= 4 * SEGMENT_STEPS
    np.testing.assert_array_equal(steps.step_B[steps.step_B >= whole_from], np.arange(whole_from, 6000))
    # AND of older ones those that every rank keeps, as far as there is room for them
    older = steps.step_B[steps.step_B < whole_from]
    everywhere = np.flatnonzero(steplog.stay(np.arange(whole_from)))
    np.testing.assert_array_equal(older, everywhere[-len(older) :])
    assert steplog.BLOCK_STEPS < len(older) <= steplog.SEGMENTS * SEGMENT_STEPS // 2
    assert thinned.first_step == older[0]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= KEPT.max_bytes * 3 // 8
    # AND what is there is what was written
    np.testing.assert_array_equal(steps.slots_BW[:, :-1], STEPS.slots_BW[steps.step_B, :-1])


def test_a_log_without_limits_is_one_file_and_whole(tmp_path, logs):
    write(tmp_path, STEPS, kept=None)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.0.steps"]
    np.testing.assert_array_equal(read(tmp_path).step_B, np.arange(6000))
    logs.refresh()
    assert logs.thinning(0) is None


def test_every_rank_keeps_the_steps_around_a_capture(tmp_path):
    # GIVEN a rank that was captured in steps 700 to 704, and another of the same host that was not
    steps = STEPS[:3000]
    words = steps.slots_BW.copy()
    words[700:705, FLAGS] |= CAPTURING
    captured = replace(steps, slots_BW=words)
    block = 700 // steplog.BLOCK_STEPS
    # WHEN both have grown so that all of that is thinned
    for folder, of_rank, blocks in (("captured", captured, ()), ("beside", steps, (block - 1, block))):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, of_rank, replace(KEPT, max_bytes=4 * KEPT.max_bytes), blocks=blocks)
        # THEN those, and the ones before them that led to it, are there
        found = set(read(tmp_path / folder).step_B.tolist())
        assert set(range((block - 1) * steplog.BLOCK_STEPS, (block + 1) * steplog.BLOCK_STEPS)) <= found
        assert (block + 1) * steplog.BLOCK_STEPS not in found


def test_steps_older_than_the_limit_go_even_if_there_is_space(tmp_path):
    # GIVEN steps of 0.1 s, and an age of 100 s
    write(tmp_path, STEPS, kept=KeptSteps(1 << 30, age_s=100.0))
    first_s = read(tmp_path)[:1].start_ns_B[0] / 1e9
    last_s = STEPS.start_ns_B[-1] / 1e9
    # THEN hardly older ones are there, and none that are not much younger have gone
    assert 75.0 <= last_s - first_s <= 125.0


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=25),
    restarts=st.sets(st.integers(0, 24)),
    torn=st.sets(st.integers(0, 24)),
    segments=st.integers(1, 8),
)
def test_the_next_writer_loses_nothing_and_writes_nothing_twice(cuts, restarts, torn, segments):
    # GIVEN agents that take a log over from each other, some of them killed in the middle of a write
    kept = KeptSteps(4 * segments * steplog.MIN_SEGMENT_BYTES, 1e6)
    with tempfile.TemporaryDirectory() as name:
        folder, at = Path(name), 0
        log = StepLog(folder, INFO, kept=kept)
        for index, cut in enumerate(cuts):
            if index in restarts:
                log.close()
                if index in torn:
                    with log.path.open("ab") as file:
                        file.write(b"\x01" * 17)
                log = StepLog(folder, INFO, kept=kept)
            # (a ring is read again from its oldest step on)
            log.append(STEPS[max(0, at - 30) : at + cut])
            at += cut
        log.close()
        # THEN each step is there once, in order, the newest all of them
        steps = read(folder).step_B
        assert (np.diff(steps) > 0).all()
        assert steps[-1] == at - 1
        logs = StepLogs(folder)
        logs.refresh()
        thinned = logs.thinning(0)
        whole_from = 0 if thinned is None else thinned.whole_from_step
        np.testing.assert_array_equal(steps[steps >= whole_from], np.arange(whole_from, at))
        assert at - whole_from >= min(at, (segments - 1) // 4 * SEGMENT_STEPS)
        # AND they are found by their numbers as well
        places, found = logs.of(0)[0].steps([(0, at)])
        np.testing.assert_array_equal(np.sort(found.step_B), steps)
        np.testing.assert_array_equal(places, found.step_B)


def test_an_agent_killed_between_thinning_a_segment_and_removing_it_leaves_no_step_twice(tmp_path, monkeypatch):
    # GIVEN one that was
    gone: list[Path] = []
    monkeypatch.setattr(Path, "unlink", lambda path, **_: gone.append(path))
    log = StepLog(tmp_path, INFO, kept=KEPT)
    while not gone:
        log.append(STEPS[log.last : log.last + 50])
    monkeypatch.undo()
    at = log.last
    assert gone[0].exists()
    # WHEN the next one goes on THEN each step is there once
    write(tmp_path, STEPS[at:])
    steps = read(tmp_path).step_B
    assert (np.diff(steps) > 0).all()
    assert not gone[0].exists()


def test_a_segment_that_was_just_begun_is_continued(tmp_path):
    # GIVEN an agent that was killed as it wrote the header of a segment
    write(tmp_path, STEPS[:200])
    paths = [path for _, path in find_segments(tmp_path)]
    assert len(paths) == 2
    os.truncate(paths[-1], 100)
    # WHEN the next one opens the log THEN what the others hold counts, and it goes on
    log = StepLog(tmp_path, INFO, kept=KEPT)
    assert log.last == SEGMENT_STEPS
    log.append(STEPS[:300])
    log.close()
    np.testing.assert_array_equal(read(tmp_path).step_B, np.arange(300))


@pytest.mark.parametrize("there", [0, SEGMENT_STEPS], ids=["the first slot", "a further segment"])
@pytest.mark.parametrize("taken", [0, 50])
def test_a_full_disk_leaves_the_log_whole_whatever_part_of_a_write_it_took(tmp_path, monkeypatch, there, taken):
    real, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1 or not taken:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:taken], offset)

    # GIVEN a disk that is full when the log or its first segment is
    log = StepLog(tmp_path, INFO, kept=KEPT)
    log.append(STEPS[:there])
    before = {path: path.stat().st_size for path in tmp_path.iterdir()}
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(RingError, match="No space left"):
        log.append(STEPS[: there + 10])
    monkeypatch.undo()
    # THEN nothing half-made is left, and once there is room it goes on
    assert ({path: path.stat().st_size for path in tmp_path.iterdir()}, log.last) == (before, there)
    log.append(STEPS[: there + 10])
    log.close()
    np.testing.assert_array_equal(read(tmp_path).step_B, np.arange(there + 10))


def test_a_segment_that_cannot_be_removed_costs_only_space(tmp_path, monkeypatch):
    # GIVEN a file system that lets nothing go
    def refused(path, **_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    log, errors = StepLog(tmp_path, INFO, kept=KEPT), set()
    for start in range(0, 2000, 50):
        # WHEN steps are appended THEN it is an error that names the file, and they are all there
        try:
            log.append(STEPS[start : start + 50])
        except RingError as error:
            errors.add(str(error).rpartition(": ")[2])
        assert log.last == start + 50
    log.close()
    monkeypatch.undo()
    assert errors == {"Read-only file system"}
    paths = [path for name, path in find_segments(tmp_path) if name.kind == "steps"]
    steps = together([LogReader(path).read(5000) for path in paths])
    np.testing.assert_array_equal(np.unique(steps.step_B), np.arange(2000))


def test_a_segment_removed_while_it_is_read_is_skipped(tmp_path, logs):
    write(tmp_path, STEPS[:500])
    (log,) = find_logs(tmp_path)
    reader = LogReader(log)
    first = reader.read(10)
    # WHEN the oldest segment is removed by whoever writes THEN the rest is read
    log.segments[0].unlink()
    rest = reader.read(10_000)
    assert (first.step_B[-1], rest.step_B[0]) == (9, SEGMENT_STEPS)
    # AND reading by step numbers misses just those
    logs.refresh()
    assert logs.of(0)[0].steps([(0, 500)])[1].step_B[0] == SEGMENT_STEPS


def test_the_log_of_another_run_is_not_appended_to(tmp_path):
    write(tmp_path, STEPS[:200])
    with pytest.raises(RingError, match="another run"):
        StepLog(tmp_path, replace(INFO, started_mono_ns=5), kept=KEPT)
    # AND neither is what is no log
    other = tmp_path / "rank-3.0.steps"
    other.write_bytes(b"something else")
    with pytest.raises(RingError, match="not a step log"):
        StepLog(tmp_path, info_of(3))
    assert other.read_bytes() == b"something else"


def test_steps_go_through_the_log_unchanged_and_a_slot_that_comes_twice_is_one_step(tmp_path):
    # GIVEN steps that are appended in two goes with one missed between them, by two agents, one of which is late
    log = StepLog(tmp_path, INFO)
    log.append(STEPS[:2])
    log.append(STEPS[3:7])
    log.close()
    with log.path.open("ab") as file:
        file.write(slots(INFO, range(2), took))
    # THEN the log holds each once
    assert log.path.stat().st_mode & 0o777 == 0o600
    reader = LogReader(log.path)
    np.testing.assert_array_equal(reader.read().step_B, [0, 1, 3, 4, 5, 6])
    assert (len(reader.read()), reader.skipped) == (0, 2)


def test_a_log_whose_header_was_cut_off_starts_again(tmp_path):
    # GIVEN an agent that was killed while it wrote the header
    StepLog(tmp_path, INFO).close()
    os.truncate(tmp_path / "rank-0.0.steps", HEADER_BYTES - 1000)
    # THEN the next one writes it whole
    write(tmp_path, STEPS[:1], kept=None)
    np.testing.assert_array_equal(read(tmp_path).step_B, [0])


@settings(max_examples=200)
@given(data=st.data(), count=st.integers(0, 6))
def test_a_damaged_log_yields_only_what_was_written(data, count):
    # GIVEN a log
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), STEPS[:count], kept=None)
        path = Path(directory) / "rank-0.0.steps"
        content = bytearray(path.read_bytes())
        # WHEN bytes of it are overwritten, and it is cut at any length
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
            content[at] = data.draw(st.integers(0, 255))
        cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
        path.write_bytes(content[:cut])
        # THEN it is refused, or it yields steps that were written, in order, and accounts for every slot
        try:
            reader, parts = LogReader(path), []
            while len(steps := reader.read(3)):
                parts.append(steps)
        except RingError:
            return
        assert reader.info == INFO
        found = together([STEPS[:0], *parts])
        np.testing.assert_array_equal(found.slots_BW[:, :-1], STEPS.slots_BW[found.step_B, :-1])
        assert (np.diff(found.step_B) > 0).all()
        assert len(found) + reader.skipped == -(-(cut - HEADER_BYTES) // slot_bytes(INFO.schema))


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("rank-3.0.steps", (3, 0, "steps", 0)),
        ("rank-3.1.137.steps", (3, 1, "steps", 137)),
        ("rank-3.1.137.thinned-device-steps", (3, 1, "thinned-device-steps", 137)),
        ("rank-0.0.99.counters", (0, 0, "counters", 99)),
        *(
            (name, None)
            for name in ("rank-3.steps", "rank-x.0.steps", "rank-3.0.1.2.steps", ".rank-3.0.steps", "rank-3.0.")
        ),
    ],
)
def test_the_names_of_segments(name, means):
    assert segment_name(name) == means


def test_readings_of_counters_are_found_across_segments(tmp_path):
    # GIVEN a reading every quarter of a second: in each, 0.1 s in the run queue
    limits = KEPT.whole(1)
    log = CountersLog(tmp_path, INFO, limits)
    quarter_ns = 250_000_000
    segment = (steplog.MIN_SEGMENT_BYTES - HEADER_BYTES) // (8 * (2 + len(COUNTERS)))
    count = 6 * segment
    for n in range(1, count):
        log.add((n * quarter_ns, n * 150_000_000, n * 100_000_000, n, *[UNKNOWN] * (len(COUNTERS) - 3)))
    log.close()
    assert len(list(tmp_path.iterdir())) in (3, 4)
    kept = kept_of(tmp_path, INFO)
    # WHEN they are laid over steps of a quarter of a second, from the first one on
    words = STEPS.slots_BW[:count].copy()
    words[:, START] = np.arange(len(words)) * quarter_ns
    words[:, 3] = 0
    durations = np.zeros((len(words), 4), dtype=np.int64)
    durations[:, 0] = quarter_ns
    words[:, 9:13] = durations
    steps = StepArrays(INFO.schema, STEPS.rank_B[: len(words)], words)
    waits_s = kept.laid_over(steps[: len(words) - 2]).counted_BC[:, PLACE["queued_s"]]
    # THEN those of which readings are kept have what they waited, without a gap between segments, and no older ones
    known = np.isfinite(waits_s)
    first = int(known.argmax())
    assert 2 * segment - 1 <= first <= 3 * segment
    assert known[first:].all()
    np.testing.assert_allclose(waits_s[first:], 0.1)
    # AND a few of them, where one segment ends and the next begins, have the same
    for at in range(first, len(waits_s) - 3, 100):
        np.testing.assert_allclose(kept.laid_over(steps[at : at + 3]).counted_BC[:, PLACE["queued_s"]], 0.1)


def steps_of(logs, rank, runs):
    logs.refresh()
    places, steps = logs.of(0)[rank].steps(runs)
    return dict(zip(places.tolist(), steps.step_B.tolist(), strict=True))


@pytest.mark.parametrize(
    ("recorded", "runs", "found"),
    [
        (range(100), [(0, 3), (97, 3)], {0: 0, 1: 1, 2: 2, 3: 97, 4: 98, 5: 99}),
        (range(500, 600), [(505, 2)], {0: 505, 1: 506}),
        # Before the first and after the last there is nothing.
        (range(10, 20), [(8, 4), (18, 4), (50, 2), (-5, 2)], {2: 10, 3: 11, 4: 18, 5: 19}),
        # Steps that were not recorded: what comes after them is found all the same.
        ([*range(10), *range(20, 30)], [(8, 4), (20, 2)], {0: 8, 1: 9, 4: 20, 5: 21}),
        (range(0, 100, 10), [(15, 10), (90, 2)], {5: 20, 10: 90}),
        ([], [(0, 5)], {}),
    ],
)
def test_steps_are_found_by_their_number(tmp_path, logs, recorded, runs, found):
    write_rank(tmp_path, 0, recorded)
    assert steps_of(logs, 0, runs) == found


def left_half_way(slot: bytes) -> bytes:
    words = np.frombuffer(slot, dtype=np.int64).copy()
    words[FLAGS] = INCOMPLETE
    words[-1] = crc32(words.tobytes()[:-WORD_BYTES])
    return words.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda slot: slot[:-1] + bytes([slot[-1] ^ 1]),
        lambda slot: slot[:72] + b"\xff" * 8 + slot[80:],
        lambda slot: bytes(len(slot)),
        lambda slot: b"\xff" * len(slot),
        left_half_way,
    ],
)
def test_a_damaged_slot_or_half_a_step_is_left_out_and_no_other(tmp_path, logs, change):
    path, size = write_rank(tmp_path, 0, range(20)), slot_bytes(info_of(0).schema)
    content = path.read_bytes()
    at = HEADER_BYTES + 5 * size
    path.write_bytes(content[:at] + change(content[at : at + size]) + content[at + size :])
    assert set(steps_of(logs, 0, [(0, 20)]).values()) == set(range(20)) - {5}


def test_a_log_that_grows_is_read_on(tmp_path, logs):
    # GIVEN a log that ends in a slot that is half written
    os.truncate(write_rank(tmp_path, 0, range(10)), HEADER_BYTES + 9 * slot_bytes(info_of(0).schema) + 17)
    assert set(steps_of(logs, 0, [(5, 10)]).values()) == {5, 6, 7, 8}
    # WHEN the agent goes on
    write(tmp_path, recorded(info_of(0), range(20), took)[9:], None, info_of(0))
    # THEN the new steps are there
    assert set(steps_of(logs, 0, [(5, 10)]).values()) == set(range(5, 15))


def test_files_that_are_no_logs_are_ignored(tmp_path, logs):
    # GIVEN a directory with a log, and much that looks like one
    write_rank(tmp_path, 1, range(3))
    (tmp_path / "rank-2.0.steps").write_bytes(b"nonsense")
    (tmp_path / "rank-3.0.steps").symlink_to(tmp_path / "rank-1.0.steps")
    (tmp_path / "rank-4.0.steps").mkdir()
    (tmp_path / "rank-5.0.device-steps").write_bytes(b"")
    # WHEN it is read THEN the log is found, and nothing else
    logs.refresh()
    assert list(logs.of(0)) == [1]
    assert logs.of(7) == {}
    # AND one that is removed has no steps
    (tmp_path / "rank-1.0.steps").unlink()
    assert steps_of(logs, 1, [(0, 3)]) == {}


def test_windows_hold_the_recorded_values_and_nan_elsewhere(tmp_path, logs):
    # GIVEN two ranks, one of which lacks a step
    write_rank(tmp_path, 0, range(10))
    write_rank(tmp_path, 1, [step for step in range(10) if step != 4])
    logs.refresh()
    # WHEN two runs are read, however few vectors are held at once
    for at_once in (1, 4, 1000):
        found = list(windows(logs.of(0), [(3, 3), (8, 1)], at_once))
        # THEN they come in order, in seconds, and what is missing is not made up
        assert [(one.first_step, one.durations_NRS.shape[:2]) for one in found] == [(3, (3, 2)), (8, (1, 2))]
        data_NR = found[0].durations_NRS[:, :, 0]
        np.testing.assert_allclose(data_NR, [[0.013, 0.013], [0.014, np.nan], [0.015, 0.015]])
