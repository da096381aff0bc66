"""A hub that breaks connections, restarts, or loses all that it had: what agents tell is taken once, and in order."""

import asyncio
import contextlib
import os
import shutil
import signal
import threading

import pytest

from sftriage.agent.agent import Agent
from sftriage.fleet import over_nats
from sftriage.fleet.hosts import Generations
from sftriage.fleet.hub import Hub, HubAddress, Leader, Lease, LogLeader, Subjects, make_places
from sftriage.fleet.over_nats import NatsFleet
from sftriage.fleet.shipping import HostEnd
from sftriage.fleet.transfers import Fetching, HostCaptures
from sftriage.fleet.wire import Shipment, encode
from sftriage.model.windows import GpuFindings
from sftriage.runtime.controlling import KeptRows
from sftriage.runtime.hub_server import HubServer, make_secret
from sftriage.traces.disk import Disk
from sftriage.traces.store import LocalStore
from sftriage.trainer.monitor import Monitor
from tests.chaos.proxy import Proxy
from tests.disks import small_disk
from tests.integration.processes import free_port, wait_until

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
from nats.js.errors import NoKeysError  # once it is known to be there

PLACES = Subjects.of("job")


class Breaking(Proxy):
    """What passes connections on to a hub; broken, all that is on its way is lost."""

    def __init__(self, port):
        super().__init__("127.0.0.1", port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listening = asyncio.start_server(self.connected, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]

    def break_all(self):
        self._loop.call_soon_threadsafe(super().break_all)

    async def _end(self):
        self._server.close()
        super().break_all()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def close(self):
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class Told:
    """A job's hub, who leads it, and an agent that tells numbers."""

    def __init__(self, directory, store=None):
        self.directory, self.store = directory, store or directory / "nats"
        make_secret(directory / "secret")
        self.port = free_port()
        self.server = self.start()
        self.between = Breaking(self.port)
        self.agent = Hub(HubAddress(f"nats://127.0.0.1:{self.port}", directory / "secret"), "agent")
        self.agent.call(self.agent.connect(), 20.0)
        self.hub, self.lease, self.fleet = self.lead()
        self.sent = 0

    def start(self):
        return HubServer(("127.0.0.1", self.port), self.store, self.directory / "secret")

    def lead(self):
        hub = Hub(HubAddress(f"nats://127.0.0.1:{self.between.port}", self.directory / "secret"), "controller")
        hub.call(hub.connect(), 20.0)
        lease = Lease(hub, PLACES, Leader("run-1", "here", 1))
        hub.call(make_places(hub, PLACES, "run-1"), 20.0)
        keep = KeptRows(self.directory / "steps", None, Disk())
        fetching = Fetching(LocalStore(self.directory), self.directory)
        return hub, lease, NatsFleet(lease, Generations(), lambda _: None, keep, fetching)

    def tell(self, number):
        """The agent tells so many messages, each until it is certain that the hub has it."""
        for _ in range(number):
            message = encode(Shipment(f"host-{self.sent}", "boot", "process"))

            def told(message=message):
                try:
                    self.agent.call(self.agent.js.publish(PLACES.up(f"host-{self.sent}"), message, timeout=2.0), 5.0)
                except Exception:
                    return False
                return True

            wait_until(told, 60.0)
            self.sent += 1

    def heard(self):
        """Whether all have come, each of whom has told one."""
        self.fleet.rows()
        return len(self.fleet._hosts) == self.sent

    def restart(self):
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.close()
        self.server = self.start()

    def close(self):
        self.fleet.close()
        self.agent.close()
        self.between.close()
        self.server.close()


@pytest.fixture
def told(tmp_path):
    found = Told(tmp_path)
    yield found
    found.close()


def breaks(told):
    told.between.silent = True
    told.tell(5)
    wait_until(lambda: pending(told) == 0, 20.0)
    told.between.break_all()
    told.between.silent = False


def pending(told):
    about = told.agent.js.consumer_info(PLACES.stream, PLACES.stream)
    return told.agent.call(about, 5.0).num_pending


def restarts(told):
    told.restart()


def loses_all(told):
    os.kill(told.server.pid, signal.SIGKILL)
    told.server.close()
    shutil.rmtree(told.directory / "nats")
    told.server = told.start()


def loses_the_consumer(told):
    told.agent.call(told.agent.js.delete_consumer(PLACES.stream, PLACES.stream), 5.0)


@pytest.mark.parametrize("befalls", [breaks, restarts, loses_all, loses_the_consumer])
def test_what_agents_tell_after_something_has_befallen_the_hub_is_heard(told, befalls):
    told.tell(5)
    wait_until(told.heard, 20.0)
    before = told.lease.epoch
    # WHEN it befalls the hub
    befalls(told)
    # THEN what is told from then on is heard, and what the hub had said that it has
    told.tell(5)
    wait_until(told.heard, 40.0)
    # AND the job is led on, by somebody who is no older than before
    assert (told.lease.lost, told.lease.epoch >= before) == ("", True)


@pytest.mark.parametrize("others_tell", [0, 30])
def test_steps_that_a_hub_has_lost_are_told_again(told, tmp_path, others_tell):
    """GIVEN steps that the hub has taken, and that nobody has fetched WHEN it loses them THEN they are told again.

    Also to an agent that comes back after others, who have told more by then than the hub had before.
    """
    told.fleet.close()
    for name in ("rings", "steps", "spool"):
        (tmp_path / name).mkdir()
    agent = Agent(tmp_path / "rings", tmp_path, LocalStore(tmp_path), job="job", run="run-1")
    link = Breaking(told.port)
    hub = Hub(HubAddress(f"nats://127.0.0.1:{link.port}", tmp_path / "secret"), "host")
    where = PLACES, "node-a", "boot", "1", HostCaptures(tmp_path)
    with (
        contextlib.closing(link),
        Monitor(("data",), sync=(), rank=0, world_size=1, rings=tmp_path / "rings") as monitor,
        contextlib.closing(HostEnd(agent, hub, *where, LogLeader(tmp_path / "speaker"))) as end,
    ):

        def train(n_steps):
            for _ in range(n_steps):
                with monitor.step(), monitor.stage("data"):
                    pass

        train(5)
        end.start()
        wait_until(lambda: agent.telemetry().steps == 5 and not end._outbox, 20.0)
        # (one who is let in again once others have told what they have)
        link.let_in = False
        link.break_all()
        loses_all(told)
        train(1)
        told.hub, told.lease, told.fleet = told.lead()
        told.tell(others_tell)
        assert end._sequence < others_tell or not others_tell
        link.let_in = True
        steps = []

        def heard():
            steps.extend(step for rows in told.fleet.rows() for step in rows.steps.step_B.tolist())
            return 5 in steps

        wait_until(heard, 40.0)
        assert steps == list(range(6))


def test_a_hub_whose_disk_was_full_stores_again_once_there_is_room(tmp_path):
    """GIVEN a hub whose disk takes nothing WHEN it has room again THEN it stores again: it is started anew.

    A server that could not write to a file once does not try again as long as it runs.
    """
    with contextlib.ExitStack() as held:
        disk = held.enter_context(small_disk(tmp_path / "disk", "16m", 2000))
        told = held.enter_context(contextlib.closing(Told(tmp_path, disk.path / "hub")))
        told.server.keep()
        told.tell(1)
        wait_until(told.heard, 20.0)
        disk.fill()

        def refused():
            try:
                told.agent.call(told.agent.js.publish(PLACES.up("host-0"), bytes(1 << 16), timeout=2.0), 5.0)
            except Exception:
                return True
            return False

        wait_until(refused, 30.0)
        disk.empty()
        told.tell(1)
        wait_until(told.heard, 40.0)
        assert told.lease.lost == ""


def test_a_host_that_only_its_hub_stores_nothing_of_is_not_gone(told, monkeypatch):
    """GIVEN a host of which nothing comes for so long that it counts as gone, as while the hub's disk is full.

    WHEN it answers, THEN its job is not over; AND once it does not, the job is.
    """
    monkeypatch.setattr(over_nats, "GONE_S", 1.0)
    told.tell(1)
    wait_until(told.heard, 20.0)

    async def answer(message):
        await message.respond(encode(GpuFindings(0.0)))

    async def listen():
        return await told.agent.client.subscribe(PLACES.query("host-0"), cb=answer)

    listening = told.agent.call(listen(), 10.0)
    heard_s = told.fleet._hosts["host-0"].heard_s
    wait_until(lambda: told.fleet.over or told.fleet._hosts["host-0"].heard_s > heard_s + 1.0, 20.0)
    assert not told.fleet.over
    told.agent.call(listening.unsubscribe(), 10.0)
    wait_until(lambda: told.fleet.over, 20.0)
    # AND one that is heard again, and quiet again, is asked again
    told.sent = 0
    told.tell(1)
    wait_until(lambda: told.heard() and not told.fleet.over, 20.0)
    told.agent.call(listen(), 10.0)
    heard_s = told.fleet._hosts["host-0"].heard_s
    wait_until(lambda: told.fleet.over or told.fleet._hosts["host-0"].heard_s > heard_s + 1.0, 20.0)
    assert not told.fleet.over


def test_a_lease_that_is_let_go_while_it_is_renewed_is_free(told):
    async def keys():
        renewal = asyncio.ensure_future(told.lease._renew())
        await asyncio.sleep(0)
        await told.lease._remove()
        await renewal
        return await (await told.hub.js.key_value(PLACES.lease)).keys()

    with pytest.raises(NoKeysError):
        told.hub.call(keys(), 10.0)
