"""What is known of each host and of groups of ranks by what agents send: who is there, what they do, what is over."""

from dataclasses import replace
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.fleet.hosts import (
    AWAY_S,
    GOES_ON_S,
    KEPT_GENERATIONS,
    SETTLE_S,
    Generations,
    Groups,
    Host,
    Known,
    RollCall,
    status_of_all,
)
from sftriage.fleet.over_nats import GONE_S, all_over, of_all
from sftriage.fleet.wire import Incarnation
from sftriage.mitigate.switching import UNLIKE, Request, Setting
from sftriage.model.ends import HostEnds, RankEnd
from sftriage.model.windows import GpuFindings, StageSchema
from sftriage.windows.rings import status_of
from tests.unit.fleet.shipments import SCHEMA, group, info, rows, shipment, status


@pytest.fixture
def generations():
    return Generations()


def started(at_s, some):
    """Rows whose processes began this long after the host."""
    return replace(
        some, ranks={rank: replace(one, started_mono_ns=int(at_s * 1e9)) for rank, one in some.ranks.items()}
    )


def heard(generations, *some, at_s=0.0, host=None, **more):
    """A host, after one message of it, by whose clock it is as late as by the hub's; and its members in the rows."""
    host = host or Host(generations)
    host.heard(shipment(*some, mono_ns=int(at_s * 1e9), **more), at_s, at_s)
    return host, [host.take("node-a", one) for one in some]


def test_what_its_ranks_are_doing_grows_old_with_us(generations):
    host, _ = heard(generations, rows(), at_s=5.0, status=status())
    (first, _) = status_of_all([host], 7.0).ranks
    assert (first.rank, first.stage_age_ns, first.step_age_ns) == (0, 2 * 10**9 + 5, 2 * 10**9 + 9)


def test_ranks_of_an_earlier_start_do_nothing_any_more(generations):
    host, _ = heard(generations, started(1.0, rows()), at_s=1010.0, status=status())
    # WHEN the job has started again elsewhere, with other processes
    other = replace(info(0, pid=9, host="node-b"), started_mono_ns=2000 * 10**9)
    generations.take("node-b:", 0.0, {0: other}, {0: Incarnation.of("boot-b", other)})
    assert host.doing() is None
    assert host.away() == []
    # AND the host's new ranks are of that start, by whatever count the host has
    again = started(2000.5, rows((1, 2), generation=4))
    _, ((members,),) = heard(generations, again, at_s=2002.0, host=host, status=status((1, 2), attempt=4))
    assert (members.generation, {one.attempt for one in members.infos.values()}) == (1, {1})
    assert host.doing().rank_R.tolist() == [1, 2]


def test_its_members_change_with_the_generations(generations):
    # GIVEN a host of a job that takes steps
    first = started(1.0, rows())
    host, ((members,),) = heard(generations, first, at_s=1010.0)
    assert (members.generation, sorted(members.of)) == (0, [0, 1])
    # THEN they are what they were for as long as nothing changes
    assert host.take("node-a", first)[0] is members
    # WHEN rank 1 is another process
    second = replace(info(1, pid=77, attempt=1), started_mono_ns=2000 * 10**9)
    other = replace(first, ranks={**first.ranks, 1: second})
    _, (some,) = heard(generations, other, at_s=2001.0, host=host)
    assert {one.generation: sorted(one.of) for one in some} == {0: [0], 1: [1]}


def test_how_its_ranks_ended_is_on_the_hubs_clock_and_in_the_generations_of_the_job(generations):
    # GIVEN a host whose fifth start is the first of the job, and whose sixth never recorded
    ends = HostEnds((RankEnd(0, attempt=4, time_s=100.0), RankEnd(1, attempt=5)), 4, 1, 101.0, 90.0, 0.5)
    host, _ = heard(generations, rows(generation=4), at_s=1010.0, over=True, ends=ends)
    host.heard(shipment(mono_ns=1010 * 10**9), 1012.0, 1012.0)
    # THEN what has been sent once counts, whatever follows
    found = host.ended()
    assert [(end.attempt, end.margin_s) for end in found.ranks] == [(0, 0.5), (1, 0.5)]
    assert [found.ranks[0].time_s, found.signalled_s] == pytest.approx([10.0, 11.0], abs=1e-3)
    assert (found.ranks[1].time_s, found.status, found.world_size) == (None, 1, 4)


