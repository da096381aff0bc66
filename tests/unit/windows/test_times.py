"""When steps began and ended: the first rank's start, the last rank's end."""

from sftriage.model.windows import StepRecord
from sftriage.windows import gather as module
from sftriage.windows.gather import Span, StepTimes
from tests.unit.windows.steps import batch


def record(rank: int, step: int, start_ns: int, *durations_ns: int) -> StepRecord:
    return StepRecord(rank, step, start_ns, 0, durations_ns, (), complete=True, capturing=False)


def test_a_run_of_steps_is_from_the_first_start_to_the_last_end():
    times = StepTimes(0)
    times.note(0, batch(record(0, 5, 100, 10, 20), record(0, 6, 140, 10, 20)))
    times.note(0, batch(record(1, 5, 90, 10, 20), record(1, 6, 145, 10, 20)))
    assert times.of(0, 5, 5) == Span(90, 130)
    assert times.of(0, 5, 6) == Span(90, 175)
    # AND what is not known is not made up
    assert times.of(0, 5, 7) is None
    assert times.of(0, 4, 5) is None


def test_only_the_newest_steps_are_kept_however_long_the_job_is(monkeypatch):
    monkeypatch.setattr(module, "KEPT_STEPS", 2)
    times = StepTimes(kept_steps=3)
    for step in range(100):
        for rank in range(2):
            times.note(0, batch(record(rank, step, step * 10, 5)))
    assert [step for step in range(100) if times.of(0, step, step)] == [97, 98, 99]


def test_another_attempt_has_times_of_its_own():
    times = StepTimes(0)
    times.note(0, batch(record(0, 5, 100, 10)))
    times.note(1, batch(record(0, 5, 900, 10)))
    assert times.of(0, 5, 5) is None
    assert times.of(1, 5, 5) == Span(900, 910)
    # AND what still comes of the one before is passed over
    times.note(0, batch(record(1, 5, 100, 10)))
    assert times.of(1, 5, 5) == Span(900, 910)
