"""What is known of each host, by what its agent has told."""

from dataclasses import replace

import pytest

from sftriage.fleet.generations import Generations
from sftriage.fleet.hosts import Host, status_of_all
from sftriage.fleet.wire import Incarnation
from sftriage.records import StageSchema
from tests.unit.fleet.shipments import block, info, shipment, status


@pytest.fixture
def generations():
    return Generations()


def heard(generations, *blocks, at_s=0.0, host=None, **more):
    """A host, after one message of it."""
    host = host or Host()
    host.heard(shipment(*blocks, **more), at_s)
    if blocks:
        host.take(blocks, generations, at_s)
    return host


def test_what_its_ranks_are_doing_grows_old_with_us(generations):
    host = heard(generations, block(), at_s=5.0, status=status())
    (first, _) = host.doing(generations, 7.0)
    assert (first.rank, first.stage_age_ns, first.step_age_ns) == (0, 2 * 10**9 + 5, 2 * 10**9 + 9)


def test_ranks_of_an_earlier_start_do_nothing_any_more(generations):
    host = heard(generations, block(), status=status())
    generations.take([Incarnation.of("boot-b", info(3, pid=8))], [], 0.0)
    # WHEN the job has started again elsewhere, with another process as rank 3
    generations.take([Incarnation.of("boot-b", info(3, pid=9))], [], 1.0)
    assert list(host.doing(generations, 2.0)) == []
    assert host.away(generations) == []
    # AND the host's new ranks are of that start, by whatever count the host has
    heard(generations, block(attempt=4), at_s=3.0, host=host, status=status(attempt=4))
    (members,) = host.members(block(attempt=4), generations)
    assert (members.generation, {one.attempt for one in members.infos.values()}) == (1, {1})
    assert [one.rank for one in host.doing(generations, 3.0)] == [0, 1]


def test_its_members_change_with_the_generations(generations):
    first = block()
    host = heard(generations, first)
    (members,) = host.members(first, generations)
    assert (members.generation, sorted(members.of)) == (0, [0, 1])
    assert host.members(first, generations)[0] is members
    # WHEN rank 1 is another process
    other = replace(first, infos={**first.infos, 1: info(1, pid=77)})
    heard(generations, other, at_s=1.0, host=host)
    assert {one.generation: sorted(one.of) for one in host.members(other, generations)} == {0: [0], 1: [1]}


@pytest.mark.parametrize(
    ("told", "away"),
    [
        ({"status": status()}, []),
        ({"status": replace(status(), ranks=(replace(status().ranks[0], closed=True), status().ranks[1]))}, [0]),
        ({"status": status(alive=False)}, [0, 1]),
        ({"status": status(), "over": True}, [0, 1]),
        ({}, []),
    ],
)
def test_ranks_that_take_no_more_steps_are_away(generations, told, away):
    assert heard(generations, block(), **told).away(generations) == away


def test_all_ranks_of_a_silent_host_are_away(generations):
    host = heard(generations, block())
    host.silent = True
    assert host.away(generations) == [0, 1]


def test_a_host_that_records_other_stages_is_not_in_the_status_of_all(generations):
    one = heard(generations, block((2, 3)), status=status((2, 3)))
    other = heard(generations, block((0, 1)), status=status((0, 1)))
    assert [each.rank for each in status_of_all([one, other], generations, 0.0).ranks] == [0, 1, 2, 3]
    foreign = replace(status((0, 1)), schema=StageSchema(("backward", "other")))
    other = heard(generations, block((0, 1)), host=other, status=foreign)
    assert [each.rank for each in status_of_all([one, other], generations, 0.0).ranks] == [2, 3]
    assert status_of_all([], generations, 0.0) is None
