"""Was a suspect waiting for a CPU? The run-queue wait of its thread, held against its lateness over its peers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.frontier import Settings
from sftriage.frontier.scheduling import run_queue_wait, with_scheduling

from .windows import Fault, Job, at, classify, every, from_step

FOUR = Job(n_ranks=4)
"""A step is 100 ms, 60 of them before the sync and after the last one: of a wait that is spread evenly, 60 % count."""

ALL = np.ones(50, dtype=bool)
EVERYWHERE = (Fault("data", 1, factor=2.0), Fault("forward", 1, factor=2.0), Fault("backward", 1, factor=2.0))
"""A rank that has its core half of the time, as it is with another busy process on it."""


def queued(window, *waits_s, unknown=()):
    """The window with so many seconds in the run queue a step, (rank, steps, seconds) each."""
    queued_NR = np.zeros(window.durations_NRS.shape[:2])
    for rank, steps, seconds in waits_s:
        queued_NR[steps(len(queued_NR)), rank] = seconds
    for rank in unknown:
        queued_NR[:, rank] = np.nan
    return replace(window, queued_NR=queued_NR, preempted_NR=np.round(queued_NR * 200.0))


always, half = from_step(0), from_step(25)
EVERYBODYS = tuple((rank, always, 0.01) for rank in range(4))


@pytest.mark.parametrize(
    ("situation", "faults", "waits_s", "least", "most"),
    [
        ("it has its core half of the time", EVERYWHERE, ((1, always, 0.085),), 0.8, 1.0),
        ("it sleeps", (Fault("data", 1, 0.05),), (), 0.0, 0.0),
        (
            "it sleeps, and all wait a little",
            (Fault("data", 1, 0.05),),
            tuple((r, always, 0.01) for r in range(4)),
            0,
            0,
        ),
        ("it sleeps, and waits a little", (Fault("data", 1, 0.05),), ((1, always, 0.01),), 0.1, 0.2),
        ("it sleeps, and a peer waits", (Fault("data", 1, 0.05),), ((2, always, 0.04),), 0.0, 0.0),
        ("it waited more than it was late", (Fault("data", 1, 0.02),), ((1, always, 0.09),), 1.0, 1.0),
        ("in half of the steps", (Fault("data", 1, 0.06, half),), ((1, half, 0.06),), 0.6, 0.9),
        ("now and then", (Fault("data", 1, 0.2, every(7, 3)),), ((1, every(7, 3), 0.2),), 0.6, 1.0),
        # What was waited now and then is spread over the steps between two readings.
        ("now and then, spread", (Fault("data", 1, 0.2, every(7, 3)),), ((1, always, 0.2 / 7),), 0.6, 1.0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_much_of_the_lateness_was_waiting(situation, faults, waits_s, least, most):
    found = run_queue_wait(queued(FOUR.run(*faults), *waits_s), [1], ALL)
    assert least <= found.fraction <= most, situation


def test_the_numbers_are_means_over_the_steps_asked_for():
    window = queued(FOUR.run(Fault("data", 1, 0.05, half)), (1, half, 0.03))
    later, all_of_them = run_queue_wait(window, [1], half(50)), run_queue_wait(window, [1], ALL)
    assert (later.queued_s, later.preempted) == (pytest.approx(0.03), pytest.approx(6.0))
    assert (all_of_them.queued_s, all_of_them.preempted) == (pytest.approx(0.015), pytest.approx(3.0))
    assert later.late_s == pytest.approx(0.05, rel=0.1)
    assert all_of_them.late_s == pytest.approx(0.025, rel=0.1)


def test_who_is_not_late_has_nothing_to_explain():
    found = run_queue_wait(queued(FOUR.run(Fault("data", (0, 2, 3), 0.05)), (1, always, 0.03)), [1], ALL)
    assert (found.fraction, found.queued_s) == (None, pytest.approx(0.03))


def test_the_ranks_of_a_host_wait_together():
    hosts = ("a", "a", "b", "b", "b")
    window = Job(n_ranks=5, hosts=hosts).run(Fault("data", (0, 1), 0.05))
    window = queued(window, (0, always, 0.06), (1, always, 0.06))
    assert run_queue_wait(window, [0, 1], ALL).fraction > 0.6
    # AND ranks of another cohort are no measure: a host with one rank of each is held against the others of each
    window = replace(window, cohorts=("x", "y", "x", "y", "y"))
    assert run_queue_wait(window, [0, 1], ALL).fraction > 0.6


@pytest.mark.parametrize(
    ("situation", "window", "ranks"),
    [
        ("nobody counts", FOUR.run(Fault("data", 1, 0.05)), [1]),
        ("not the suspect's", queued(FOUR.run(Fault("data", 1, 0.05)), unknown=(1,)), [1]),
        ("of no peer", queued(FOUR.run(Fault("data", 1, 0.05)), (1, always, 0.05), unknown=(0, 2, 3)), [1]),
        ("it has no peers", queued(FOUR.run(Fault("data", None, 0.05))), [0, 1, 2, 3]),
        ("of one of its cohort", queued(replace(FOUR.run(), cohorts=("a", "b", "b", "b"))), [0]),
        ("nobody is asked about", queued(FOUR.run()), []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_known_is_not_said(situation, window, ranks):
    assert run_queue_wait(window, ranks, ALL) is None, situation


def test_enough_of_the_steps_must_be_known():
    window = queued(FOUR.run(Fault("data", 1, 0.05)), (1, always, 0.05))
    window.queued_NR[26:, 1] = np.nan
    assert run_queue_wait(window, [1], ALL).queued_s == pytest.approx(0.05)
    window.queued_NR[24:, 1] = np.nan
    assert run_queue_wait(window, [1], ALL) is None
    # AND a peer that is not known is none
    window = queued(FOUR.run(Fault("data", 1, 0.05)), (1, always, 0.05), unknown=(2,))
    without = run_queue_wait(window.of_ranks([0, 1, 3]), [1], ALL)
    assert run_queue_wait(window, [1], ALL).fraction == pytest.approx(without.fraction, rel=0.01)


@given(
    waits_s=st.lists(st.floats(0.0, 10.0), min_size=4, max_size=4),
    late_s=st.floats(0.0, 1.0),
    missing=st.sets(st.integers(0, 49)),
)
def test_a_fraction_is_one_and_more_waiting_never_explains_less(waits_s, late_s, missing):
    window = queued(FOUR.run(Fault("data", 1, late_s)), *((rank, always, one) for rank, one in enumerate(waits_s)))
    window.durations_NRS[list(missing), 3] = np.nan
    found = run_queue_wait(window, [1], ALL)
    if found is None or found.fraction is None:
        assert found is not None or len(missing) > 25
        return
    assert 0.0 <= found.fraction <= 1.0
    longer = replace(window, queued_NR=window.queued_NR + np.array([0.0, 1.0, 0.0, 0.0]))
    assert run_queue_wait(longer, [1], ALL).fraction >= found.fraction


def test_a_suspect_that_waited_for_a_cpu_is_one_and_the_verdict_says_that_it_did():
    # GIVEN a rank that has its core half of the time, and one that sleeps
    waited = classify(queued(FOUR.run(*EVERYWHERE), (1, always, 0.085)))
    slept = classify(queued(FOUR.run(Fault("data", 1, 0.05))))
    # THEN both are named
    assert [(one.label, one.suspects[0].ranks) for one in (waited, slept)] == [("suspect", (1,))] * 2
    # AND of each it is known
    assert waited.suspects[0].descheduled_fraction > 0.8
    assert slept.suspects[0].descheduled_fraction == 0.0
    assert waited.numbers["queued_s"] == pytest.approx(0.085)
    assert waited.numbers["preempted"] == pytest.approx(17.0)
    # AND all else is as it is where nobody counts
    unknown = classify(FOUR.run(*EVERYWHERE))
    assert unknown.suspects[0].descheduled_fraction is None
    assert replace(waited.suspects[0], descheduled_fraction=None) == unknown.suspects[0]
    assert {**waited.numbers, "queued_s": 0, "preempted": 0} == {**unknown.numbers, "queued_s": 0, "preempted": 0}


def test_steps_of_another_kind_and_those_before_it_began_are_not_counted():
    # GIVEN a rank that waits from step 30 on, and an evaluation for which it waits by itself in every tenth step
    kinds = tuple("evaluation" if n % 10 == 0 else "" for n in range(50))
    job = replace(FOUR, kinds=kinds)
    faults = [Fault(stage, 1, factor=2.0, steps=from_step(30)) for stage in ("data", "forward", "backward")]
    window = job.run(*faults, Fault("other", None, 0.3, every(10)))
    window = queued(window, (1, from_step(30), 0.085), (1, at(0, 10, 20), 5.0), (0, every(10), 9.0))
    verdict = classify(window)
    assert verdict.suspects[0].ranks == (1,)
    assert verdict.suspects[0].descheduled_fraction > 0.8
    # (its onset is not known to the step)
    assert 0.06 <= verdict.numbers["queued_s"] <= 0.086


def test_what_is_of_all_ranks_is_nobodys_waiting():
    window = FOUR.run(Fault("data", 1, 0.05))
    verdict = classify(window)
    everybody = replace(verdict.suspects[0], scope="all", ranks=(0, 1, 2, 3), rank=None)
    waited = queued(window, *((rank, always, 0.05) for rank in range(4)))
    found = with_scheduling(replace(verdict, suspects=(everybody,)), waited, Settings())
    assert found.suspects[0].descheduled_fraction is None
    assert "queued_s" not in found.numbers
