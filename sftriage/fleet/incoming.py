"""What agents tell, as it comes from the hub's stream: read by the hub's thread, and taken in order by the triage's."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sftriage.errors import SftriageError
from sftriage.fleet.asking import Message
from sftriage.fleet.hub import Hub, Places
from sftriage.fleet.leading import Lease, taken_up
from sftriage.fleet.wire import Shipment, decode_shipment

log = logging.getLogger("sftriage")

MAX_WAITING = 8192
"""Messages that wait here to be taken in; the others wait on the hub."""
FETCH, FETCH_S, AGAIN_S = 512, 0.25, 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """A message: when it was sent by the hub's clock, and when by ours, as far as that can be told.

    One that is nothing that its agent sends has no shipment.
    """

    message: Message
    sent_s: float
    at_s: float
    shipment: Shipment | None


class Incoming:
    """What has come, and is to be taken.

    Args:
        hub: connected.
        places: of the job.
        lease: while it is held.
        clock: seconds on a clock that only goes on.

    Attributes:
        refused: how many messages of each agent were none.
    """

    def __init__(self, hub: Hub, places: Places, lease: Lease, clock: Callable[[], float]) -> None:
        self._hub, self._places, self._lease, self._clock = hub, places, lease, clock
        self.refused: dict[str, int] = {}
        # As they came: two threads that decode and judge in turns wait for each other with every message.
        self._waiting: deque[tuple[Message, bytes, float, float]] = deque()
        self._newest_s = 0.0
        self._delivered = 0
        hub.start(self._consume())

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def taken(self) -> Iterator[Arrived]:
        """What has come by now, in the order of the stream."""
        for _ in range(len(self._waiting)):
            message, data, sent_s, at_s = self._waiting.popleft()
            yield Arrived(message, sent_s, at_s, self._shipment(message.agent, data))

    async def _consume(self) -> None:
        from nats.errors import TimeoutError as NothingError

        consumer = None
        while not self._lease.lost:
            try:
                consumer = consumer or await taken_up(self._hub, self._places)
                if len(self._waiting) > MAX_WAITING:
                    await asyncio.sleep(AGAIN_S / 20)
                    continue
                for one in await consumer.fetch(FETCH, FETCH_S):
                    self._receive(one)
            except NothingError:
                continue
            except Exception as error:
                log.debug("nothing comes from the hub: %s", error)
                await asyncio.sleep(AGAIN_S)

    def _receive(self, received: Any) -> None:
        about = received.metadata
        sequence, sent_s = about.sequence.stream, about.timestamp.timestamp()
        # (what was said last of all was said just now; what comes again to a new controller may be old)
        self._newest_s = max(self._newest_s, sent_s)
        at_s = self._clock() - (self._newest_s - sent_s)
        if sequence <= self._delivered:
            return
        self._delivered = sequence
        agent = received.subject.rpartition(".")[2]
        self._waiting.append((Message(agent, sequence, received.reply), received.data, sent_s, at_s))

    def _shipment(self, agent: str, data: bytes) -> Shipment | None:
        """What an agent has sent, if it is what agents send."""
        try:
            shipment = decode_shipment(data)
            if shipment.agent != agent:
                raise SftriageError("it says that it is another's")
        except SftriageError as error:
            if agent not in self.refused:
                log.warning("a message of host %s is not taken: %s", agent, error)
            self.refused[agent] = self.refused.get(agent, 0) + 1
            return None
        return shipment
