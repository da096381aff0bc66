"""What is known of each host, by what its agent has told."""

from dataclasses import replace

import pytest

from sftriage.fleet.generations import Generations
from sftriage.fleet.hosts import Host, status_of_all
from sftriage.fleet.wire import Incarnation
from sftriage.model.windows import StageSchema
from sftriage.windows.shipped import status_of
from tests.unit.fleet.shipments import SCHEMA, block, info, shipment, status


@pytest.fixture
def generations():
    return Generations()


def started(at_s, some):
    """A block of rows, whose processes began so long after the host."""
    infos = {rank: replace(one, started_mono_ns=int(at_s * 1e9)) for rank, one in some.infos.items()}
    return replace(some, infos=infos)


def heard(generations, *blocks, at_s=0.0, host=None, **more):
    """A host, after one message of it, by whose clock it is as late as by the hub's; and its members in each block."""
    host = host or Host()
    host.heard(shipment(*blocks, mono_ns=int(at_s * 1e9), **more), at_s, at_s)
    return host, [host.take("node-a", one, generations) for one in blocks]


def test_what_its_ranks_are_doing_grows_old_with_us(generations):
    host, _ = heard(generations, block(), at_s=5.0, status=status())
    (first, _) = status_of_all([host], generations, 7.0).ranks
    assert (first.rank, first.stage_age_ns, first.step_age_ns) == (0, 2 * 10**9 + 5, 2 * 10**9 + 9)


def test_ranks_of_an_earlier_start_do_nothing_any_more(generations):
    host, _ = heard(generations, started(1.0, block()), at_s=1010.0, status=status())
    # WHEN the job has started again elsewhere, with other processes
    other = replace(info(0, pid=9, host="node-b"), started_mono_ns=2000 * 10**9)
    generations.take("node-b:", 0.0, {0: other}, {0: Incarnation.of("boot-b", other)})
    assert host.doing(generations) is None
    assert host.away(generations) == []
    # AND the host's new ranks are of that start, by whatever count the host has
    again = started(2000.5, block((1, 2), attempt=4))
    _, ((members,),) = heard(generations, again, at_s=2002.0, host=host, status=status((1, 2), attempt=4))
    assert (members.generation, {one.attempt for one in members.infos.values()}) == (1, {1})
    assert host.doing(generations).rank_R.tolist() == [1, 2]


def test_its_members_change_with_the_generations(generations):
    # GIVEN a host of a job that takes steps
    first = started(1.0, block())
    host, ((members,),) = heard(generations, first, at_s=1010.0)
    assert (members.generation, sorted(members.of)) == (0, [0, 1])
    # THEN they are what they were for as long as nothing changes
    assert host.take("node-a", first, generations)[0] is members
    # WHEN rank 1 is another process
    second = replace(info(1, pid=77, attempt=1), started_mono_ns=2000 * 10**9)
    other = replace(first, infos={**first.infos, 1: second})
    _, (some,) = heard(generations, other, at_s=2001.0, host=host)
    assert {one.generation: sorted(one.of) for one in some} == {0: [0], 1: [1]}


@pytest.mark.parametrize(
    ("told", "away"),
    [
        ({"status": status()}, []),
        ({"status": status_of(SCHEMA, 4, [replace(status().ranks[0], closed=True), status().ranks[1]])}, [0]),
        ({"status": status(alive=False)}, [0, 1]),
        ({"status": status(), "over": True}, [0, 1]),
        ({}, []),
    ],
)
def test_ranks_that_take_no_more_steps_are_away(generations, told, away):
    host, _ = heard(generations, block(), **told)
    assert host.away(generations) == away


def test_all_ranks_of_a_silent_host_are_away(generations):
    host, _ = heard(generations, block())
    host.silent = True
    assert host.away(generations) == [0, 1]


def test_a_host_that_records_other_stages_is_not_in_the_status_of_all(generations):
    one, _ = heard(generations, block((2, 3)), status=status((2, 3)))
    other, _ = heard(generations, block((0, 1)), status=status((0, 1)))
    assert [each.rank for each in status_of_all([one, other], generations, 0.0).ranks] == [0, 1, 2, 3]
    foreign = replace(status((0, 1)), schema=StageSchema(("backward", "other")))
    other, _ = heard(generations, block((0, 1)), host=other, status=foreign)
    assert [each.rank for each in status_of_all([one, other], generations, 0.0).ranks] == [2, 3]
    assert status_of_all([], generations, 0.0) is None
