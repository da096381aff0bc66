"""Which ranks belong together, told by their processes alone."""

from dataclasses import replace
from math import inf

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.fleet.hosts import GOES_ON_S, KEPT_GENERATIONS, Generations, Known
from sftriage.fleet.wire import Incarnation
from tests.unit.fleet.shipments import info

EPOCH_S = 2e6
CLOCKS_S = {"a": 1e6, "b": -50.0, "c": 0.0, "d": 7e3}  # what the hub's clock is ahead of those of hosts


class Job:
    """The hosts of a job, whose ranks start at times of the hub's clock."""

    def __init__(self, known=None):
        self.generations = Generations() if known is None else Generations(known)

    def take(self, host, ranks, began_s, start=0, world_size=4):
        """What a host tells of one of its starts: whether anything is new."""
        some = {rank: process(host, rank, began_s, start, world_size) for rank in ranks}
        ones = {rank: one(host, info) for rank, info in some.items()}
        return self.generations.take(f"{host}:", CLOCKS_S[host], some, ones)

    def step(self, host, ranks, first_s, began_s, last_s=0.0, start=0, world_size=4):
        stepping = [one(host, process(host, rank, began_s, start, world_size)) for rank in ranks]
        return self.generations.stepped(stepping, lambda: (EPOCH_S + first_s, EPOCH_S + last_s))

    def of(self, host, ranks, began_s, start=0, world_size=4):
        return {self.generations.of(one(host, process(host, rank, began_s, start, world_size))) for rank in ranks}


def process(host, rank, began_s, start, world_size):
    mono_ns = int((EPOCH_S + began_s - CLOCKS_S[host]) * 1e9)
    made = info(rank, world_size=world_size, attempt=start, pid=1000 + int(10 * began_s) * 10 + rank, host=host)
    return replace(made, started_mono_ns=mono_ns)


def one(host, info):
    return Incarnation.of(f"boot-{host}", info)


def test_who_begins_after_the_others_have_taken_steps_is_not_of_them():
    # GIVEN a host that was never heard of before the job started again, and whose ranks' numbers are free therefore
    job = Job()
    job.take("a", (0, 1), 0.0)
    job.step("a", (0, 1), 2.0, began_s=0.0)
    job.take("b", (2, 3), 60.0, start=1)
    # THEN they are of the generation of those that start when they do
    job.take("a", (0, 1), 60.0, start=1)
    assert job.of("b", (2, 3), 60.0, 1) == job.of("a", (0, 1), 60.0, 1) == {1}


def test_where_ranks_do_not_wait_for_each_other_one_may_begin_late():
    job = Job()
    job.take("a", (0, 1), 0.0)
    assert not job.step("a", (0, 1), inf, began_s=0.0)
    job.take("b", (2, 3), 600.0)
    assert job.of("b", (2, 3), 600.0) == job.of("a", (0, 1), 0.0) == {0}


def test_a_start_that_no_others_are_known_of_is_of_no_generation():
    # GIVEN a start that came to nothing between two generations, told of by one host long after
    job = Job()
    job.take("a", (0, 1), 0.0)
    job.step("a", (0, 1), 2.0, began_s=0.0)
    job.take("a", (0, 1), 60.0, start=1)
    job.step("a", (0, 1), 62.0, began_s=60.0, start=1)
    assert not job.take("b", (0, 1), 30.0, start=1)
    assert job.of("b", (0, 1), 30.0, 1) == {None}


def test_a_rank_that_goes_on_is_of_the_generation_that_goes_on():
    # GIVEN a job of which one rank alone starts again
    job = Job()
    job.take("a", (0, 1), 0.0)
    job.take("b", (2, 3), 0.0)
    job.step("a", (0, 1), 1.0, began_s=0.0)
    job.take("b", (2,), 30.0, start=1)
    assert job.of("b", (2,), 30.0, 1) == {1}
    # WHEN the others take steps long after
    assert not job.step("a", (0, 1), 1.0, 0.0, last_s=30.0 + GOES_ON_S)
    assert job.step("a", (0, 1), 1.0, 0.0, last_s=30.1 + GOES_ON_S)
    assert job.step("b", (3,), 1.0, 0.0, last_s=30.1 + GOES_ON_S)
    # THEN all are together
    assert job.of("a", (0, 1), 0.0) == job.of("b", (3,), 0.0) == {1}


