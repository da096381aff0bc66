"""``fleet_agents.py JSON``: some agents of a made-up job in a process, which tell the hub what agents of real hosts do.

Each has a connection of its own, and a moment of the second at which it ships: the steps that have ended by then, what
its ranks are doing, and its reports, in the format of `sftriage.fleet.wire`, waiting for the hub's acknowledgement as
`sftriage.fleet.shipping.HostEnd` does. It listens to orders, polls them too, and reports each capture as failed.

It prints ``ready`` once all are connected, begins at the moment that it reads, and prints what it counted at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError

from bench.fleet_job import BOOTED_S, S_NS, SCHEMA, Job, Shape
from sftriage.fleet.hub import HubAddress, Subjects, token
from sftriage.fleet.shipping import PUBLISH_S, READ_S, SHIP_S, ship_s
from sftriage.fleet.wire import Shipment, decode_orders, encode
from sftriage.model.captures import CaptureResult, Report
from sftriage.model.windows import ReadCounts
from sftriage.trainer.layout import RingInfo
from sftriage.windows.rings import Rows

CONNECTING = 32
"""Agents that connect at the same time."""


@dataclass
class Seen:
    """What came of it: when an agent first saw each capture; how late messages were on the hub; and how many."""

    captures: dict[str, float] = field(default_factory=dict)
    late_s: list[float] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0


class Agent:
    def __init__(self, number: int, job: Job, places: Subjects, seen: Seen) -> None:
        self._job, self._places, self._seen = job, places, seen
        self._name, self._number = token(f"host-{number:05}"), number
        self._ranks = job.shape.ranks_of(number)
        self._told = Shipment(self._name, f"boot-{number}", secrets.token_hex(8))
        self._infos: list[RingInfo] = []
        self._until_s = float("inf")
        self._shipped = 0
        self._reports: list[Report] = []
        self._captures: set[str] = set()

    async def connect(self, address: HubAddress) -> None:
        self._client = Client()
        await self._client.connect(**address.options(), name=self._name, max_reconnect_attempts=-1, connect_timeout=30)
        self._js = self._client.jetstream(timeout=PUBLISH_S)
        await self._client.subscribe(self._places.down(self._name), cb=self._heard)

    async def work(self, until_s: float) -> None:
        self._infos, self._until_s = [self._info(rank) for rank in self._ranks], until_s
        # (spread evenly)
        every_s = ship_s(self._job.shape.ranks)
        phase_s = self._number * 0.618034 % 1.0 * every_s
        due_s = self._job.begin_s + phase_s
        look = asyncio.create_task(self._look(phase_s / every_s * READ_S))
        while due_s < until_s:
            await asyncio.sleep(max(0.0, due_s - time.time()))
            await self._ship()
            self._seen.late_s.append(time.time() - due_s)
            # (as late as it was: nothing is sent before what was sent last is acknowledged)
            due_s = max(due_s + (SHIP_S if self._reports else every_s), time.time())
        await asyncio.sleep(max(0.0, until_s - time.time()))
        look.cancel()
        await self._ship(over=True)

    async def close(self) -> None:
        await self._client.close()

    def _info(self, rank: int) -> RingInfo:
        job = self._job
        begun_ns = (round(BOOTED_S * S_NS), round(job.begin_s * S_NS))
        where = (rank, job.shape.ranks, rank - self._ranks.start, 0, "job", self._name, "", SCHEMA)
        return RingInfo(*where, *begun_ns, 1000 + rank, 77 * (1000 + rank), "C", True)

    async def _ship(self, *, over: bool = False) -> None:
        now_s, job, n_ranks = time.time(), self._job, self._job.shape.ranks
        # (all ranks of a job end with the same step)
        job.advance(min(now_s, self._until_s))
        first, last = self._shipped, len(job.ends_s)
        rows: tuple[Rows, ...] = ()
        if last:
            steps = job.steps(self._ranks, first, last) if last > first else job.steps(self._ranks, last - 1, last)[:0]
            wall_ns = round((job.begin_s - BOOTED_S) * S_NS)
            rows = (Rows(0, SCHEMA, n_ranks, {one.rank: one for one in self._infos}, steps, wall_ns=wall_ns),)
        reports, self._reports = tuple(self._reports), []
        shipment = Shipment(
            *(self._told.agent, self._told.boot_id, self._told.process, rows),
            status=None if over else job.status(self._infos, now_s),
            counts=ReadCounts(last * len(self._ranks)),
            reports=reports,
            over=over,
            mono_ns=round((now_s - job.begin_s + BOOTED_S) * S_NS),
        )
        message = encode(shipment)
        while True:
            with contextlib.suppress(Exception):
                await self._js.publish(self._places.up(self._name), message, timeout=PUBLISH_S)
                break
            await asyncio.sleep(SHIP_S)
        self._shipped = last
        self._seen.messages += 1
        self._seen.bytes += len(message)

    async def _look(self, phase_s: float) -> None:
        await asyncio.sleep(phase_s)
        while True:
            try:
                want = await self._js.key_value(self._places.want)
                self._take((await want.get(self._name)).value or b"")
            except KeyNotFoundError:
                pass
            except Exception as error:
                logging.debug("could not read the orders: %s", error)
            await asyncio.sleep(READ_S)

    async def _heard(self, message: Any) -> None:
        self._take(message.data)

    def _take(self, data: bytes) -> None:
        for order in decode_orders(data).captures:
            capture_id = order.request.capture_id
            if capture_id not in self._captures:
                self._seen.captures[capture_id] = time.time()
                self._captures.add(capture_id)
                result = CaptureResult(capture_id, order.request.rank, "failed", "a made-up agent has no profiler")
                self._reports.append(Report(result))


async def run(about: dict[str, Any]) -> None:
    shape, places, seen = Shape(**about["shape"]), Subjects.of(about["job_id"]), Seen()
    address = HubAddress(about["url"], Path(about["credentials"]))
    job = Job(shape, 0.0)
    numbers = range(about["first"], min(about["first"] + about["agents"], shape.agents))
    one_of = asyncio.Semaphore(CONNECTING)

    async def connected(agent: Agent) -> None:
        async with one_of:
            await agent.connect(address)

    agents = [Agent(number, job, places, seen) for number in numbers]
    await asyncio.gather(*map(connected, agents))
    print("ready", flush=True)
    job.begin_s = float(await asyncio.to_thread(sys.stdin.readline))
    await asyncio.gather(*(agent.work(job.begin_s + about["seconds"]) for agent in agents))
    ends_s = job.ends_s if about["first"] == 0 else []
    print(json.dumps({**vars(seen), "ends_s": ends_s}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*(agent.close() for agent in agents))


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
