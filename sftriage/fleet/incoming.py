"""Receives agents' messages from the hub's stream for `NatsFleet`: each step once, and when every rank has reached it.

The hub's thread reads messages, and the triage thread takes them in order. Each host ships about a second's steps at a
time, and a restarted agent ships again what it finds in the rings. A window leaves out a rank that is a window behind
the others, so steps that only some hosts have shipped are held for as long as the others may take.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sftriage.errors import SftriageError
from sftriage.fleet.hub import Lease, is_token, make_places, taken_up
from sftriage.fleet.wire import Incarnation, Shipment, decode_shipment
from sftriage.trainer.layout import MAX_COUNT
from sftriage.windows.decoding import StepArrays
from sftriage.windows.rings import Rows

log = logging.getLogger("sftriage")

MAX_WAITING, MAX_WAITING_BYTES = 8192, 256 << 20  # of messages in memory; others stay on the hub
MAX_NAMED = 16
FETCH, FETCH_S, AGAIN_S = 512, 0.25, 1.0
GATHER_S = 0.1  # a fetch costs as much for one message as for a hundred, here and on the hub


class Refusals:
    """Counts refused messages by agent, and logs the first of each. Agents beyond `MAX_NAMED` share a count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, agent: str, why: object) -> None:
        if not is_token(agent) or (agent not in self._counts and len(self._counts) >= MAX_NAMED):
            agent = "other names"
        if not self._counts[agent]:
            log.warning("refused a message of host %s: %s", agent, why)
        self._counts[agent] += 1

    def log_totals(self) -> None:
        if self._counts:
            counts = ", ".join(f"{number:,} messages of host {agent}" for agent, number in self._counts.items())
            log.warning("refused: %s", counts)

    @property
    def problems(self) -> Mapping[str, str]:
        return {f"messages of {agent}": f"{number} refused" for agent, number in self._counts.items()}


@dataclass(slots=True, eq=False)
class AgentMessage:
    """A message that is not acknowledged yet, because its ``rows`` or its number of ``reports`` are not settled.

    It was sent at ``sent_s`` on the hub's clock, and arrived at ``at_s`` on ours. ``reply`` is the subject that
    acknowledges it to the ``consumer`` that delivered it last.
    """

    agent: str
    sequence: int
    reply: str
    consumer: int = 0
    sent_s: float = 0.0
    at_s: float = 0.0
    rows: bool = False
    reports: int = 0


class Incoming:
    """Receives messages until the job has ``ended``; calls ``lost_all`` when the hub has lost its data."""

    def __init__(self, lease: Lease, lost_all: Callable[[], None], refusals: Refusals) -> None:
        self._hub, self._places, self._lease = lease.hub, lease.places, lease
        self._lost_all, self._refusals, self.ended = lost_all, refusals, False
        # Undecoded: if this thread decoded them, it would contend with the triage thread for every message.
        self._waiting: deque[tuple[AgentMessage, bytes]] = deque()
        self._waiting_bytes = 0
        # Positions continue after those of a stream that the hub has lost; `_before` is the offset.
        self._delivered = self._before = self._consumer = 0
        self._stream: object = None
        # Messages that are not settled.
        self._open: dict[int, AgentMessage] = {}
        self._hub.start(self._consume())

    @property
    def agents(self) -> set[str]:
        """The agents of waiting messages."""
        return {message.agent for message, _ in list(self._waiting)}

    def taken(self) -> Iterator[tuple[AgentMessage, Shipment | None]]:
        """The messages so far, in the order of the stream; invalid ones come without a shipment."""
        for _ in range(len(self._waiting)):
            message, data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            try:
                shipment = decode_shipment(data)
                if shipment.agent != message.agent:
                    raise SftriageError("it claims to be from another host")
                yield message, shipment
            except SftriageError as error:
                self._refusals.note(message.agent, error)
                yield message, None

    def settle(self, messages: Sequence[AgentMessage]) -> None:
        """Acknowledge messages, in the order of the stream, whose results are recorded."""
        for message in messages:
            self._open.pop(message.sequence, None)
        # (a new consumer knows nothing of earlier deliveries: a redelivered message is acknowledged with the next one)
        if messages and messages[-1].consumer == self._consumer and not self._lease.lost:
            self._hub.start(self._hub.client.publish(messages[-1].reply, b"+ACK"))

    async def _consume(self) -> None:
        from nats.errors import TimeoutError as NothingError
        from nats.js.errors import NotFoundError

        consumer, connected_s = None, None
        while not (self._lease.lost or self.ended):
            try:
                if consumer is None or connected_s != self._hub.connected_s:
                    # (this redelivers messages that were in transit when the connection broke)
                    connected_s = self._hub.connected_s
                    consumer = await self._take_up()
                if len(self._waiting) > MAX_WAITING:
                    await asyncio.sleep(AGAIN_S / 20)
                    continue
                fetched = await consumer.fetch(FETCH, FETCH_S)
                for message in fetched:
                    while self._waiting_bytes > MAX_WAITING_BYTES:
                        await asyncio.sleep(AGAIN_S / 20)
                    self._receive(message)
                if len(fetched) < FETCH:
                    await asyncio.sleep(GATHER_S)
            except NothingError:
                continue
            except Exception as error:
                log.debug("no messages from the hub: %s", error)
                consumer = None
                if isinstance(error, NotFoundError):
                    await self._make_again()
                await asyncio.sleep(AGAIN_S)

    async def _take_up(self) -> Any:
        stream = (await self._hub.js.stream_info(self._places.stream)).created
        if self._stream not in (None, stream):
            # The hub has lost the previous stream with its messages: numbers begin anew.
            self._before = self._delivered
        self._stream, self._consumer = stream, self._consumer + 1
        first = min(list(self._open), default=self._delivered + 1) - self._before
        return await taken_up(self._hub, self._places, max(1, first))

    async def _make_again(self) -> None:
        if self.ended:
            return
        log.warning("the hub lost its data of this job, and messages on their way; sftriage still watches the job")
        try:
            await make_places(self._hub, self._places, self._lease.run_id)
            self._lost_all()
        except Exception as error:
            log.debug("cannot create streams on the hub: %s", error)

    def _receive(self, received: Any) -> None:
        about = received.metadata
        sequence, sent_s = self._before + about.sequence.stream, about.timestamp.timestamp()
        if sequence <= self._delivered:
            if (known := self._open.get(sequence)) is not None:
                known.reply, known.consumer = received.reply, self._consumer
            return
        self._delivered = sequence
        agent = received.subject.rpartition(".")[2]
        message = AgentMessage(agent, sequence, received.reply, self._consumer, sent_s, time.monotonic())
        self._open[sequence] = message
        self._waiting_bytes += len(received.data)
        self._waiting.append((message, received.data))


