"""What comes back every so many steps, found in noise that hides each single time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.frontier.recurrence import HISTORY_STEPS, MAX_SERIES, History, recurrences

RANK, WINDOW = (3,), 50


def history_of(*series, first_step=0):
    """A history of ranks 3, 4, …, each with one stage; and with all stages together, which is the same."""
    late = {(3 + n,): np.column_stack([one, one]) for n, one in enumerate(series)}
    return History().with_window(first_step, len(series[0]), late)


def hiccups(n_steps, seed):
    """Jitter of 1 ms, and in one step of eight, by chance, a delay of up to 20 ms."""
    random = np.random.default_rng(seed)
    return random.normal(0.0, 0.001, n_steps) + (random.random(n_steps) < 1 / 8) * random.uniform(0.0, 0.020, n_steps)


def find(history, min_s=0.001):
    return recurrences(history, list(history.late_s), WINDOW, min_s)


@pytest.mark.parametrize(
    ("period", "delay_s", "n_steps", "began"),
    [
        (2, 0.004, 100, 0),
        (5, 0.005, 100, 0),
        (7, 0.005, 200, 0),
        (5, 0.010, 300, 200),
        (12, 0.010, 150, 0),
        (40, 0.030, 300, 0),
        (60, 0.030, 480, 0),
    ],
)
def test_a_period_is_found_among_hiccups_as_large(period, delay_s, n_steps, began):
    for seed in range(5):
        # GIVEN a delay in every so many steps, from some step on, and hiccups of the machine that are as large
        steps = 1000 + np.arange(n_steps)
        late = hiccups(n_steps, seed) + delay_s * ((steps % period == period // 2) & (steps >= 1000 + began))
        # WHEN it is looked for THEN the period and the phase are found, and nearly the step at which it began
        found = find(history_of(late, hiccups(n_steps, seed + 100), first_step=1000))
        assert set(found) == {RANK}, seed
        assert (found[RANK].period, found[RANK].phase) == (period, period // 2)
        assert abs(found[RANK].onset - (1000 + began)) <= max(2 * period, 20)


def test_hiccups_and_what_fills_a_part_of_the_steps_do_not_come_back():
    found = 0
    for seed in range(200):
        # GIVEN hiccups alone, or with a fault that is there from some step on, or was for some
        late = hiccups(200, seed)
        late[120 : 200 if seed % 3 else 160] += 0.010 * (seed % 2)
        found += bool(find(history_of(late)))
    # THEN hardly ever is there a period in them: one time in a hundred by the odds, three to be safe
    assert found <= 6


def test_what_has_ended_is_not_found():
    # GIVEN a delay in every fifth step that ended 50 steps ago
    late = hiccups(200, 1)
    late[:150:5] += 0.010
    assert find(history_of(late)) == {}
    # AND it was found while it was there
    assert find(history_of(late[:150]))[RANK].period == 5


def test_what_is_too_little_to_matter_is_not_looked_at():
    late = hiccups(200, 1) / 100
    late[::5] += 0.0005
    assert find(history_of(late)) == {}
    assert find(history_of(late), min_s=0.0001)[RANK].period == 5


def test_steps_that_nobody_looked_at_are_no_evidence():
    # GIVEN a delay in every fifth step, and every third step without a number
    late = hiccups(240, 2) + 0.010 * (np.arange(240) % 5 == 1)
    late[::3] = np.nan
    assert find(history_of(late))[RANK].period == 5
    # AND nothing but such steps
    assert find(history_of(np.full(240, np.nan))) == {}


def test_a_stage_that_comes_back_is_found_where_the_rank_as_a_whole_only_jitters():
    # GIVEN 3 ms in every sixth step of a quiet stage, in a rank that jitters by 10 ms elsewhere
    random = np.random.default_rng(5)
    quiet = random.normal(0.0, 0.0005, 200) + 0.003 * (np.arange(200) % 6 == 0)
    late = np.column_stack([quiet, random.normal(0.0, 0.010, 200)])
    history = History().with_window(0, 200, {RANK: np.column_stack([late, late.sum(axis=1)])})
    found = find(history)[RANK]
    assert (found.column, found.period) == (0, 6)


@given(
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    overlap=st.integers(0, 20),
    start=st.integers(0, 1000),
)
@settings(deadline=None)
def test_a_history_is_the_last_steps_whatever_the_windows(cuts, overlap, start):
    # GIVEN windows that overlap, cut from one long series
    end = start + sum(cuts)
    series = np.random.default_rng(0).random(end + 1)
    history, first = History(), start
    for length in cuts:
        begin = max(start, first - overlap)
        part = series[begin : first + length]
        history = history.with_window(begin, len(part), {RANK: np.column_stack([part, part])})
        first += length
    # THEN the history has the last steps of the series, each once, and no more than it may
    expected = series[max(start, end - HISTORY_STEPS) : end]
    assert history.first_step == end - len(expected)
    np.testing.assert_array_equal(history.late_s[RANK][:, 0], expected)


def test_a_history_keeps_those_that_were_looked_at_last():
    history = History()
    for rank in range(2 * MAX_SERIES):
        history = history.with_window(10 * rank, 10, {(rank,): np.ones((10, 2))})
    assert list(history.late_s) == [(rank,) for rank in range(MAX_SERIES, 2 * MAX_SERIES)]
    assert len({len(series) for series in history.late_s.values()}) == 1
