"""StragglAR's schedules, followed chunk by chunk: who has whose part of it, after every round."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import UsageError
from sftriage.mitigate.advice import Messages, under_straggler
from sftriage.mitigate.schedule import Send, fewest_rounds, schedule_of

ONE_MORE = {13, 14, 21, 22, 23, 25, 26, 27, 28, 30}
TWO_MORE = {29}


def followed(n: int, rounds: tuple[tuple[Send, ...], ...]) -> list[list[frozenset[int]]]:
    """Of each rank and chunk, whose gradients its sum holds in the end; a sum that is passed on must be whole.

    This is the reduction itself, with sets of ranks for sums: adding up is a union of sets with nothing in common.
    """
    straggler = n - 1
    sums = [[frozenset({rank})] * (n - 1) for rank in range(n)]
    for rank in range(n - 1):
        sums[rank][rank] = frozenset(range(n - 1))  # what ReduceScatter leaves it
    for number, sends in enumerate(rounds):
        busy = {number, straggler} if number < n - 1 else set()
        for ends in ([send.source for send in sends], [send.target for send in sends]):
            assert len(ends) == len(set(ends)), f"round {number}: a rank sends or receives twice"
            assert busy.isdisjoint(ends), f"round {number}: the straggler and its partner have no time for others"
        before = [list(chunks) for chunks in sums]
        for send in sends:
            assert before[send.source][send.chunk] == frozenset(range(n)), f"round {number}: {send} is of no whole sum"
            sums[send.target][send.chunk] = before[send.source][send.chunk]
        if busy:
            mine, its = before[number][number], before[straggler][number]
            assert mine.isdisjoint(its)
            sums[number][number] = sums[straggler][number] = mine | its
    return sums


@pytest.mark.parametrize("n", [*range(2, 34), 48, 64, 96, 128])
def test_every_rank_ends_with_the_whole_sum_of_every_chunk(n: int) -> None:
    """GIVEN a schedule WHEN it is followed round by round THEN all ranks have all sums, in this many rounds."""
    assert followed(n, schedule_of(n)) == [[frozenset(range(n))] * (n - 1)] * n
    more = (n in ONE_MORE | {48, 96}) + 2 * (n in TWO_MORE)
    assert len(schedule_of(n)) == fewest_rounds(n) + more


def test_no_chunk_is_sent_to_a_rank_that_has_it() -> None:
    for n in range(2, 20):
        received = [(send.target, send.chunk) for send in chain.from_iterable(schedule_of(n))]
        assert len(received) == len(set(received)) == (n - 1) * (n - 2)


def test_a_wrong_schedule_is_detected() -> None:
    """GIVEN a chunk that is passed on before it is whole WHEN it is followed THEN the check fails."""
    good = schedule_of(4)
    with pytest.raises(AssertionError, match="is of no whole sum"):
        followed(4, ((Send(1, 2, 0),), *good))
    assert followed(4, good[:-1]) != followed(4, good)


def test_one_rank_reduces_nothing() -> None:
    with pytest.raises(UsageError, match="1 ranks"):
        schedule_of(1)


@pytest.mark.parametrize(
    ("n", "break_even"),
    # In units of the time that one whole message takes; None: a ring is never slower.
    [(2, None), (3, None), (4, 0.5), (5, 0.65), (6, 0.5333), (8, 0.3929), (16, 0.2583), (32, 0.1593)],
)
def test_break_even_delay(n: int, break_even: float | None) -> None:
    """GIVEN no latency WHEN the straggler is later than this THEN StragglAR leaves less to do than a ring."""
    cost = under_straggler(n, Messages(1.0, 0.0, 1.0))
    assert cost.break_even_s == (None if break_even is None else pytest.approx(break_even, abs=1e-4))


@given(n=st.integers(2, 20), size_bytes=st.floats(1, 1e10), latency_s=st.floats(0, 1e-3), delay_s=st.floats(0, 10))
def test_at_break_even_both_cost_the_same(n: int, size_bytes: float, latency_s: float, delay_s: float) -> None:
    cost = under_straggler(n, Messages(size_bytes, latency_s, 1e-9))
    at = cost.break_even_s
    if at is None:
        assert cost.exposed_s(delay_s) >= cost.ring_s
    elif at > 0:
        assert cost.exposed_s(at) == pytest.approx(cost.ring_s)
        assert (cost.exposed_s(delay_s) < cost.ring_s) == (delay_s > at) or delay_s == pytest.approx(at)
