"""The captures that are wanted of a fleet: written down for each agent, followed to their end, and given up in time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from sftriage.fleet.hub import Hub, Subjects
from sftriage.fleet.incoming import AgentMessage, Refusals
from sftriage.fleet.lease import Lease
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import Incarnation, Orders, encode
from sftriage.mitigate.switching import Setting
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, CaptureState, Report, WantedCapture

log = logging.getLogger("sftriage")

REFRESH_S = 20.0
"""How often orders are written again, so that they do not expire."""
BEGIN_GRACE_S = 15.0
"""How long after its time a capture's host may take to report that it has begun."""
END_GRACE_S = 480.0
"""How long after its time-box a capture's host may take to report how it ended."""
UNHEARD_S = 60.0
"""How long a controller that takes over waits for the host of a capture that it resumes."""
LOOK_S, AGAIN_S, CLOSE_S = 0.05, 1.0, 2.0

Place = Callable[[WantedCapture], "tuple[str, Incarnation | None]"]
"""The agent that a capture is asked of, "" where none has its rank; and which process that has to be, if one has to."""


@dataclass(slots=True)
class _Asked:
    """A capture that is wanted since ``at_s``, and of which agent: "" while none that has its rank is heard of.

    ``begin_s`` is None once that has said anything of it.
    """

    request: CaptureRequest
    agent: str
    of: Incarnation | None
    at_s: float
    begin_s: float | None
    end_s: float
    ended: bool = False