@pytest.mark.parametrize("silent", [False, True])
def test_ranks_whose_host_reports_no_end_are_where_they_were_last_heard_of(generations, silent):
    host, _ = heard(generations, rows(), status=status())
    host.silent = silent
    assert {(end.rank, end.host, end.step, end.stage, end.sync) for end in host.ended().ranks} == {
        (rank, "node-a", 7, "backward", True) for rank in (0, 1)
    }
    assert {(end.silent, end.alive) for end in host.ended().ranks} == {(True, not silent)}
    assert Host(generations).ended().ranks == ()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    ("reported", "away"),
    [
        ({"status": status()}, []),
        ({"status": status_of(SCHEMA, 4, [replace(status().ranks[0], closed=True), status().ranks[1]])}, [0]),
        ({"status": status(alive=False)}, [0, 1]),
        ({"status": status(), "over": True}, [0, 1]),
        ({}, []),
    ],
)
def test_ranks_that_take_no_more_steps_are_away_and_all_of_a_silent_host(generations, reported, away, silent):
    host, _ = heard(generations, rows(), **reported)
    host.silent = silent
    assert host.away() == ([0, 1] if silent else away)


def test_a_host_that_records_other_stages_is_not_in_the_status_of_all(generations):
    one, _ = heard(generations, rows((2, 3)), status=status((2, 3)))
    other, _ = heard(generations, rows((0, 1)), status=status((0, 1)))
    assert [each.rank for each in status_of_all([one, other], 0.0).ranks] == [0, 1, 2, 3]
    foreign = replace(status((0, 1)), schema=StageSchema(("backward", "other")))
    other, _ = heard(generations, rows((0, 1)), host=other, status=foreign)
    assert [each.rank for each in status_of_all([one, other], 0.0).ranks] == [2, 3]
    assert status_of_all([], 0.0) is None


NOW_S = 1000.0


def host(*, over=False, quiet_s=0.0):
    return Host(Generations(), NOW_S - quiet_s, over=over)


@pytest.mark.parametrize(
    ("hosts", "waiting", "expected"),
    [
        # the state of each host, the hosts with waiting messages, and whether the job is over
        ({}, set(), False),
        ({"a": host()}, set(), False),
        ({"a": host(over=True)}, set(), True),
        ({"a": host(over=True), "b": host()}, set(), False),
        ({"a": host(over=True), "b": host(over=True)}, set(), True),
        ({"a": host(over=True), "b": host(quiet_s=GONE_S - 1)}, set(), False),
        ({"a": host(over=True), "b": host(quiet_s=GONE_S + 1)}, set(), True),
        # one that waits for the others says every second that it is over
        ({"a": host(over=True), "b": host(over=True)}, {"a"}, True),
        ({"a": host(over=True), "b": host(quiet_s=GONE_S + 1)}, {"a"}, True),
        # a quiet host may have sent something else, and so may an unknown host
        ({"a": host(over=True), "b": host(quiet_s=GONE_S + 1)}, {"b"}, False),
        ({"a": host(over=True)}, {"c"}, False),
    ],
)
def test_a_job_is_over_once_it_is_on_all_hosts(hosts, waiting, expected):
    assert all_over(hosts, waiting, NOW_S, 0.0) is expected


def test_what_the_drivers_of_two_hosts_say_is_put_together():
    slow = GpuFindings(8.0, ("GPU 0 is too hot",), {1: {"uuid": "GPU-a"}})
    none = GpuFindings(9.0, problem="this host has no NVIDIA driver")
    assert of_all([slow, none]) == GpuFindings(8.0, slow.remarks, slow.gpus, none.problem)