def test_two_jobs_under_one_name_are_said_once(caplog):
    job = Job()
    job.take("a", (0, 1), 0.0)
    job.take("b", (0, 1), 1.0)
    for last_s in (5.0, 20.0, 30.0):
        job.step("a", (0, 1), 2.0, 0.0, last_s)
    # THEN the newer one counts
    assert (job.of("a", (0, 1), 0.0), job.of("b", (0, 1), 1.0)) == ({0}, {1})
    assert [record.message[:50] for record in caplog.records] == ["hosts a and b both have a rank 0 that takes steps;"]


def test_a_controller_that_takes_over_knows_the_generations():
    job = Job()
    for start in range(20):
        job.take("a", (0, 1), 60.0 * start, start)
        job.step("a", (0, 1), 60.0 * start + 2.0, 60.0 * start, start=start)
    known = msgspec.json.decode(msgspec.json.encode(job.generations.known), type=Known)
    # THEN the newest, and of the older ones so many as may still send something
    again = Job(known)
    oldest = 20 - KEPT_GENERATIONS
    assert (again.of("a", (0, 1), 1140.0, 19), again.of("a", (0,), 60.0 * oldest, oldest)) == ({19}, {oldest})
    assert again.of("a", (0,), 60.0 * (oldest - 1), oldest - 1) == {None}
    assert not again.take("a", (0, 1), 1140.0, 19)
    # AND who began long after the newest has taken steps is of the next one
    again.take("b", (2, 3), 1200.0)
    assert again.of("b", (2, 3), 1200.0) == {20}


@st.composite
def starts(draw, replaced=True):
    """A job's starts: of each which hosts have which ranks, from when on; and what each host tells, in its order."""
    told, truth, counts = {host: [] for host in "abcd"}, [], dict.fromkeys("abcd", 0)
    always = draw(st.integers(1, 4))
    for number in range(draw(st.integers(1, 5))):
        hosts = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
        if not replaced:
            hosts = draw(st.permutations("abcd"[:always]))
        truth.append({})
        for place, host in enumerate(hosts):
            # (nobody ends a first step before all have begun; not every start comes to a step)
            began_s = 100.0 * number + draw(st.floats(0.0, 20.0))
            about = (place,), began_s, counts[host], len(hosts)
            truth[-1][host] = about
            told[host].append(("take", host, *about))
            if draw(st.booleans()):
                told[host].append(("step", host, *about, 100.0 * number + 25.0))
            counts[host] += 1
    return told, truth


ORDERS = st.lists(st.integers(0, 11), min_size=40, max_size=40).map(iter)
"""Whose turn it is to tell something, of four hosts at most that tell of two things a start."""


def generations_of(told, truth, order, late_s=inf):
    """The generations of each start, where what hosts tell comes in an order, none so late after what others tell."""
    found = Job()
    while left := {host: some[0] for host, some in told.items() if some}:
        earliest_s = min(began_s for _, _, _, began_s, *_ in left.values())
        heard = sorted(host for host, some in left.items() if some[3] < earliest_s + late_s)
        what, host, ranks, began_s, start, world_size, *first_s = told[heard[next(order) % len(heard)]].pop(0)
        if what == "take":
            found.take(host, ranks, began_s, start, world_size)
        else:
            found.step(host, ranks, first_s[0], began_s, first_s[0], start, world_size)
    return [{number for host, about in some.items() for number in found.of(host, *about)} for some in truth]


@settings(max_examples=200)
@given(job=starts(replaced=False), order=ORDERS)
def test_generations_are_the_same_in_whatever_order_hosts_are_heard_of(job, order):
    # GIVEN hosts whose ranks are numbered anew with each start, and that are heard of as early or late as may be
    found = generations_of(*job, order)
    # THEN each start is a generation
    assert found == [{number} for number in range(len(found))]


@settings(max_examples=200)
@given(job=starts(), order=ORDERS)
def test_hosts_may_come_and_go_with_each_generation(job, order):
    # GIVEN hosts that are lost and replaced, and heard of before others have begun again twice
    found = generations_of(*job, order, late_s=70.0)
    assert found == [{number} for number in range(len(found))]
