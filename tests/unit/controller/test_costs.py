"""What a capture cost the job: its steps and those just after it against those before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.controller.controller import AFTER_STEPS, KEPT_STEPS, Ledger
from sftriage.model.windows import StageSchema, Window

SCHEMA = StageSchema(("forward", "other"))


def windows(took_s, capturing, length=50, stride=10, ranks=3):
    """Overlapping windows over steps with these times of the slowest rank, in two stages and the time between."""
    took_s, capturing = np.asarray(took_s, dtype=float), np.asarray(capturing, dtype=bool)
    for first in range(0, len(took_s) - length + 1, stride):
        part = took_s[first : first + length]
        durations_NRS = np.empty((length, ranks, 2))
        durations_NRS[:, :, 0], durations_NRS[:, :, 1] = part[:, None] * 0.5, part[:, None] * 0.25
        durations_NRS[:, 1:, 0] *= 0.9
        between_NR = np.broadcast_to(part[:, None] * 0.25, (length, ranks))
        yield Window(SCHEMA, first, durations_NRS, between_NR=between_NR, capturing_N=capturing[first : first + length])


def costs_over(some):
    ledger = Ledger()
    return [cost for window in some for cost in ledger.add(window, 100.0)]


def costs_of(took_s, capturing, **cut):
    return costs_over(windows(took_s, capturing, **cut))


def job(n_steps=200, *captures):
    """Steps of 100 ms, and captures: (first, last, extra seconds in each of its steps, and in the ten after)."""
    took_s, capturing = np.full(n_steps, 0.1), np.zeros(n_steps, dtype=bool)
    for first, last, during_s, after_s in captures:
        capturing[first : last + 1] = True
        took_s[first : last + 1] += during_s
        took_s[last + 1 : last + 1 + AFTER_STEPS] += after_s
    return took_s, capturing


@pytest.mark.parametrize(
    ("captures", "expected"),
    [
        # One capture: its steps, and those just after it.
        ([(80, 85, 0.05, 0.0)], [(80, 85, 0.3)]),
        ([(80, 85, 0.05, 0.01)], [(80, 85, 0.4)]),
        # A capture without cost. If the machine was quicker meanwhile, the cost is not negative.
        ([(80, 85, 0.0, 0.0)], [(80, 85, 0.0)]),
        ([(80, 85, -0.01, 0.0)], [(80, 85, 0.0)]),
        # Two captures that are apart count separately, two that overlap or follow at once count as one.
        ([(60, 62, 0.1, 0.0), (120, 122, 0.2, 0.0)], [(60, 62, 0.3), (120, 122, 0.6)]),
        ([(60, 62, 0.1, 0.0), (66, 68, 0.1, 0.0)], [(60, 68, 0.6)]),
        # What is not over yet is not known yet.
        ([(180, 199, 0.1, 0.0)], []),
        # Of a capture at the very beginning nothing is known to compare with.
        ([(2, 5, 0.1, 0.0)], [(2, 5, None)]),
    ],
)
def test_what_captures_cost(captures, expected):
    found = costs_of(*job(200, *captures))
    assert [(one.first_step, one.last_step) for one in found] == [one[:2] for one in expected]
    for one, (*_, cost_s) in zip(found, expected, strict=True):
        assert one.cost_s == (None if cost_s is None else pytest.approx(cost_s))


def test_a_cost_is_recorded_once_however_windows_overlap():
    took_s, capturing = job(300, (80, 85, 0.05, 0.0), (200, 205, 0.05, 0.0))
    for stride in (1, 7, 10, 50):
        assert [round(one.cost_s, 6) for one in costs_of(took_s, capturing, stride=stride)] == [0.3, 0.3]


def test_missing_ranks_and_steps_have_no_cost():
    # GIVEN a missing step of the capture, and a rank that is missing throughout
    took_s, capturing = job(200, (80, 85, 0.05, 0.0))
    some = list(windows(took_s, capturing))
    for window in some:
        window.durations_NRS[:, 2] = np.nan
        if window.first_step <= 82 <= window.last_step:
            window.durations_NRS[82 - window.first_step] = np.nan
    # THEN the cost is that of the other steps
    assert [one.cost_s for one in costs_over(some)] == [pytest.approx(0.25)]


def test_a_long_job_is_remembered_within_bounds():
    ledger = Ledger()
    for window in windows(np.full(3 * KEPT_STEPS, 0.1), np.zeros(3 * KEPT_STEPS, dtype=bool), stride=50):
        ledger.add(window, 100.0)
    assert len(ledger.steps) == KEPT_STEPS


@pytest.mark.parametrize(
    ("onset", "period", "most_s"),
    [
        (85, 1, 0.05),  # a fault that began 15 steps before it
        (20, 7, 0.05),  # one that comes back every seventh step, and twice in the steps that are charged
        (20, 1, 0.05),  # one that was always there
    ],
)
def test_an_earlier_fault_is_not_charged(onset, period, most_s):
    # GIVEN a job with a fault of 200 ms, and a capture of four steps because of it that costs next to nothing
    took_s, capturing = job(200, (100, 103, 0.001, 0.0))
    took_s[np.arange(200) >= onset] += np.where(np.arange(onset, 200) % period == 0, 0.2, 0.0)
    # WHEN its cost is recorded
    (cost,) = costs_of(took_s, capturing)
    # THEN the fault is not charged to it
    assert cost.cost_s <= most_s


def test_a_checkpoint_before_a_capture_hides_no_cost():
    took_s, capturing = job(200, (100, 103, 0.1, 0.02))
    took_s[70] += 30.0
    (cost,) = costs_of(took_s, capturing)
    # (0.6 s, less what is taken for usual of the checkpoint)
    assert cost.cost_s == pytest.approx(0.6, abs=0.15)


def checkpointing(every, captured, *, stall_s=0.15, kind="", rank=1, n_steps=700):
    """Steps of 100 ms of two ranks, one of which now and then takes 200 ms more; a capture stalls the other one."""
    slow_N = np.arange(n_steps) % every == 0
    durations_NRS = np.full((n_steps, 2, 2), 0.05)
    durations_NRS[:, rank, 1] += 0.2 * slow_N
    between_NR = np.zeros((n_steps, 2))
    between_NR[captured + 3, 0] = stall_s
    capturing_N = np.zeros(n_steps, dtype=bool)
    capturing_N[captured : captured + 4] = True
    kinds = tuple(kind if slow else "" for slow in slow_N)
    return Window(SCHEMA, 0, durations_NRS, between_NR=between_NR, capturing_N=capturing_N, kinds=kinds)


@pytest.mark.parametrize(
    ("every", "captured", "kind", "expected_s"),
    [
        # The capture is laid over the checkpoint: its stall is its cost, and the checkpoint is not.
        (50, 599, "", 0.15),
        (120, 599, "", 0.15),
        (250, 499, "", 0.15),
        (7, 601, "", 0.15),
        # The job says which of its steps are checkpoints.
        (120, 599, "checkpoint", 0.15),
        # There is none in it: the stall is not taken for one, though it is nearly as long.
        (250, 600, "", 0.15),
        (50, 610, "", 0.15),
        # The usual time of a new kind of step is unknown.
        (600, 599, "checkpoint", 0.15),
    ],
)
def test_a_checkpoint_in_a_capture_is_not_charged(every, captured, kind, expected_s):
    job = checkpointing(every, captured, kind=kind)
    (cost,) = costs_over([job])
    assert cost.cost_s == pytest.approx(expected_s, abs=0.025)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("length", "stride"), [(50, 10), (50, 50), (7, 7)])
def test_a_checkpoint_after_the_sync_counts_once(ranks, length, stride):
    # GIVEN steps of 100 ms, a checkpoint of 200 ms on one rank after the sync of every 25th, for which the others wait
    # in the next, and a capture of one that holds its rank up for 60 ms
    slow_N, n_steps = np.arange(400) % 25 == 0, 400
    durations_NRS = np.full((n_steps, ranks, 3), [0.03, 0.06, 0.01])
    durations_NRS[:, 0, 2] += 0.2 * slow_N
    durations_NRS[1:, 1:, 1] += 0.2 * slow_N[:-1, None]
    between_NR, capturing_N = np.zeros((n_steps, ranks)), np.zeros(n_steps, dtype=bool)
    between_NR[303, 1], capturing_N[298:304] = 0.06, True
    durations_NRS[303, np.arange(ranks) != 1, 1] += 0.06
    schema = StageSchema(("forward", "backward", "other"), ("backward",))
    job = Window(schema, 0, durations_NRS, between_NR=between_NR, capturing_N=capturing_N)
    # WHEN its windows come in THEN the cost is what it held the job up for
    found = costs_over(job.steps(first, first + length - 1) for first in range(0, n_steps - length + 1, stride))
    assert [one.cost_s for one in found] == [pytest.approx(0.06, abs=0.02)]


def test_an_earlier_slow_phase_does_not_count_as_recurring():
    # GIVEN a job that was slower for a hundred steps, and no longer is, and a capture that makes five steps slower
    took_s, capturing = job(500, (400, 404, 0.1, 0.0))
    took_s[100:200] += 0.1
    # THEN all of that is its cost
    (cost,) = costs_of(took_s, capturing)
    assert cost.cost_s == pytest.approx(0.5)


@given(st.lists(st.floats(0.0, 2.0), min_size=60, max_size=120), st.integers(8, 40), st.integers(1, 8))
def test_a_cost_is_between_zero_and_the_observed_excess(took_s, first, length):
    capturing = np.zeros(len(took_s), dtype=bool)
    capturing[first : first + length] = True
    for cost in costs_of(took_s, capturing, length=len(took_s)):
        assert 0.0 <= cost.cost_s <= sum(took_s[first : first + length + AFTER_STEPS]) + 1e-9
