"""The header of a rank's files, and the file of a ring: how it is made, locked, swept, and read while it is written."""

import contextlib
import json
import os
import struct
import tempfile
import threading
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftriage.base.files import GROUP_ENV, MODE_ENV
from sftriage.errors import RingError
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, MAX_STAGES, OTHER, StageSchema
from sftriage.trainer import layout
from sftriage.trainer.layout import BLOCK_WORDS, END, HEADER_BYTES, KEPT_RINGS, LIVE_AT, LOG_AT, RING_MAGIC, RingFile
from sftriage.trainer.monitor import Monitor
from sftriage.windows.rings import Ring
from tests.rings import word
from tests.scenario import new_records

CLAIMED, OPENED = 0, 1
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]{0,30}", fullmatch=True).filter(lambda name: name != OTHER)


@st.composite
def schemas(draw):
    stages = tuple(draw(st.lists(names, min_size=1, max_size=MAX_STAGES - 1, unique=True)))
    sync = tuple(name for name in stages if draw(st.booleans()))
    return StageSchema.closed(stages, sync)


@given(schema=schemas(), host=st.text(max_size=300), blocks=st.integers(1, 1 << 20))
def test_a_header_is_decoded_as_it_was_encoded(make_info, schema, host, blocks):
    info = make_info(schema=schema, host=layout.bounded_text(host))
    header = layout.encode_header(RING_MAGIC, info, log_words=blocks * BLOCK_WORDS)
    # THEN nothing has changed, and the header has its fixed size
    assert layout.decode_header(RING_MAGIC, header, "x") == layout.Header(info, log_words=blocks * BLOCK_WORDS)
    assert len(header) == HEADER_BYTES


def test_the_largest_header_fits(make_info):
    # GIVEN as many stages as there may be, all sync, with the longest names, and texts that JSON makes longer still
    stages = tuple(f"{index:02d}".ljust(MAX_STAGE_NAME_BYTES, "x") for index in range(MAX_STAGES - 1))
    quotes = '"' * 255
    info = make_info(schema=StageSchema.closed(stages, stages), job=quotes, host=quotes, cohort=quotes)
    # THEN it is encoded without overlapping the live words
    header = layout.encode_header(RING_MAGIC, info, log_words=BLOCK_WORDS)
    assert layout.decode_header(RING_MAGIC, header, "x") == layout.Header(info, log_words=BLOCK_WORDS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda header: b"", "not a ring"),
        (lambda header: b"\x7fELF" + header[4:], "not a ring"),
        (lambda header: layout.LOG_MAGIC + header[8:], "not a ring"),
        (lambda header: header[:100], "truncated"),
        (lambda header: header[:8] + header[8:12][::-1] + header[12:], "another byte order"),
        (lambda header: header[:12] + struct.pack("=I", 9) + header[16:], "format version 9"),
        (lambda header: header[:16] + struct.pack("=I", 1 << 31) + header[20:], "a document of"),
        (lambda header: header.replace(b"node-a", b"node-b"), "checksum"),
    ],
)
def test_a_wrong_header_is_refused_with_the_reason(make_info, damage, message):
    # GIVEN a good header THEN, damaged, it is refused with the file's name and the reason, on one line
    header = layout.encode_header(RING_MAGIC, make_info(), log_words=BLOCK_WORDS)
    with pytest.raises(RingError, match=rf"^some\.ring: .*{message}") as caught:
        layout.decode_header(RING_MAGIC, damage(header), "some.ring")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 8},
        {"rank": -1},
        {"world_size": True},
        {"attempt": 1.0},
        {"pid": 1 << 63},
        {"host": "x" * 256},
        {"job": "a\nb"},
        {"cohort": None},
        {"writer": "a\nb"},
    ],
)
def test_an_invalid_info_is_refused(make_info, changes):
    with pytest.raises(RingError):
        make_info(**changes)


def test_texts_are_cut_at_a_whole_character():
    # GIVEN a text of 2-byte characters whose limit falls in the middle of one
    assert layout.bounded_text("é" * 200) == "é" * 127
    assert layout.bounded_text("a\x1b[31mb\udc80") == "a?[31mb?"


def train(monitor: Monitor, count: int, *stages: str) -> None:
    for _ in range(count):
        with contextlib.ExitStack() as opened:
            for span in (monitor.step(), *map(monitor.stage, stages)):
                opened.enter_context(span)


