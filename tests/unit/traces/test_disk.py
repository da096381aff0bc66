"""Writes are done in order, late, or counted as lost; no caller waits for a disk that does not answer."""

import errno
import logging
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.model.events import DiskFailed, DiskRecovered
from sftriage.traces import disk as module
from sftriage.traces.disk import Counted, Disk, refusal

DEADLINE_S = 20.0
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def no_test_waits_long(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.005)


@pytest.fixture
def disk():
    made = Disk(clock=lambda: 100.0)
    yield made
    made.close()


class Moody:
    """A disk's temper: takes what it is given, or refuses it."""

    def __init__(self):
        self.full, self.took = False, []

    def write(self, what):
        def act():
            if self.full:
                raise FULL
            self.took.append(what)

        return act


def test_writes_run_in_order_before_the_call_returns(disk):
    moody = Moody()
    for number in range(5):
        disk.do(moody.write(number), f"queue {number % 2}")
        assert moody.took[-1] == number
    assert (disk.well, list(disk.news())) == (True, [])


def test_what_a_full_disk_refuses_is_written_late_in_order_and_counted(disk):
    moody = Moody()
    moody.full = True
    # GIVEN a disk that has become full
    for number in range(3):
        disk.do(moody.write(number), "journal", Counted("windows", steps=(10 * number, 10 * number + 49)))
    disk.do(moody.write("steps"), "log", Counted("steps", 20), waits=False)
    # THEN nothing was written, and that is reported once, with the disk's error
    assert (moody.took, disk.well) == ([], False)
    assert list(disk.news()) == [DiskFailed(100.0, "No space left on device")]
    # WHEN it takes writes again THEN all of them run, in order, and are reported by number
    moody.full = False
    disk.drain(DEADLINE_S)
    assert [one for one in moody.took if one != "steps"] == [0, 1, 2]
    (over,) = disk.news()
    assert (over.over, over.late, over.lost, over.lost_steps) == (True, {"windows": 3, "steps": 20}, {}, None)


def test_a_file_that_is_refused_holds_up_no_other(disk):
    # GIVEN a disk without room for another file
    moody, full = Moody(), Moody()
    full.full = True
    disk.do(full.write("state"), "state.json", latest=True)
    # WHEN a file that is there is written to THEN it is, at once
    disk.do(moody.write("window"), "journal")
    assert moody.took == ["window"]
    # AND of what is to be in the file in the end, only that is written
    disk.do(full.write("newer state"), "state.json", latest=True)
    full.full = False
    disk.drain(DEADLINE_S)
    assert full.took == ["newer state"]


def test_what_has_time_is_done_after_all_else(disk):
    moody, hold = Moody(), threading.Event()
    # GIVEN a disk that is busy
    disk.do(lambda: hold.wait(DEADLINE_S), "busy", waits=False)
    # WHEN a write with time is queued, and then another one
    disk.do(moody.write("has time"), "late", waits=False, last=True)
    disk.do(moody.write("at once"), "soon", waits=False)
    hold.set()
    disk.drain(DEADLINE_S)
    assert moody.took == ["at once", "has time"]
    # AND what a caller holds back is queued before anything counts as settled
    disk.holds_back(lambda: disk.do(moody.write("held back"), "held", waits=False, last=True))
    disk.settle()
    assert moody.took[2:] == ["held back"]


def test_what_finds_no_room_in_memory_or_waits_at_the_end_is_lost_by_number():
    moody = Moody()
    moody.full = True
    disk = Disk(max_bytes=2 * (1000 + 512))
    for number in range(5):
        steps = (10 * number, 10 * number + 49)
        disk.do(moody.write(number), "journal", Counted("windows", size_bytes=1000, steps=steps))
    moody.full = False
    disk.drain(DEADLINE_S)
    _, over = disk.news()
    assert (moody.took, over.late, over.lost, over.lost_steps) == ([0, 1], {"windows": 2}, {"windows": 3}, (20, 89))
    # WHEN it ends while something waits THEN that is lost too
    moody.full = True
    disk.do(moody.write(5), "journal", Counted("windows", steps=(20, 69)))
    disk.close()
    *_, over = disk.news()
    assert (over.over, over.lost, over.lost_steps) == (False, {"windows": 1}, (20, 69))
    # AND what comes later is ignored
    disk.do(moody.write(6), "journal")
    assert list(disk.news()) == []


