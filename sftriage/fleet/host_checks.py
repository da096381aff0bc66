"""The hosts of a job report their checks to the first one before it starts, and that compares their clocks.

A host publishes its report where an agent ships steps, until the first host answers, and answers on the subject of
queries to an agent. So the permissions of a job suffice, and the hub stores nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from sftriage.base.bounds import bounded
from sftriage.fleet.hub import Hub, Subjects, is_token, token
from sftriage.fleet.wire import MAX_SECONDS, WireError, decoded, encode
from sftriage.model.checks import CheckResult, HostReport

AGAIN_S = 0.25
ANSWER_S = 2.0
"""How long a host may take to answer a query."""
BUSY_S = 60.0
"""How much longer a host waits for a first host that has queried its clock: that may still examine itself."""
CLOCK_QUERIES = 5
"""Queries for the clock of a host; the fastest counts."""
MAX_HOSTS = 1 << 14


class _Message(msgspec.Struct, frozen=True):
    """From a host its report, or the time on its clock; to a host a query for that, with the status once it may end."""

    report: HostReport | None = None
    time_ns: int = 0
    status: int | None = None


_MESSAGES = msgspec.msgpack.Decoder(_Message)


class HostReports:
    """The first host's side: collects ``reports``, by the token of the host's name."""

    def __init__(self, hub: Hub, places: Subjects) -> None:
        self._hub, self._places = hub, places
        self.reports: dict[str, HostReport] = {}
        self._found: set[str] = set()
        hub.call(self._begin(), ANSWER_S)

    def wait(self, enough: Callable[[], bool], until_s: float) -> None:
        """Wait until there are ``enough`` reports, or a time on the monotonic clock."""
        while not enough() and time.monotonic() < until_s:
            time.sleep(AGAIN_S / 5)

    def dismiss(self, status: int) -> None:
        """Let the hosts exit with this status. A host that does not answer exits by itself, with 1."""
        with suppress(Exception):
            self._hub.call(self._dismiss(status), 2 * ANSWER_S)

    async def _begin(self) -> None:
        await self._hub.client.subscribe(self._places.up(), cb=self._received)
        await self._hub.client.flush()

    async def _received(self, message: Any) -> None:
        agent = message.subject.rpartition(".")[2]
        if agent in self._found or not is_token(agent) or len(self._found) >= MAX_HOSTS:
            return
        try:
            report = decoded(message.data, _decode).report
        except WireError as error:
            wrong = CheckResult("versions", "wrong", str(error), "install the same release on all hosts")
            report = HostReport(agent, agent, None, (wrong,))
        if report is not None:
            self._found.add(agent)
            # (a query inside this callback would hold up the reports of other hosts)
            self._hub.start(self._compare_clocks(agent, report))

    async def _compare_clocks(self, agent: str, report: HostReport) -> None:
        best = float("inf"), 0.0
        for _ in range(CLOCK_QUERIES):
            with suppress(Exception):
                sent_ns = time.time_ns()
                answer = decoded((await self._query(agent, _Message())).data, _decode)
                here_ns = time.time_ns()
                ahead_s = (answer.time_ns - (sent_ns + here_ns) // 2) / 1e9
                best = min(best, ((here_ns - sent_ns) / 2e9, ahead_s))
        margin_s, ahead_s = best
        known = margin_s < ANSWER_S and abs(ahead_s) < MAX_SECONDS
        self.reports[agent] = replace(report, ahead_s=ahead_s, margin_s=margin_s) if known else report

    async def _dismiss(self, status: int) -> None:
        await asyncio.gather(
            *(self._query(agent, _Message(status=status)) for agent in self.reports), return_exceptions=True
        )

    def _query(self, agent: str, message: _Message) -> Any:
        return self._hub.client.request(self._places.query(agent), encode(message), timeout=ANSWER_S)


def report_in(hub: Hub, places: Subjects, report: HostReport, until_s: float) -> int | None:
    """Report to the first host, until it says with which status to exit; None if it does not in time."""
    host = _Host(hub, places, report, until_s)
    with suppress(Exception):
        hub.call(host.report(), max(0.0, until_s - time.monotonic()) + BUSY_S + ANSWER_S)
    return host.status


class _Host:
    def __init__(self, hub: Hub, places: Subjects, report: HostReport, until_s: float) -> None:
        self._hub, self._places, self._report, self._until_s = hub, places, report, until_s
        self._agent = token(report.host)
        self.status: int | None = None

    async def report(self) -> None:
        client = self._hub.client
        await client.subscribe(self._places.query(self._agent), cb=self._queried)
        while self.status is None and time.monotonic() < self._until_s:
            await client.publish(self._places.up(self._agent), encode(_Message(report=self._report)))
            await asyncio.sleep(AGAIN_S)
        await client.flush()

    async def _queried(self, message: Any) -> None:
        with suppress(WireError):
            query = decoded(message.data, _decode)
            await self._hub.client.publish(message.reply, encode(_Message(time_ns=time.time_ns())))
            if self.status is None:
                self._until_s, self.status = time.monotonic() + BUSY_S, query.status


def _decode(data: bytes) -> _Message:
    return bounded(_MESSAGES.decode(data))