@pytest.fixture
def written(tmp_path, form):
    """A monitor whose ring holds two blocks, and a function that records so many steps of two stages each."""
    with Monitor(("a", "b"), (), rings=tmp_path, slots=1) as monitor:
        yield monitor, lambda count: train(monitor, count, "a", "b")


@pytest.fixture
def reader(written, tmp_path):
    with Ring(tmp_path / "rank-0.0.ring") as made:
        yield made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(bursts=st.lists(st.integers(0, 200), max_size=6))
def test_every_step_is_read_or_counted_as_missed(form, bursts):
    # GIVEN a ring of two blocks
    with tempfile.TemporaryDirectory() as directory, Monitor(("a",), (), rings=directory, slots=1) as monitor:
        seq = 0
        with Ring(Path(directory) / "rank-0.0.ring") as reader:
            # WHEN it is written in bursts, some longer than the ring, and read after each
            for burst in bursts:
                train(monitor, burst, "a")
                batch = reader.read()
                seq += burst
                # THEN the newest steps are read in order, and the others are counted
                assert (len(batch.steps) + batch.missed, batch.torn) == (burst, 0)
                assert batch.steps.step_B.tolist() == list(range(seq - len(batch.steps), seq))
                assert batch.steps.seq_B.tolist() == list(range(seq - len(batch.steps) + 1, seq + 1))
                # AND as many as fit into a block are never missed
                assert len(batch.steps) >= min(burst, BLOCK_WORDS // 5 - 2)


@cache
def ring_of(form: str, published: int) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        with Monitor(("a",), ("a",), rings=directory, slots=1) as monitor:
            train(monitor, published, "a")
        return (Path(directory) / "rank-0.0.ring").read_bytes()


RING_BYTES = LOG_AT + 2 * BLOCK_WORDS * 8
WHERE = st.one_of(st.integers(0, RING_BYTES - 1), st.integers(LIVE_AT, LIVE_AT + 50), st.integers(LOG_AT, LOG_AT + 200))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    published=st.sampled_from([0, 1, 2, 3, 10, 50, 100, 101, 102, 150, 200, 203, 204, 205, 249, 250]),
    damage=st.lists(st.tuples(WHERE, st.integers(0, 255)), max_size=8),
    size=st.just(RING_BYTES) | st.integers(0, RING_BYTES),
)
def test_damage_is_refused_or_costs_steps_and_ends_in_no_other_error(form, published, damage, size):
    # GIVEN bytes of a ring that are overwritten, and a ring that is cut at any length
    content = bytearray(ring_of(form, published))
    assert len(content) == RING_BYTES
    for at, value in damage:
        content[at] = value
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rank-0.0.ring"
        path.write_bytes(content[:size])
        # THEN reading it raises a RingError, or gives steps with times that can be
        try:
            with Ring(path) as reader:
                reader.status()
                batch = reader.read()
                reader.status()
        except RingError:
            return
        assert (batch.steps.times_ns_BV >= 0).all()
        assert (batch.steps.between_ns_B >= 0).all()
        batch.steps.records()


def test_the_docstring_is_enough_to_read_a_ring_written_at_full_speed(tmp_path, form):
    # GIVEN a writer that never pauses
    monitor = Monitor(("a", "b"), (), rings=tmp_path, slots=4096)
    done = threading.Event()

    def without_a_pause() -> None:
        while not done.is_set():
            with monitor.step(), monitor.stage("a"), monitor.stage("b"):
                pass

    thread = threading.Thread(target=without_a_pause)
    thread.start()
    # WHEN it is read as `layout` says, with nothing of ours, from the first word on
    path = tmp_path / "rank-0.0.ring"
    try:
        numbers = read_by_the_book(path, looks=30)
    finally:
        done.set()
        thread.join(10)
        monitor.close()
    # THEN no step is there that did not happen: numbers only go up, and each step has its six moments
    assert len(numbers) > 100
    assert numbers == sorted(set(numbers))