def test_no_caller_waits_long_for_a_disk_that_hangs(disk):
    inside, answers, took = threading.Event(), threading.Event(), []

    def hang():
        inside.set()
        assert answers.wait(DEADLINE_S)
        took.append("hung")

    # GIVEN a disk that does not answer
    disk.do(hang, "journal", Counted("windows"), patience_s=0.01)
    assert inside.is_set()
    assert (disk.hangs, disk.well, [type(one) for one in disk.news()]) == (True, False, [DiskFailed])
    # WHEN more is to be written THEN no caller waits for it
    disk.do(lambda: took.append("later"), "log", Counted("steps", 7))
    assert took == []
    # AND once it answers, it is
    answers.set()
    disk.drain(DEADLINE_S)
    (over,) = disk.news()
    assert (took, over.late, disk.hangs) == (["hung", "later"], {"windows": 1, "steps": 7}, False)


def test_an_error_other_than_a_refusal_is_logged_and_not_retried(disk, caplog):
    caplog.set_level(logging.DEBUG, "sftriage")
    tried = []

    def broken():
        tried.append(1)
        raise ValueError("no number")

    disk.do(broken, "journal")
    assert (tried, disk.well) == ([1], True)
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR] == ["ValueError: no number"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FULL, "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (OSError(errno.ESTALE, "Stale file handle"), "Stale file handle"),
        # An error about a name is no refusal.
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), None),
        (ValueError("no"), None),
        (RingError("the log of another run"), None),
        (None, None),
    ],
)
def test_a_refusal_of_the_disk_differs_from_other_errors(error, message):
    assert refusal(error) == message
    if error is not None:
        # AND behind another error it is the same
        behind = RingError("cannot be written")
        behind.__cause__ = error
        assert refusal(behind) == message


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(0, 12))
def test_everything_is_in_time_or_late_or_lost_and_each_queue_in_order(steps, room):
    # GIVEN a disk that is full at some times, and memory for some of what waits
    disk, moody, in_time = Disk(max_bytes=room * 512), Moody(), 0
    for number, (queue, full) in enumerate(steps):
        moody.full = full
        disk.do(moody.write((queue, number)), queue, Counted("things"))
    moody.full = False
    disk.drain(DEADLINE_S)
    disk.close()
    counted = Counter()
    for one in disk.news():
        if isinstance(one, DiskRecovered):
            counted.update(late=one.late.get("things", 0), lost=one.lost.get("things", 0))
    in_time = len(moody.took) - counted["late"]
    # THEN what was taken and what is lost are all there was
    assert len(moody.took) + counted["lost"] == len(steps)
    assert in_time >= 0
    for queue in "abc":
        numbers = [number for of, number in moody.took if of == queue]
        assert numbers == sorted(numbers)


def test_without_a_thread_no_caller_waits_and_writes_run_once_there_is_one(disk, monkeypatch):
    took = []
    # GIVEN that no thread can be started, as where a container's limit is reached
    with monkeypatch.context() as limited:

        def refuse(_):
            raise RuntimeError("can't start new thread")

        limited.setattr(threading.Thread, "start", refuse)
        disk.do(lambda: took.append(1), "journal", Counted("windows"))
        disk.drain(DEADLINE_S)
        assert (took, list(disk.news())) == ([], [DiskFailed(100.0, "can't start new thread")])
    # WHEN one can be again THEN it is done, late
    disk.do(lambda: took.append(2), "journal", Counted("windows"))
    disk.drain(DEADLINE_S)
    assert (took, [one.late for one in disk.news()]) == ([1, 2], [{"windows": 2}])


@pytest.mark.parametrize("by", ["removed", "replaced", "moved"])
def test_where_its_directory_is_gone_the_disk_takes_nothing_more(tmp_path, by):
    root, took = tmp_path / "run", []
    root.mkdir()
    disk = Disk(clock=lambda: 100.0, root=root)
    with (root / "journal").open("a", encoding="ascii") as file:
        disk.do(lambda: file.write("written"), "journal")
        # GIVEN a directory that is gone, though files in it are still open
        (root / "journal").unlink() if by == "removed" else None
        root.rmdir() if by == "removed" else root.rename(tmp_path / "elsewhere")
        if by == "replaced":
            root.mkdir()
        # WHEN more is to be written THEN none of it counts as written, and that is reported once
        for number in range(3):
            disk.do(lambda number=number: took.append(number), f"queue-{number}", Counted("windows"))
    disk.close()
    failed, over = disk.news()
    assert (took, failed.problem, over.lost) == ([], "it has been removed", {"windows": 3})