HERE, SILENT, OVER = (Host(Generations(), newest=rows(), **how) for how in ({}, {"silent": True}, {"over": True}))
AWAY = "the hub cannot be reached: is its host up?"
A, AB, ABC = (dict.fromkeys(names, HERE) for names in ("a", "ab", "abc"))
LOOKS = {
    "hosts that come one after another are one line": [
        ({"b": HERE, "later_s": 0.5}, []),
        (AB, ["4 ranks on 2 hosts: a and b"]),
        (AB, []),
    ],
    "of many hosts some are named": [
        ({f"n{number}": HERE for number in range(64)}, ["128 ranks on 64 hosts: n0, n1, n10, n11 and 60 more"]),
    ],
    "silent hosts are one line, and so is their return": [
        (ABC, ["6 ranks on 3 hosts: a, b and c"]),
        (ABC | {"b": SILENT, "c": SILENT}, ["no data from b and c: windows leave out their ranks"]),
        (ABC | {"b": SILENT, "c": SILENT}, []),
        (ABC | {"c": SILENT}, ["b is back"]),
    ],
    "a host that has left is no news": [(AB, ["4 ranks on 2 hosts: a and b"]), (AB | {"b": OVER}, [])],
    "a hub that is away for long is news, and hosts that were silent meanwhile are not": [
        (A, ["2 ranks on 1 host: a"]),
        (A | {"away": AWAY, "later_s": 1.0}, []),
        (A, []),
        (A | {"away": AWAY, "later_s": AWAY_S}, [f"{AWAY} The job keeps running, and is not judged meanwhile"]),
        (A, [f"the hub is back after {AWAY_S:.0f} s; judging what was recorded meanwhile"]),
    ],
}


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_a_roll_call_says_only_what_lasts_and_once(looks):
    call, now_s = RollCall(), 100.0
    for hosts, lines in looks:
        about = {"away": "", "later_s": SETTLE_S} | hosts
        away, later_s = about.pop("away"), about.pop("later_s")
        first = call.update(about, away, now_s)
        now_s += later_s
        assert first + call.update(about, away, now_s) == lines


NAME = "ranks-0.abcd"
ALONE = group(ranks=(0, 1), name="rank-0.0.switch")
ON = Setting(3)


class ReportedGroups:
    """Groups of a job whose hosts have two ranks each."""

    def __init__(self):
        self.gone, self.silent = set(), set()
        self.begin()

    def begin(self):
        self.groups = Groups(lambda agent: agent not in self.gone, lambda agent: agent in self.silent)

    def says(self, host, *parts):
        self.groups.heard(f"host-{host}", parts, {2 * host, 2 * host + 1})

    def both(self, values=(0, 0), requests=(0, 0), **more):
        for host in range(2):
            self.says(host, group((2 * host, 2 * host + 1), value=values[host], request=requests[host], **more))

    def wanted(self, setting=ON, name=NAME):
        """Once this is wanted of a group: what is written down for each agent."""
        self.groups.want({name: setting})
        return self.groups.wanted


@pytest.fixture
def reported():
    return ReportedGroups()


@pytest.mark.parametrize(
    ("values", "requests", "value", "request_", "written"),
    [
        # values in force and requests, of each host and of the group; and whether an order to switch it on is written
        ((0, 0), (0, 0), 0, Request(0, 0, 0), True),
        ((0, 0), (3, 0), 0, UNLIKE, True),
        ((0, 0), (3, 3), 0, Request(0, 0, 3), False),
        # (one host tells of it later than the other)
        ((3, 0), (3, 3), None, Request(0, 0, 3), False),
        ((3, None), (3, 3), None, Request(0, 0, 3), False),
        ((3, 3), (3, 3), 3, Request(0, 0, 3), False),
        # it is to be off, by the word of an earlier controller that one of them has heard
        ((3, 3), (0, 3), 3, UNLIKE, True),
        ((3, 3), (0, 0), 3, Request(0, 0, 0), True),
    ],
)
def test_a_group_keeps_its_order_until_all_hosts_have_applied_it(reported, values, requests, value, request_, written):
    reported.both(values, requests)
    (whole,) = reported.groups.statuses()
    assert (whole.value, whole.request) == (value, request_)
    assert reported.wanted() == ({"host-0": {NAME: ON}, "host-1": {NAME: ON}} if written else {})