def read_by_the_book(path: Path, looks: int) -> list[int]:
    """The numbers of the steps of the newest few blocks at each look."""
    header = path.read_bytes()[:HEADER_BYTES]
    log_words = json.loads(header[24 : 24 + struct.unpack_from("=I", header, 16)[0]])["log_words"]
    at, numbers, step = 0, [], []
    with path.open("rb") as file:
        for _ in range(looks):
            live = os.pread(file.fileno(), HEADER_BYTES, 0)
            claimed, opened = word(live, CLAIMED), word(live, OPENED)
            start = max(at, claimed - log_words, opened - 4 * BLOCK_WORDS)
            words = b"".join(
                os.pread(file.fileno(), 8 * BLOCK_WORDS, LOG_AT + 8 * (block % log_words))
                for block in range(start - start % BLOCK_WORDS, opened, BLOCK_WORDS)
            )
            gone = word(os.pread(file.fileno(), HEADER_BYTES, 0), CLAIMED) - log_words
            if start > at:
                step = None
            for at, one in enumerate(np.frombuffer(words, np.uint64)[start % BLOCK_WORDS :].tolist(), start=start):
                code, value = one >> layout.CODE_AT, one & layout.MAX_VALUE
                if at < gone:
                    step = None
                elif not one:
                    break
                elif step is not None and code != layout.BLOCK:
                    step.append((code, value))
                if at >= gone and code in (END, layout.LEFT):
                    if step is not None:
                        assert [code for code, _ in step] == [layout.NUMBER, layout.BEGIN, 2, 4, 5, 3, END]
                        times = [value for _, value in step[1:]]
                        assert times == sorted(times)
                        numbers.append(step[0][1])
                    step = []
            else:
                at = max(start, opened)
    return numbers


def test_a_writer_that_laps_the_reader_while_it_copies_costs_steps_and_makes_none_up(written, reader, monkeypatch):
    # GIVEN a ring of two blocks, nearly full
    _, steps = written
    steps(120)
    copy = type(reader)._circular

    def lapped(self, *where):
        copy(self, *where)
        steps(150)
        return copy(self, *where)

    # WHEN the writer goes on by more than that between the reader's look and its copy
    monkeypatch.setattr(type(reader), "_circular", lapped)
    batch = reader.read()
    monkeypatch.undo()
    # THEN what was overwritten is missed, what was not is right, and the next read goes on from there
    numbers = batch.steps.step_B.tolist()
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else batch.missed == 0
    after = reader.read()
    assert after.steps.step_B.tolist()[-1] == 269
    assert len(batch.steps) + batch.missed + len(after.steps) + after.missed == 270
    assert batch.torn == after.torn == 0


def test_a_step_longer_than_the_ring_is_missed_and_the_next_one_is_read(written, reader):
    monitor, steps = written
    steps(3)
    with monitor.step():
        for _ in range(2 * BLOCK_WORDS):
            with monitor.stage("a"):
                pass
    steps(1)
    batch = reader.read()
    assert (batch.steps.step_B.tolist(), batch.missed) == ([4], 4)


@pytest.mark.parametrize("killed_after", range(9))
def test_a_writer_killed_between_two_stores_leaves_earlier_steps(tmp_path, form, killed_after):
    # GIVEN a step of seven words after a whole one, of which only the first few were stored
    with Monitor(("a", "b"), (), rings=tmp_path, slots=1) as monitor:
        train(monitor, 2, "a", "b")
        content = bytearray((tmp_path / "rank-0.0.ring").read_bytes())
    first = LOG_AT + 8 * (1 + 7 + killed_after)
    content[first : LOG_AT + 8 * (1 + 14)] = bytes(max(0, LOG_AT + 8 * 15 - first))
    (tmp_path / "rank-0.1.ring").write_bytes(content)
    # THEN the whole one is read, and the other one only once its end is there
    with Ring(tmp_path / "rank-0.1.ring") as reader:
        assert [record.step for record in new_records(reader)] == ([0] if killed_after < 7 else [0, 1])
        expected = [None, None, "other", "a", "b", "a", "other", None, None][killed_after]
        assert reader.status().stage == expected


def test_a_reader_goes_on_where_an_earlier_one_stopped(written, tmp_path):
    _, steps = written
    steps(5)
    with Ring(tmp_path / "rank-0.0.ring", skip=3) as reader:
        batch = reader.read()
        assert (batch.steps.seq_B.tolist(), batch.missed) == ([4, 5], 0)
        assert (batch.steps.between_ns_B > 0).all()


