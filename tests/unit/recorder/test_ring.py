from __future__ import annotations

import os
import tempfile
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.recorder import files
from sftriage.recorder.layout import HEADER_BYTES, LIVE_AT
from sftriage.recorder.ring import CURRENT_STAGE, PUBLISHED, RingReader, RingWriter, find_rings
from sftriage.records import StageSchema
from tests.recorded import new_records, records_in

schemas = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(
    lambda sizes: StageSchema.closed(
        tuple(f"s{index}" for index in range(sizes[0])), tuple(f"s{index}" for index in range(min(sizes)))
    )
)


@given(schema=schemas, slots=st.integers(1, 9), bursts=st.lists(st.integers(0, 12), max_size=6))
def test_every_step_is_read_or_counted_as_missed(make_info, slot_of, record_of, schema, slots, bursts):
    # GIVEN a ring of any schema and size
    info = make_info(schema=schema)
    with tempfile.TemporaryDirectory() as directory:
        writer = RingWriter(Path(directory), info, slots)
        seq = 0
        with RingReader(writer.path) as reader:
            # WHEN it is written in bursts, some longer than the ring, and read after each
            for burst in bursts:
                for _ in range(burst):
                    seq += 1
                    writer.publish(slot_of(info, seq))
                batch = reader.read()
                # THEN the newest steps that fit are read in order, and the others are counted
                kept = min(burst, slots)
                assert records_in(batch.raw, info) == [
                    record_of(info, number) for number in range(seq - kept + 1, seq + 1)
                ]
                assert (batch.steps, batch.missed, batch.torn) == (kept, burst - kept, 0)
                assert len(batch.raw) == kept * info.slot_bytes
        writer.close()


@settings(max_examples=300)
@given(data=st.data(), published=st.integers(0, 9))
def test_damage_never_makes_a_record_that_was_not_written(make_info, slot_of, record_of, data, published):
    # GIVEN a ring with some steps
    info = make_info()
    with tempfile.TemporaryDirectory() as directory:
        writer = RingWriter(Path(directory), info, 4)
        for seq in range(1, published + 1):
            writer.publish(slot_of(info, seq))
        path = writer.path
        writer.close()
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
            with RingReader(path) as reader:
                count = reader.status().published
                batch = reader.read()
                records = records_in(batch.raw, reader.info)
                found = [record.step - 40 for record in records]
        except RingError:
            return
        assert [written[seq] for seq in found] == records
        assert sorted(set(found)) == found
        # AND every step that is said to be published is read, missed or torn
        assert len(found) == batch.steps
        assert batch.steps + batch.missed + batch.torn == count


def test_a_torn_slot_is_skipped_and_counted(ring, slot_of, record_of):
    # GIVEN three steps, the second with a wrong checksum
    for seq, crc in ((1, None), (2, 0), (3, None)):
        ring.writer.publish(slot_of(ring.info, seq, crc=crc))
    # THEN the other two are read
    batch = ring.reader.read()
    assert records_in(batch.raw, ring.info) == [record_of(ring.info, 1), record_of(ring.info, 3)]
    assert (batch.missed, batch.torn) == (0, 1)


def test_a_writer_that_laps_the_reader_while_it_copies_is_missed_not_torn(ring, record_of, monkeypatch):
    # GIVEN a ring of four slots with four steps
    ring.publish(1, 2, 3, 4)
    copy = ring.reader._slots

    def lapped(first: int, end: int) -> bytes:
        ring.publish(5, 6)
        return copy(first, end)

    # WHEN two more come between the reader's look at the count and its copy
    monkeypatch.setattr(ring.reader, "_slots", lapped)
    batch = ring.reader.read()
    monkeypatch.undo()
    # THEN the two that were overwritten are missed, and the next read goes on with the new ones
    assert records_in(batch.raw, ring.info) == [record_of(ring.info, 3), record_of(ring.info, 4)]
    assert (batch.missed, batch.torn) == (2, 0)
    assert new_records(ring.reader) == [record_of(ring.info, 5), record_of(ring.info, 6)]


def test_the_slot_being_written_while_it_is_copied_is_missed_not_torn(ring, slot_of):
    # GIVEN a full ring, and a writer in the middle of storing step 5 over step 1, not yet published
    ring.publish(1, 2, 3, 4)
    half = slot_of(ring.info, 5)[:5]
    ring.writer.words[: len(half)] = half
    # THEN step 1 is missed
    batch = ring.reader.read()
    assert [record.step for record in records_in(batch.raw, ring.info)] == [42, 43, 44]
    assert (batch.missed, batch.torn) == (1, 0)


