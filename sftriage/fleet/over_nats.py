"""The controller's fleet over the hub: joins the messages of a job's agents, and writes the orders for each agent.

Methods answer from the messages so far; only the hub's thread uses the connection. A message is acknowledged, in the
order of the stream, once its results are recorded (`NatsFleet.settled`). If a controller is killed, the next one gets
all other messages again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sftriage.fleet.hangs import HangQueries
from sftriage.fleet.hosts import Generations, Groups, Host, Members, status_of_all
from sftriage.fleet.hub import Lease
from sftriage.fleet.incoming import FETCH_S, AgentMessage, Deduplicator, Incoming, Refusals, RowBuffer
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import Incarnation, Orders, decode_findings, encode
from sftriage.mitigate.switching import Setting, SwitchStatus
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, CaptureState, Report, WantedCapture
from sftriage.model.ends import HostEnds
from sftriage.model.hangs import RankEvidence
from sftriage.model.windows import GpuFindings, JobStatus, ReadCounts
from sftriage.windows.rings import Rows

if TYPE_CHECKING:
    from sftriage.runtime.controlling import KeptRows

log = logging.getLogger("sftriage")

SILENT_S = 10.0  # after this long without messages, windows leave out an agent's ranks
GONE_S = 60.0  # after this long without messages, the job counts as ended on an agent's host
MAX_HOSTS = 1 << 14
GPUS_S = 10.0


def all_over(hosts: Mapping[str, Host], waiting: Collection[str], now_s: float, connected_s: float) -> bool:
    """Whether a job has ended on all of its ``hosts``, by name, and none of them has messages ``waiting``.

    A host that waits for the others repeats every second that it is over.
    """
    if not hosts or any(agent not in hosts or not hosts[agent].over for agent in waiting):
        return False
    quiet = ((host, host.quiet_s(now_s, connected_s)) for host in hosts.values())
    return all(
        host.over or quiet_s > GONE_S or (quiet_s > SILENT_S and not host.takes_part()) for host, quiet_s in quiet
    )


class NatsFleet:
    """See `sftriage.controller.agents.Fleet`. It closes the ``lease`` and its hub.

    ``note`` saves generations before any report depends on them, and ``keep`` saves steps.
    """

    def __init__(
        self,
        lease: Lease,
        generations: Generations,
        note: Callable[[Generations], None],
        keep: KeptRows,
        fetching: Fetching,
    ) -> None:
        self._lease, self._hub = lease, lease.hub
        self._generations, self._note, self._keep = generations, note, keep
        self._noted, self._refusals = generations.changes, Refusals()
        self._orders = CaptureOrders(self, lease, fetching, time.monotonic, self._refusals)
        self._hosts: dict[str, Host] = {}
        self._incoming = Incoming(lease, self._orders.write_again, self._refusals)
        self._unsettled: deque[AgentMessage] = deque()
        self._rows = RowBuffer(SILENT_S + FETCH_S)
        self._dedup = Deduplicator()
        self._groups = Groups(
            lambda agent: self._hosts[agent].takes_part(),
            lambda agent: self._is_silent(self._hosts[agent]),
        )
        self._gpus: tuple[tuple[int, ...], list[Future[GpuFindings]]] | None = None
        self._hangs = HangQueries(lease)
        # Queries that check whether quiet hosts still answer.
        self._called: dict[str, Future[GpuFindings]] = {}

    @property
    def over(self) -> bool:
        connected_s = self._hub.connected_s
        if connected_s is None or self._orders.busy:
            return False
        if not all_over(self._hosts, self._incoming.agents, time.monotonic(), connected_s):
            self._called.clear()
            return False
        answers = [self._answers(agent) for agent, host in self._hosts.items() if not host.over]
        return not any(answers)

    @property
    def hosts(self) -> dict[str, Host]:
        """The hosts by agent, for any thread."""
        return self._hosts.copy()

    def rows(self) -> Sequence[Rows]:
        """See `Fleet`: returns repeated steps once, and reports the silence of ranks once."""
        self._take_messages()
        due = self._rows.due(time.monotonic(), [rank for host in self._hosts.values() for rank in host.away()])
        for host in self._hosts.values():
            if host.silent or host.newest is None or not self._is_silent(host):
                continue
            host.silent = True
            newest, away = host.newest, tuple(host.away())
            if away:
                empty = replace(newest, steps=newest.steps[:0], device_steps=None, device_over=(), agent="")
                due.append(replace(empty, generation=self._generations.newest, away=away))
        return due

    def statuses(self) -> JobStatus | None:
        """See `Fleet`; None, too, while the hub is away."""
        self._take_messages()
        connected_s = self._hub.connected_s
        if connected_s is None:
            return None
        heard = [host for host in self._hosts.values() if host.heard_s >= connected_s and not self._is_silent(host)]
        return status_of_all(heard, time.monotonic())

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """See `Fleet`. Captures that do not begin or end in time expire."""
        self._orders.want(wanted, {agent: host.over for agent, host in self._hosts.items()}, self._groups.wanted)
        self._acknowledge()

    def reports(self) -> Sequence[Report]:
        """See `Fleet`: a capture has one final report, which is its last."""
        self._take_messages()
        return self._orders.reports()

    def switches(self) -> Sequence[SwitchStatus]:
        """See `Fleet`: the latest reports of the groups that all of their hosts have reported."""
        return self._groups.statuses()

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """See `Fleet`: goes out with the next orders to all hosts of a group, until all of them have applied it."""
        self._groups.want(wanted)

    def telemetry(self) -> ReadCounts:
        problems = {
            f"{agent}: {ring}": how for agent, host in self._hosts.items() for ring, how in host.counts.problems.items()
        }
        torn = sum(host.counts.torn for host in self._hosts.values())
        return ReadCounts(self._dedup.steps, self._dedup.missed, torn, {**problems, **self._refusals.problems})

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """See `Fleet`. A host that does not answer counts as one whose drivers report nothing."""
        if self._gpus is None or self._gpus[0] != tuple(ranks):
            newest = self._generations.newest
            having = {self._find_rank(rank, newest)[0] for rank in ranks} - {""}
            answers = [self._hub.later(self._request_gpus(agent, tuple(ranks))) for agent in having]
            self._gpus = tuple(ranks), answers
        answers = self._gpus[1]
        if not all(answer.done() for answer in answers):
            return None
        self._gpus = None
        return of_all([answer.result() for answer in answers]) if answers else GpuFindings(time.time())

    def hang_evidence(self, token: str, detail: Sequence[int]) -> tuple[RankEvidence, ...] | None:
        """See `Fleet`. Of a host that does not answer in time, it has the last status."""
        return self._hangs.poll(token, detail, self._hosts)

    def ends(self) -> list[HostEnds]:
        """How the job ended on its hosts, by the hub's clock. A rank's end counts from the host that has the rank."""
        owners = {
            (host.generation_of(info), rank): agent
            for agent, host in self._hosts.items()
            for infos in host.rings.values()
            for rank, info in infos.items()
        }
        found = []
        for agent, host in self._hosts.items():
            ended = host.ended()
            own = [end for end in ended.ranks if owners.get((end.attempt, end.rank), agent) == agent]
            found.append(replace(ended, ranks=tuple(own)))
        return found

    def announce(self, broken: Sequence[str]) -> None:
        """Send the hosts sentences on how the job broke, in place of all orders."""
        self._orders.broken = tuple(broken)
        self._orders.close(self._hosts)

    def settled(self, agent: str, position: int) -> None:
        """See `Fleet`. Acknowledged with the next orders: a window settles the messages of a thousand agents."""
        host = self._hosts.get(agent)
        while host is not None and host.waiting and host.waiting[0].sequence <= position:
            host.waiting.popleft().rows = False

    def end(self) -> None:
        """The job has ended: no more messages come, and its data on the hub is no longer needed."""
        self._incoming.ended = True

    def close(self) -> None:
        """See `Fleet`: withdraw all orders, and release the lease."""
        self._orders.close(self._hosts)
        self._refusals.log_totals()
        self._lease.let_go()
        self._hub.close()

    def _is_silent(self, host: Host) -> bool:
        connected_s = self._hub.connected_s
        return connected_s is not None and host.quiet_s(time.monotonic(), connected_s) > SILENT_S

    def _answers(self, agent: str) -> bool:
        """Whether a quiet host answers a query, or may still do so: a hub with a full disk still passes queries on."""
        if agent not in self._called:
            self._called[agent] = self._hub.later(self._request_gpus(agent, ()))
        if not self._called[agent].done():
            return True
        if self._called[agent].result().problem:
            return False
        del self._called[agent]
        self._hosts[agent].heard_s = time.monotonic()
        return True

    def _take_messages(self) -> None:
        for message, shipment in self._incoming.taken():
            self._unsettled.append(message)
            if shipment is None:
                continue
            if shipment.agent not in self._hosts and len(self._hosts) >= MAX_HOSTS:
                self._refusals.note(shipment.agent, f"a job of more than {MAX_HOSTS} hosts")
                continue
            host = self._hosts.setdefault(shipment.agent, Host(self._generations))
            host.heard(shipment, message.sent_s, message.at_s)
            for rows in sorted(shipment.rows, key=attrgetter("generation")):
                members = host.take(shipment.agent, rows)
                if sum(len(some.of) for some in members) < len(rows.ranks):
                    # (ranks of a start that is long over, or never took place)
                    known = {rank for some in members for rank in some.of}
                    self._dedup.missed += sum(rank not in known for rank in rows.steps.rank_B.tolist())
                for some in members:
                    self._add(rows, some, message)
            if shipment.switches is not None:
                self._groups.heard(shipment.agent, shipment.switches, host.ranks)
            for report in shipment.reports:
                self._orders.heard(report, message)
            if message.rows:
                host.waiting.append(message)
        if self._noted != self._generations.changes:
            self._note(self._generations)
            self._noted = self._generations.changes
        self._keep.turn()
        self._acknowledge()

    def _add(self, rows: Rows, members: Members, message: AgentMessage) -> None:
        of = members.of
        steps, device = self._dedup.new(rows.steps, of), rows.device_steps
        whole = len(of) == len(rows.ranks)
        if device is not None and not whole:
            device = device[np.isin(device.rank_B, list(of))]
        message.rows |= len(steps) > 0 or (device is not None and len(device) > 0)
        # (the constructor takes a third of the time of `replace`, at a thousand messages a second)
        mine = Rows(
            generation=members.generation,
            schema=rows.schema,
            world_size=rows.world_size,
            ranks=members.infos,
            steps=steps,
            device_steps=device,
            device_over=rows.device_over if whole else tuple(rank for rank in rows.device_over if rank in of),
            wall_ns=rows.wall_ns,
            agent=message.agent,
            position=message.sequence,
            links=rows.links,
        )
        self._keep.take(mine)
        self._rows.add(mine, time.monotonic())

    def holds(self, message: AgentMessage) -> bool:
        """Whether steps that came before a message are still held back."""
        return self._rows.holds(message.agent, message.sequence)

    def place(self, wanted: WantedCapture) -> tuple[str, Incarnation | None]:
        """The agent whose host has a capture's rank ("": none), and the required process, if any."""
        generation = self._generations.newest if wanted.generation is None else wanted.generation
        agent, process = self._find_rank(wanted.request.rank, generation)
        return agent, None if wanted.generation is None else process

    def gone(self, agent: str, process: Incarnation | None) -> bool:
        """Whether the job has restarted without the host that had this process."""
        generation = None if process is None else self._generations.of(process)
        started_again = generation is not None and generation < self._generations.newest
        return started_again and self._is_silent(self._hosts[agent])

    def _find_rank(self, rank: int, generation: int) -> tuple[str, Incarnation | None]:
        for agent, host in self._hosts.items():
            for info in [infos[rank] for infos in host.rings.values() if rank in infos]:
                process = Incarnation.of(host.boot_id, info)
                if self._generations.of(process) == generation:
                    return agent, process
        return "", None

    async def _request_gpus(self, agent: str, ranks: tuple[int, ...]) -> GpuFindings:
        try:
            answer = await self._hub.client.request(self._lease.places.query(agent), encode(ranks), timeout=GPUS_S)
            return decode_findings(answer.data)
        except Exception as error:
            return GpuFindings(time.time(), problem=f"host {agent} did not answer: {type(error).__name__}")

    def _acknowledge(self) -> None:
        settled, position = [], self._keep.position
        while self._unsettled and not self._unsettled[0].rows and self._unsettled[0].reports <= 0:
            if position is not None and self._unsettled[0].sequence >= position:
                break
            settled.append(self._unsettled.popleft())
        self._incoming.settle(settled)


