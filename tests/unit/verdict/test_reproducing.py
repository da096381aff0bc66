"""Was the fault there while it was captured? Read off the captured steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.captures import Trigger
from sftriage.verdict.judging import reproduced
from tests.scenario import Fault, Job, at, every, from_step, judged

RANKS_4 = Job(n_ranks=4, n_steps=5)
TWELVE = Job(n_ranks=4, n_steps=12)


def trigger(scope="rank", ranks=(1,), stage="data", gain_s=0.03, period=None, onset=None):
    return Trigger(
        0, 49, "suspect", scope, ranks, stage, gain_s, 0.3, 1.0, "p", "0" * 64, "r",
        pattern="recurring" if period else "chronic", period_steps=period, onset_step=onset,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("situation", "faults", "wanted", "expected"),
    [
        ("it is there", (Fault("data", 1, 0.03),), trigger(), ("yes", 5, 5)),
        ("it is there by more than half", (Fault("data", 1, 0.02),), trigger(), ("yes", 5, 5)),
        ("it is there by less than half", (Fault("data", 1, 0.01),), trigger(), ("no", 5, 0)),
        ("it is gone", (), trigger(), ("no", 5, 0)),
        ("it is in another rank", (Fault("data", 2, 0.03),), trigger(), ("no", 5, 0)),
        ("it is in another stage", (Fault("forward", 1, 0.03),), trigger(), ("no", 5, 0)),
        ("it is in some of the steps", (Fault("data", 1, 0.03, at(1, 2)),), trigger(), ("partly", 5, 2)),
        ("it is in most of the steps", (Fault("data", 1, 0.03, at(1, 2, 4)),), trigger(), ("yes", 5, 3)),
        ("a whole rank", (Fault("data", 1, 0.015), Fault("forward", 1, 0.015)), trigger(stage=None), ("yes", 5, 5)),
        ("after the last sync", (Fault("optimizer", 1, 0.03),), trigger(stage="optimizer"), ("yes", 5, 5)),
        # Of what comes back, one step is due in a capture that is shorter than the period, wherever it lies.
        ("it comes back", (Fault("data", 1, 0.03, every(20, 2)),), trigger(period=20, onset=62), ("yes", 1, 1)),
        ("its phase has drifted", (Fault("data", 1, 0.03, at(4)),), trigger(period=20, onset=62), ("yes", 1, 1)),
        ("its onset is another's", (Fault("data", 1, 0.03, at(2)),), trigger(period=20, onset=61), ("yes", 1, 1)),
        ("its onset is not known", (Fault("data", 1, 0.03, at(2)),), trigger(period=20), ("yes", 1, 1)),
        ("it does not come back", (), trigger(period=20, onset=62), ("no", 1, 0)),
        ("it comes back by less", (Fault("data", 1, 0.01, at(2)),), trigger(period=20, onset=62), ("no", 1, 0)),
        ("it has grown", (Fault("data", 1, 0.09, at(2)),), trigger(period=20, onset=62), ("yes", 1, 1)),
        ("each time a burst", (Fault("data", 1, 0.03, at(1, 2, 3)),), trigger(period=20, onset=61), ("yes", 3, 3)),
        ("it is there to stay by now", (Fault("data", 1, 0.03),), trigger(period=20, onset=62), ("yes", 5, 5)),
        ("every second step", (Fault("data", 1, 0.03, at(0, 2)),), trigger(period=2, onset=61), ("yes", 2, 2)),
        ("one of them late", (Fault("data", 1, 0.03, at(0, 3)),), trigger(period=2, onset=60), ("yes", 2, 2)),
        ("not each time", (Fault("data", 1, 0.03, at(2)),), trigger(period=2, onset=60), ("partly", 2, 1)),
        ("of a peer", (Fault("data", 2, 0.03, at(2)),), trigger(period=20, onset=62), ("no", 1, 0)),
        ("a host", (Fault("data", 1, 0.03), Fault("data", 0, 0.03)), trigger("host", (0, 1)), ("yes", 5, 5)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_truth_table(situation, faults, wanted, expected):
    found = reproduced(RANKS_4.run(*faults, first_step=100), wanted)
    assert (found.answer, found.steps, found.steps_with) == expected, situation
    assert found.expected_s == wanted.gain_s


def test_reproduction_is_known_in_a_job_whose_levels_come_from_a_sample():
    # GIVEN more ranks than the sample for their typical time
    large = Job(n_ranks=1200, n_steps=3).run(Fault("data", 700, 0.03), first_step=100)
    # THEN the fault is found in the rank that has it, and in no other one
    assert reproduced(large, trigger(ranks=(700,))).answer == "yes"
    assert reproduced(large, trigger(ranks=(701,))).answer == "no"


@pytest.mark.parametrize(
    ("faults", "wanted", "over_s"),
    [
        ((Fault("data", 1, 0.05),), trigger(), 0.05),
        # A mean over the steps that it was due in: the captured steps between two times are none of its.
        ((Fault("data", 1, 0.05, at(2)),), trigger(period=20, onset=61), 0.05),
        ((Fault("data", 1, 0.05, at(2)),), trigger(), 0.01),
    ],
    ids=["there to stay", "comes back", "some of it"],
)
def test_the_numbers_are_the_suspects_time_over_its_peers(faults, wanted, over_s):
    found = reproduced(RANKS_4.run(*faults, first_step=100), wanted)
    assert found.over_s == pytest.approx(over_s, rel=0.15)


PERIOD = 7


def test_a_recurring_fault_after_a_one_off_of_the_same_rank_is_found_in_each_trace():
    # GIVEN a rank with 40 ms in every seventh step from step 150 on, after a run of slow steps that has passed
    returns = np.arange(150, 260, PERIOD)
    job = Job(n_ranks=4, n_steps=260)
    window = job.run(Fault("forward", 1, 0.04, from_step(140, 152)), Fault("forward", 1, 0.04, at(*returns)))
    # AND the verdict by which it was captured
    verdict = next(
        one for one, _ in judged(window, stride=10) if one.suspects and one.suspects[0].pattern == "recurring"
    )
    suspect = verdict.suspects[0]
    assert (suspect.ranks, suspect.stage, suspect.period_steps) == ((1,), "forward", PERIOD)
    for first in range(200, 250):
        # WHEN five steps are captured, laid over any step
        wanted = trigger(stage="forward", gain_s=suspect.gain_s, period=PERIOD, onset=suspect.onset_step)
        found = reproduced(window.steps(first, first + 4), wanted)
        # THEN what it says of the trace is what the trace holds, whatever the verdict took for the onset
        held = [step for step in returns.tolist() if first <= step <= first + 4]
        assert (found.answer, found.fault_steps) == ("yes" if held else "no", tuple(held))


@given(
    held=st.sets(st.integers(0, 11)),
    period=st.none() | st.integers(2, 64),
    onsets=st.tuples(st.none() | st.integers(0, 500), st.none() | st.integers(0, 500)),
)
def test_the_answer_depends_only_on_the_captured_steps(held, period, onsets):
    # GIVEN twelve captured steps, some of which have the fault, of a suspect that comes back or not
    window = TWELVE.run(Fault("data", 1, 0.03, at(*held)), first_step=100)
    found, other = (reproduced(window, trigger(period=period, onset=onset)) for onset in onsets)
    # THEN the onset makes no difference
    assert found == other
    # AND each step with the fault is found, of at least as many as were due
    assert found.fault_steps == tuple(sorted(100 + step for step in held))
    assert found.steps_with == len(held) <= found.steps <= 12
    assert found.steps >= max(1, 12 // (period or 1))
    assert (found.answer == "no") == (not held)


def test_reproduction_is_unknown_if_the_due_step_may_be_missing():
    # GIVEN a capture of five steps, of which one is not there
    window = RANKS_4.run(first_step=100)
    window.durations_NRS[2, 3] = np.nan
    # THEN what comes back every 20 steps may have been in that one, and what comes back every second step was not there
    assert reproduced(window, trigger(period=20, onset=62)) is None
    assert reproduced(window, trigger(period=2, onset=62)).answer == "no"
    # AND what is found in the others is found
    window = RANKS_4.run(Fault("data", 1, 0.03, at(4)), first_step=100)
    window.durations_NRS[2, 3] = np.nan
    assert reproduced(window, trigger(period=20, onset=62)).answer == "yes"


@pytest.mark.parametrize(
    "wanted",
    [trigger("all", (0, 1, 2, 3)), trigger("cohort", (0, 1)), trigger(ranks=(9,)), trigger(stage="elsewhere")],
    ids=["everybody", "a cohort", "a rank that is not there", "a stage that is not there"],
)
def test_reproduction_is_unknown_without_peers(wanted):
    assert reproduced(RANKS_4.run(Fault("data", 1, 0.03), first_step=100), wanted) is None


def test_incomplete_steps_do_not_count():
    window = RANKS_4.run(Fault("data", 1, 0.03), first_step=100)
    window.durations_NRS[1, 3] = np.nan
    assert (reproduced(window, trigger()).steps, reproduced(window, trigger()).steps_with) == (4, 4)
    window.durations_NRS[:, 3] = np.nan
    assert reproduced(window, trigger()) is None
