"""What a job says of a step: what sort it is, and how much there is to do in it."""

from __future__ import annotations

import numbers
import threading

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sftriage.recorder import Monitor
from sftriage.recorder.layout import MAX_VALUE, kind_words


class Device:
    """A number that lies on a device: to ask it anything is to wait for the device."""

    def _waits(self, *_: object) -> object:
        raise AssertionError("it was asked")

    def __repr__(self) -> str:
        return "Device()"

    __index__ = __int__ = __bool__ = __eq__ = __hash__ = _waits  # type: ignore[assignment]


class Whole(int):
    """As other libraries have their own whole numbers."""


def notes(watched) -> list[tuple[str, int]]:
    return [(record.kind, record.work) for record in watched.steps()]


def test_a_step_carries_its_kind_and_work_and_the_next_one_starts_without(watch):
    # GIVEN steps of several kinds and sizes, plain ones between them, and one left by an exception
    watched = watch()
    monitor = watched.monitor
    with monitor.step(kind="checkpoint", work=4096):
        pass
    with monitor.step():
        pass
    with monitor.step(7, work=5):
        pass

    def fails() -> None:
        with monitor.step(kind="evaluation"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    # AND one that is still open when the next one begins
    monitor.step(kind="lost", work=9).__enter__()
    with monitor.step(9):
        pass
    # THEN each has its own, and nothing is left over
    assert notes(watched) == [("checkpoint", 4096), ("", 0), ("", 5), ("evaluation", 0), ("lost", 9), ("", 0)]
    assert watched.misuse == 1


def test_a_note_may_come_while_the_step_is_open_and_the_last_one_counts(watch):
    watched = watch()
    monitor = watched.monitor
    with monitor.step(kind="train", work=1):
        with monitor.stage("data"):
            monitor.note(work=100)
        monitor.note(kind="long")
        monitor.note()
    with monitor.step(kind="train", work=1):
        monitor.note(kind="", work=0)
    with monitor.step(work=Whole(3)):
        pass
    with monitor.step(kind=None, work=None):
        pass
    assert notes(watched) == [("long", 100), ("", 0), ("", 3), ("", 0)]
    assert watched.misuse == 0


def test_who_looks_from_outside_sees_that_a_step_in_progress_is_no_ordinary_one(watch):
    watched = watch()
    monitor, special = watched.monitor, []

    def look() -> None:
        special.append(watched.reader.status().special)

    # GIVEN an ordinary step, WHEN somebody looks at it, before and after it is said to be a checkpoint
    with monitor.step():
        look()
        monitor.note(kind="checkpoint")
        look()
    # AND at an ordinary one after it, and at one that is a checkpoint for a while
    with monitor.step():
        look()
    with monitor.step(kind="checkpoint"):
        look()
        monitor.note(kind="")
        look()
    # THEN it is seen while it is so
    assert special == [False, True, False, True, False]


@pytest.mark.parametrize(
    "note",
    [
        *({"kind": kind} for kind in ("a kind of 17 bytes", "é" * 9, "two\nlines", "\ud800")),
        *({"kind": kind} for kind in (b"bytes", 7, ["list"], Device())),
        *({"work": work} for work in (-1, 1 << 62, 1.0, "1", Device())),
    ],
    ids=repr,
)
def test_a_note_that_makes_no_sense_is_counted_warned_of_once_and_never_raises(watch, caplog, note):
    # GIVEN a kind or a work that a slot cannot hold WHEN it is given twice, as the step begins and inside it
    watched = watch()
    with watched.monitor.step(3, **note):
        watched.monitor.note(**note)
    # THEN the step is recorded without it
    assert notes(watched) == [("", 0)]
    assert (watched.misuse, len(caplog.records)) == (2, 1)
    # AND each sort has its own warning
    with watched.monitor.step(kind=object(), work=object()):
        pass
    assert len(caplog.records) == 2


def test_a_note_outside_a_step_or_from_another_thread_is_misuse(watch):
    # GIVEN notes before a step, in it but from another thread, and after it
    watched = watch()
    monitor = watched.monitor
    monitor.note(kind="before")
    with monitor.step():
        thread = threading.Thread(target=lambda: monitor.note(kind="elsewhere", work=5))
        thread.start()
        thread.join(10)
    monitor.note(work=5)
    with monitor.step():
        pass
    # THEN they are counted, and are in no step
    assert (notes(watched), watched.misuse) == ([("", 0), ("", 0)], 3)


def test_an_inert_monitor_takes_any_note(caplog):
    monitor = Monitor()
    with monitor.step(kind=["nonsense"], work=Device()):
        monitor.note(kind=7, work="x")
    monitor.note(work=Device())
    assert caplog.records == []


def test_kinds_are_encoded_once_and_only_so_many_are_remembered(watch):
    # GIVEN a job that makes up a kind for every step
    watched = watch()
    for number in range(60):
        with watched.monitor.step(kind=f"k{number}"):
            pass
    watched.steps()
    for number in range(60, 120):
        with watched.monitor.step(kind=f"k{number}"):
            pass
    # THEN what is remembered is bounded, and every step has its own kind all the same
    assert kind_words.cache_info().currsize == 64
    assert [kind for kind, _ in notes(watched)] == [f"k{number}" for number in range(60, 120)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(
        st.tuples(
            st.one_of(st.none(), st.text(max_size=20), st.integers()),
            st.one_of(st.none(), st.integers(), st.floats(), st.booleans()),
        ),
        max_size=4,
    )
)
@example(said=[(None, MAX_VALUE), (None, MAX_VALUE + 1)])
def test_whatever_is_said_a_slot_is_whole_and_holds_what_was_valid_last(watch, said):
    watched = watch()
    kind, work = "", 0
    with watched.monitor.step():
        for given_kind, given_work in said:
            watched.monitor.note(given_kind, given_work)
            if isinstance(given_kind, str) and fits(given_kind):
                kind = given_kind
            if isinstance(given_work, numbers.Integral) and 0 <= given_work <= MAX_VALUE:
                work = int(given_work)
    assert notes(watched) == [(kind.rstrip("\0"), work)]
    watched.monitor.close()


def fits(kind: str) -> bool:
    return isinstance(kind, str) and kind.isprintable() and len(kind.encode("utf-8", "replace")) <= 16
