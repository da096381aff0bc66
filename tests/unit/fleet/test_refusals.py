"""What is not taken is counted, in as much room as there is, and said once; and who may have which rank."""

from dataclasses import replace

from sftriage.fleet.claims import FRESH_S, Claims
from sftriage.fleet.refusals import MAX_NAMED, Refusals
from tests.unit.fleet.shipments import block, shipment, status


def test_a_flood_of_names_is_counted_and_said_a_few_times(caplog):
    refusals = Refusals()
    names = ["\x1b[31m", "", "a.b", "*", "\u202e", *(f"node-{number}" for number in range(1000))]
    for _ in range(10):
        for name in names:
            refusals.note(name, "garbage")
    assert len(refusals.problems) == len(caplog.messages) <= MAX_NAMED + 1
    assert sum(int(how.split()[0]) for how in refusals.problems.values()) == 10 * len(names)
    assert all(said.isprintable() for said in (*caplog.messages, *refusals.problems))


def told(agent, ranks, attempt=0, **changes):
    """A message of an agent that has these ranks."""
    return replace(shipment(block(ranks, attempt=attempt), status=status(ranks, attempt, **changes)), agent=agent)


def test_a_rank_that_one_host_has_is_no_other_hosts():
    # GIVEN a host that says that its ranks are alive
    claims = Claims()
    assert claims.refused(told("a", (0, 1)), 100.0) == ""
    assert claims.refused(told("b", (2, 3)), 100.5) == ""
    # THEN no other one can tell of these, be it of the same process or another one, while that is fresh
    why = "it tells of rank 1, which host a has"
    assert claims.refused(told("b", (1, 2)), 101.0) == why
    assert claims.refused(told("b", (1, 2), attempt=1), 101.0) == why
    assert claims.refused(replace(told("b", (1,)), status=None), 101.0) == why
    # AND what is its own it can tell, as that one can, again and again
    assert [claims.refused(told(*one), 101.0) for one in (("a", (0, 1)), ("b", (2, 3)))] == ["", ""]
    # AND another one has it once nothing has been heard of it for a while
    assert claims.refused(told("c", (1,), attempt=1), 101.0 + FRESH_S) == ""


def test_a_rank_that_is_gone_can_be_anothers_and_what_it_had_recorded_is_still_its_hosts():
    for gone in ({"alive": False}, {"alive": None}, {"closed": True}):
        # GIVEN a host whose rank is gone, or of which nobody can know, and another one that has it now
        claims = Claims()
        assert claims.refused(told("a", (0, 1), **gone), 100.0) == ""
        assert claims.refused(told("b", (1,), attempt=1), 100.0) == ""
        # THEN the first one goes on to tell of what it had
        assert claims.refused(told("a", (0, 1), **gone), 100.0) == ""


def test_what_was_a_rank_before_its_hosts_newest_start_may_be_anothers_by_now():
    # GIVEN a job that has started again with its ranks on the other hosts, and a host that has told of that
    claims = Claims()
    assert claims.refused(told("a", (2, 3), attempt=1), 100.0) == ""
    # THEN the other one, of which nothing was heard meanwhile, can tell of both of its starts
    both = replace(told("b", (0, 1), attempt=1), blocks=(block((2, 3)), block((0, 1), attempt=1)))
    assert claims.refused(both, 100.5) == ""
