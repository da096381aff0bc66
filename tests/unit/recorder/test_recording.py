"""How a step's time is accounted, on a clock that only moves when told."""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sftriage.recorder import layout
from sftriage.recorder.monitor import Monitor
from sftriage.windows.rings import open_ring

STAGES = ("data", "forward", "backward", "optimizer")


def spend(clock, monitor, name: str, ns: int) -> None:
    with monitor.stage(name):
        clock.passes(ns)


def test_a_step_is_its_stages_and_the_rest_is_other(watch, clock):
    # GIVEN a step of four stages with time between them
    watched = watch()
    with watched.monitor.step():
        clock.passes(1)
        for ns, name in zip((10, 20, 30, 40), STAGES, strict=True):
            spend(clock, watched.monitor, name, ns)
            clock.passes(2)
    # THEN each stage has its time and `other` what was outside them
    record = watched.step()
    assert record.durations_ns == (10, 20, 30, 40, 9)
    assert (record.step, record.complete, record.capturing, record.between_ns) == (0, True, False, 0)
    # AND 1 + 2 + 2 of the outside time was before the end of backward, the sync stage
    assert record.outside_ns == (5,)


def test_a_repeated_stage_adds_up_and_the_last_end_of_a_sync_stage_counts(watch, clock):
    # GIVEN gradient accumulation: forward and backward twice, with outside time before, between and after
    watched = watch()
    with watched.monitor.step():
        for pause in (3, 5):
            clock.passes(pause)
            spend(clock, watched.monitor, "forward", 10)
            spend(clock, watched.monitor, "backward", 20)
        clock.passes(100)
    record = watched.step()
    assert record.durations_ns == (0, 20, 40, 0, 108)
    assert record.outside_ns == (8,)


def test_outside_time_belongs_to_the_sync_stage_that_it_delayed(watch, clock):
    # GIVEN two sync stages, as under FSDP, run twice in turn
    watched = watch(("forward", "backward"), ("backward", "forward"))
    with watched.monitor.step():
        for pause in (1, 10):
            clock.passes(pause)
            spend(clock, watched.monitor, "forward", 5)
            clock.passes(100 * pause)
            spend(clock, watched.monitor, "backward", 5)
        clock.passes(7)
    # THEN forward, the first of them, has what was outside before its last end, and backward what came after that
    record = watched.step()
    assert record.outside_ns == (1 + 100 + 10, 1000)
    assert record.durations_ns == (10, 10, 1 + 100 + 10 + 1000 + 7)


def test_a_sync_stage_that_did_not_run_claims_nothing(watch, clock):
    watched = watch(("forward", "backward"), ("forward", "backward"))
    for name in ("forward", "backward"):
        with watched.monitor.step():
            clock.passes(4)
            spend(clock, watched.monitor, name, 5)
    # THEN what one step claimed is not left over in the next one, either
    assert [record.outside_ns for record in watched.steps()] == [(4, 0), (0, 4)]


def test_a_nested_stage_stops_the_outer_ones_clock(watch, clock):
    # GIVEN forward with data inside it, and forward inside itself
    watched = watch()
    with watched.monitor.step(), watched.monitor.stage("forward"):
        clock.passes(1)
        spend(clock, watched.monitor, "data", 10)
        clock.passes(2)
        spend(clock, watched.monitor, "forward", 20)
        clock.passes(4)
    # THEN time is self time
    assert watched.step().durations_ns == (10, 27, 0, 0, 0)


def test_the_outermost_end_of_a_sync_stage_nested_in_itself_counts(watch, clock):
    # GIVEN backward that re-enters itself, with a stretch of `other` inside
    watched = watch()
    monitor = watched.monitor
    with monitor.step():
        clock.passes(1)
        with monitor.stage("backward"):
            spend(clock, monitor, "backward", 5)
            spend(clock, monitor, "other", 7)
        clock.passes(100)
    assert watched.step().outside_ns == (8,)


def test_an_exception_closes_the_stage_and_the_step_and_goes_on_up(watch, clock):
    # GIVEN a step whose forward fails
    watched = watch()

    def fails() -> None:
        with watched.monitor.step():
            clock.passes(1)
            with watched.monitor.stage("forward"):
                clock.passes(10)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    # THEN it is recorded up to there, as incomplete, and nothing was misused
    record = watched.step()
    assert (record.durations_ns, record.complete) == ((0, 10, 0, 0, 1), False)
    assert watched.misuse == 0
    # AND the next step starts clean
    with watched.monitor.step():
        clock.passes(3)
    assert (watched.step().durations_ns, record.step) == ((0, 0, 0, 0, 3), 0)


def test_an_unknown_stage_leaves_its_time_where_it_was(watch, clock, caplog):
    # GIVEN stages with names nobody declared, by themselves and inside another
    watched = watch()
    with watched.monitor.step():
        spend(clock, watched.monitor, "loss", 5)
        with watched.monitor.stage("forward"):
            spend(clock, watched.monitor, "lr", 7)
        with watched.monitor.stage(["unhashable"]):
            clock.passes(1)
    # THEN the enclosing stage, or other, has it; each is counted; the warning comes once
    assert watched.step().durations_ns == (0, 7, 0, 0, 6)
    assert watched.misuse == 3
    assert [record.getMessage().count("'loss'") for record in caplog.records] == [1]