@pytest.mark.parametrize(("at", "value"), [(CLAIMED, 100), (OPENED, -512), (OPENED, 513), (OPENED, 1 << 40)])
def test_impossible_counts_are_refused(written, reader, tmp_path, at, value):
    _, steps = written
    steps(100)
    with (tmp_path / "rank-0.0.ring").open("r+b") as file:
        file.seek(LIVE_AT + 8 * at)
        file.write(struct.pack("=q", value))
    with pytest.raises(RingError):
        reader.read()


def test_a_ring_truncated_under_the_reader_is_an_error_not_a_signal(written, reader, tmp_path):
    monitor, steps = written
    steps(3)
    monitor.close()
    for size in (LOG_AT, 100):
        os.truncate(tmp_path / "rank-0.0.ring", size)
        with pytest.raises(RingError, match="truncated"):
            reader.read()


def test_a_ring_is_private_whole_from_the_start_and_never_replaces_another(tmp_path, make_info):
    ring = RingFile(tmp_path, make_info(), 4)
    # THEN only its owner may read it, and nothing else is left in the directory
    assert ring.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.0.ring"]
    before = ring.path.read_bytes()
    # AND a second one of that name is refused, and changes nothing
    with pytest.raises(FileExistsError):
        RingFile(tmp_path, make_info(host="node-b"), 4)
    assert ring.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.0.ring"]
    ring.close()


@pytest.mark.parametrize(("mode", "group", "expected"), [("640", "", 0o640), ("0660", "1", 0o660), ("777", "", 0o666)])
def test_mode_and_group_of_the_files_can_be_set(tmp_path, monkeypatch, mode, group, expected):
    monkeypatch.setenv(MODE_ENV, mode)
    monkeypatch.setenv(GROUP_ENV, group)
    with Monitor(rings=tmp_path):
        found = [path.stat() for path in tmp_path.iterdir()]
    assert [status.st_mode & 0o777 for status in found] == [expected] * 4
    assert {status.st_gid for status in found} == {int(group or os.getgid())}


@pytest.mark.parametrize(("variable", "value"), [(MODE_ENV, "rw"), (GROUP_ENV, "no such group")])
def test_an_invalid_mode_or_group_is_one_warning(tmp_path, monkeypatch, caplog, variable, value):
    monkeypatch.setenv(variable, value)
    with Monitor(rings=tmp_path) as monitor:
        assert not monitor.active
    assert [value in record.message for record in caplog.records] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_closed_ring_says_so_and_stays_readable(written, reader):
    monitor, steps = written
    steps(1)
    assert (reader.status().closed, reader.status().alive) == (False, True)
    monitor.close()
    monitor.close()
    status = reader.status()
    assert (status.closed, status.stage, status.alive, status.published) == (True, None, False, 1)
    assert len(reader.read().steps) == 1


def test_a_reader_in_the_trainers_own_process_leaves_it_its_lock(written, tmp_path):
    # GIVEN a ring that is read and closed in the process that writes it, which by POSIX would end its lock
    with Ring(tmp_path / "rank-0.0.ring") as reader:
        assert reader.writer_alive
    # THEN another process still sees that the writer lives, until it does not
    assert seen_elsewhere(tmp_path / "rank-0.0.ring") == 1
    written[0].close()
    assert seen_elsewhere(tmp_path / "rank-0.0.ring") == 0


def seen_elsewhere(path: Path) -> int | None:
    """Whether another process sees that the writer of a ring lives."""
    child = get_context("fork").Process(target=lambda: os._exit(Ring(path).writer_alive))
    child.start()
    child.join(60)
    return child.exitcode


