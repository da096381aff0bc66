"""Since when a fault is there, and what it costs: of made-up jobs, in which both are known."""

import numpy as np

from tests.simulated.made_up import made_up, namings

N_JOBS = 60


def test_the_range_of_an_onset_has_the_true_step_and_the_gain_is_the_cost():
    held, widths, gains = [], [], []
    for number in range(N_JOBS):
        # GIVEN a job with one slow rank, whatever else happens in it
        one = made_up(number)
        found = namings(one, number)
        # WHEN the rank is named for the first time, and for the last
        for verdict in found[:1] + found[-1:]:
            earliest, latest = verdict.suspect.onset_range
            assert earliest <= verdict.suspect.onset_step <= latest
            held.append(earliest <= one.onset <= latest)
            widths.append(latest - earliest)
            gains.append(verdict.suspect.gain_s / verdict.cost_s)
            # THEN a slow step takes some time without it
            assert verdict.without_s > 0.0
    # AND most are named
    assert len(held) > 1.7 * N_JOBS
    # AND the range holds the truth, and says something
    assert np.mean(held) >= 0.97
    assert np.median(widths) <= 15
    # AND the gain is right
    assert abs(np.median(gains) - 1.0) < 0.05
    assert np.mean(np.abs(np.asarray(gains) - 1.0) < 0.15) > 0.8
