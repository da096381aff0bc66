"""Windows overlap: what is taken over from the one before is what looking again would find."""

from dataclasses import replace

import numpy as np
import pytest

from sftriage.model.verdicts import Settings
from sftriage.verdict.evidence import resumed
from sftriage.verdict.judging import judge
from sftriage.verdict.whatif import SAMPLE_RANKS, roles_of
from tests.scenario import Fault, Job, from_step

SETTINGS = Settings()
N_RANKS = SAMPLE_RANKS + 88
HOSTS = tuple(f"node-{rank // 8}" for rank in range(N_RANKS))
COHORTS = tuple(f"pp{rank * 3 // N_RANKS}" for rank in range(N_RANKS))
SLOW_RANK = Fault("data", 77, 0.020, from_step(60))
SLOW_HOST = Fault("forward", tuple(range(80, 88)), 0.020, from_step(60))


def windows(run, stride=10):
    return [run.steps(first, first + 49) for first in range(0, len(run.durations_NRS) - 49, stride)]


@pytest.mark.parametrize("stride", [10, 48, 50])
@pytest.mark.parametrize(
    ("job", "fault"),
    [
        ({}, Fault("other", 5, 0.020, from_step(60))),
        ({"between_s": 0.004}, SLOW_RANK),
        ({"hosts": HOSTS}, SLOW_HOST),
        ({"hosts": HOSTS, "cohorts": COHORTS}, SLOW_RANK),
    ],
)
def test_reusing_replays_changes_no_verdict(job, fault, stride):
    # GIVEN a run of many ranks
    run = Job(n_ranks=N_RANKS, n_steps=150, **job).run(fault, split=True)
    past, taken_over = None, 0
    for window in windows(run, stride):
        # WHEN a window is judged with what is known of the one before it, and without
        again = None if past is None else replace(past, replayed=None)
        verdict, after = judge(window, past, SETTINGS)
        alone, _ = judge(window, again, SETTINGS)
        # THEN both say the same, to the last bit
        assert verdict == alone
        taken_over += past is not None and resumed(window, roles_of(window), past.replayed) is not None
        past = after
    # AND windows that share steps did take something over
    assert bool(taken_over) == (stride < 50)


def test_changed_steps_are_replayed_again():
    run = Job(n_ranks=N_RANKS, n_steps=60).run()
    first, second = windows(run)
    _, past = judge(first, None, SETTINGS)
    roles = roles_of(second)
    assert resumed(second, roles, past.replayed) is not None
    # GIVEN the same numbers of steps with other times, fewer ranks, other roles, or steps that are missing
    missing_NRS = second.durations_NRS.copy()
    missing_NRS[3] = np.nan
    others = [
        replace(second, durations_NRS=2.0 * second.durations_NRS),
        second.of_ranks(range(SAMPLE_RANKS + 1)),
        replace(second, cohorts=COHORTS),
        replace(second, durations_NRS=missing_NRS),
        replace(second, attempt=1),
        # AND a window that begins where the other did, or before it
        first,
        replace(first, first_step=-5),
    ]
    # THEN nothing is taken over
    for window in others:
        assert resumed(window, roles_of(window), past.replayed) is None
        again, _ = judge(window, past, SETTINGS)
        assert again == judge(window, replace(past, replayed=None), SETTINGS)[0]


def test_small_jobs_keep_no_replay():
    window = Job(n_ranks=8).run()
    assert judge(window, None, SETTINGS)[1].replayed is None


def test_a_kept_replay_does_not_hold_the_window_in_memory():
    # GIVEN a window of many ranks that was judged
    window = Job(n_ranks=N_RANKS).run()
    kept = judge(window, None, SETTINGS)[1].replayed
    # THEN what is kept of it has no part of its durations
    arrays = [kept.some_NXS, *(arrival_R for one in kept.replays for arrival_R in one.arrivals_M)]
    assert not any(np.shares_memory(window.durations_NRS, array) for array in arrays)
    assert all(one.segment.columns == () for one in kept.replays)
