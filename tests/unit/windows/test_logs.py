from zlib import crc32

import numpy as np
import pytest

from sftriage.recorder.layout import HEADER_BYTES, LOG_MAGIC, WORD_BYTES, encode_header
from sftriage.windows.decoding import FLAGS, INCOMPLETE, slot_bytes
from sftriage.windows.logs import StepLogs, windows
from sftriage.windows.steplog import StepLog
from tests.scenario import info_of, slots
from tests.scenario import steps_of as recorded


def took(step):
    return {"data": 10.0 + step, "forward": 30.0, "backward": 60.0}


@pytest.fixture
def logs(tmp_path) -> StepLogs:
    return StepLogs(tmp_path)


def write(directory, rank, steps, **about):
    """A log as an agent leaves it; ``damage`` maps the index of a slot to what is done to its bytes."""
    damage = about.pop("damage", {})
    info = info_of(rank, **about)
    size = slot_bytes(info.schema)
    raw = bytearray(slots(info, steps, took))
    for index, change in damage.items():
        raw[index * size : (index + 1) * size] = change(bytes(raw[index * size : (index + 1) * size]))
    (directory / info.file_name("steps")).write_bytes(encode_header(LOG_MAGIC, info) + bytes(raw))


def steps_of(logs, rank, runs):
    logs.look()
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
    write(tmp_path, 0, recorded)
    assert steps_of(logs, 0, runs) == found


@pytest.mark.parametrize(
    "change",
    [
        lambda slot: slot[:-1] + bytes([slot[-1] ^ 1]),
        lambda slot: slot[:72] + b"\xff" * 8 + slot[80:],
        lambda slot: bytes(len(slot)),
        lambda slot: b"\xff" * len(slot),
    ],
)
def test_a_damaged_slot_is_left_out_and_no_other(tmp_path, logs, change):
    write(tmp_path, 0, range(20), damage={5: change})
    assert set(steps_of(logs, 0, [(0, 20)]).values()) == set(range(20)) - {5}


def test_a_step_that_was_left_half_way_is_missing(tmp_path, logs):

    def left(slot: bytes) -> bytes:
        words = np.frombuffer(slot, dtype=np.int64).copy()
        words[FLAGS] = INCOMPLETE
        words[-1] = crc32(words.tobytes()[:-WORD_BYTES])
        return words.tobytes()

    write(tmp_path, 0, range(20), damage={7: left})
    assert set(steps_of(logs, 0, [(5, 5)]).values()) == {5, 6, 8, 9}


def test_a_log_that_grows_is_read_on(tmp_path, logs):
    # GIVEN a log that ends in a slot that is half written
    write(tmp_path, 0, range(10))
    path = tmp_path / info_of(0).file_name("steps")
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 9 * slot_bytes(info_of(0).schema) + 17)
    assert set(steps_of(logs, 0, [(5, 10)]).values()) == {5, 6, 7, 8}
    # WHEN the agent goes on
    log = StepLog(tmp_path, info_of(0))
    log.append(recorded(info_of(0), range(20), took)[9:])
    log.close()
    # THEN the new steps are there
    assert set(steps_of(logs, 0, [(5, 10)]).values()) == set(range(5, 15))


def test_what_is_no_log_is_none(tmp_path, logs):
    # GIVEN a directory with a log, and much that looks like one
    write(tmp_path, 1, range(3))
    (tmp_path / "rank-2.0.steps").write_bytes(b"nonsense")
    (tmp_path / "rank-3.0.steps").symlink_to(tmp_path / "rank-1.0.steps")
    (tmp_path / "rank-4.0.steps").mkdir()
    (tmp_path / "rank-5.0.device-steps").write_bytes(b"")
    # WHEN it is looked at THEN the log is taken, and nothing else
    logs.look()
    assert list(logs.of(0)) == [1]
    assert logs.of(7) == {}
    # AND one that is removed has no steps
    (tmp_path / "rank-1.0.steps").unlink()
    assert steps_of(logs, 1, [(0, 3)]) == {}


def test_windows_hold_what_was_recorded_and_nan_where_nothing_was(tmp_path, logs):
    # GIVEN two ranks, one of which lacks a step
    write(tmp_path, 0, range(10))
    write(tmp_path, 1, [step for step in range(10) if step != 4])
    logs.look()
    # WHEN two runs are asked for, however few vectors are held at once
    for together in (1, 4, 1000):
        found = list(windows(logs.of(0), [(3, 3), (8, 1)], together))
        # THEN they come in order, in seconds, and what is missing is not made up
        assert [(one.first_step, one.durations_NRS.shape[:2]) for one in found] == [(3, (3, 2)), (8, (1, 2))]
        data_NR = found[0].durations_NRS[:, :, 0]
        np.testing.assert_allclose(data_NR, [[0.013, 0.013], [0.014, np.nan], [0.015, 0.015]])


def test_records_are_those_of_the_recorder(tmp_path, logs):
    write(tmp_path, 0, range(10))
    logs.look()
    records = logs.of(0)[0].steps([(4, 2)])[1].records()
    assert [(record.step, record.durations_ns[0]) for record in records] == [(4, 14_000_000), (5, 15_000_000)]
