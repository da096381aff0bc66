"""What the ranks of many hosts are doing, joined from what each host says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.windows import RankStatus, StageSchema
from sftriage.windows.rings import joined_statuses, status_of

SCHEMA = StageSchema.closed(("data", "backward"), ("backward",))
AGES = st.integers(0, 2**40)
RANKS = st.lists(
    st.builds(
        RankStatus,
        rank=st.integers(0, 99),
        host=st.sampled_from(["", "a", "b", "c"]),
        stage=st.sampled_from([None, *SCHEMA.stages]),
        stage_age_ns=AGES,
        step=st.integers(-1, 2**40),
        step_age_ns=AGES,
        published=st.integers(0, 2**40),
        closed=st.booleans(),
        alive=st.sampled_from([True, False, None]),
        special=st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.rank,
)


@given(ranks=RANKS, parts=st.integers(1, 4), older_ns=st.lists(AGES, min_size=4, max_size=4))
def test_statuses_of_several_hosts_are_joined_with_their_ages(ranks, parts, older_ns):
    # GIVEN ranks of which each host tells of some, and a while ago
    sent = [(some, age_ns) for n, age_ns in zip(range(parts), older_ns, strict=False) if (some := ranks[n::parts])]
    # WHEN they are joined
    found = joined_statuses([status_of(SCHEMA, 100, some, 3) for some, _ in sent], [age_ns for _, age_ns in sent])
    # THEN each is there as it was, so much older, by rank
    grown = [
        replace(one, stage_age_ns=one.stage_age_ns + age_ns, step_age_ns=one.step_age_ns + age_ns)
        for some, age_ns in sent
        for one in some
    ]
    assert found.ranks == tuple(sorted(grown, key=lambda one: one.rank))
    assert (found.schema, found.world_size, found.attempt) == (SCHEMA, 100, 3)


@pytest.mark.parametrize(
    "other", [status_of(StageSchema.closed(("load",)), 4, []), status_of(SCHEMA, 5, []), status_of(SCHEMA, 4, [], 1)]
)
def test_a_status_that_differs_from_the_first_is_left_out(other):
    one = RankStatus(1, "a", "data", 5, 7, 9, 7, False, True)
    foreign = replace(other, hosts=("b",), doing_VR=status_of(SCHEMA, 4, [replace(one, rank=2)]).doing_VR)
    assert [each.rank for each in joined_statuses([status_of(SCHEMA, 4, [one]), foreign], [0, 0]).ranks] == [1]
    assert joined_statuses([], []) is None
