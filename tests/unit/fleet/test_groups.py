"""Groups of ranks on several hosts, by what their agents tell: whole, and asked until all hosts have heard."""

from dataclasses import replace

import pytest

from sftriage.fleet.hosts import Groups
from sftriage.mitigate.loop import JobNow, RemedyLoop
from sftriage.mitigate.switch_state import UNLIKE, Request, Setting
from sftriage.model.events import RemedyChanged
from sftriage.policy.schema import Mitigate
from tests.unit.fleet.shipments import group

NAME = "ranks-0.abcd"
ALONE = group(ranks=(0, 1), name="rank-0.0.switch")
ON = Setting(3)


class Told:
    """Groups of a job whose hosts have two ranks each."""

    def __init__(self):
        self.gone, self.silent = set(), set()
        self.begin()

    def begin(self):
        """A controller begins."""
        self.groups = Groups(lambda agent: agent not in self.gone, lambda agent: agent in self.silent)

    def says(self, host, *parts):
        """A host tells how its parts stand."""
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


def test_a_controller_that_takes_over_while_a_host_is_silent_leaves_in_force_what_is_kept(told):
    # GIVEN a remedy that is kept on ranks of two hosts, beside a group on one of them
    kept = RemedyChanged(100.0, 1, 70, "stragglar", "kept", "helps", 2, "rank 2", "data", NAME, {"ring_ranks": 4})
    policy = Mitigate(remedies=("stragglar",))
    now = JobNow(200.0, 0, 80, {}, (), None, is_known=False, allowed=policy)
    # WHEN another controller takes over, which hears of one host, and no window yet, as of the job's second start
    told.begin()
    told.says(0, group((0, 1), value=3, request=3), ALONE)

    def turn(attempt, loop):
        switches = told.groups.statuses()
        loop, said = loop.after(replace(now, attempt=attempt, switches=switches))
        told.groups.want(loop.wanted(switches))
        return loop, said, told.groups.wanted

    loop, said, wanted = turn(0, RemedyLoop.resumed([kept]))
    # THEN nothing is said, and nobody asked for anything else; neither once windows come, of the host that speaks
    assert (said, wanted) == (None, {})
    loop, said, wanted = turn(1, loop)
    assert (said, wanted) == (None, {})
    # WHEN the other host speaks again THEN it is gone on with: that one is asked again, if it has heard otherwise
    told.says(1, group((2, 3), value=3, request=0))
    loop, said, wanted = turn(1, loop)
    assert (said, wanted) == (None, {"host-0": {NAME: ON}, "host-1": {NAME: ON}})
    told.says(1, group((2, 3), value=3, request=3))
    assert turn(1, loop) == (loop, None, {})
    # AND if the ranks have begun anew meanwhile, that goes on record
    assert turn(2, loop)[1].reason == "restarted"


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
