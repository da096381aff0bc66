"""A fleet over the hub: it joins what agents report, and writes down the captures that are wanted of each of them.

Everything that a controller asks is answered from what has come in by then; the hub is talked to by the hub's thread. A
message is acknowledged once all that came of it is on record (`NatsFleet.settled`), in the order of the stream: what a
controller that was killed had not put on record comes again to the next one.
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

from sftriage.fleet.hosts import Generations, Groups, Host, Members, status_of_all
from sftriage.fleet.hub import Lease
from sftriage.fleet.incoming import FETCH_S, AgentMessage, Deduplicator, Incoming, Refusals, RowBuffer
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import Incarnation, Orders, decode_findings, encode
from sftriage.mitigate.switching import Setting, SwitchStatus
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, CaptureState, Report, WantedCapture
from sftriage.model.windows import GpuFindings, JobStatus, ReadCounts
from sftriage.windows.rings import Rows

if TYPE_CHECKING:
    from sftriage.runtime.controlling import KeptRows

log = logging.getLogger("sftriage")

SILENT_S = 10.0  # after which windows do not wait for an agent's ranks
GONE_S = 60.0  # after which the job goes on without an agent's host, or has ended there
MAX_HOSTS = 1 << 14
GPUS_S = 10.0


def all_over(hosts: Mapping[str, Host], waiting: Collection[str], now_s: float, connected_s: float) -> bool:
    """Whether a job has ended on all of its hosts, by name, as far as is known and nothing else is ``waiting`` of them.

    A host that waits for the others, and for us, goes on saying every second that it is over.
    """
    if not hosts or any(agent not in hosts or not hosts[agent].over for agent in waiting):
        return False
    quiet = ((host, host.quiet_s(now_s, connected_s)) for host in hosts.values())
    return all(
        host.over or quiet_s > GONE_S or (quiet_s > SILENT_S and not host.takes_part()) for host, quiet_s in quiet
    )


class NatsFleet:
    """See `sftriage.controller.agents.Fleet`. It lets go of the ``lease`` and its hub.

    ``note`` saves generations before anything is reported by them, and ``keep`` saves steps.
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
        # Of hosts that are quiet, whether they answer.
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
        """See `Fleet`: steps that come twice are reported once, and so is the silence of ranks."""
        self._take_in()
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
        """See `Fleet`; None while the hub is away, and nobody knows."""
        self._take_in()
        connected_s = self._hub.connected_s
        if connected_s is None:
            return None
        heard = [one for one in self._hosts.values() if one.seen_s >= connected_s and not self._is_silent(one)]
        return status_of_all(heard, time.monotonic())

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """See `Fleet`. Captures that do not begin or end in time expire."""
        self._orders.want(wanted, {agent: host.over for agent, host in self._hosts.items()}, self._groups.wanted)
        self._acknowledge()

    def reports(self) -> Sequence[Report]:
        """See `Fleet`: of each capture one that it has ended, and none after that."""
        self._take_in()
        return self._orders.reports()

    def switches(self) -> Sequence[SwitchStatus]:
        """See `Fleet`: as their hosts have reported last, those that all hosts have reported."""
        return self._groups.statuses()

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """See `Fleet`: it goes down with what is wanted next, to all hosts of a group, and stands until all know."""
        self._groups.want(wanted)

    def telemetry(self) -> ReadCounts:
        problems = {
            f"{agent}: {what}": how for agent, host in self._hosts.items() for what, how in host.counts.problems.items()
        }
        torn = sum(host.counts.torn for host in self._hosts.values())
        return ReadCounts(self._dedup.steps, self._dedup.missed, torn, {**problems, **self._refusals.problems})

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """See `Fleet`. A host that does not answer is one whose drivers say nothing."""
        if self._gpus is None or self._gpus[0] != tuple(ranks):
            newest = self._generations.newest
            having = {self._who_has(rank, newest)[0] for rank in ranks} - {""}
            answers = [self._hub.later(self._request_gpus(agent, tuple(ranks))) for agent in having]
            self._gpus = tuple(ranks), answers
        answers = self._gpus[1]
        if not all(answer.done() for answer in answers):
            return None
        self._gpus = None
        return of_all([answer.result() for answer in answers]) if answers else GpuFindings(time.time())

    def settled(self, agent: str, position: int) -> None:
        """See `Fleet`. The hub hears it with what is wanted next: a window settles what a thousand agents have sent."""
        host = self._hosts.get(agent)
        while host is not None and host.waiting and host.waiting[0].sequence <= position:
            host.waiting.popleft().rows = False

    def end(self) -> None:
        """The job has ended: nothing more comes, and its data on the hub is no longer needed."""
        self._incoming.ended = True

    def close(self) -> None:
        """See `Fleet`: nothing more is ordered; the lease is released."""
        self._orders.close(self._hosts)
        self._refusals.log_totals()
        self._lease.let_go()
        self._hub.close()

    def _is_silent(self, host: Host) -> bool:
        connected_s = self._hub.connected_s
        return connected_s is not None and host.quiet_s(time.monotonic(), connected_s) > SILENT_S

    def _answers(self, agent: str) -> bool:
        """Whether a quiet host answers, or still may: a hub on a full disk passes questions on."""
        if agent not in self._called:
            self._called[agent] = self._hub.later(self._request_gpus(agent, ()))
        if not self._called[agent].done():
            return True
        if self._called[agent].result().problem:
            return False
        del self._called[agent]
        self._hosts[agent].seen_s = time.monotonic()
        return True

    def _take_in(self) -> None:
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
                    # (of a start of the job that is long over, or that never was)
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
        # (a third of the time of `replace`, of what is a thousand messages a second)
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
        )
        self._keep.take(mine)
        self._rows.add(mine, time.monotonic())

    def holds(self, message: AgentMessage) -> bool:
        """Whether steps that came before a message are still held back."""
        return self._rows.holds(message.agent, message.sequence)

    def place(self, wanted: WantedCapture) -> tuple[str, Incarnation | None]:
        """The agent whose host has a capture's rank ("": none), and the process that it has to be, if any."""
        newest = self._generations.newest
        agent, one = self._who_has(wanted.request.rank, newest if wanted.generation is None else wanted.generation)
        return agent, None if wanted.generation is None else one

    def gone(self, agent: str, one: Incarnation | None) -> bool:
        """Whether the job has started again without the host that had this process."""
        generation = None if one is None else self._generations.of(one)
        started_again = generation is not None and generation < self._generations.newest
        return started_again and self._is_silent(self._hosts[agent])

    def _who_has(self, rank: int, generation: int) -> tuple[str, Incarnation | None]:
        for agent, host in self._hosts.items():
            for info in [infos[rank] for infos in host.rings.values() if rank in infos]:
                one = Incarnation.of(host.boot_id, info)
                if self._generations.of(one) == generation:
                    return agent, one
        return "", None

    async def _request_gpus(self, agent: str, ranks: tuple[int, ...]) -> GpuFindings:
        try:
            answer = await self._hub.client.request(self._lease.places.ask(agent), encode(ranks), timeout=GPUS_S)
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


