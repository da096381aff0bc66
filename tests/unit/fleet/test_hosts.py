"""What is known of each host and of groups of ranks by what agents send: who is there, what they do, what is over."""

from dataclasses import replace

import pytest

from sftriage.fleet.hosts import AWAY_S, SETTLE_S, Generations, Groups, Host, RollCall, status_of_all
from sftriage.fleet.over_nats import GONE_S, all_over, of_all
from sftriage.fleet.wire import Incarnation
from sftriage.mitigate.switching import UNLIKE, Request, Setting
from sftriage.model.windows import GpuFindings, StageSchema
from sftriage.windows.rings import status_of
from tests.unit.fleet.shipments import SCHEMA, block, group, info, shipment, status


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


@pytest.mark.parametrize("silent", [False, True])
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
def test_ranks_that_take_no_more_steps_are_away_and_all_of_a_silent_host(generations, told, away, silent):
    host, _ = heard(generations, block(), **told)
    host.silent = silent
    assert host.away(generations) == ([0, 1] if silent else away)


def test_a_host_that_records_other_stages_is_not_in_the_status_of_all(generations):
    one, _ = heard(generations, block((2, 3)), status=status((2, 3)))
    other, _ = heard(generations, block((0, 1)), status=status((0, 1)))
    assert [each.rank for each in status_of_all([one, other], generations, 0.0).ranks] == [0, 1, 2, 3]
    foreign = replace(status((0, 1)), schema=StageSchema(("backward", "other")))
    other, _ = heard(generations, block((0, 1)), host=other, status=foreign)
    assert [each.rank for each in status_of_all([one, other], generations, 0.0).ranks] == [2, 3]
    assert status_of_all([], generations, 0.0) is None


NOW_S = 1000.0


def host(*, over=False, quiet_s=0.0):
    return Host(seen_s=NOW_S - quiet_s, over=over)


@pytest.mark.parametrize(
    ("hosts", "waiting", "expected"),
    [
        # what is known of each host, of whom something waits to be read, and whether the job is over
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
        # who was quiet may have said something else, and so may somebody who was never heard of
        ({"a": host(over=True), "b": host(quiet_s=GONE_S + 1)}, {"b"}, False),
        ({"a": host(over=True)}, {"c"}, False),
    ],
)
def test_a_job_is_over_once_it_is_on_all_hosts(hosts, waiting, expected):
    assert all_over(hosts, waiting, Generations(), NOW_S, 0.0) is expected


def test_what_the_drivers_of_two_hosts_say_is_put_together():
    slow = GpuFindings(8.0, ("GPU 0 is too hot",), {1: {"uuid": "GPU-a"}})
    none = GpuFindings(9.0, problem="this host has no NVIDIA driver")
    assert of_all([slow, none]) == GpuFindings(8.0, slow.remarks, slow.gpus, none.problem)


HERE, SILENT, OVER = (Host(newest=block(), **how) for how in ({}, {"silent": True}, {"over": True}))
AWAY = "the hub cannot be reached: is its host up?"


class Said:
    def __init__(self) -> None:
        self._call, self.now_s = RollCall(), 100.0

    def of(self, away: str = "", later_s: float = SETTLE_S, **hosts: Host) -> list[str]:
        """What is said of some hosts that are as they are for a while."""
        said = self._call.look(hosts, away, self.now_s)
        self.now_s += later_s
        return said + self._call.look(hosts, away, self.now_s)


def test_hosts_that_come_one_after_another_are_said_in_one_line():
    said = Said()
    assert said.of(later_s=0.5, b=HERE) == []
    assert said.of(b=HERE, a=HERE) == ["4 ranks on 2 hosts: a and b"]
    assert said.of(b=HERE, a=HERE) == []


def test_of_many_hosts_some_are_named():
    hosts = {f"n{number}": HERE for number in range(64)}
    assert Said().of(**hosts) == ["128 ranks on 64 hosts: n0, n1, n10, n11 and 60 more"]


def test_hosts_of_which_nothing_is_heard_are_said_together_and_so_is_their_return():
    said = Said()
    said.of(a=HERE, b=HERE, c=HERE)
    silent = ["nothing is heard of b and c: windows go out without their ranks"]
    assert said.of(a=HERE, b=SILENT, c=SILENT) == silent
    assert said.of(a=HERE, b=SILENT, c=SILENT) == []
    assert said.of(a=HERE, b=HERE, c=SILENT) == ["b is back"]