def test_a_step_begun_inside_a_step_closes_the_open_one_as_incomplete(watch, clock):
    # GIVEN a step that was never left, as with callbacks, in the middle of a stage
    watched = watch()
    monitor = watched.monitor
    monitor.step().__enter__()
    abandoned = monitor.stage("forward")
    abandoned.__enter__()
    clock.passes(10)
    # WHEN the next one begins, ends properly, and the old stage and step are then left as well
    with monitor.step():
        clock.passes(3)
    abandoned.__exit__(None, None, None)
    monitor.step().__exit__(None, None, None)
    # THEN both are recorded, the first as incomplete, and the strays are only counted
    first, second = watched.steps()
    assert (first.step, first.durations_ns, first.complete) == (0, (0, 10, 0, 0, 0), False)
    assert (second.step, second.durations_ns, second.complete) == (1, (0, 0, 0, 0, 3), True)
    assert watched.misuse == 3


def test_stages_left_in_the_wrong_order_close_what_was_inside(watch, clock):
    # GIVEN backward entered, optimizer entered in it, and backward left first
    watched = watch()
    monitor = watched.monitor
    backward, optimizer = monitor.stage("backward"), monitor.stage("optimizer")
    with monitor.step():
        clock.passes(2)
        backward.__enter__()
        clock.passes(10)
        optimizer.__enter__()
        clock.passes(20)
        backward.__exit__(None, None, None)
        clock.passes(5)
        optimizer.__exit__(None, None, None)
        clock.passes(1)
    # THEN both were closed there, backward as a sync stage too, and the late exit is ignored
    record = watched.step()
    assert record.durations_ns == (0, 0, 10, 20, 8)
    assert record.outside_ns == (2,)
    assert watched.misuse == 2


def test_time_outside_steps_is_between(watch, clock):
    # GIVEN a stage used between two steps
    watched = watch()
    with watched.monitor.step():
        clock.passes(5)
    clock.passes(30)
    spend(clock, watched.monitor, "data", 12)
    with watched.monitor.step():
        clock.passes(5)
    # THEN its time is part of the second step's between_ns, and it counts as misuse
    first, second = watched.steps()
    assert (first.between_ns, second.between_ns) == (0, 42)
    assert second.start_ns == first.start_ns + 5 + 42
    assert second.durations_ns == (0, 0, 0, 0, 5)
    assert watched.misuse == 2


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
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(10)
    # THEN the step goes on as if it had not
    assert watched.step().durations_ns == (0, 12, 0, 0, 0)
    assert watched.misuse == 5
    # AND with no step open, another thread may record one
    thread = threading.Thread(target=lambda: spend_a_step(clock, monitor))
    thread.start()
    thread.join(10)
    assert watched.step().durations_ns == (5, 0, 0, 0, 0)


def spend_a_step(clock, monitor) -> None:
    with monitor.step():
        spend(clock, monitor, "data", 5)


def test_the_header_says_where_the_rank_is_now(watch, clock):
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


class Model:
    """The accounting written down naively: a list of who had the clock, summed at the end."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.spent = dict.fromkeys((*STAGES, "other"), 0)
        self.outside = {"forward": 0, "backward": 0}

    def passes(self, ns: int) -> None:
        self.spent[self.open[-1] if self.open else "other"] += ns

    def leave(self, name: str) -> None:
        while name in self.open:
            left = self.open.pop()
            if left in self.outside:
                self.outside[left] = self.spent["other"]
            if left == name:
                break

    def record(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        forward = self.outside["forward"]
        backward = max(0, self.outside["backward"] - forward)
        return tuple(self.spent.values()), (forward, backward)


operations = st.lists(
    st.tuples(st.sampled_from(["enter", "leave"]), st.sampled_from((*STAGES, "other")), st.integers(0, 1000)),
    max_size=25,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(operations, min_size=1, max_size=4))
@example(steps=[[("enter", "forward", 1), ("enter", "forward", 0), ("leave", "forward", 0)]])
@example(steps=[[("enter", "forward", 1), ("enter", "data", 5), ("enter", "forward", 0), ("leave", "forward", 3)]])
def test_whatever_order_stages_come_in_they_sum_to_the_step_exactly(watch, clock, steps):
    # GIVEN steps that enter and leave stages in any order at all
    watched = watch(STAGES, ("forward", "backward"))
    for sequence in steps:
        model = Model()
        start = clock.now_ns
        with watched.monitor.step():
            for operation, name, ns in sequence:
                clock.passes(ns)
                model.passes(ns)
                if operation == "enter":
                    watched.monitor.stage(name).__enter__()
                    model.open.append(name)
                else:
                    watched.monitor.stage(name).__exit__(None, None, None)
                    model.leave(name)
            clock.passes(1)
            model.passes(1)
        # THEN the record is what a naive account says, and its stages sum to the step
        record = watched.step()
        assert (record.durations_ns, record.outside_ns) == model.record()
        assert sum(record.durations_ns) == clock.now_ns - start
        assert sum(record.outside_ns) <= record.durations_ns[-1]
    watched.monitor.close()


def test_an_error_inside_turns_the_recorder_off_and_training_goes_on(watch, clock, caplog, monkeypatch):
    # GIVEN a recorder that has recorded one step
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
    with open_ring(tmp_path / "rank-0.0.ring") as reader:
        del monitor
        assert reader.status().closed
    with stage:
        pass
