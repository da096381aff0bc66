"""Was the fault there while it was captured? Read off the captured steps."""

import numpy as np
import pytest

from sftriage.frontier.reproducing import reproduced
from sftriage.records import Trigger

from .windows import Fault, Job, at, every

RANKS_4 = Job(n_ranks=4, n_steps=5)


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
        # What comes back is expected in its steps alone: here steps 102 and so on.
        ("it comes back", (Fault("data", 1, 0.03, every(20, 2)),), trigger(period=20, onset=62), ("yes", 1, 1)),
        ("it does not come back", (), trigger(period=20, onset=62), ("no", 1, 0)),
        ("it would not be there yet", (), trigger(period=20, onset=70), ("no", 0, 0)),
        ("a host", (Fault("data", 1, 0.03), Fault("data", 0, 0.03)), trigger("host", (0, 1)), ("yes", 5, 5)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_truth_table(situation, faults, wanted, expected):
    found = reproduced(RANKS_4.run(*faults, first_step=100), wanted)
    assert (found.answer, found.steps, found.steps_with) == expected, situation
    assert found.expected_s == wanted.gain_s


@pytest.mark.parametrize(
    ("faults", "wanted", "steps"),
    [
        ((Fault("data", 1, 0.03, at(1, 4)),), trigger(), (101, 104)),
        ((Fault("data", 1, 0.03, every(2, 0)),), trigger(period=2, onset=100), (100, 102, 104)),
        ((Fault("data", 1, 0.03, at(1)),), trigger(period=2, onset=100), ()),
        ((), trigger(), ()),
    ],
    ids=["some", "what comes back", "not when it was expected", "none"],
)
def test_the_steps_that_have_the_fault_are_named(faults, wanted, steps):
    found = reproduced(RANKS_4.run(*faults, first_step=100), wanted)
    assert found.fault_steps == steps
    assert found.steps_with == len(steps)


def test_the_numbers_say_by_how_much():
    found = reproduced(RANKS_4.run(Fault("data", 1, 0.05), first_step=100), trigger())
    assert found.over_s == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(
    "wanted",
    [trigger("all", (0, 1, 2, 3)), trigger("cohort", (0, 1)), trigger(ranks=(9,)), trigger(stage="elsewhere")],
    ids=["everybody", "a cohort", "a rank that is not there", "a stage that is not there"],
)
def test_what_has_no_peers_cannot_be_told(wanted):
    assert reproduced(RANKS_4.run(Fault("data", 1, 0.03), first_step=100), wanted) is None


def test_steps_that_are_not_complete_are_not_looked_at():
    window = RANKS_4.run(Fault("data", 1, 0.03), first_step=100)
    window.durations_NRS[1, 3] = np.nan
    assert (reproduced(window, trigger()).steps, reproduced(window, trigger()).steps_with) == (4, 4)
    window.durations_NRS[:, 3] = np.nan
    assert reproduced(window, trigger()) is None
