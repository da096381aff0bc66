"""Which ranks a captured one is compared with."""

import pytest

from sftriage.runs.lanes import peers_of
from tests.unit.conftest import manifest_of


@pytest.mark.parametrize(
    ("n_ranks", "number", "expected"),
    [(1, 4, []), (3, 4, [0, 1]), (5, 4, [0, 1, 3, 4]), (6, 4, [0, 3, 5]), (8192, 2, [0, 4097])],
)
def test_the_peers_of_a_captured_rank_are_some_from_all_over_the_job(n_ranks, number, expected):
    # GIVEN rank 2, which is the suspect and was captured
    assert peers_of(manifest_of("a", rank=2), range(2, 3) if n_ranks == 1 else range(n_ranks), number) == expected


def test_however_large_a_job_is_few_ranks_of_it_are_read():
    assert len(peers_of(manifest_of("a"), range(100_000), 128)) <= 128
