"""A fleet over the hub: what agents tell is put together, and what is wanted is written down for each of them.

Everything that a controller asks is answered from what has come in by then; the hub is talked to by the hub's thread. A
message is acknowledged once all that came of it is on record (`NatsFleet.settled`), in the order of the stream: what a
controller that was killed had not put on record comes again to the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from sftriage.errors import SftriageError
from sftriage.fleet.asking import Asking, Message
from sftriage.fleet.fetching import Fetching, Take
from sftriage.fleet.generations import KEPT_GENERATIONS, Generations
from sftriage.fleet.hub import Hub, Places
from sftriage.fleet.in_process import of_all
from sftriage.fleet.leading import Lease, make_places, taken_up
from sftriage.fleet.together import Together
from sftriage.fleet.wire import Block, Incarnation, Shipment, decode_findings, decode_shipment, encode
from sftriage.recorder.layout import RingInfo
from sftriage.records import (
    GpuFindings,
    JobStatus,
    Report,
    WantedCapture,
)
from sftriage.windows.decoding import StepArrays
from sftriage.windows.shipped import ReadCounts, Rows

log = logging.getLogger("sftriage")

SILENT_S = 10.0
"""An agent that says nothing for so long has its ranks waited for no longer."""
GONE_S = 60.0
"""After so long, the job goes on without its host, or has ended there."""
MAX_WAITING = 8192
"""Messages that wait here to be taken in; the others wait on the hub."""
GPUS_S = 10.0
FETCH, FETCH_S, AGAIN_S = 256, 1.0, 1.0

Keep = Callable[[RingInfo, StepArrays, "StepArrays | None"], None]
"""Keeps new steps of one rank, and device times; the info has the controller's count of starts."""


@dataclass(slots=True)
class _Host:
    """What is known of one agent: on our clock, its newest message is of ``seen_s``, and its status of ``status_s``."""

    seen_s: float = 0.0
    boot_id: str = ""
    status: JobStatus | None = None
    status_s: float = 0.0
    # Rings by the host's own count of starts, and the newest rows of that, for what they say of the ranks.
    infos: dict[tuple[int, int], RingInfo] = field(default_factory=dict)
    newest: Block | None = None
    counts: dict[str, ReadCounts] = field(default_factory=dict)
    over: bool = False
    silent: bool = False
    waiting: deque[Message] = field(default_factory=deque)

    @property
    def away(self) -> Sequence[RingInfo]:
        """Ranks of its newest start that take no more steps, as far as is known."""
        if self.newest is None or (self.status is None and not self.silent):
            return []
        infos = self.newest.infos
        if self.silent or self.over or self.status is None:
            return list(infos.values())
        left = (one.rank for one in self.status.ranks if one.closed or one.alive is False)
        return [infos[rank] for rank in left if rank in infos]

    def quiet_s(self, now_s: float, connected_s: float) -> float:
        """For how long nothing has come from it, though something could."""
        return now_s - max(self.seen_s, connected_s)