def test_a_host_that_has_left_is_no_news():
    said = Said()
    said.of(a=HERE, b=HERE)
    assert said.of(a=HERE, b=OVER) == []


def test_a_hub_that_is_away_for_a_moment_is_no_news_and_one_that_stays_away_is():
    said = Said()
    said.of(a=HERE)
    assert said.of(AWAY, later_s=1.0, a=HERE) == []
    assert said.of(a=HERE) == []
    assert said.of(AWAY, later_s=AWAY_S, a=HERE) == [f"{AWAY} The job goes on, and nobody is judged meanwhile"]
    # WHEN it is back THEN that is said once, and hosts that could not be heard of meanwhile are none of the news
    assert said.of(a=HERE) == [f"the hub is back after {AWAY_S:.0f} s; what was recorded meanwhile is judged now"]


NAME = "ranks-0.abcd"
ALONE = group(ranks=(0, 1), name="rank-0.0.switch")
ON = Setting(3)


class Told:
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
def told():
    return Told()


@pytest.mark.parametrize(
    ("values", "requests", "value", "request_", "written"),
    [
        # what is in force on each host, and asked for; the same of the group; whether it is written down that it be on
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
def test_a_group_is_asked_until_all_its_hosts_have_heard(told, values, requests, value, request_, written):
    told.both(values, requests)
    (whole,) = told.groups.statuses()
    assert (whole.value, whole.request) == (value, request_)
    assert told.wanted() == ({"host-0": {NAME: ON}, "host-1": {NAME: ON}} if written else {})


def test_of_a_group_that_lacks_a_host_nothing_is_known_and_nothing_wanted(told):
    told.says(0, group((0, 1)), ALONE)
    # THEN of one that is on one host it is
    assert [one.name for one in told.groups.statuses()] == [ALONE.name]
    assert told.wanted() == {}
    assert told.wanted(Setting(2), ALONE.name) == {"host-0": {ALONE.name: Setting(2)}}
    # WHEN the other host tells of it too, and then no more, as of ranks that are gone
    told.says(1, group((2, 3)))
    assert {one.name for one in told.groups.statuses()} == {NAME, ALONE.name}
    assert told.wanted().keys() == {"host-0", "host-1"}
    told.says(1)
    assert [one.name for one in told.groups.statuses()] == [ALONE.name]
    assert told.wanted() == {}


def test_a_host_that_is_silent_has_not_switched(told):
    # GIVEN a group of which one host says nothing any more WHEN it is asked for something
    told.both()
    told.silent = {"host-1"}
    told.says(0, group((0, 1), request=3))
    # THEN it is not there yet, and stays to be asked for: the trial will end by that
    (whole,) = told.groups.statuses()
    assert (whole.value, whole.next_request(3)) == (0, Request(0, 0, 3))
    assert told.wanted() == {"host-0": {NAME: ON}, "host-1": {NAME: ON}}
    # AND what is asked for instead takes its place, and is not taken for heard
    told.says(0, group((0, 1), request=0))
    assert told.wanted(Setting()) == {"host-0": {NAME: Setting()}, "host-1": {NAME: Setting()}}
    # WHEN it speaks again THEN that is known
    told.silent = set()
    assert told.wanted(Setting()) == {}


def test_of_a_group_on_a_host_that_is_silent_nothing_more_is_known(told):
    told.says(0, ALONE)
    assert told.wanted(Setting(), ALONE.name) == {}
    told.silent = {"host-0"}
    assert told.wanted(Setting(), ALONE.name) == {"host-0": {ALONE.name: Setting()}}


def test_a_host_that_the_job_goes_on_without_tells_of_nothing(told):
    # GIVEN a host that was replaced by another one, on which the ranks have files of the same names
    told.says(0, ALONE)
    told.groups.heard("host-2", [replace(ALONE, value=2)], {0, 1})
    assert told.groups.statuses() == []
    told.gone.add("host-0")
    # THEN these count, and are asked
    assert told.groups.statuses() == [replace(ALONE, value=2)]
    assert told.wanted(Setting(), ALONE.name) == {"host-2": {ALONE.name: Setting()}}


def test_a_host_tells_of_its_own_ranks_alone(told):
    # GIVEN hosts of which one says how another one's ranks stand
    told.says(0, group((0, 1)), group((2, 3), value=3))
    told.says(1, group((2, 3)), replace(ALONE, value=2))
    (whole,) = told.groups.statuses()
    assert (whole.name, whole.value, list(whole.here)) == (NAME, 0, [0, 1, 2, 3])
