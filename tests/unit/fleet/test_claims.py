"""Whose a rank is: nobody takes one that another host has, and finding that out takes no longer in a larger job."""

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.fleet.claims import FRESH_S, Claims
from sftriage.fleet.messages import Block
from tests.unit.fleet.shipments import info, rows, shipment, status

A_HAS_IT = "it tells of rank 1, which host a has"


def told(agent, ranks, *, alive=None, pid=None):
    """What an agent tells of ranks that are processes of its host."""
    infos = {rank: info(rank, world_size=1 << 16, pid=pid and pid + rank, host=agent) for rank in ranks}
    block = Block(infos, rows(ranks, world_size=1 << 16))
    about = status(ranks if alive is None else alive)
    return replace(shipment(block, status=about), agent=agent, boot_id=f"boot of {agent}")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        # whom another host has told of, with when; who tells of whom now; and which rank that is refused for
        ([("a", (0, 1), 10.0)], ("b", (2, 3), 10.5), ""),
        ([("a", (0, 1), 10.0)], ("b", (1, 2), 10.5), A_HAS_IT),
        ([("a", (0, 1), 10.0)], ("a", (0, 1), 10.5), ""),
        # a host that says nothing more of it has it no longer
        ([("a", (0, 1), 10.0)], ("b", (1, 2), 10.0 + FRESH_S), ""),
        ([("a", (0, 1), 10.0), ("a", (0,), 10.2)], ("b", (1, 2), 10.5), ""),
        # of two that have it, as after a network was parted, it is one that has told of it lately
        (
            [("a", (1,), 5.0), ("b", (1,), 9.0), ("a", (1,), 10.0)],
            ("c", (1,), 10.5),
            "it tells of rank 1, which host a has",
        ),
        ([("a", (1,), 5.0), ("b", (1,), 9.0)], ("c", (1,), 10.5), "it tells of rank 1, which host b has"),
        ([("a", (1,), 5.0), ("b", (1,), 9.0)], ("b", (1,), 10.5), ""),
    ],
)
def test_a_rank_that_another_host_has_just_now_is_refused(before, now, expected):
    claims = Claims()
    for agent, ranks, sent_s in before:
        assert claims.refused(told(agent, ranks), sent_s) == ""
    agent, ranks, sent_s = now
    assert claims.refused(told(agent, ranks, pid=5000), sent_s) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.integers(0, 4))
    )
)
def test_it_is_as_if_each_had_been_compared_with_all_others(messages):
    claims, known, alive, now_s = Claims(), set(), {}, 0.0
    for agent, ranks, living, later_s in messages:
        now_s += later_s
        message = told(agent, sorted(ranks), alive=sorted(living))
        new = {rank for rank in ranks if (agent, rank) not in known}
        theirs = [ranks for other, (at_s, ranks) in alive.items() if other != agent and now_s - at_s < FRESH_S]
        expected = any(new & one for one in theirs)
        assert bool(claims.refused(message, now_s)) is expected
        if not expected:
            known |= {(agent, rank) for rank in new}
            alive[agent] = now_s, living


def operations(act) -> int:
    """How many lines of Python something takes."""
    lines = 0

    def counted(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return counted

    before = sys.gettrace()
    sys.settrace(counted)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


def test_a_host_that_comes_late_takes_as_much_in_a_large_job_as_in_a_small_one():
    # GIVEN jobs of a few hosts and of many, all of which have just told of their ranks
    took = []
    for n_hosts in (10, 1000):
        claims = Claims()
        for number in range(n_hosts):
            assert claims.refused(told(f"host-{number}", (2 * number, 2 * number + 1)), 10.0) == ""
        # WHEN another host tells of its own for the first time
        late = told("late", (2 * n_hosts, 2 * n_hosts + 1))
        took.append(operations(lambda claims=claims, late=late: claims.refused(late, 10.5)))
    # THEN it is compared with no more of the others where there are more of them
    assert took[0] == took[1] > 0