REFRESH_S = 20.0  # how often orders are written again, so that they do not expire
BEGIN_GRACE_S = 15.0  # how long after its time a capture's host may take to report that it has begun
END_GRACE_S = 480.0  # how long after its time-box a capture's host may take to report how it ended
UNHEARD_S = 60.0  # how long a controller that takes over waits for the host of a capture that it resumes
LOOK_S, AGAIN_S, CLOSE_S = 0.05, 1.0, 2.0


@dataclass(slots=True)
class _Order:
    """A capture wanted since ``at_s`` of an agent ("": unknown); ``begin_s`` is None once the agent reports on it."""

    request: CaptureRequest
    agent: str
    of: Incarnation | None
    at_s: float
    begin_s: float | None
    end_s: float
    ended: bool = False


class CaptureOrders:
    """Captures that a fleet wants, followed to their end or given up in time. The hub's thread writes the orders."""

    def __init__(
        self, fleet: NatsFleet, lease: Lease, fetching: Fetching, clock: Callable[[], float], refusals: Refusals
    ) -> None:
        self._fleet, self._lease = fleet, lease
        self._fetching, self._clock, self._refusals = fetching, clock, refusals
        self._orders: dict[str, _Order] = {}
        self._begun = False
        # What is to be written of each agent, beside what that says; and what was written when.
        self._lock = threading.Lock()
        self._to_write: dict[str, tuple[bytes, bytes]] = {}
        self._written: dict[str, tuple[bytes, float]] = {}
        # Agents of which nothing is wanted.
        self._idle: set[str] = set()
        # Reports with their messages, which are settled once what they led to is on record.
        self._reports: deque[tuple[Report, AgentMessage | None, bool]] = deque()
        self._reported: list[AgentMessage] = []
        self._reported_before: list[AgentMessage] = []
        # Captures that are on their way here, and those that have come.
        self._under_way: set[str] = set()
        self._fetched: set[str] = set()
        # Of the former, those that the hub has lost: their hosts send them again.
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
        """See `Fleet.want`; by agent, whether the job is ``over`` there, and the settings of its groups.

        What was reported before the last call is on record by now.
        """
        self._begun, now_s = True, self._clock()
        for message in self._reported_before:
            message.reports -= 1
        self._reported_before, self._reported = self._reported, []
        # (of most agents nothing is wanted, and that is written already)
        agents = (agent for agent in over if agent not in self._idle or agent in switches)
        orders: dict[str, list[WantedCapture]] = {agent: [] for agent in agents}
        for one in wanted:
            order = self._orders.get(one.request.capture_id) or self._new_order(one, now_s)
            if not order.agent:
                order.agent, order.of = self._fleet.place(one)
            if order.ended:
                continue
            if one.request.capture_id in self._under_way:
                # (that ends by itself: nothing comes to be here that was given up)
                heard = one.request.capture_id not in self._missing
                orders.setdefault(order.agent, []).append(replace(one, process=order.of, heard=heard))
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
                orders.setdefault(order.agent, []).append(replace(one, process=order.of))
        for agent, some in orders.items():
            self._document(agent, some, switches.get(agent, {}))
        self._idle = {agent for agent in over if not (orders.get(agent) or agent in switches)}

    def heard(self, report: Report, message: AgentMessage) -> None:
        message.reports += 1
        # (until the first call of `want`, the captures of an earlier controller are not known)
        self._reports.append((report, message, self._begun))

    def reports(self) -> list[Report]:
        if not self._begun:
            # The captures to resume are not known yet.
            return []
        found = []
        for _ in range(len(self._reports)):
            report, message, known = self._reports.popleft()
            if message is not None and self._fleet.holds(message):
                # Its steps are reported first: the controller looks for the fault in them at once.
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
        """Withdraw all orders, and wait a moment until that is written."""
        for agent in agents:
            self._document(agent, [])
        deadline_s = time.monotonic() + CLOSE_S
        while self._to_write and not self._lease.lost and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)

    def _new_order(self, wanted: WantedCapture, now_s: float) -> _Order:
        request, begin_s = wanted.request, None
        if wanted.expires_s is not None:
            begin_s = now_s + wanted.expires_s + BEGIN_GRACE_S
        end_s = now_s + (wanted.expires_s or 0.0) + request.max_seconds + END_GRACE_S
        order = self._orders[request.capture_id] = _Order(request, *self._fleet.place(wanted), now_s, begin_s, end_s)
        # (a resumed capture's host may not have reported to this controller yet)
        if not order.agent and not wanted.resumed:
            self._end(order, "failed", f"no host of the job has rank {request.rank}")
        return order

    def _end(self, order: _Order, state: CaptureState, why: str) -> None:
        result = CaptureResult(order.request.capture_id, order.request.rank, state, why)
        self._reports.append((Report(result), None, True))

    def _pending(self, order: _Order) -> bool:
        """Whether a report of it waits, or its files are on their way."""
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
            tell=lambda progress: self._reports.append((progress, None, True)),
            missing=partial(self._missing.add, report.result.capture_id),
        )
        self._fetched.add(report.result.capture_id)
        self._reports.append((report, message, True))
        self._under_way.discard(report.result.capture_id)

    def _document(self, agent: str, orders: Sequence[WantedCapture], switches: Mapping[str, Setting] = {}) -> None:
        # An age changes with every look, and is news to nobody.
        ageless = [replace(one, expires_s=None) for one in orders]
        same = msgspec.msgpack.encode((ageless, switches))
        with self._lock:
            written, at_s = self._written.get(agent, (b"", 0.0))
            newest = self._to_write[agent][0] if agent in self._to_write else written
            if newest != same or ((orders or switches) and self._clock() > at_s + REFRESH_S):
                sent = Orders(self._lease.epoch, tuple(orders), agent=agent, run=self._fetching.run, switches=switches)
                self._to_write[agent] = same, encode(sent)

    async def _write(self) -> None:
        want = None
        while not self._lease.lost:
            await asyncio.sleep(LOOK_S)
            with self._lock:
                some = list(self._to_write.items())
            for agent, (same, data) in some:
                try:
                    want = want or await self._lease.hub.js.key_value(self._lease.places.want)
                    await want.put(agent, data)
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
    """What the drivers of several hosts say, as one."""
    return GpuFindings(
        min(one.time_s for one in findings),
        tuple(remark for one in findings for remark in one.remarks),
        {rank: gpu for one in findings for rank, gpu in one.gpus.items()},
        "; ".join(dict.fromkeys(one.problem for one in findings if one.problem)),
    )
