"""How the time of a step is accounted, on a clock that a test moves; and what a job says of it: its kind and work."""

import logging
import numbers

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sftriage.trainer import layout
from sftriage.trainer.layout import MAX_VALUE, kind_words
from sftriage.trainer.monitor import Monitor
from sftriage.windows.rings import Ring
from tests.unit.trainer.conftest import Account, in_a_thread

STAGES = ("data", "forward", "backward", "optimizer")


def spend(clock, monitor, name: str, ns: int) -> None:
    with monitor.stage(name):
        clock.passes(ns)


def test_steps_have_the_jobs_own_numbers(watch):
    # GIVEN a job that resumes at step 1000 WHEN later steps give no number, or none that could be one
    watched = watch()
    for number in (1000, None, 1005, -1, "12", 1.5, 1 << 62, True):
        with watched.monitor.step(number):
            pass
    assert [record.step for record in watched.steps()] == [1000, 1001, 1005, 1006, 1007, 1008, 1009, 1]
    assert watched.misuse == 4


def test_another_thread_is_ignored_and_counted(watch, clock):
    # GIVEN a step open in this thread WHEN another thread uses its stages, ends it, and begins one
    watched = watch()
    monitor = watched.monitor

    def elsewhere() -> None:
        spend(clock, monitor, "data", 5)
        monitor.step().__exit__(None, None, None)
        with monitor.step():
            clock.passes(7)

    with monitor.step(), monitor.stage("forward"):
        in_a_thread(elsewhere)
    # THEN the step goes on as if it had not
    assert watched.step().durations_ns == (0, 12, 0, 0, 0)
    assert watched.misuse == 5
    # AND with no step open, another thread may record one
    in_a_thread(spend_a_step, clock, monitor)
    assert watched.step().durations_ns == (5, 0, 0, 0, 0)


def spend_a_step(clock, monitor) -> None:
    with monitor.step():
        spend(clock, monitor, "data", 5)


def test_the_header_shows_where_the_rank_is_now(watch, clock):
    # GIVEN a rank at work THEN from outside one sees its stage and since when, at every moment
    watched = watch()
    status = watched.reader.status
    assert (status().stage, status().published) == (None, 0)
    with watched.monitor.step(7):
        assert (status().stage, status().stage_age_ns, status().step, status().step_age_ns) == ("other", 0, 7, 0)
        clock.passes(10)
        with watched.monitor.stage("forward"):
            assert (status().stage, status().stage_age_ns, status().step_age_ns) == ("forward", 0, 10)
            clock.passes(5)
            assert status().stage_age_ns == 5
        assert (status().stage, status().stage_age_ns, status().step_age_ns) == ("other", 0, 15)
        clock.passes(5)
    assert (status().stage, status().stage_age_ns, status().step, status().published) == (None, 0, 7, 1)


NAMES = st.sampled_from((*STAGES, "other", "nowhere"))
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["enter", "leave"]), NAMES),
    st.tuples(st.just("pass"), st.integers(1, 1000)),
    st.tuples(st.sampled_from(["begin", "end", "fail"]), st.none()),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(program=st.lists(OPERATIONS, max_size=60))
@example(program=[("begin", None), ("enter", "forward"), ("pass", 1), ("enter", "forward"), ("leave", "forward")])
@example(program=[("begin", None), ("enter", "forward"), ("pass", 9), ("begin", None), ("leave", "forward")])
def test_the_steps_of_any_script_agree_with_a_naive_account(watch, clock, program):
    # GIVEN stages in any order, in steps that end, are left by an exception, or begin within one another, and outside
    watched = watch(STAGES, ("backward", "forward"))
    monitor, account, expected, misuse, between_ns, ended_ns = watched.monitor, None, [], 0, 0, 0
    for operation, value in [*program, ("end", None)]:
        if operation == "pass":
            clock.passes(value)
            if account is not None:
                account.passes(value)
        elif operation in ("enter", "leave"):
            stage = monitor.stage(value)
            stage.__enter__() if operation == "enter" else stage.__exit__(None, None, None)
            if account is None or value == "nowhere":
                misuse += 1
            else:
                account.open.append(value) if operation == "enter" else account.leave(value)
        else:
            # (a step within a step, and the end of none)
            misuse += (account is None) == (operation != "begin")
            if account is not None:
                expected.append((*account.record(), between_ns, operation == "end"))
                misuse, account, ended_ns = misuse + account.misuse, None, clock.now_ns
            if operation == "begin":
                between_ns = clock.now_ns - ended_ns if expected else 0
                account = Account("forward", "backward")
                monitor.step().__enter__()
            else:
                monitor.step().__exit__(KeyError if operation == "fail" else None, None, None)
    # THEN each step has its times, and all that made no sense is counted
    steps = watched.steps()
    assert [(row.durations_ns, row.outside_ns, row.between_ns, row.complete) for row in steps] == expected
    assert [record.step for record in steps] == list(range(len(expected)))
    assert watched.misuse == misuse
    monitor.close()


