"""Which ranks belong together, told by their processes alone."""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sftriage.fleet.generations import GOES_ON_S, Generations, Known
from sftriage.fleet.wire import Incarnation


def of(host, ranks, start=0):
    """The processes of some ranks on a host, of one of its starts."""
    return [Incarnation(f"boot-{host}", 100 * start + rank, start, rank) for rank in ranks]


def told(generations, *ones):
    return [generations.of(one) for one in ones]


def test_hosts_of_one_start_are_one_generation_in_whatever_order_they_come():
    generations = Generations()
    assert generations.take(of("a", (0, 1)), (), 0.0)
    assert generations.take(of("b", (2, 3)), (), 5.0)
    assert told(generations, *of("a", (0, 1)), *of("b", (2, 3))) == [0, 0, 0, 0]
    # AND nothing has changed when they are seen again
    assert not generations.take(of("a", (0, 1)), of("a", (0, 1)), 100.0)


def test_a_restart_is_a_generation_though_one_host_alone_counts_it():
    # GIVEN a job of two hosts, of which one sees its ranks start again a second before the other does
    generations = Generations()
    generations.take(of("a", (0, 1)), (), 0.0)
    generations.take(of("b", (2, 3)), (), 0.0)
    generations.take(of("a", (0, 1), start=1), (), 10.0)
    # (steps that b's ranks took before come later)
    generations.take(of("b", (2, 3)), of("b", (2, 3)), 10.5)
    generations.take(of("b", (2, 3), start=1), (), 11.0)
    # THEN the new processes are together, and the old ones stay where they were
    assert told(generations, *of("a", (0, 1), start=1), *of("b", (2, 3), start=1)) == [1, 1, 1, 1]
    assert told(generations, *of("a", (0, 1)), *of("b", (2, 3))) == [0, 0, 0, 0]


def test_ranks_that_are_numbered_anew_and_a_node_that_is_replaced():
    generations = Generations()
    generations.take(of("a", (0, 1)), (), 0.0)
    generations.take(of("b", (2, 3)), (), 0.0)
    # WHEN host b is gone, c is there, and the ranks have changed places
    generations.take(of("c", (0, 1)), (), 60.0)
    generations.take(of("a", (2, 3), start=1), (), 61.0)
    assert generations.newest == 1
    assert told(generations, *of("c", (0, 1)), *of("a", (2, 3), start=1)) == [1, 1, 1, 1]


def test_a_rank_that_goes_on_is_of_the_generation_that_goes_on():
    # GIVEN a restart in which what was seen first of host b was of before it
    generations = Generations()
    generations.take(of("a", (0, 1)), (), 0.0)
    generations.take(of("a", (0, 1), start=1), (), 2.0)
    generations.take(of("b", (2, 3)), (), 2.5)
    generations.take(of("b", (2, 3), start=1), (), 3.0)
    assert told(generations, *of("a", (0, 1), start=1)) == [1, 1]
    # WHEN host a's ranks take steps long after
    now = of("a", (0, 1), start=1)
    assert not generations.take(now, now, 3.0 + GOES_ON_S)
    assert generations.take(now, now, 3.1 + GOES_ON_S)
    # THEN all are together
    assert told(generations, *now, *of("b", (2, 3), start=1)) == [2, 2, 2, 2]


def test_a_controller_that_takes_over_knows_the_generations():
    generations = Generations()
    for start in range(20):
        generations.take(of("a", (0, 1), start=start), (), float(start))
    known = msgspec.json.decode(msgspec.json.encode(generations.known), type=Known)
    # THEN the newest, and of the older ones so many as may still send something
    again = Generations(known)
    assert told(again, *of("a", (0, 1), start=19), *of("a", (0,), start=13)) == [19, 19, 13]
    assert told(again, *of("a", (0,), start=3)) == [None]
    assert not again.take(of("a", (0, 1), start=19), (), 30.0)


@given(hosts=st.integers(1, 4), starts=st.integers(1, 6), seed=st.integers(0, 999))
def test_generations_of_a_job_that_starts_again_never_mix(hosts, starts, seed):
    # GIVEN hosts that are heard of in any order, each start of the job after the one before it
    generations, shuffled = Generations(), random.Random(seed)
    for start in range(starts):
        for host in shuffled.sample(range(hosts), hosts):
            generations.take(of(host, (host,), start=start), (), float(start))
    # THEN each start is a generation
    found = [{generations.of(*of(host, (host,), start=start)) for host in range(hosts)} for start in range(starts)]
    assert found == [{start} for start in range(starts)]
