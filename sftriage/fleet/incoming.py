"""What agents tell, as it comes from the hub's stream: read by the hub's thread, and taken in order by the triage's."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sftriage.errors import SftriageError
from sftriage.fleet.hub import Hub, Subjects, is_token
from sftriage.fleet.lease import Lease, make_places, taken_up
from sftriage.fleet.messages import Shipment
from sftriage.fleet.wire import decode_shipment

log = logging.getLogger("sftriage")

MAX_WAITING, MAX_WAITING_BYTES = 8192, 256 << 20
"""Messages, and bytes of these, that wait here to be taken in; the others wait on the hub."""
MAX_NAMED = 16
FETCH, FETCH_S, AGAIN_S = 512, 0.25, 1.0
GATHER_S = 0.1
"""To ask for what has come takes as much, here and on the hub, for one message as for a hundred."""


class Refusals:
    """Counts refused messages by agent, and logs the first of each. Agents beyond `MAX_NAMED` count as one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, agent: str, why: object) -> None:
        """Refuse a message."""
        if not is_token(agent) or (agent not in self._counts and len(self._counts) >= MAX_NAMED):
            agent = "other names"
        if not self._counts[agent]:
            log.warning("a message of host %s is not taken: %s", agent, why)
        self._counts[agent] += 1

    def log_totals(self) -> None:
        """Log the number of messages refused."""
        if self._counts:
            counts = ", ".join(f"{number:,} messages of host {agent}" for agent, number in self._counts.items())
            log.warning("not taken: %s", counts)

    @property
    def problems(self) -> Mapping[str, str]:
        """The counts as problems of telemetry."""
        return {f"messages of {agent}": f"{number} refused" for agent, number in self._counts.items()}


@dataclass(slots=True, eq=False)
class Message:
    """A message of an agent that is not acknowledged yet, because of its ``rows`` or the number of ``reports`` in it.

    ``reply`` acknowledges it to the ``consumer`` that delivered it last.
    """

    agent: str
    sequence: int
    reply: str
    consumer: int = 0
    rows: bool = False
    reports: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A message: when it was sent by the hub's clock, and when it came by ours.

    One that is nothing that its agent sends has no shipment.
    """

    message: Message
    sent_s: float
    at_s: float
    shipment: Shipment | None


class Incoming:
    """Messages that have arrived.

    Args:
        hub, places, lease, clock: those of the fleet.
        lost_all: is called once the hub has lost what it had of the job, and it is made again.
        refusals: counts messages that cannot be read.

    Attributes:
        ended: the job has ended; nothing else arrives.
    """

    def __init__(
        self,
        hub: Hub,
        places: Subjects,
        lease: Lease,
        lost_all: Callable[[], None],
        clock: Callable[[], float],
        refusals: Refusals,
    ) -> None:
        self._hub, self._places, self._lease, self._clock = hub, places, lease, clock
        self._lost_all, self._refusals, self.ended = lost_all, refusals, False
        # As they came: two threads that decode and judge in turns wait for each other with every message.
        self._waiting: deque[tuple[Message, bytes, float, float]] = deque()
        self._waiting_bytes = 0
        # Positions go on where those of a stream that the hub has lost ended; and which stream, and consumer, it is.
        self._delivered = self._before = self._consumer = 0
        self._stream: object = None
        # Those that are not settled.
        self._open: dict[int, Message] = {}
        hub.start(self._consume())

    @property
    def agents(self) -> set[str]:
        """Those of which something waits."""
        return {message.agent for message, *_ in list(self._waiting)}

    def taken(self) -> Iterator[Arrived]:
        """What has come by now, in the order of the stream."""
        for _ in range(len(self._waiting)):
            message, data, sent_s, at_s = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            yield Arrived(message, sent_s, at_s, self._shipment(message.agent, data))

    def settle(self, messages: Sequence[Message]) -> None:
        """All that came of these, which are in the order of the stream, is on record: tell the hub so."""
        for message in messages:
            self._open.pop(message.sequence, None)
        # (a consumer is told nothing of what it has not given: what comes again is acknowledged with what follows it)
        if messages and messages[-1].consumer == self._consumer and not self._lease.lost:
            self._hub.start(self._hub.client.publish(messages[-1].reply, b"+ACK"))

    async def _consume(self) -> None:
        from nats.errors import TimeoutError as NothingError
        from nats.js.errors import NotFoundError

        consumer, connected_s = None, None
        while not (self._lease.lost or self.ended):
            try:
                if consumer is None or connected_s != self._hub.connected_s:
                    # (what was on its way when a connection broke comes by no other way)
                    connected_s = self._hub.connected_s
                    consumer = await self._take_up()
                if len(self._waiting) > MAX_WAITING:
                    await asyncio.sleep(AGAIN_S / 20)
                    continue
                fetched = await consumer.fetch(FETCH, FETCH_S)
                for one in fetched:
                    while self._waiting_bytes > MAX_WAITING_BYTES:
                        await asyncio.sleep(AGAIN_S / 20)
                    self._receive(one)
                if len(fetched) < FETCH:
                    await asyncio.sleep(GATHER_S)
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
        if self.ended:
            return
        log.warning("the hub has lost what it had of this job; what was on its way is lost, and the job is watched on")
        try:
            await make_places(self._hub, self._places, self._lease.run_id)
            self._lost_all()
        except Exception as error:
            log.debug("nothing can be made on the hub: %s", error)

    def _receive(self, received: Any) -> None:
        about = received.metadata
        sequence, sent_s = self._before + about.sequence.stream, about.timestamp.timestamp()
        if sequence <= self._delivered:
            if (known := self._open.get(sequence)) is not None:
                known.reply, known.consumer = received.reply, self._consumer
            return
        self._delivered = sequence
        agent = received.subject.rpartition(".")[2]
        message = self._open[sequence] = Message(agent, sequence, received.reply, self._consumer)
        self._waiting_bytes += len(received.data)
        self._waiting.append((message, received.data, sent_s, self._clock()))

    def _shipment(self, agent: str, data: bytes) -> Shipment | None:
        try:
            shipment = decode_shipment(data)
            if shipment.agent != agent:
                raise SftriageError("it says that it is another's")
        except SftriageError as error:
            self._refusals.note(agent, error)
            return None
        return shipment
