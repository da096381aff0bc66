"""Groups of ranks on two hosts, switched over a real hub by agents of which each has but its own host's rings."""

import contextlib

import pytest

from sftriage.agent.agent import Agent
from sftriage.fleet.hub import Hub, HubAddress, LogLeader
from sftriage.fleet.shipping import HostEnd
from sftriage.mitigate.switching import UNLIKE, Setting
from sftriage.recorder import Monitor
from sftriage.traces.store import LocalStore
from tests.integration.processes import wait_until
from tests.unit.mitigate.test_multi_host import NAME, Group

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
from tests.integration.test_hub_lost import PLACES, Told  # once it is known to be there


class Job:
    """Two ranks, each on a host of its own, whose gradients go around and around; and who leads their job."""

    def __init__(self, directory):
        self.directory, self.hub = directory, Told(directory)
        self.group = Group(directory, (0,), (1,))
        self.ends = [self.host(number) for number in range(2)]

    def host(self, number):
        """A host's agent begins."""
        kept = self.directory / f"kept-{number}"
        kept.mkdir(exist_ok=True)
        rings = self.directory / f"host-{number}"
        agent = Agent(rings, kept, kept, LocalStore(kept), job="job", run="run-1")
        hub = Hub(HubAddress(f"nats://127.0.0.1:{self.hub.port}", self.directory / "secret"), f"host-{number}")
        about = PLACES, f"host-{number}", f"boot-{number}", "1", self.directory / f"begun-{number}"
        end = HostEnd(agent, hub, *about, None, LogLeader(self.directory / "speaker"))
        end.start()
        return end

    def turn(self, wanted=None):
        """A turn of the controller, and a round of the ranks; how their group stands, as far as that is known."""
        fleet = self.hub.fleet
        fleet.rows()
        if wanted is not None:
            fleet.switch({NAME: wanted})
        fleet.want([])
        self.group.rounds()
        return next(iter(fleet.switches()), None)

    def stands(self, value, wanted=None):
        """Whether something is in force, and known to be, and nothing else to come."""
        found = self.turn(wanted)
        return found is not None and found.value == value and found.next_request(value) is None

    @property
    def asked(self):
        return [file.status().request.value for file in self.group.files]

    def close(self):
        for end in self.ends:
            end.close()
        self.hub.close()
        for file in self.group.files:
            file.close()


@pytest.fixture
def job(tmp_path):
    with contextlib.closing(Job(tmp_path)) as made, contextlib.ExitStack() as ranks:
        for rank in range(2):
            about = {"rank": rank, "world_size": 2, "rings": tmp_path / f"host-{rank}"}
            ranks.enter_context(Monitor(("data", "backward"), sync=("backward",), **about))
        yield made


def test_a_group_is_switched_over_the_hub_once_all_of_its_hosts_have_heard(job):
    # GIVEN a group with ranks on two hosts, which nobody has asked for anything WHEN something is wanted of it
    wait_until(lambda: job.stands(0), 40.0)
    wait_until(lambda: job.stands(2, Setting(2)), 40.0)
    # THEN it is in force on all ranks, from the same round on
    (first, second) = job.group.values
    assert first == second
    assert sorted(set(first)) == [0, 2]
    # WHEN a host's agent is gone, and it is wanted no more
    job.ends[1].close()
    wait_until(lambda: job.turn(Setting()) and job.asked == [0, 2], 40.0)
    # THEN nothing is switched, and it is known that it is not
    found = wait_until(lambda: (one := job.turn(Setting())) and one.request == UNLIKE and one, 40.0)
    assert (found.value, job.group.values[0][-1], job.group.values[1][-1]) == (2, 2, 2)
    # WHEN another controller leads the job, and the agent is there again
    job.hub.fleet.close()
    job.hub.hub, job.hub.lease, job.hub.fleet = job.hub.lead()
    assert job.turn(Setting()) is None
    job.ends[1] = job.host(1)
    # THEN it comes to what is wanted
    wait_until(lambda: job.stands(0, Setting()), 40.0)
    assert job.group.values[0] == job.group.values[1]
    # AND nothing more is written down for anybody
    job.turn(Setting())
    assert job.hub.fleet._groups.wanted == {}
