"""Who a suspect can be compared with."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sftriage.controller.windows import median_known, peers_of
from sftriage.decisions import Suspect, Verdict
from sftriage.records import StageSchema, Window

SCHEMA = StageSchema(("data", "backward", "other"), ("backward",))


def window(local_R, **refined):
    """Ten steps in which each rank takes so long by itself, and waits for the others in backward."""
    local_R = np.array(local_R)
    durations_NRS = np.zeros((10, len(local_R), 3))
    durations_NRS[:, :, 0] = local_R
    durations_NRS[:, :, 1] = 1.0 - local_R
    return Window(SCHEMA, 0, durations_NRS, **refined)


def suspecting(*ranks):
    suspects = tuple(Suspect("rank", (rank,), "data", 0.1, 0.1, 1.0, rank=rank) for rank in ranks)
    return Verdict(0, 9, "suspect", (), suspects, 1.0, {}, {}, {})


def test_the_most_typical_comes_first_the_first_suspect_never_and_others_last():
    seen = window([0.5, 0.10, 0.14, 0.09, 0.11, 0.3, 0.101])
    assert peers_of(suspecting(0, 5), seen) == (6, 1, 4, 3, 2, 5)


def test_of_two_ranks_the_other_one_is_who_there_is():
    # WHETHER it is healthy enough is for the policy to say: see tests/unit/policy
    assert peers_of(suspecting(0, 1), window([0.5, 0.1])) == (1,)


def test_only_ranks_of_the_suspects_cohort_do_the_same_work():
    seen = window([0.5, 0.10, 0.9, 0.9], cohorts=("a", "a", "b", "b"))
    assert peers_of(suspecting(0), seen) == (1,)


def test_a_rank_nobody_saw_is_no_peer():
    seen = window([0.5, 0.1, 0.1])
    seen.durations_NRS[:, 1] = np.nan
    assert peers_of(suspecting(0), seen) == (2,)


def test_what_backward_took_by_itself_counts_where_it_is_known():
    seen = window([0.5, 0.1, 0.1, 0.1])
    seen = replace(seen, ready_NR=np.tile([0.0, 0.0, 0.4, 0.1], (10, 1)))
    assert peers_of(suspecting(0), seen)[-1] == 2


def test_without_a_window_the_others_are_taken_in_their_order():
    assert peers_of(suspecting(1), None, [3, 1, 0]) == (0, 3)


def test_without_a_suspect_there_is_nothing_to_compare():
    assert peers_of(suspecting(), window([0.1, 0.1])) == ()


VALUES = st.floats(0, 1e3) | st.just(float("nan"))


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_the_median_of_what_is_known_is_numpys(rows):
    values = np.array(rows)
    known = ~np.isnan(values).all(axis=1)
    found = median_known(values)
    np.testing.assert_allclose(found[known], np.nanmedian(values[known], axis=1))
    assert np.isnan(found[~known]).all()