class CaptureOrders:
    """The captures that are wanted, and what has become of them. The hub's thread writes the orders.

    ``holds`` says whether steps that came before a message are still held back, ``gone`` whether the job has started
    again without an agent's host since that had this process.
    """

    def __init__(
        self,
        hub: Hub,
        places: Subjects,
        lease: Lease,
        place: Place,
        holds: Callable[[AgentMessage], bool],
        fetching: Fetching,
        gone: Callable[[str, Incarnation | None], bool],
        clock: Callable[[], float],
        refusals: Refusals,
    ) -> None:
        self._refusals = refusals
        self._hub, self._places, self._lease, self._clock = hub, places, lease, clock
        self._place, self._holds, self._fetching, self._gone = place, holds, fetching, gone
        self._asked: dict[str, _Asked] = {}
        self._begun = False
        # What is to be written of each agent, beside what that says; and what was written when.
        self._lock = threading.Lock()
        self._to_write: dict[str, tuple[bytes, bytes]] = {}
        self._written: dict[str, tuple[bytes, float]] = {}
        # Agents of which nothing is wanted.
        self._idle: set[str] = set()
        # Reports with their messages, which are settled once what was told is on record.
        self._reports: deque[tuple[Report, AgentMessage | None, bool]] = deque()
        self._told: list[AgentMessage] = []
        self._told_before: list[AgentMessage] = []
        # Captures that are on their way here, and those that have come.
        self._under_way: set[str] = set()
        self._fetched: set[str] = set()
        # Of the former, those that the hub has lost: their hosts send them again.
        self._missing: set[str] = set()
        hub.start(self._write())

    @property
    def busy(self) -> bool:
        """Whether there is something to be told yet."""
        return bool(self._under_way or self._reports)

    def want(
        self,
        wanted: Sequence[WantedCapture],
        over: Mapping[str, bool],
        switches: Mapping[str, Mapping[str, Setting]] = {},
    ) -> None:
        """See `Fleet.want`; for each agent, whether the job is ``over`` there, and the settings of its groups.

        What was reported before the last call is on record by now.
        """
        self._begun, now_s = True, self._clock()
        for message in self._told_before:
            message.reports -= 1
        self._told_before, self._told = self._told, []
        # (of most agents nothing is wanted, and that is written already)
        agents = (agent for agent in over if agent not in self._idle or agent in switches)
        orders: dict[str, list[WantedCapture]] = {agent: [] for agent in agents}
        for one in wanted:
            asked = self._asked.get(one.request.capture_id) or self._ask(one, now_s)
            if not asked.agent:
                asked.agent, asked.of = self._place(one)
            if asked.ended:
                continue
            if one.request.capture_id in self._under_way:
                # (that ends by itself: nothing comes to be here that was given up)
                heard = one.request.capture_id not in self._missing
                orders.setdefault(asked.agent, []).append(replace(one, process=asked.of, heard=heard))
            elif asked.begin_s is not None and now_s > asked.begin_s:
                self._end(asked, "expired", "its host has not begun it in time")
            elif now_s > asked.end_s:
                self._end(asked, "expired", "nothing was heard of it from its host, long past its time-box")
            elif over.get(asked.agent) and not self._pending(asked):
                self._end(asked, "failed", "the job ended on its host before it did")
            elif not asked.agent and now_s > asked.at_s + UNHEARD_S:
                self._end(asked, "failed", "nothing is heard any more of the host that it was asked of")
            elif asked.agent and self._gone(asked.agent, asked.of) and not self._pending(asked):
                self._end(asked, "failed", "its host is gone, and the job has started again without it")
            elif asked.agent:
                orders.setdefault(asked.agent, []).append(replace(one, process=asked.of))
        for agent, some in orders.items():
            self._document(agent, some, switches.get(agent, {}))
        self._idle = {agent for agent in over if not (orders.get(agent) or agent in switches)}

    def heard(self, report: Report, message: AgentMessage) -> None:
        """A report has come."""
        message.reports += 1
        # (before the first look it is not known what an earlier controller has asked for)
        self._reports.append((report, message, self._begun))

    def reports(self) -> list[Report]:
        """See `Fleet.reports`."""
        if not self._begun:
            # Which captures are gone on with is not known yet.
            return []
        told = []
        for _ in range(len(self._reports)):
            report, message, known = self._reports.popleft()
            if message is not None and self._holds(message):
                # Its steps are told first: whether the fault was in them is asked at once.
                self._reports.append((report, message, known))
                continue
            asked = self._asked.get(report.result.capture_id)
            why = "" if message is None else _unfit(asked, report, message.agent, known)
            if message is not None and why:
                self._refusals.note(message.agent, why)
            elif asked is not None and not asked.ended:
                if report.result.state == "stored" and report.result.capture_id not in self._fetched:
                    self._fetch_once(report, message)
                    continue
                asked.begin_s, asked.ended = None, report.result.state in ENDED
                told.append(report)
            if message is not None:
                self._told.append(message)
        return told

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

    def _ask(self, wanted: WantedCapture, now_s: float) -> _Asked:
        request, begin_s = wanted.request, None
        if wanted.expires_s is not None:
            begin_s = now_s + wanted.expires_s + BEGIN_GRACE_S
        end_s = now_s + (wanted.expires_s or 0.0) + request.max_seconds + END_GRACE_S
        asked = self._asked[request.capture_id] = _Asked(request, *self._place(wanted), now_s, begin_s, end_s)
        # (of one that is gone on with, the host may be yet to be heard of by this controller)
        if not asked.agent and not wanted.resumed:
            self._end(asked, "failed", f"no host of the job has rank {request.rank}")
        return asked

    def _end(self, asked: _Asked, state: CaptureState, why: str) -> None:
        result = CaptureResult(asked.request.capture_id, asked.request.rank, state, why)
        self._reports.append((Report(result), None, True))

    def _pending(self, asked: _Asked) -> bool:
        """Whether a report of it waits, or its files are on their way."""
        capture_id = asked.request.capture_id
        told = any(report.result.capture_id == capture_id for report, *_ in list(self._reports))
        return told or capture_id in self._under_way

    def _fetch_once(self, report: Report, message: AgentMessage | None) -> None:
        capture_id = report.result.capture_id
        if capture_id not in self._under_way:
            self._under_way.add(capture_id)
            self._hub.start(self._fetch(report, message))
            return
        self._missing.discard(capture_id)
        if message is not None:
            self._told.append(message)

    async def _fetch(self, report: Report, message: AgentMessage | None) -> None:
        report = await self._fetching.fetched(
            *(self._hub, self._places.traces, report),
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
                told = Orders(self._lease.epoch, tuple(orders), agent=agent, run=self._fetching.run, switches=switches)
                self._to_write[agent] = same, encode(told)

    async def _write(self) -> None:
        want = None
        while not self._lease.lost:
            await asyncio.sleep(LOOK_S)
            with self._lock:
                some = list(self._to_write.items())
            for agent, (same, data) in some:
                try:
                    want = want or await self._hub.js.key_value(self._places.want)
                    await want.put(agent, data)
                except Exception as error:
                    log.debug("what is wanted was not written: %s", error)
                    await asyncio.sleep(AGAIN_S)
                    continue
                with self._lock:
                    self._written[agent] = same, self._clock()
                    if self._to_write[agent][1] == data:
                        del self._to_write[agent]


def _unfit(asked: _Asked | None, report: Report, agent: str, known: bool) -> str:
    if asked is None:
        return f"it reports on capture {report.result.capture_id}, which nobody asked for" if known else ""
    if asked.agent not in ("", agent):
        return f"it reports on a capture that was asked of host {asked.agent}"
    if asked.request.rank != report.result.rank:
        return f"it reports on a capture of rank {asked.request.rank} as one of rank {report.result.rank}"
    return ""