def test_of_a_group_that_lacks_a_host_nothing_is_known_and_nothing_wanted(reported):
    reported.says(0, group((0, 1)), ALONE)
    # THEN of one that is on one host it is
    assert [one.name for one in reported.groups.statuses()] == [ALONE.name]
    assert reported.wanted() == {}
    assert reported.wanted(Setting(2), ALONE.name) == {"host-0": {ALONE.name: Setting(2)}}
    # WHEN the other host tells of it too, and then no more, as of ranks that are gone
    reported.says(1, group((2, 3)))
    assert {one.name for one in reported.groups.statuses()} == {NAME, ALONE.name}
    assert reported.wanted().keys() == {"host-0", "host-1"}
    reported.says(1)
    assert [one.name for one in reported.groups.statuses()] == [ALONE.name]
    assert reported.wanted() == {}


def test_a_host_that_is_silent_has_not_switched(reported):
    # GIVEN a group with a silent host WHEN it gets a request
    reported.both()
    reported.silent = {"host-1"}
    reported.says(0, group((0, 1), request=3))
    # THEN it is not in force yet, and stays requested: the trial will end
    (whole,) = reported.groups.statuses()
    assert (whole.value, whole.next_request(3)) == (0, Request(0, 0, 3))
    assert reported.wanted() == {"host-0": {NAME: ON}, "host-1": {NAME: ON}}
    # AND another request takes its place, and does not count as applied
    reported.says(0, group((0, 1), request=0))
    assert reported.wanted(Setting()) == {"host-0": {NAME: Setting()}, "host-1": {NAME: Setting()}}
    # WHEN it speaks again THEN that is known
    reported.silent = set()
    assert reported.wanted(Setting()) == {}


def test_of_a_group_on_a_host_that_is_silent_nothing_more_is_known(reported):
    reported.says(0, ALONE)
    assert reported.wanted(Setting(), ALONE.name) == {}
    reported.silent = {"host-0"}
    assert reported.wanted(Setting(), ALONE.name) == {"host-0": {ALONE.name: Setting()}}


def test_a_host_that_left_the_job_reports_no_groups(reported):
    # GIVEN a host that was replaced by another one, on which the ranks have files of the same names
    reported.says(0, ALONE)
    reported.groups.heard("host-2", [replace(ALONE, value=2)], {0, 1})
    assert reported.groups.statuses() == []
    reported.gone.add("host-0")
    # THEN these count, and get requests
    assert reported.groups.statuses() == [replace(ALONE, value=2)]
    assert reported.wanted(Setting(), ALONE.name) == {"host-2": {ALONE.name: Setting()}}


def test_a_host_reports_only_its_own_ranks(reported):
    # GIVEN hosts of which one says how another one's ranks stand
    reported.says(0, group((0, 1)), group((2, 3), value=3))
    reported.says(1, group((2, 3)), replace(ALONE, value=2))
    (whole,) = reported.groups.statuses()
    assert (whole.name, whole.value, list(whole.here)) == (NAME, 0, [0, 1, 2, 3])


EPOCH_S = 2e6
CLOCKS_S = {"a": 1e6, "b": -50.0, "c": 0.0, "d": 7e3}  # what the hub's clock is ahead of those of hosts


class Job:
    """The hosts of a job, whose ranks start at times of the hub's clock."""

    def __init__(self, known=None):
        self.generations = Generations() if known is None else Generations(known)

    def take(self, host, ranks, began_s, start=0, world_size=4):
        """What a host tells of one of its starts: whether anything is new."""
        some = {rank: process(host, rank, began_s, start, world_size) for rank in ranks}
        ones = dict(zip(ranks, incarnations(host, ranks, began_s, start, world_size), strict=True))
        return self.generations.take(f"{host}:", CLOCKS_S[host], some, ones)

    def step(self, host, ranks, first_s, began_s, last_s=0.0, start=0, world_size=4):
        stepping = incarnations(host, ranks, began_s, start, world_size)
        return self.generations.stepped(stepping, lambda: (EPOCH_S + first_s, EPOCH_S + last_s))

    def of(self, host, ranks, began_s, start=0, world_size=4):
        return set(map(self.generations.of, incarnations(host, ranks, began_s, start, world_size)))