def test_without_file_locks_the_pid_shows_whether_the_writer_lives(tmp_path, monkeypatch, make_info):
    def refused(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(layout.fcntl, "lockf", refused)
    with Monitor(rings=tmp_path) as monitor, Ring(tmp_path / "rank-0.0.ring") as reader:
        assert (monitor.info.locked, reader.writer_alive) == (False, True)
    # AND a pid that is used again is not the writer
    ring = RingFile(tmp_path, make_info(pid_start_ticks=1), 4)
    with Ring(ring.path) as reader:
        assert not reader.writer_alive
    ring.close()


def test_files_of_dead_attempts_are_swept_except_the_last(tmp_path, make_info):
    # GIVEN rings of more dead attempts than are kept, an old one of a number that no rank has any more among them, one
    # that is held, and half a file
    dead = [RingFile(tmp_path, make_info(rank=0, attempt=attempt), 4) for attempt in range(KEPT_RINGS + 2)]
    held = RingFile(tmp_path, make_info(rank=0, attempt=KEPT_RINGS + 2), 4)
    other = RingFile(tmp_path, make_info(rank=1), 4)
    for ring in (*dead, other):
        ring.path.with_suffix(".mailbox").touch()
        ring.close()
    half = tmp_path / ".rank-0.7.ring.77.partial"
    half.touch()
    os.utime(half, (0, 0))
    # WHEN the next attempt begins
    claimed = layout.claim(tmp_path, make_info(rank=0, attempt=KEPT_RINGS + 3), 4)
    # THEN the oldest are gone, with what goes with them
    left = {path.stem for path in tmp_path.iterdir()}
    assert left == {ring.path.stem for ring in (*dead[2:], held, claimed)}
    for ring in (claimed, held):
        ring.close()


@pytest.mark.parametrize(("ended", "pid", "attempt"), [(True, 7, 3), (False, 7, 2), (True, None, 2)])
def test_ranks_that_start_together_have_one_attempt_whatever_numbers_they_had(tmp_path, make_info, ended, pid, attempt):
    # GIVEN the ring of another rank of attempt 2, of another process that has ended, or goes on, or of this one
    about = {} if pid is None else {"pid": pid}
    other = RingFile(tmp_path, make_info(rank=0, attempt=2, **about), 4)
    if ended:
        other.close()
    # WHEN a rank that has no ring here yet begins, whose launcher counts no restart
    ring = layout.claim(tmp_path, make_info(rank=1), 4)
    # THEN it is of the attempt after that which is over, or of the one that goes on
    assert ring.info.attempt == attempt
    for held in (ring, other):
        held.close()


def test_rings_are_found_by_rank_and_attempt_and_other_files_are_not(tmp_path):
    for name in ("10.0.ring", "2.1.ring", "2.0.ring", "2.0.mailbox", "x.0.ring", "1.ring"):
        (tmp_path / f"rank-{name}").touch()
    assert [path.name for path in layout.find_rings(tmp_path)] == ["rank-2.0.ring", "rank-2.1.ring", "rank-10.0.ring"]


def test_stages_and_the_cohort_may_come_later(tmp_path, form):
    # GIVEN a monitor that knows no stages yet
    with Monitor((), (), rings=tmp_path) as monitor, Ring(tmp_path / "rank-0.0.ring") as reader:
        with monitor.step():
            monitor.declare("forward")
            with monitor.stage("forward"):
                monitor.declare("backward", sync=True)
        monitor.declare("backward")
        monitor.join("pp0")
        with monitor.step(), monitor.stage("backward"):
            pass
        # THEN what is recorded has them from where they came on
        first, second = new_records(reader)
        assert reader.info.schema.stages == ("forward", "backward", "other") == monitor.info.schema.stages
        assert (reader.info.schema.sync, reader.info.cohort) == (("backward",), "pp0")
        assert (first.durations_ns[0] > 0, second.durations_ns[1] > 0) == (True, True)
        # AND they are lines of their own, written before anything says their number
        lines = (tmp_path / "rank-0.0.ring").read_bytes()[layout.ADDITIONS_AT :].partition(b"\0")[0].splitlines()
        assert [json.loads(line) for line in lines] == [
            {"stage": "forward", "sync": False},
            {"stage": "backward", "sync": True},
            {"cohort": "pp0"},
        ]


@pytest.mark.parametrize(
    ("stages", "misuse", "known"),
    [
        *(([stage], 1, 5) for stage in ("no spaces", "", "other " * 20, 7, None)),
        ([f"stage-{number}" for number in range(40)], 13, 32),
    ],
)
def test_stages_that_cannot_be_declared_or_are_too_many_are_misuse(tmp_path, form, stages, misuse, known, caplog):
    with Monitor(rings=tmp_path) as monitor, Ring(tmp_path / "rank-0.0.ring") as reader:
        for stage in stages:
            monitor.declare(stage)
        reader.status()
        assert (reader.misuse, len(reader.info.schema.stages), monitor.active) == (misuse, known, True)
        assert len(caplog.records) == 1
