"""Rings of version 2: what a trainer of the version before writes is read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.recorder.layout import HEADER_BYTES, LIVE_AT
from sftriage.records import StageSchema
from sftriage.windows.rings import SlotRing as Reader
from sftriage.windows.rings import open_ring
from tests.recorded import new_records
from tests.rings import SlotRing

schemas = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(
    lambda sizes: StageSchema.closed(
        tuple(f"s{index}" for index in range(sizes[0])), tuple(f"s{index}" for index in range(min(sizes)))
    )
)
PUBLISHED, STAGE = 0, 1


@pytest.fixture
def ring(tmp_path, make_info):
    """A ring of four slots."""
    return SlotRing(tmp_path, make_info(), 4)


@pytest.fixture
def reader(ring):
    with open_ring(ring.path) as reader:
        yield reader


@given(schema=schemas, slots=st.integers(1, 9), bursts=st.lists(st.integers(0, 12), max_size=6))
def test_every_step_is_read_or_counted_as_missed(make_info, slot_of, record_of, schema, slots, bursts):
    # GIVEN a ring of any schema and size
    info = make_info(schema=schema)
    with tempfile.TemporaryDirectory() as directory:
        writer = SlotRing(Path(directory), info, slots)
        seq = 0
        with open_ring(writer.path) as reader:
            # WHEN it is written in bursts, some longer than the ring, and read after each
            for burst in bursts:
                for _ in range(burst):
                    seq += 1
                    writer.publish(slot_of(info, seq))
                batch = reader.read()
                # THEN the newest steps that fit are read in order, and the others are counted
                kept = min(burst, slots)
                assert batch.steps.records() == [record_of(info, number) for number in range(seq - kept + 1, seq + 1)]
                assert (len(batch.steps), batch.missed, batch.torn) == (kept, burst - kept, 0)


@settings(max_examples=200)
@given(data=st.data(), published=st.integers(0, 9))
def test_damage_never_makes_a_record_that_was_not_written(make_info, slot_of, record_of, data, published):
    # GIVEN a ring with some steps
    info = make_info()
    with tempfile.TemporaryDirectory() as directory:
        writer = SlotRing(Path(directory), info, 4)
        for seq in range(1, published + 1):
            writer.publish(slot_of(info, seq))
        path = writer.path
        size = path.stat().st_size
        # WHEN bytes of it are overwritten, or it is cut at any length
        content = bytearray(path.read_bytes())
        interesting = st.one_of(st.integers(0, size - 1), st.integers(LIVE_AT, LIVE_AT + 55), st.integers(0, 500))
        for at in data.draw(st.lists(interesting, max_size=8)):
            content[at] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.one_of(st.just(size), st.integers(0, size)))])
        # THEN reading it raises a RingError, or yields steps that were written, each once
        written = {seq: record_of(info, seq) for seq in range(1, published + 1)}
        try:
            with open_ring(path) as reader:
                count = reader.status().published
                batch = reader.read()
        except RingError:
            return
        records = batch.steps.records()
        found = [record.step - 40 for record in records]
        assert [written[seq] for seq in found] == records
        assert sorted(set(found)) == found
        # AND every step that is said to be published is read, missed or torn
        assert len(found) + batch.missed + batch.torn == count


def test_a_torn_slot_is_skipped_and_counted(ring, reader, slot_of, record_of, make_info):
    # GIVEN three steps, the second with a wrong checksum
    info = make_info()
    for seq in (1, 2, 3):
        ring.publish(slot_of(info, seq) if seq != 2 else slot_of(info, seq)[:-8] + bytes(8))
    # THEN the other two are read
    batch = reader.read()
    assert batch.steps.records() == [record_of(info, 1), record_of(info, 3)]
    assert (batch.missed, batch.torn) == (0, 1)


def test_a_writer_that_laps_the_reader_while_it_copies_is_missed_not_torn(
    ring, reader, slot_of, make_info, monkeypatch
):
    # GIVEN a ring of four slots with four steps
    info = make_info()
    for seq in (1, 2, 3, 4):
        ring.publish(slot_of(info, seq))
    copy = reader._circular

    def lapped(*where: int) -> bytes:
        for seq in (5, 6):
            ring.publish(slot_of(info, seq))
        return copy(*where)

    # WHEN two more come between the reader's look at the count and its copy
    monkeypatch.setattr(Reader, "_circular", lambda _, *where: lapped(*where))
    batch = reader.read()
    monkeypatch.undo()
    # THEN the two that were overwritten are missed, and the next read goes on with the new ones
    assert [record.step for record in batch.steps.records()] == [43, 44]
    assert (batch.missed, batch.torn) == (2, 0)
    assert [record.step for record in new_records(reader)] == [45, 46]


def test_a_reader_goes_on_where_an_earlier_one_stopped(ring, slot_of, make_info):
    for seq in (1, 2, 3):
        ring.publish(slot_of(make_info(), seq))
    with open_ring(ring.path, skip=2) as reader:
        assert [record.step for record in new_records(reader)] == [43]


@pytest.mark.parametrize("count", [-1, 1, (1 << 62), (1 << 63) - 1])
def test_a_count_that_cannot_be_is_refused(ring, reader, slot_of, make_info, count):
    # GIVEN a reader that has read two steps
    for seq in (1, 2):
        ring.publish(slot_of(make_info(), seq))
    reader.read()
    # WHEN the count goes backwards, or jumps to where no process counts THEN the ring is refused
    ring.live[PUBLISHED] = count
    ring.store()
    with pytest.raises(RingError, match="steps"):
        reader.read()


def test_a_ring_truncated_under_the_reader_is_an_error_not_a_signal(ring, reader, slot_of, make_info):
    for seq in (1, 2):
        ring.publish(slot_of(make_info(), seq))
    # WHEN the file loses its slots, and then its header THEN the reader says so
    os.truncate(ring.path, HEADER_BYTES)
    with pytest.raises(RingError, match="truncated: steps are missing"):
        reader.read()
    os.truncate(ring.path, 100)
    with pytest.raises(RingError, match="truncated: its header"):
        reader.status()


def test_where_the_rank_is_and_a_stage_that_is_none(ring, reader):
    ring.live[STAGE] = 1
    ring.store()
    assert (reader.status().stage, reader.status().closed, reader.status().alive) == ("forward", False, True)
    ring.live[6] = 1
    ring.store()
    assert reader.status().closed
    ring.live[STAGE] = 4
    ring.store()
    with pytest.raises(RingError, match="stage 4 of 4"):
        reader.status()


def test_a_pid_that_is_used_again_is_not_the_writer(tmp_path, make_info):
    # GIVEN a ring whose writer had this process's pid, but was started at another time
    with open_ring(SlotRing(tmp_path, make_info(pid_start_ticks=1), 4).path) as reader:
        assert not reader.writer_alive