def process(host, rank, began_s, start, world_size):
    mono_ns = int((EPOCH_S + began_s - CLOCKS_S[host]) * 1e9)
    made = info(rank, world_size=world_size, attempt=start, pid=1000 + int(10 * began_s) * 10 + rank, host=host)
    return replace(made, started_mono_ns=mono_ns)


def incarnations(host, ranks, *about):
    return [Incarnation.of(f"boot-{host}", process(host, rank, *about)) for rank in ranks]


def test_a_rank_that_begins_after_the_others_took_steps_is_not_of_their_generation():
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
    # GIVEN a failed start between two generations, reported by one host long after
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


def test_a_host_whose_start_goes_on_takes_no_rank_of_another_host():
    # GIVEN a job that takes steps
    job = Job()
    job.take("a", (0, 1), 0.0)
    job.take("b", (2, 3), 0.0)
    job.step("a", (0, 1), 1.0, began_s=0.0)
    # WHEN a host claims another one's rank as one of the same start, a moment later
    assert not job.take("a", (2,), 0.1)
    # THEN there is no other generation, as there is where it has started again
    assert job.of("a", (2,), 0.1) == {None}
    assert job.take("a", (2,), 30.0, start=1)
    assert job.of("a", (2,), 30.0, 1) == {1}
    # AND a rank without a process may begin late
    late = Job()
    late.take("a", (0,), 0.0)
    late.step("a", (0,), 1.0, began_s=0.0)
    assert late.take("a", (1,), 30.0)


def test_two_jobs_under_one_name_are_reported_once(caplog):
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
    # THEN the newest, and as many older ones as may still send something
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
    reported, truth, counts = {host: [] for host in "abcd"}, [], dict.fromkeys("abcd", 0)
    always = draw(st.integers(1, 4))
    for number in range(draw(st.integers(1, 5))):
        hosts = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
        if not replaced:
            hosts = draw(st.permutations("abcd"[:always]))
        truth.append({})
        for place, host in enumerate(hosts):
            # (no rank ends its first step before all have begun; some starts never take a step)
            began_s = 100.0 * number + draw(st.floats(0.0, 20.0))
            about = (place,), began_s, counts[host], len(hosts)
            truth[-1][host] = about
            reported[host].append(("take", host, *about))
            if draw(st.booleans()):
                reported[host].append(("step", host, *about, 100.0 * number + 25.0))
            counts[host] += 1
    return reported, truth


ORDERS = st.lists(st.integers(0, 11), min_size=40, max_size=40).map(iter)
"""Whose turn it is to tell something, of four hosts at most that tell of two things a start."""


def generations_of(reported, truth, order, late_s=inf):
    """The generations of each start, where what hosts tell comes in an order, none so late after what others tell."""
    found = Job()
    while left := {host: some[0] for host, some in reported.items() if some}:
        earliest_s = min(began_s for _, _, _, began_s, *_ in left.values())
        heard = sorted(host for host, some in left.items() if some[3] < earliest_s + late_s)
        what, host, ranks, began_s, start, world_size, *first_s = reported[heard[next(order) % len(heard)]].pop(0)
        if what == "take":
            found.take(host, ranks, began_s, start, world_size)
        else:
            found.step(host, ranks, first_s[0], began_s, first_s[0], start, world_size)
    return [{number for host, about in some.items() for number in found.of(host, *about)} for some in truth]


@settings(max_examples=200)
@given(job=starts(replaced=False), order=ORDERS)
def test_generations_do_not_depend_on_the_order_of_messages(job, order):
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