def test_a_reader_goes_on_where_an_earlier_one_stopped(ring):
    ring.publish(1, 2, 3)
    with RingReader(ring.path, skip=2) as reader:
        assert [record.step for record in new_records(reader)] == [43]


@pytest.mark.parametrize("count", [-1, 1, (1 << 62), (1 << 63) - 1])
def test_a_count_that_cannot_be_is_refused(ring, count):
    # GIVEN a reader that has read two steps
    ring.publish(1, 2)
    ring.reader.read()
    # WHEN the count goes backwards, or jumps to where no process counts THEN the ring is refused
    ring.writer.live[PUBLISHED] = count
    with pytest.raises(RingError, match="steps"):
        ring.reader.read()


def test_a_ring_truncated_under_the_reader_is_an_error_not_a_signal(ring):
    # GIVEN an open reader
    ring.publish(1, 2)
    # WHEN the file loses its slots, and then its header THEN the reader says so
    os.truncate(ring.path, HEADER_BYTES)
    with pytest.raises(RingError, match="truncated: slots are missing"):
        ring.reader.read()
    os.truncate(ring.path, 100)
    with pytest.raises(RingError, match="truncated: its header"):
        ring.reader.status()


def test_a_stage_that_is_none_is_refused(ring):
    ring.writer.live[CURRENT_STAGE] = 4
    with pytest.raises(RingError, match="stage 4 of 4"):
        ring.reader.status()


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    # GIVEN a pipe that nobody writes to, a link, a directory, and nothing
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link", "missing", "."):
        with pytest.raises(RingError):
            RingReader(tmp_path / name)


def test_a_ring_is_private_whole_from_the_start_and_never_replaces_another(tmp_path, make_info):
    # GIVEN a ring
    writer = RingWriter(tmp_path, make_info(), 4)
    # THEN only its owner may read it, and nothing else is left in the directory
    assert writer.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.0.ring"]
    before = writer.path.read_bytes()
    # AND a second one of that name is refused, and changes nothing
    with pytest.raises(FileExistsError):
        RingWriter(tmp_path, make_info(host="node-b"), 4)
    assert writer.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.0.ring"]
    writer.close()


def test_a_full_disk_leaves_nothing_behind(tmp_path, make_info, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        RingWriter(tmp_path, make_info(), 4)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_ring_says_so_and_stays_readable(ring):
    ring.publish(1)
    ring.writer.live[CURRENT_STAGE] = 1
    assert (ring.reader.status().closed, ring.reader.status().stage) == (False, "forward")
    ring.writer.close()
    ring.writer.close()
    assert (ring.reader.status().closed, ring.reader.status().stage) == (True, None)
    assert ring.reader.read().steps == 1


def test_a_pid_that_is_used_again_is_not_the_writer(tmp_path, make_info):
    # GIVEN a ring whose writer had this process's pid, but was started at another time
    writer = RingWriter(tmp_path, make_info(pid_start_ticks=1), 4)
    with RingReader(writer.path) as reader:
        assert not reader.writer_alive
    writer.close()


def test_a_zombie_is_not_alive():
    # GIVEN a child that has ended, and whose parent has not looked yet
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        assert files.start_ticks(child) is None
        assert files.start_ticks(os.getpid()) is not None
    finally:
        os.waitpid(child, 0)


def test_rings_are_found_by_rank_and_attempt_and_other_files_are_not(tmp_path):
    for name in ("10.0.ring", "2.1.ring", "2.0.ring", "2.0.mailbox", "x.0.ring", "1.ring"):
        (tmp_path / f"rank-{name}").touch()
    assert [path.name for path in find_rings(tmp_path)] == ["rank-2.0.ring", "rank-2.1.ring", "rank-10.0.ring"]


def test_the_slot_is_stored_before_the_count(ring, slot_of, monkeypatch):
    # GIVEN a writer that is watched as it publishes
    slot = slot_of(ring.info, 1)
    seen = []

    class Watching:
        def __setitem__(self, key: slice, value: array[int]) -> None:
            seen.append(("slot", ring.writer.live[PUBLISHED]))

    monkeypatch.setattr(ring.writer, "words", Watching())
    ring.writer.publish(slot)
    monkeypatch.undo()
    # THEN the count was still the old one while the slot was stored
    assert seen == [("slot", 0)]
    assert ring.writer.live[PUBLISHED] == 1