REFRESH_S = 20.0  # how often to write orders again, so that they do not expire
BEGIN_GRACE_S = 15.0  # after its latest begin, how long a capture's host may take to report that it has begun
END_GRACE_S = 480.0  # after its time-box, how long a capture's host may take to report how it ended
UNHEARD_S = 60.0  # how long a controller that takes over waits for the host of a resumed capture
POLL_S, AGAIN_S, CLOSE_S = 0.05, 1.0, 2.0


@dataclass(slots=True)
class _Order:
    """A capture ordered at ``at_s`` from an agent ("": unknown); ``begin_s`` is None once the agent reports on it."""

    request: CaptureRequest
    agent: str
    of: Incarnation | None
    at_s: float
    begin_s: float | None
    end_s: float
    ended: bool = False


class CaptureOrders:
    """Follows the captures of a fleet until they end or time out. The hub's thread writes the orders."""

    def __init__(
        self, fleet: NatsFleet, lease: Lease, fetching: Fetching, clock: Callable[[], float], refusals: Refusals
    ) -> None:
        self._fleet, self._lease = fleet, lease
        self._fetching, self._clock, self._refusals = fetching, clock, refusals
        self._orders: dict[str, _Order] = {}
        self._begun = False
        self.broken: tuple[str, ...] | None = None
        # By agent, orders to write (as content to compare, and as a message); and those written, with the time.
        self._lock = threading.Lock()
        self._to_write: dict[str, tuple[bytes, bytes]] = {}
        self._written: dict[str, tuple[bytes, float]] = {}
        # Agents without orders.
        self._idle: set[str] = set()
        # Reports with their messages, which are settled once the results of the reports are recorded.
        self._reports: deque[tuple[Report, AgentMessage | None, bool]] = deque()
        self._reported: list[AgentMessage] = []
        self._reported_before: list[AgentMessage] = []
        # Captures that are being fetched, and those that have been.
        self._under_way: set[str] = set()
        self._fetched: set[str] = set()
        # Captures in transfer that the hub has lost: their hosts send them again.
        self._missing: set[str] = set()
        lease.hub.start(self._write())

    @property
    def busy(self) -> bool:
        return bool(self._under_way or self._reports)

    def want(
        self,
        wanted: Sequence[WantedCapture],
        over: Mapping[str, bool],
        switches: Mapping[str, Mapping[str, Setting]] = {},
    ) -> None:
        """See `Fleet.want`. By agent: whether the job is ``over`` there, and the settings of its groups.

        Reports returned before the previous call are recorded by now.
        """
        self._begun, now_s = True, self._clock()
        for message in self._reported_before:
            message.reports -= 1
        self._reported_before, self._reported = self._reported, []
        # (most agents have no orders, as was written before)
        agents = (agent for agent in over if agent not in self._idle or agent in switches)
        orders: dict[str, list[WantedCapture]] = {agent: [] for agent in agents}
        for capture in wanted:
            order = self._orders.get(capture.request.capture_id) or self._new_order(capture, now_s)
            if not order.agent:
                order.agent, order.of = self._fleet.place(capture)
            if order.ended:
                continue
            if capture.request.capture_id in self._under_way:
                # (fetching ends by itself, so it is never given up)
                heard = capture.request.capture_id not in self._missing
                orders.setdefault(order.agent, []).append(replace(capture, process=order.of, heard=heard))
            elif order.begin_s is not None and now_s > order.begin_s:
                self._end(order, "expired", "its host did not begin it in time")
            elif now_s > order.end_s:
                self._end(order, "expired", "no answer from its host long after its time-box")
            elif over.get(order.agent) and not self._pending(order):
                self._end(order, "failed", "the job ended on its host before the capture did")
            elif not order.agent and now_s > order.at_s + UNHEARD_S:
                self._end(order, "failed", "the host that was to make it no longer answers")
            elif order.agent and self._fleet.gone(order.agent, order.of) and not self._pending(order):
                self._end(order, "failed", "its host is gone, and the job restarted without it")
            elif order.agent:
                orders.setdefault(order.agent, []).append(replace(capture, process=order.of))
        for agent, some in orders.items():
            self._document(agent, some, switches.get(agent, {}))
        self._idle = {agent for agent in over if not (orders.get(agent) or agent in switches)}

    def heard(self, report: Report, message: AgentMessage) -> None:
        message.reports += 1
        # (the captures of an earlier controller are unknown until the first call of `want`)
        self._reports.append((report, message, self._begun))

    def reports(self) -> list[Report]:
        if not self._begun:
            # (the captures to resume are not known yet)
            return []
        found = []
        for _ in range(len(self._reports)):
            report, message, known = self._reports.popleft()
            if message is not None and self._fleet.holds(message):
                # Report its steps first: the controller will look for the fault in them at once.
                self._reports.append((report, message, known))
                continue
            order = self._orders.get(report.result.capture_id)
            why = "" if message is None else _unfit(order, report, message.agent, known)
            if message is not None and why:
                self._refusals.note(message.agent, why)
            elif order is not None and not order.ended:
                if report.result.state == "stored" and report.result.capture_id not in self._fetched:
                    self._fetch_once(report, message)
                    continue
                order.begin_s, order.ended = None, report.result.state in ENDED
                found.append(report)
            if message is not None:
                self._reported.append(message)
        return found

    def write_again(self) -> None:
        """Write all orders again: the hub has lost them."""
        with self._lock:
            self._written.clear()

    def close(self, agents: Iterable[str]) -> None:
        """Withdraw all orders, and wait a moment until they are written."""
        for agent in agents:
            self._document(agent, [])
        deadline_s = time.monotonic() + CLOSE_S
        while self._to_write and not self._lease.lost and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _new_order(self, wanted: WantedCapture, now_s: float) -> _Order:
        request, begin_s = wanted.request, None
        if wanted.expires_s is not None:
            begin_s = now_s + wanted.expires_s + BEGIN_GRACE_S
        end_s = now_s + (wanted.expires_s or 0.0) + request.max_seconds + END_GRACE_S
        order = self._orders[request.capture_id] = _Order(request, *self._fleet.place(wanted), now_s, begin_s, end_s)
        # (the host of a resumed capture may not have reported to this controller yet)
        if not order.agent and not wanted.resumed:
            self._end(order, "failed", f"no host of the job has rank {request.rank}")
        return order

    def _end(self, order: _Order, state: CaptureState, why: str) -> None:
        result = CaptureResult(order.request.capture_id, order.request.rank, state, why)
        self._reports.append((Report(result), None, True))

    def _pending(self, order: _Order) -> bool:
        """Whether a report on it waits, or its files are in transfer."""
        capture_id = order.request.capture_id
        waits = any(report.result.capture_id == capture_id for report, *_ in list(self._reports))
        return waits or capture_id in self._under_way

    def _fetch_once(self, report: Report, message: AgentMessage | None) -> None:
        capture_id = report.result.capture_id
        if capture_id not in self._under_way:
            self._under_way.add(capture_id)
            self._lease.hub.start(self._fetch(report, message))
            return
        self._missing.discard(capture_id)
        if message is not None:
            self._reported.append(message)

    async def _fetch(self, report: Report, message: AgentMessage | None) -> None:
        report = await self._fetching.fetched(
            *(self._lease.hub, self._lease.places.traces, report),
            progress=lambda report: self._reports.append((report, None, True)),
            missing=partial(self._missing.add, report.result.capture_id),
        )
        self._fetched.add(report.result.capture_id)
        self._reports.append((report, message, True))
        self._under_way.discard(report.result.capture_id)

    def _document(self, agent: str, orders: Sequence[WantedCapture], switches: Mapping[str, Setting] = {}) -> None:
        # (compare orders without ages, which always change)
        ageless = [replace(capture, expires_s=None) for capture in orders]
        same = msgspec.msgpack.encode((ageless, switches, self.broken))
        with self._lock:
            written, at_s = self._written.get(agent, (b"", 0.0))
            newest = self._to_write[agent][0] if agent in self._to_write else written
            if newest != same or ((orders or switches) and self._clock() > at_s + REFRESH_S):
                sent = Orders(self._lease.epoch, tuple(orders), agent, self._fetching.run, switches, self.broken)
                self._to_write[agent] = same, encode(sent)

    async def _write(self) -> None:
        bucket = None
        while not self._lease.lost:
            await asyncio.sleep(POLL_S)
            with self._lock:
                some = list(self._to_write.items())
            for agent, (same, data) in some:
                try:
                    bucket = bucket or await self._lease.hub.js.key_value(self._lease.places.want)
                    await bucket.put(agent, data)
                except Exception as error:
                    log.debug("orders were not written: %s", error)
                    await asyncio.sleep(AGAIN_S)
                    continue
                with self._lock:
                    self._written[agent] = same, self._clock()
                    if self._to_write[agent][1] == data:
                        del self._to_write[agent]


def _unfit(order: _Order | None, report: Report, agent: str, known: bool) -> str:
    if order is None:
        return f"it reports on capture {report.result.capture_id}, which was not ordered" if known else ""
    if order.agent not in ("", agent):
        return f"it reports on a capture that was ordered from host {order.agent}"
    if order.request.rank != report.result.rank:
        return f"it reports on a capture of rank {order.request.rank} as one of rank {report.result.rank}"
    return ""


def of_all(findings: Sequence[GpuFindings]) -> GpuFindings:
    """Join the findings of several hosts."""
    return GpuFindings(
        min(finding.time_s for finding in findings),
        tuple(remark for finding in findings for remark in finding.remarks),
        {rank: gpu for finding in findings for rank, gpu in finding.gpus.items()},
        "; ".join(dict.fromkeys(finding.problem for finding in findings if finding.problem)),
    )
