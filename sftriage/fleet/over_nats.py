"""A fleet over the hub: what agents tell is put together, and what is wanted is written down for each of them.

Everything that a controller asks is answered from what has come in by then; the hub is talked to by the hub's thread. A
message is acknowledged once all that came of it is on record (`NatsFleet.settled`), in the order of the stream: what a
controller that was killed had not put on record comes again to the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sftriage.fleet.generations import Generations
from sftriage.fleet.hosts import Groups, Host, Members, status_of_all
from sftriage.fleet.hub import Hub, Subjects
from sftriage.fleet.incoming import FETCH_S, AgentMessage, Deduplicator, Incoming, Refusals, RowBuffer
from sftriage.fleet.lease import Lease
from sftriage.fleet.orders import CaptureOrders
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import Block, Incarnation, decode_findings, encode
from sftriage.mitigate.switching import Setting, SwitchStatus
from sftriage.model.captures import Report, WantedCapture
from sftriage.model.windows import GpuFindings, JobStatus
from sftriage.windows.shipped import ReadCounts, Rows

if TYPE_CHECKING:
    from sftriage.runtime.controlling import KeptRows

SILENT_S = 10.0
"""An agent that says nothing for so long has its ranks waited for no longer."""
GONE_S = 60.0
"""After so long, the job goes on without its host, or has ended there."""
MAX_HOSTS = 1 << 14
GPUS_S = 10.0


def all_over(
    hosts: Mapping[str, Host], waiting: Collection[str], generations: Generations, now_s: float, connected_s: float
) -> bool:
    """Whether a job has ended on all of its hosts, by name, as far as is known and nothing else is ``waiting`` of them.

    A host that waits for the others, and for us, goes on saying every second that it is over.
    """
    if not hosts or any(agent not in hosts or not hosts[agent].over for agent in waiting):
        return False
    quiet = ((host, host.quiet_s(now_s, connected_s)) for host in hosts.values())
    return all(
        host.over or quiet_s > GONE_S or (quiet_s > SILENT_S and not host.takes_part(generations))
        for host, quiet_s in quiet
    )


class NatsFleet:
    """See `sftriage.controller.desired.Fleet`. It lets go of ``hub`` and ``lease``.

    ``note`` saves generations before anything is reported by them, and ``keep`` saves steps.
    """

    def __init__(
        self,
        hub: Hub,
        places: Subjects,
        lease: Lease,
        generations: Generations,
        note: Callable[[Generations], None],
        keep: KeptRows,
        fetching: Fetching,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub, self._places, self._lease, self._clock = hub, places, lease, clock
        self._generations, self._note, self._keep = generations, note, keep
        self._noted, self._refusals = generations.changes, Refusals()
        self._orders = CaptureOrders(
            hub, places, lease, self._place, self._holds, fetching, self._gone, clock, self._refusals
        )
        self._hosts: dict[str, Host] = {}
        self._incoming = Incoming(hub, places, lease, self._orders.write_again, clock, self._refusals)
        self._unsettled: deque[AgentMessage] = deque()
        self._rows = RowBuffer(SILENT_S + FETCH_S)
        self._dedup = Deduplicator()
        self._groups = Groups(
            lambda agent: self._hosts[agent].takes_part(self._generations),
            lambda agent: self._is_silent(self._hosts[agent]),
        )
        self._gpus: tuple[tuple[int, ...], list[Future[GpuFindings]]] | None = None
        # Of hosts that are quiet, whether they answer.
        self._called: dict[str, Future[GpuFindings]] = {}

    @property
    def lost(self) -> str:
        """Why this controller leads no longer; "" while it does."""
        return self._lease.lost

    @property
    def over(self) -> bool:
        """Whether every host that was heard of has said that its part of the job has ended, or is gone.

        One without which the job has started again is waited for no longer than it is to be heard of.
        """
        connected_s = self._hub.connected_s
        if connected_s is None or self._orders.busy:
            return False
        if not all_over(self._hosts, self._incoming.agents, self._generations, self._clock(), connected_s):
            self._called.clear()
            return False
        answers = [self._answers(agent) for agent, host in self._hosts.items() if not host.over]
        return not any(answers)

    @property
    def hosts(self) -> dict[str, Host]:
        """The hosts by agent, for any thread."""
        return self._hosts.copy()

    def rows(self) -> Sequence[Rows]:
        """See `Fleet`: steps that come twice are told once; of ranks that are silent, that they are."""
        self._take_in()
        told = self._rows.due(
            self._clock(), [rank for host in self._hosts.values() for rank in host.away(self._generations)]
        )
        for host in self._hosts.values():
            if host.silent or host.newest is None or not self._is_silent(host):
                continue
            host.silent = True
            newest, away = host.newest.rows, tuple(host.away(self._generations))
            if away:
                empty = replace(newest, steps=newest.steps[:0], device_steps=None, device_over=(), agent="")
                told.append(replace(empty, generation=self._generations.newest, away=away))
        return told

    def statuses(self) -> JobStatus | None:
        """See `Fleet`; None while the hub is away, and nobody knows."""
        self._take_in()
        connected_s = self._hub.connected_s
        if connected_s is None:
            return None
        heard = [one for one in self._hosts.values() if one.seen_s >= connected_s and not self._is_silent(one)]
        return status_of_all(heard, self._generations, self._clock())

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """See `Fleet`. What nobody begins in time is called off, and what nobody ends is given up."""
        over = {agent: host.over for agent, host in self._hosts.items()}
        self._orders.want(wanted, over, self._groups.wanted)
        self._acknowledge()

    def reports(self) -> Sequence[Report]:
        """See `Fleet`: of each capture one that it has ended, and none after that."""
        self._take_in()
        return self._orders.reports()

    def switches(self) -> Sequence[SwitchStatus]:
        """See `Fleet`: as their hosts have told last, those of which all hosts have."""
        return self._groups.statuses()

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """See `Fleet`: it goes down with what is wanted next, to all hosts of a group, and stands until all know."""
        self._groups.want(wanted)

    def telemetry(self) -> ReadCounts:
        """See `Fleet`."""
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
            answers = [self._hub.later(self._ask_gpus(agent, tuple(ranks))) for agent in having]
            self._gpus = tuple(ranks), answers
        answers = self._gpus[1]
        if not all(answer.done() for answer in answers):
            return None
        self._gpus = None
        return of_all([answer.result() for answer in answers]) if answers else GpuFindings(time.time())

    def settled(self, agent: str, position: int) -> None:
        """See `Fleet`. The hub is told with what is wanted next: a window settles what a thousand agents have sent."""
        host = self._hosts.get(agent)
        while host is not None and host.waiting and host.waiting[0].sequence <= position:
            host.waiting.popleft().rows = False

    def end(self) -> None:
        """The job has ended: nothing comes any more, and what it had on the hub is missed by nobody."""
        self._incoming.ended = True

    def close(self) -> None:
        """See `Fleet`: nothing is wanted any more; the lease is let go."""
        self._orders.close(self._hosts)
        self._refusals.log_totals()
        self._lease.let_go()
        self._hub.close()

    def _is_silent(self, host: Host) -> bool:
        connected_s = self._hub.connected_s
        return connected_s is not None and host.quiet_s(self._clock(), connected_s) > SILENT_S

    def _answers(self, agent: str) -> bool:
        """Whether a host that is quiet may still be there: it answers, or is being asked.

        A hub that stores nothing, as on a full disk, passes questions on all the same.
        """
        if agent not in self._called:
            self._called[agent] = self._hub.later(self._ask_gpus(agent, ()))
        if not self._called[agent].done():
            return True
        if self._called[agent].result().problem:
            return False
        del self._called[agent]
        self._hosts[agent].seen_s = self._clock()
        return True

    def _take_in(self) -> None:
        for message, shipment in self._incoming.taken():
            self._unsettled.append(message)
            if shipment is None:
                continue
            if shipment.agent not in self._hosts and len(self._hosts) >= MAX_HOSTS:
                self._refusals.note(shipment.agent, f"a job of more than {MAX_HOSTS} hosts")
                continue
            host = self._hosts.setdefault(shipment.agent, Host())
            host.heard(shipment, message.sent_s, message.at_s)
            for block in sorted(shipment.blocks, key=lambda block: block.rows.generation):
                members = host.take(shipment.agent, block, self._generations)
                if sum(len(some.of) for some in members) < len(block.infos):
                    # (of a start of the job that is long over, or that never was)
                    known = {rank for some in members for rank in some.of}
                    self._dedup.missed += sum(rank not in known for rank in block.rows.steps.rank_B.tolist())
                for some in members:
                    self._add(shipment.agent, block, some, message)
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

    def _add(self, agent: str, block: Block, members: Members, message: AgentMessage) -> None:
        rows, of = block.rows, members.of
        steps, device = self._dedup.new(rows.steps, of), rows.device_steps
        whole = len(of) == len(rows.ranks)
        if device is not None and not whole:
            device = device[np.isin(device.rank_B, list(of))]
        self._keep.take(agent, message.sequence, members.generation, members.infos, steps, device)
        message.rows |= len(steps) > 0 or (device is not None and len(device) > 0)
        # (a third of the time of `replace`, of what is a thousand messages a second)
        mine = Rows(
            generation=members.generation,
            schema=rows.schema,
            world_size=rows.world_size,
            ranks=rows.ranks if whole else {rank: rows.ranks[rank] for rank in of},
            steps=steps,
            device_steps=device,
            device_over=rows.device_over if whole else tuple(rank for rank in rows.device_over if rank in of),
            wall_ns=rows.wall_ns,
            agent=agent,
            position=message.sequence,
        )
        self._rows.add(mine, self._clock())

    def _holds(self, message: AgentMessage) -> bool:
        return self._rows.holds(message.agent, message.sequence)

    def _place(self, wanted: WantedCapture) -> tuple[str, Incarnation | None]:
        newest = self._generations.newest
        agent, one = self._who_has(wanted.request.rank, newest if wanted.generation is None else wanted.generation)
        return agent, None if wanted.generation is None else one

    def _gone(self, agent: str, one: Incarnation | None) -> bool:
        """Whether the job has started again without the host that had this process."""
        generation = None if one is None else self._generations.of(one)
        started_again = generation is not None and generation < self._generations.newest
        return started_again and self._is_silent(self._hosts[agent])

    def _who_has(self, rank: int, generation: int) -> tuple[str, Incarnation | None]:
        for agent, host in self._hosts.items():
            one = host.process_of(rank, generation, self._generations)
            if one is not None:
                return agent, one
        return "", None

    async def _ask_gpus(self, agent: str, ranks: tuple[int, ...]) -> GpuFindings:
        try:
            answer = await self._hub.client.request(self._places.ask(agent), encode(ranks), timeout=GPUS_S)
            return decode_findings(answer.data)
        except Exception as error:
            return GpuFindings(time.time(), problem=f"host {agent} does not say: {type(error).__name__}")

    def _acknowledge(self) -> None:
        settled, position = [], self._keep.position
        while self._unsettled and not self._unsettled[0].rows and self._unsettled[0].reports <= 0:
            if position is not None and self._unsettled[0].sequence >= position:
                break
            settled.append(self._unsettled.popleft())
        self._incoming.settle(settled)


def of_all(told: Sequence[GpuFindings]) -> GpuFindings:
    """What the drivers of several hosts say, as one."""
    return GpuFindings(
        min(one.time_s for one in told),
        tuple(remark for one in told for remark in one.remarks),
        {rank: gpu for one in told for rank, gpu in one.gpus.items()},
        "; ".join(dict.fromkeys(one.problem for one in told if one.problem)),
    )
