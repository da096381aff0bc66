from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.recorder.layout import HEADER_BYTES
from sftriage.windows import steplog
from sftriage.windows.decoding import StepArrays, decode, slot_bytes
from sftriage.windows.steplog import StepLog
from tests.recorded import read_log


@pytest.fixture(scope="session")
def raw(slot_of):
    def make(info, *seqs) -> bytes:
        return b"".join(slot_of(info, seq) for seq in seqs)

    return make


@pytest.fixture(scope="session")
def steps(raw):
    """Steps as a log takes them."""

    def make(info, *seqs) -> StepArrays:
        return decode([(info.rank, raw(info, *seqs))], info.schema)

    return make


@pytest.fixture
def info(make_info):
    return make_info()


@pytest.fixture
def log(tmp_path, info):
    """A log that its agent goes on with, or closes."""
    made = StepLog(tmp_path, info)
    yield made
    made.close()


def test_steps_go_through_the_log_unchanged(log, info, tmp_path, record_of, steps):
    # WHEN steps are appended, in two goes with some missed between them THEN the log holds them
    log.append(steps(info, 1, 2))
    log.append(steps(info, 4, 5, 6, 7))
    records = [record_of(info, seq) for seq in (1, 2, 4, 5, 6, 7)]
    assert read_log(tmp_path / "rank-3.0.steps") == (info, records, 0)
    assert (tmp_path / "rank-3.0.steps").stat().st_mode & 0o777 == 0o600


def test_an_agent_that_was_restarted_goes_on_after_a_half_written_slot(tmp_path, log, info, raw, record_of, steps):
    # GIVEN a log whose agent was killed in the middle of a write
    log.append(steps(info, 1, 2))
    log.close()
    with log.path.open("ab") as file:
        file.write(raw(info, 3)[:20])
    # WHEN the next agent opens it
    log = StepLog(tmp_path, info)
    # THEN it knows where to go on, and what it appends is read
    assert log.last_seq == 2
    log.append(steps(info, 3))
    log.close()
    assert read_log(log.path) == (info, [record_of(info, seq) for seq in (1, 2, 3)], 0)


def test_a_log_whose_header_was_cut_off_starts_again(tmp_path, make_info, steps):
    # GIVEN an agent that was killed while it wrote the header
    info = make_info()
    StepLog(tmp_path, info).close()
    os.truncate(tmp_path / "rank-3.0.steps", HEADER_BYTES - 1000)
    # THEN the next one writes it whole
    log = StepLog(tmp_path, info)
    log.append(steps(info, 1))
    log.close()
    assert len(read_log(log.path).records) == 1


def test_the_log_of_another_run_is_not_appended_to(tmp_path, make_info):
    StepLog(tmp_path, make_info()).close()
    with pytest.raises(RingError, match="another run"):
        StepLog(tmp_path, make_info(started_mono_ns=5))
    (tmp_path / "rank-3.0.steps").write_bytes(b"something else")
    with pytest.raises(RingError, match="not a step log"):
        StepLog(tmp_path, make_info())
    assert (tmp_path / "rank-3.0.steps").read_bytes() == b"something else"


def test_an_agent_that_starts_again_appends_what_the_log_does_not_have(log, info, steps, record_of):
    # GIVEN a log with two steps, and a ring that is read from its oldest step again
    log.append(steps(info, 1, 2))
    # WHEN all that was read is offered THEN only what is new is appended
    log.append(steps(info, 1, 2))
    log.append(steps(info, 1, 2, 3))
    log.append(steps(info, 4))
    log.close()
    assert read_log(log.path) == (info, [record_of(info, seq) for seq in (1, 2, 3, 4)], 0)


def test_a_slot_that_comes_twice_is_one_record(log, info, raw, record_of, steps):
    # GIVEN two agents that wrote the same log, one over the other's shoulder
    log.append(steps(info, 1, 2))
    log.close()
    with log.path.open("ab") as file:
        file.write(raw(info, 1, 2, 3))
    assert read_log(log.path) == (info, [record_of(info, seq) for seq in (1, 2, 3)], 2)


def test_a_disk_that_fills_up_leaves_the_log_whole(log, info, steps, record_of, monkeypatch):
    # GIVEN a disk that takes half a slot and then no more
    real, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[:50], offset)

    monkeypatch.setattr(steplog.os, "pwrite", full)
    with pytest.raises(RingError, match="No space left"):
        log.append(steps(info, 1))
    monkeypatch.undo()
    # THEN none of it is in the log, and when there is space again it goes on
    assert (log.last_seq, log.path.stat().st_size) == (0, HEADER_BYTES)
    log.append(steps(info, 1))
    log.close()
    assert read_log(log.path) == (info, [record_of(info, 1)], 0)


@settings(max_examples=200)
@given(data=st.data(), count=st.integers(0, 6))
def test_a_damaged_log_yields_only_what_was_written(make_info, raw, record_of, data, count, steps):
    # GIVEN a log
    info = make_info()
    with tempfile.TemporaryDirectory() as directory:
        log = StepLog(directory, info)
        log.append(steps(info, *range(1, count + 1)))
        log.close()
        content = bytearray(log.path.read_bytes())
        # WHEN bytes of it are overwritten, and it is cut at any length
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)):
            content[at] = data.draw(st.integers(0, 255))
        cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
        log.path.write_bytes(content[:cut])
        # THEN it is refused, or it yields steps that were written, in order, and accounts for every slot
        try:
            info_read, records, skipped = read_log(log.path)
        except RingError:
            return
        assert info_read == info
        assert all(record == record_of(info, record.step - 40) for record in records)
        assert [record.step for record in records] == sorted({record.step for record in records})
        assert len(records) + skipped == -(-(cut - HEADER_BYTES) // slot_bytes(info.schema))


def test_a_reader_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "rank-0.0.steps")
    with pytest.raises(RingError, match="regular"):
        read_log(Path(tmp_path / "rank-0.0.steps"))