def test_an_error_inside_turns_the_recorder_off_and_training_goes_on(watch, clock, caplog, monkeypatch):
    watched = watch()
    with watched.monitor.step():
        pass

    # WHEN something in it breaks in the middle of a step
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(layout, "kind_words", broken)
    with watched.monitor.step(kind="evaluation"), watched.monitor.stage("forward"):
        pass
    monkeypatch.undo()
    for _ in range(3):
        with watched.monitor.step(), watched.monitor.stage("forward"):
            clock.passes(1)
    # THEN there is one warning, what was published stays, and from outside the rank is known to record no more
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "a bug" in caplog.text
    assert len(watched.steps()) == 1
    assert not watched.monitor.active
    assert watched.reader.status().closed


def test_a_warning_that_raises_goes_no_further(watch, monkeypatch):
    # GIVEN a job whose log filter raises, and a stage name that cannot be shown
    class Unshowable:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    def broken(record: logging.LogRecord) -> bool:
        raise RuntimeError("in the filter")

    watched = watch()
    monkeypatch.setattr(logging.getLogger("sftriage"), "filters", [broken])
    # WHEN the monitor has something to say THEN training hears nothing of it
    with watched.monitor.step(), watched.monitor.stage(Unshowable()), watched.monitor.stage("unknown"):
        pass
    assert watched.misuse == 2
    assert watched.monitor.active


def test_a_monitor_closed_in_the_middle_of_a_step_is_inert(watch, caplog):
    watched = watch()
    with watched.monitor.step(), watched.monitor.stage("forward"):
        watched.monitor.close()
    watched.monitor.close()
    assert watched.steps() == []
    assert caplog.records == []


def test_a_monitor_that_is_dropped_closes_its_ring(tmp_path):
    # GIVEN a script that lets go of its monitor, but keeps a stage of it
    monitor = Monitor(rings=tmp_path)
    stage = monitor.stage("data")
    with Ring(tmp_path / "rank-0.0.ring") as reader:
        del monitor
        assert reader.status().closed
    with stage:
        pass


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


def test_the_kind_of_a_step_in_progress_shows_from_outside(watch):
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


def test_a_stage_that_the_step_before_did_not_enter_is_special(watch):
    watched = watch()
    found = []
    for stages in (("data", "backward"), ("data", "forward", "backward"), ("forward",)):
        with watched.monitor.step():
            for stage in stages:
                with watched.monitor.stage(stage):
                    found.append((stage, watched.reader.status().special))
            # (nor is the time outside the stages, or between steps, ever special)
            assert not watched.reader.status().special
        assert not watched.reader.status().special
        watched.steps()
    assert [stage for stage, special in found if special] == ["forward"]
    assert len(found) == 6


@pytest.mark.parametrize(
    "note",
    [
        *({"kind": kind} for kind in ("a kind of 17 bytes", "é" * 9, "two\nlines", "\ud800")),
        *({"kind": kind} for kind in (b"bytes", 7, ["list"], Device())),
        *({"work": work} for work in (-1, 1 << 62, 1.0, "1", Device())),
    ],
    ids=repr,
)
def test_an_invalid_note_is_counted_warned_of_once_and_never_raises(watch, caplog, note):
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
    watched = watch()
    monitor = watched.monitor
    monitor.note(kind="before")
    with monitor.step():
        in_a_thread(lambda: monitor.note(kind="elsewhere", work=5))
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


def test_kinds_are_encoded_once_and_the_cache_is_bounded(watch):
    watched = watch()
    for number in range(120):
        with watched.monitor.step(kind=f"k{number}"):
            pass
        # THEN every step has its own kind
        assert notes(watched) == [(f"k{number}", 0)]
    # AND what is remembered is bounded
    assert kind_words.cache_info().currsize == 64


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(
        st.tuples(
            st.one_of(st.none(), st.text(max_size=20), st.integers()),
            st.one_of(st.none(), st.integers(), st.integers(0, 1 << 60).map(Whole), st.floats(), st.booleans()),
        ),
        max_size=4,
    )
)
@example(said=[(None, MAX_VALUE), (None, MAX_VALUE + 1)])
def test_a_step_holds_the_last_valid_kind_and_work(watch, said):
    watched = watch()
    kind, work = "", 0
    with watched.monitor.step(None, *(said[0] if said else ())):
        for number, (given_kind, given_work) in enumerate(said):
            if number:
                watched.monitor.note(given_kind, given_work)
            if isinstance(given_kind, str) and fits(given_kind):
                kind = given_kind
            if isinstance(given_work, numbers.Integral) and 0 <= given_work <= MAX_VALUE:
                work = int(given_work)
    assert notes(watched) == [(kind.rstrip("\0"), work)]
    watched.monitor.close()


def fits(kind: str) -> bool:
    return isinstance(kind, str) and kind.isprintable() and len(kind.encode("utf-8", "replace")) <= 16