_NEVER = -MAX_COUNT


class Deduplicator:
    """Remembers the last step of each process; counts ``steps`` passed on, and those ``missed`` between them."""

    def __init__(self) -> None:
        self.steps = self.missed = 0
        self._last_seq: dict[Incarnation, int] = {}

    def new(self, steps: StepArrays, of: Mapping[int, Incarnation]) -> StepArrays:
        """The steps, in any order, that were not passed on before; ``of`` has the process of each rank."""
        # (a rank mostly has a few steps: a plain loop is faster than numpy)
        before = {rank: self._last_seq.get(process) for rank, process in of.items()}
        new: list[bool] = []
        came: dict[int, list[int]] = {}
        for rank, seq in zip(steps.rank_B.tolist(), steps.seq_B.tolist(), strict=True):
            is_new = rank in before and seq > (before[rank] or 0)
            new.append(is_new)
            if is_new:
                came.setdefault(rank, []).append(seq)
        for rank, seqs in came.items():
            last, highest = before[rank], max(seqs)
            # (the steps before a process first shipped are not missed)
            first = min(seqs) if last is None else last + 1
            self.steps += len(seqs)
            self.missed += highest - first + 1 - len(seqs)
            self._last_seq[of[rank]] = highest
        return steps if all(new) else steps[np.array(new, dtype=np.bool_)]


class RowBuffer:
    """Holds rows back, for at most ``hold_s`` seconds, and releases those of an agent in the order of arrival."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: deque[_Held] = deque()
        self._generation = -1
        self._latest_R = np.zeros(0, dtype=np.int64)
        # Steps of the newest generation that `_latest_R` does not count yet.
        self._new: list[StepArrays] = []

    def add(self, rows: Rows, now_s: float) -> None:
        if rows.generation > self._generation:
            self._generation = rows.generation
            self._latest_R, self._new = np.full(rows.world_size, _NEVER), []
        if rows.generation == self._generation:
            self._new.append(rows.steps)
        self._held.append(_Held(now_s, rows, *_span(rows)))

    def due(self, now_s: float, away: Iterable[int] = ()) -> list[Rows]:
        """Remove and return the rows that are due; does not wait for ranks that are ``away``."""
        if self._new:
            rank_B = np.concatenate([steps.rank_B for steps in self._new])
            step_B = np.concatenate([steps.step_B for steps in self._new])
            here_B = rank_B < len(self._latest_R)
            np.maximum.at(self._latest_R, rank_B[here_B], step_B[here_B])
            self._new = []
        here_R = np.ones(len(self._latest_R), dtype=np.bool_)
        here_R[[rank for rank in away if rank < len(here_R)]] = False
        common = int(self._latest_R.min(initial=MAX_COUNT, where=here_R))
        due: list[Rows] = []
        held: deque[_Held] = deque()
        for waiting in self._held:
            rows = waiting.rows
            # (until all ranks of a generation have appeared, hosts may still ship steps of the previous one)
            is_due = waiting.last_step <= common != _NEVER
            if is_due or rows.generation < self._generation or now_s >= waiting.came_s + self._hold_s:
                due.append(rows)
            elif waiting.first_step > common or common == _NEVER:
                held.append(waiting)
            else:
                now, later = _split(rows, common)
                due.append(now)
                held.append(_Held(waiting.came_s, later, *_span(later)))
        self._held = held
        return due

    def holds(self, agent: str, position: int) -> bool:
        return any(waiting.rows.agent == agent and waiting.rows.position <= position for waiting in self._held)


class _Held(NamedTuple):
    came_s: float
    rows: Rows
    first_step: int
    last_step: int


def _span(rows: Rows) -> tuple[int, int]:
    """The first and last step, on either clock; rows without steps are due at once."""
    some = rows.steps.step_B.tolist() + ([] if rows.device_steps is None else rows.device_steps.step_B.tolist())
    return min(some, default=_NEVER), max(some, default=_NEVER)


def _split(rows: Rows, last_step: int) -> tuple[Rows, Rows]:
    """The rows up to a step, and those after it.

    The message's position, and the ranks whose device times are over, go with the second part: using the first part
    does not settle the message.
    """
    device = rows.device_steps
    upto_B = rows.steps.step_B <= last_step
    device_upto_B = np.zeros(0, dtype=np.bool_) if device is None else device.step_B <= last_step

    def part(upto: bool) -> Rows:
        return replace(
            rows,
            steps=rows.steps[upto_B == upto],
            device_steps=None if device is None else device[device_upto_B == upto],
        )

    return replace(part(True), device_over=(), position=rows.position - 1), part(False)
