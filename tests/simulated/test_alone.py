"""What one rank does alone by its own note, while the others wait: it is named for it, with what that has cost."""

from dataclasses import replace

import numpy as np
import pytest

from sftriage.runs.timetable import Charges
from sftriage.windows.npz import counted_of
from sftriage.words.verdicts import verdict_sentence
from tests.scenario import OUTSIDE, Fault, Job, every, from_step, gaussian, verdicts

JOB = Job(n_steps=300, noise=gaussian(0.05))


def noting(window, *notes):
    """The window with notes of ranks: a kind, a rank, and a function of the number of steps that says in which."""
    n_steps, n_ranks, _ = window.durations_NRS.shape
    noted_NR = np.full((n_steps, n_ranks), "", dtype="U16")
    for kind, rank, steps in notes:
        noted_NR[steps(n_steps), rank] = kind
    return replace(window, noted_NR=noted_NR)


@pytest.mark.parametrize("kind", ["evaluation", "checkpoint", "mine"])
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
@pytest.mark.parametrize("period", [40, 25])
def test_a_rank_that_sometimes_does_something_alone_is_named_with_its_whole_cost(kind, n_ranks, period):
    # GIVEN a rank that periodically does something for 1.2 s, of which it notes the kind
    steps = every(period, 30)
    window = replace(JOB, n_ranks=n_ranks).run(Fault(OUTSIDE, 0, 1.2, steps), seed=n_ranks)
    found = verdicts(noting(window, (kind, 0, steps)))
    # THEN it is named in the window of its fifth time at the latest, and no other rank
    named = [one for one in found if one.label == "suspect"]
    assert {(one.named.rank, one.named.stage, one.named.alone.kind) for one in named} == {(0, "other", kind)}
    assert named[0].last_step < 30 + 4 * period + 20
    # AND what it has cost is known of all its times
    times = int(steps(300)[20:].sum())
    assert named[-1].named.alone.lost_s == pytest.approx(1.2 * times, rel=0.1)
    assert Charges.of_judged((verdict, ()) for verdict in found).losses.lost_s == pytest.approx(
        named[-1].named.alone.lost_s
    )
    # AND the sentence has what it does, and where the others wait
    sentence = verdict_sentence(named[-1])
    assert " alone every " in sentence
    assert sentence.endswith("so far; the others wait in backward.")


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("first", [0, 90])
def test_a_rank_that_compiles_alone_in_every_step_is_named_in_that_stage(n_ranks, first):
    # GIVEN a rank that from a step on compiles in every step, which is most of it
    steps = from_step(first)
    window = replace(JOB, n_ranks=n_ranks).run(Fault("forward", 1, 0.6, steps), seed=n_ranks)
    found = verdicts(noting(window, ("compilation", 1, steps)))
    # THEN it is named soon, though the past of two ranks may be unknown, and the sentence has the note
    named = [one for one in found if one.label == "suspect"]
    assert {(one.named.rank, one.named.stage) for one in named} == {(1, "forward")}
    assert named[0].last_step < max(70, first + 30)
    assert "it compiles alone" in verdict_sentence(named[0])


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_work_that_every_rank_does_alone_at_its_own_time_names_none(n_ranks):
    # GIVEN ranks that each compile now and then, in steps of their own
    notes = [("compilation", rank, every(37, 3 + 11 * rank)) for rank in range(n_ranks)]
    faults = [Fault("forward", rank, 0.6, steps) for _, rank, steps in notes]
    window = replace(JOB, n_ranks=n_ranks).run(*faults, seed=n_ranks)
    # THEN no rank is named for that
    assert all(one.named is None for one in verdicts(noting(window, *notes)))


def test_a_rank_that_marks_steps_waits_for_a_cpu_because_it_has_more_to_do():
    # GIVEN a rank that compiles in every step on a busy host, for most of which it waits for a CPU
    steps = from_step(90)
    window = noting(JOB.run(Fault("forward", 1, 0.6, steps), seed=3), ("compilation", 1, steps))
    waited_NR = steps(300)[:, None] * (np.arange(4) == 1) * 0.5
    window = replace(window, counted_NRC=counted_of({"queued_s": waited_NR}))
    # THEN it is named for its stage, and not for the system
    named = [one.named for one in verdicts(window) if one.named is not None]
    assert {(one.rank, one.stage, one.by_system, one.contended_fraction) for one in named} == {
        (1, "forward", None, None)
    }


def test_a_note_on_a_step_that_delays_no_rank_names_none():
    # GIVEN a rank that notes a kind for every tenth step, which takes it no longer, in a job with hiccups
    hiccups = [Fault("data", rank, 0.05, every(23, 5 * rank)) for rank in range(4)]
    window = noting(JOB.run(*hiccups, seed=5), ("evaluation", 2, every(10)))
    # THEN no rank is named
    assert all(one.named is None for one in verdicts(window))
