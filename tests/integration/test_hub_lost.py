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


class HubJob:
    """A job's hub, its leader, and an agent that sends messages of many hosts."""

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

    def send(self, number):
        """Send a number of messages, each repeatedly until the hub certainly has it."""
        for _ in range(number):
            message = encode(Shipment(f"host-{self.sent}", "boot", "process"))

            def published(message=message):
                try:
                    self.agent.call(self.agent.js.publish(PLACES.up(f"host-{self.sent}"), message, timeout=2.0), 5.0)
                except Exception:
                    return False
                return True

            wait_until(published, 60.0)
            self.sent += 1

    def received(self):
        """Whether all messages have come, one of each host."""
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
def job(tmp_path):
    found = HubJob(tmp_path)
    yield found
    found.close()


def breaks(job):
    job.between.silent = True
    job.send(5)
    wait_until(lambda: pending(job) == 0, 20.0)
    job.between.break_all()
    job.between.silent = False


def pending(job):
    about = job.agent.js.consumer_info(PLACES.stream, PLACES.stream)
    return job.agent.call(about, 5.0).num_pending


def restarts(job):
    job.restart()


def loses_all(job):
    os.kill(job.server.pid, signal.SIGKILL)
    job.server.close()
    shutil.rmtree(job.directory / "nats")
    job.server = job.start()


def loses_the_consumer(job):
    job.agent.call(job.agent.js.delete_consumer(PLACES.stream, PLACES.stream), 5.0)


@pytest.mark.parametrize("befalls", [breaks, restarts, loses_all, loses_the_consumer])
def test_messages_after_a_failure_of_the_hub_arrive(job, befalls):
    job.send(5)
    wait_until(job.received, 20.0)
    before = job.lease.epoch
    # WHEN the hub fails in one way
    befalls(job)
    # THEN later messages arrive, and those that the hub has confirmed
    job.send(5)
    wait_until(job.received, 40.0)
    # AND the job still has a leader, no older than before
    assert (job.lease.lost, job.lease.epoch >= before) == ("", True)


@pytest.mark.parametrize("others_send", [0, 30])
def test_steps_that_a_hub_has_lost_are_sent_again(job, tmp_path, others_send):
    """GIVEN steps on the hub that were not fetched WHEN it loses them THEN they are sent again.

    Also by an agent that comes back after others, who have sent more by then than the hub had before.
    """
    job.fleet.close()
    for name in ("rings", "steps", "spool"):
        (tmp_path / name).mkdir()
    agent = Agent(tmp_path / "rings", tmp_path, LocalStore(tmp_path), job="job", run="run-1")
    link = Breaking(job.port)
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
        # (one that may connect again once others have sent their messages)
        link.let_in = False
        link.break_all()
        loses_all(job)
        train(1)
        job.hub, job.lease, job.fleet = job.lead()
        job.send(others_send)
        assert end._sequence < others_send or not others_send
        link.let_in = True
        steps = []

        def heard():
            steps.extend(step for rows in job.fleet.rows() for step in rows.steps.step_B.tolist())
            return 5 in steps

        wait_until(heard, 40.0)
        assert steps == list(range(6))


def test_a_hub_whose_disk_was_full_stores_again_once_there_is_room(tmp_path):
    """GIVEN a hub whose disk takes nothing WHEN it has room again THEN it stores again: it is started anew.

    A server that could not write to a file once does not try again as long as it runs.
    """
    with contextlib.ExitStack() as held:
        disk = held.enter_context(small_disk(tmp_path / "disk", "16m", 2000))
        job = held.enter_context(contextlib.closing(HubJob(tmp_path, disk.path / "hub")))
        job.server.keep()
        job.send(1)
        wait_until(job.received, 20.0)
        disk.fill()

        def refused():
            try:
                job.agent.call(job.agent.js.publish(PLACES.up("host-0"), bytes(1 << 16), timeout=2.0), 5.0)
            except Exception:
                return True
            return False

        wait_until(refused, 30.0)
        disk.empty()
        job.send(1)
        wait_until(job.received, 40.0)
        assert job.lease.lost == ""


def test_a_host_whose_messages_the_hub_cannot_store_is_not_gone(job, monkeypatch):
    """GIVEN a host without messages for longer than a gone one, as while the hub's disk is full.

    WHEN it answers, THEN its job is not over; AND once it does not, the job is.
    """
    monkeypatch.setattr(over_nats, "GONE_S", 1.0)
    job.send(1)
    wait_until(job.received, 20.0)

    async def answer(message):
        await message.respond(encode(GpuFindings(0.0)))

    async def listen():
        return await job.agent.client.subscribe(PLACES.query("host-0"), cb=answer)

    listening = job.agent.call(listen(), 10.0)
    heard_s = job.fleet._hosts["host-0"].heard_s
    wait_until(lambda: job.fleet.over or job.fleet._hosts["host-0"].heard_s > heard_s + 1.0, 20.0)
    assert not job.fleet.over
    job.agent.call(listening.unsubscribe(), 10.0)
    wait_until(lambda: job.fleet.over, 20.0)
    # AND a host that sends again, and is quiet again, gets another query
    job.sent = 0
    job.send(1)
    wait_until(lambda: job.received() and not job.fleet.over, 20.0)
    job.agent.call(listen(), 10.0)
    heard_s = job.fleet._hosts["host-0"].heard_s
    wait_until(lambda: job.fleet.over or job.fleet._hosts["host-0"].heard_s > heard_s + 1.0, 20.0)
    assert not job.fleet.over


def test_a_lease_that_is_let_go_while_it_is_renewed_is_free(job):
    async def keys():
        renewal = asyncio.ensure_future(job.lease._renew())
        await asyncio.sleep(0)
        await job.lease._remove()
        await renewal
        return await (await job.hub.js.key_value(PLACES.lease)).keys()

    with pytest.raises(NoKeysError):
        job.hub.call(keys(), 10.0)
