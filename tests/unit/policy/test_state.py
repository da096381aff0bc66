"""What the state remembers: no more than is of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.policy.engine import decide
from sftriage.policy.losses import key_of_ranks, suspect_key
from sftriage.policy.state import DAY_S, MEMORY_S, MOST_REMEMBERED, finished, remembered

from .making import BEGUN, CAPTURING, NOW, make_policy, make_verdict, of


@pytest.mark.parametrize(
    ("scope", "ranks", "stage", "expected"),
    [
        ("rank", (3,), "data", "rank 3 data"),
        ("rank", (3,), None, "rank 3 *"),
        ("host", (8, 9, 10, 11), "forward", "host 8-11 *"),
        ("cohort", (11, 0, 8, 1, 2), None, "cohort 0-2,8,11 *"),
        ("all", tuple(range(16_384)), "data", "all 0-16383 data"),
    ],
)
def test_who_and_where(scope, ranks, stage, expected):
    assert suspect_key(make_verdict(ranks=ranks, stage=stage, scope=scope).suspects[0]) == expected


@given(st.lists(st.lists(st.integers(0, 300), min_size=1).map(tuple), min_size=2, max_size=2))
def test_other_ranks_are_another_suspect_and_any_are_short(both):
    one, other = (key_of_ranks("cohort", ranks, None) for ranks in both)
    assert (one == other) == (set(both[0]) == set(both[1]))
    assert max(len(one), len(other)) < 80


def test_what_has_cooled_is_forgotten():
    kept = remembered({"old": NOW - MEMORY_S - 1, "new": NOW - MEMORY_S}, {"last": NOW}, lambda at_s: at_s)
    assert kept == {"new": NOW - MEMORY_S, "last": NOW}
    many = remembered({f"s{n}": NOW + n for n in range(MOST_REMEMBERED)}, {"last": NOW + 1e5}, lambda at_s: at_s)
    assert len(many) == MOST_REMEMBERED
    assert "s0" not in many


def test_the_state_of_a_month_is_small():
    """GIVEN a month of a job in which another rank is suspected every hour THEN as much is kept as can matter."""
    policy = make_policy({**CAPTURING, "notify": [{"webhook": {"url_from_env": "A"}}]}, captures_per_day=24)
    state, captures, sizes = BEGUN, 0, []
    for hour in range(60 * 24):
        now_s = NOW + 3600 * hour
        decision, state = decide(make_verdict(ranks=(hour % 5000,), gain_s=0.02 + hour * 1e-5), policy, state, now_s)
        for number, request in enumerate(decision.requests):
            result = of(request.capture_id, "failed" if (hour + number) % 3 == 0 else "stored")
            state = finished(state, result, now_s + 60, reproduced=hour % 2 == 0)
            captures += 1
        if hour in (30 * 24, 60 * 24 - 1):
            sizes.append(len(state.to_json()))
    assert captures == 60 * 24
    assert sizes[1] < 1.05 * sizes[0] < 200_000
    assert len(state.asked_s) == 24
    assert all(now_s - DAY_S < at_s for at_s in state.asked_s)