class NatsFleet:
    """See `sftriage.controller.needs.Fleet`.

    Args:
        hub: connected; closed with this.
        places: of the job.
        lease: held; let go with this.
        generations: as they are known.
        note: keeps what is known of generations, before anything is told by them.
        keep: keeps steps.
        take: takes the files of a capture that was fetched.
        spool: a directory for what is being fetched.
        clock: seconds on a clock that only goes on.
    """

    def __init__(
        self,
        hub: Hub,
        places: Places,
        lease: Lease,
        generations: Generations,
        note: Callable[[Generations], None],
        keep: Keep,
        take: Take,
        spool: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub, self._places, self._lease, self._clock = hub, places, lease, clock
        self._generations, self._note, self._keep = generations, note, keep
        self._asking = Asking(hub, places, lease, self._place, self._holds, Fetching(take, spool), clock)
        self._hosts: dict[str, _Host] = {}
        # Messages with when they were sent by the hub's clock, and when they came by ours.
        self._inbox: deque[tuple[Message, float, float, Shipment | None]] = deque()
        self._unsettled: deque[Message] = deque()
        self._rows = Together(SILENT_S + FETCH_S)
        self._counted = ReadCounts()
        self._last_seq: dict[Incarnation, int] = {}
        self._gpus: tuple[tuple[int, ...], list[Future[GpuFindings]]] | None = None
        # Positions go on where those of a stream that the hub has lost ended; and which stream, and consumer, it is.
        self._delivered = self._before = self._consumer = 0
        self._stream: object = None
        self._ended = False
        self._open: dict[int, Message] = {}
        self._refused: dict[str, int] = {}
        hub.start(self._consume())

    @property
    def lost(self) -> str:
        """Why this controller leads no longer; "" while it does."""
        return self._lease.lost

    @property
    def over(self) -> bool:
        """Whether every host that was heard of has said that its part of the job has ended, or is gone."""
        now_s, connected_s = self._clock(), self._hub.connected_s
        if connected_s is None or not self._hosts or self._inbox or self._asking.busy:
            return False
        return all(host.over or host.quiet_s(now_s, connected_s) > GONE_S for host in self._hosts.values())

    def rows(self) -> Sequence[Rows]:
        """See `Fleet`: steps that come twice are told once; of ranks that are silent, that they are."""
        self._take_in()
        told = self._rows.told(self._clock(), [rank for host in self._hosts.values() for rank in self._away(host)])
        for host in self._hosts.values():
            if host.silent or host.newest is None or not self._is_silent(host):
                continue
            host.silent = True
            newest = host.newest.rows
            empty = replace(newest, steps=newest.steps[:0], device_steps=None, device_over=(), agent="")
            told.append(replace(empty, generation=self._generations.newest, away=tuple(self._away(host))))
        return told

    def _away(self, host: _Host) -> list[int]:
        """The ranks of the newest generation that are a host's and take no more steps."""
        of = ((info.rank, self._generations.of(Incarnation.of(host.boot_id, info))) for info in host.away)
        return [rank for rank, generation in of if generation == self._generations.newest]

    def statuses(self) -> JobStatus | None:
        """See `Fleet`; None while the hub is away, and nobody knows."""
        self._take_in()
        connected_s, now_s, newest = self._hub.connected_s, self._clock(), self._generations.newest
        if connected_s is None:
            return None
        told: list[JobStatus] = []
        for host in self._hosts.values():
            status = host.status
            if status is None or host.seen_s < connected_s or self._is_silent(host):
                continue
            older_ns = int((now_s - host.status_s) * 1e9)
            ranks = tuple(
                replace(one, stage_age_ns=one.stage_age_ns + older_ns, step_age_ns=one.step_age_ns + older_ns)
                for one in status.ranks
                if (info := host.infos.get((status.attempt, one.rank))) is not None
                and self._generations.of(Incarnation.of(host.boot_id, info)) == newest
            )
            if ranks:
                told.append(replace(status, ranks=ranks, attempt=newest))
        if not told:
            return None
        alike = [status for status in told if replace(status, ranks=told[0].ranks) == told[0]]
        ranks = tuple(sorted((rank for status in alike for rank in status.ranks), key=attrgetter("rank")))
        return replace(told[0], ranks=ranks)

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """See `Fleet`. What nobody begins in time is called off, and what nobody ends is given up."""
        self._asking.want(wanted, {agent: host.over for agent, host in self._hosts.items()})
        self._acknowledge()

    def reports(self) -> Sequence[Report]:
        """See `Fleet`: of each capture one that it has ended, and none after that."""
        self._take_in()
        return self._asking.reports()

    def telemetry(self) -> ReadCounts:
        """See `Fleet`."""
        counts = [count for host in self._hosts.values() for count in host.counts.values()]
        problems = {
            f"{agent}: {what}": how
            for agent, host in self._hosts.items()
            for count in host.counts.values()
            for what, how in count.problems.items()
        }
        problems |= {f"messages of {agent}": f"{number} refused" for agent, number in self._refused.items()}
        return ReadCounts(self._counted.steps, self._counted.missed, sum(one.torn for one in counts), problems)

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
        """See `Fleet`."""
        host = self._hosts.get(agent)
        while host is not None and host.waiting and host.waiting[0].sequence <= position:
            host.waiting.popleft().rows = False
        self._acknowledge()

    def end(self) -> None:
        """The job has ended: nothing comes any more, and what it had on the hub is missed by nobody."""
        self._ended = True

    def close(self) -> None:
        """See `Fleet`: nothing is wanted any more; the lease is let go."""
        self._asking.close(self._hosts)
        self._lease.let_go()
        self._hub.close()

    def _is_silent(self, host: _Host) -> bool:
        connected_s = self._hub.connected_s
        return connected_s is not None and host.quiet_s(self._clock(), connected_s) > SILENT_S

    def _take_in(self) -> None:
        """Take what has come, in the order of the stream."""
        for _ in range(len(self._inbox)):
            message, sent_s, at_s, shipment = self._inbox.popleft()
            self._unsettled.append(message)
            if shipment is None:
                continue
            host = self._hosts.setdefault(shipment.agent, _Host())
            host.seen_s = at_s
            host.boot_id, host.over, host.silent = shipment.boot_id, shipment.over, False
            if shipment.process not in host.counts and host.counts:
                # (another process has read the rings again from their beginning)
                host.counts.clear()
            if shipment.blocks or shipment.status is not None:
                host.counts[shipment.process] = shipment.counts
            self._take_rows(host, shipment, message, sent_s)
            if shipment.status is not None:
                host.status, host.status_s = shipment.status, host.seen_s
            for report in shipment.reports:
                self._asking.heard(report, message)
            if message.rows:
                host.waiting.append(message)
        self._acknowledge()

    def _take_rows(self, host: _Host, shipment: Shipment, message: Message, sent_s: float) -> None:
        blocks = sorted(shipment.blocks, key=lambda block: block.rows.generation)
        if not blocks:
            return
        newest = blocks[-1]
        if host.newest is None or newest.rows.generation >= host.newest.rows.generation:
            host.newest = newest
            here = [Incarnation.of(shipment.boot_id, info) for info in newest.infos.values()]
            stepping = set(newest.rows.steps.rank_B.tolist())
            if self._generations.take(here, [one for one in here if one.rank in stepping], sent_s):
                self._note(self._generations)
        for block in blocks:
            for rank, info in block.infos.items():
                host.infos[block.rows.generation, rank] = info
            for old in [at for at in host.infos if at[0] <= host.newest.rows.generation - KEPT_GENERATIONS]:
                del host.infos[old]
            of_generation: dict[int, dict[int, Incarnation]] = {}
            for rank, info in block.infos.items():
                one = Incarnation.of(shipment.boot_id, info)
                generation = self._generations.of(one)
                if generation is not None:
                    of_generation.setdefault(generation, {})[rank] = one
            for generation, ranks in of_generation.items():
                self._add(shipment.agent, block, generation, ranks, message)

    def _add(
        self, agent: str, block: Block, generation: int, ranks: Mapping[int, Incarnation], message: Message
    ) -> None:
        """Add the rows of some ranks, which are of one generation, but for those that have come before."""
        rows = block.rows
        new = [self._new(rows.steps[rows.steps.rank_B == rank], one) for rank, one in ranks.items()]
        keep_B = np.zeros(len(rows.steps), dtype=np.bool_)
        for rank, first_seq in zip(ranks, new, strict=True):
            keep_B |= (rows.steps.rank_B == rank) & (rows.steps.seq_B >= first_seq)
        steps, device = rows.steps[keep_B], rows.device_steps
        if device is not None:
            device = device[np.isin(device.rank_B, list(ranks))]
        self._counted.steps += len(steps)
        for rank in ranks:
            info = block.infos[rank]
            info = info if info.attempt == generation else replace(info, attempt=generation)
            its = None if device is None else device[device.rank_B == rank]
            self._keep(info, steps[steps.rank_B == rank], its)
        message.rows |= len(steps) > 0 or (device is not None and len(device) > 0)
        mine = replace(
            rows,
            generation=generation,
            ranks={rank: rows.ranks[rank] for rank in ranks},
            steps=steps,
            device_steps=device,
            device_over=tuple(rank for rank in rows.device_over if rank in ranks),
            agent=agent,
            position=message.sequence,
        )
        self._rows.add(mine, self._clock())

    def _new(self, steps: StepArrays, one: Incarnation) -> int:
        """The first sequence number of a rank's steps that has not come before; what is not there is counted."""
        last = self._last_seq.get(one)
        if not len(steps):
            return 1 if last is None else last + 1
        seq_B = steps.seq_B
        first = int(seq_B.min()) if last is None else last + 1
        fresh_B = seq_B[seq_B >= first]
        if len(fresh_B):
            self._last_seq[one] = int(fresh_B.max())
            self._counted.missed += int(fresh_B.max()) - first + 1 - len(fresh_B)
        return first

    def _holds(self, message: Message) -> bool:
        return self._rows.holds(message.agent, message.sequence)

    def _place(self, wanted: WantedCapture) -> tuple[str, Incarnation | None]:
        """The agent that a capture is asked of, and which process its rank has to be."""
        newest = self._generations.newest
        agent, one = self._who_has(wanted.request.rank, newest if wanted.generation is None else wanted.generation)
        return agent, None if wanted.generation is None else one

    def _who_has(self, rank: int, generation: int) -> tuple[str, Incarnation | None]:
        """The agent that has a rank of a generation, and its process there; "" where none has."""
        for agent, host in self._hosts.items():
            for info in host.infos.values():
                one = Incarnation.of(host.boot_id, info)
                if info.rank == rank and self._generations.of(one) == generation:
                    return agent, one
        return "", None

    async def _ask_gpus(self, agent: str, ranks: tuple[int, ...]) -> GpuFindings:
        try:
            answer = await self._hub.client.request(self._places.ask(agent), encode(ranks), timeout=GPUS_S)
            return decode_findings(answer.data)
        except Exception as error:
            return GpuFindings(time.time(), problem=f"host {agent} does not say: {type(error).__name__}")

    def _acknowledge(self) -> None:
        """Tell the hub up to where everything is on record."""
        last = None
        while self._unsettled and not self._unsettled[0].rows and self._unsettled[0].reports <= 0:
            last = self._unsettled.popleft()
            self._open.pop(last.sequence, None)
        # (a consumer is told nothing of what it has not given: what comes again is acknowledged with what follows it)
        if last is not None and last.consumer == self._consumer and not self.lost:
            self._hub.start(self._hub.client.publish(last.reply, b"+ACK"))

    async def _consume(self) -> None:
        from nats.errors import TimeoutError as NothingError
        from nats.js.errors import NotFoundError

        consumer, connected_s = None, None
        while not (self.lost or self._ended):
            try:
                if consumer is None or connected_s != self._hub.connected_s:
                    # (what was on its way when a connection broke comes by no other way)
                    connected_s = self._hub.connected_s
                    consumer = await self._take_up()
                if len(self._inbox) > MAX_WAITING:
                    await asyncio.sleep(AGAIN_S / 20)
                    continue
                for one in await consumer.fetch(FETCH, FETCH_S):
                    await self._receive(one)
            except NothingError:
                continue
            except Exception as error:
                log.debug("nothing comes from the hub: %s", error)
                consumer = None
                if isinstance(error, NotFoundError):
                    await self._make_again()
                await asyncio.sleep(AGAIN_S)

    async def _take_up(self) -> Any:
        stream = (await self._hub.js.stream_info(self._places.stream)).created
        if self._stream not in (None, stream):
            # The hub has lost the one before, and what was in it: its numbers begin anew.
            self._before = self._delivered
        self._stream, self._consumer = stream, self._consumer + 1
        first = min(list(self._open), default=self._delivered + 1) - self._before
        return await taken_up(self._hub, self._places, max(1, first))

    async def _make_again(self) -> None:
        """The hub has lost all that it had."""
        if self._ended:
            return
        log.warning("the hub has lost what it had of this job; what was on its way is lost, and the job is watched on")
        try:
            await make_places(self._hub, self._places, self._lease.run_id)
            self._asking.write_again()
        except Exception as error:
            log.debug("nothing can be made on the hub: %s", error)

    async def _receive(self, received: Any) -> None:
        about = received.metadata
        sequence, sent_s = self._before + about.sequence.stream, about.timestamp.timestamp()
        if sequence <= self._delivered:
            if (known := self._open.get(sequence)) is not None:
                known.reply, known.consumer = received.reply, self._consumer
            return
        self._delivered = sequence
        agent = received.subject.rpartition(".")[2]
        message = self._open[sequence] = Message(agent, sequence, received.reply, self._consumer)
        try:
            shipment = decode_shipment(received.data)
            if shipment.agent != agent:
                raise SftriageError("it says that it is another's")
        except SftriageError as error:
            if agent not in self._refused:
                log.warning("a message of host %s is not taken: %s", agent, error)
            self._refused[agent] = self._refused.get(agent, 0) + 1
            shipment = None
        self._inbox.append((message, sent_s, self._clock(), shipment))
