"""A host's end of the fleet over the hub: ships the agent's steps and reports, and passes orders to the agent.

It reads the rings only once the previous rows are on the hub, so at most one reading is in memory. During an outage the
rings hold new steps, and count those that they overwrite as missed. A hub that has lost its data gets again what the
rings still hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sftriage.base.loops import Backoff, LogOnce, Loop
from sftriage.errors import CaptureError, SftriageError
from sftriage.fleet.hub import Hub, HubError, LogLeader, Subjects, token
from sftriage.fleet.transfers import CountedFile, HostCaptures, StoredBeforeError, Transfer
from sftriage.fleet.wire import (
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    HangQuery,
    Incarnation,
    Orders,
    RunName,
    Shipment,
    decode_orders,
    decode_query,
    encode,
    encode_evidence,
    fitting,
    parts,
)
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, Report, WantedCapture
from sftriage.model.ends import HostEnds
from sftriage.words.verdicts import size

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.object_store import ObjectStore

    from sftriage.agent.agent import Agent

log = logging.getLogger("sftriage")

SHIP_S, POLL_S, READ_S = 1.0, 0.25, 5.0  # how often to send messages, to take a turn, and to read the orders
RANKS_A_SECOND, LONGEST_SHIP_S = 8192, 2.5  # a job of more ranks ships less often, see `ship_s`
PUBLISH_S, AGAIN_S = 5.0, 1.0
SLOWEST_BYTES_PER_S = 32 << 10  # on a slower link, a message is sent again
REPORT_AGAIN_S = 10.0  # report the end of a capture again if the order still stands after this long
REWOUND_ROWS = 1 << 20  # steps, of all ranks of a job, to ship again to a hub that has lost them
MAX_REPORTS = 32
LAST_ANSWER_S = 6.0  # how long to wait for captures in progress once the job has ended here
SEND_AGAIN_S, OBJECT_S = 1.0, 600.0
FULL = 10077  # the hub's error code for a full bucket
SLACK_BYTES = 1 << 20  # space that the hub needs in a bucket beside the bytes of traces
LOG_AFTER_S = 20.0  # log that the hub is away after this long
MAX_MARGIN_S = 60.0  # of the hub's clock, where it has not answered yet
NO_GENERATION = -1  # of a process that is gone


def ship_s(world_size: int) -> float:
    """Seconds between messages of an agent; a message costs the controller little more with more steps in it."""
    return min(max(SHIP_S, SHIP_S * world_size / RANKS_A_SECOND), LONGEST_SHIP_S)


class HostEnd:
    """Ships an agent's data and passes orders to it, in threads of its own between `start` and `close`.

    It closes ``agent`` and ``hub``. A file beside the captures notes each before it begins, so that none begins twice.
    """

    def __init__(
        self,
        agent: Agent,
        hub: Hub,
        places: Subjects,
        name: str,
        boot_id: str,
        rings_id: str,
        kept: HostCaptures,
        log_leader: LogLeader,
    ) -> None:
        self._agent, self._hub, self._places, self._kept = agent, hub, places, kept
        self._name, self._rings_id = name, rings_id
        self._token, self._boot_id, self._process = token(name), boot_id, secrets.token_hex(8)
        begun = self._begun_file = kept.directory / "begun"
        self._log_leader, self._logged_away, self._stores = log_leader, False, True
        self._begun_before = frozenset(begun.read_text(encoding="ascii").split()) if begun.exists() else frozenset()
        self._begun = set(self._begun_before)
        self._orders: Orders | None = None
        self._reports: deque[Report] = deque()
        # Queries about the GPUs of some ranks, and the subjects for the answers.
        self._gpu_requests: deque[tuple[tuple[int, ...], str]] = deque(maxlen=16)
        # The newest query about a hang, and the parts of the answer to the last one, by its token and details.
        self._hang_requests: deque[tuple[HangQuery, str]] = deque(maxlen=1)
        self._evidence: tuple[tuple[str, tuple[int, ...]] | None, list[bytes]] = None, []
        # Messages to send: at most one reading of the rings.
        self._outbox: deque[Shipment] = deque()
        self._wake = asyncio.Event()
        self._sent_s, self._every_s = -LONGEST_SHIP_S, SHIP_S
        self._sending = 0
        # The connection on which the hub last had all of its data, its last message in the stream, and when its
        # buckets were made; and whether it has lost data, which it has to get again.
        self._known_s: float | None = None
        self._sequence, self._lost = 0, False
        self._kept_since: datetime | None = None
        self._away_since_s = time.monotonic()
        self._log_once = LogOnce(log)
        # Captures refused because their begin could not be noted; the final reports of others, with their times.
        self._refused: set[str] = set()
        self._has_read = False
        self._reported: dict[str, tuple[Report, float]] = {}
        # When the host's part of the job ended, and whether that was reported.
        self._over_s, self._over_reported = float("inf"), False
        self._ends: HostEnds | None = None
        # The shortest time in which the hub has answered.
        self._answered_s = float("inf")
        # When a transfer last made progress.
        self._moved_s = 0.0
        self._loop = Loop(
            *("host", self.turn, POLL_S),
            failing=f"host {self._name}: a turn of the agent failed",
            backoff=Backoff(POLL_S, POLL_S),
        )

    def start(self) -> None:
        """Begin; waits in the background for a hub that cannot be reached."""
        self._hub.start(self._talk())
        self._loop.start()

    @property
    def broken(self) -> tuple[str, ...] | None:
        """How the job broke, in sentences of the controller; None until it has judged that."""
        return None if self._orders is None else self._orders.broken

    def restarted(self, ends: HostEnds) -> None:
        """Send how the ranks here ended, once: they have restarted."""
        self._ends = fitting(ends)

    def finish(self, patience_s: float, ends: HostEnds | None = None) -> bool:
        """Send what is left, and that the job has ended here; return whether in time, which progress extends."""
        self._ends = None if ends is None else fitting(ends)
        self._over_s = time.monotonic()
        while not self._over_reported and time.monotonic() < max(self._over_s, self._moved_s) + patience_s:
            time.sleep(POLL_S / 5)
        return self._over_reported

    def close(self) -> None:
        """Cancel captures in progress, and close the agent and the hub."""
        # (a turn may be waiting for a disk that hangs)
        self._loop.stop(LAST_ANSWER_S)
        self._hub.close()
        self._agent.close()

    def turn(self) -> None:
        """Pass orders to the agent, take its reports, and fill the outbox if it is empty and a message is due."""
        orders = self._orders
        # (the host's ranks are unknown before the first reading)
        if orders is not None and self._has_read:
            captures = [self._resolved(capture) for capture in orders.captures]
            self._agent.want([capture for capture in captures if capture.request.capture_id not in self._refused])
            self._report_again({capture.request.capture_id: capture.heard for capture in orders.captures})
            if orders.switches:
                self._agent.switch(orders.switches)
        for report in self._agent.reports():
            self._report(report)
        if self._gpu_requests and (found := self._agent.gpus(self._gpu_requests[0][0])) is not None:
            self._hub.start(self._hub.client.publish(self._gpu_requests.popleft()[1], encode(found)))
        if self._hang_requests:
            self._gather(*self._hang_requests[0])
        self._log_if_away()
        self._every_s = ship_s(max((info.world_size for info in self._agent.infos), default=0))
        if self._lost:
            # Read the rings again, under a new process id: steps repeated by a known process would be dropped.
            self._agent.rewind(REWOUND_ROWS // max((info.world_size for info in self._agent.infos), default=1))
            self._process = secrets.token_hex(8)
            self._outbox.clear()
            self._lost = False
        soon = self._reports or time.monotonic() >= self._over_s
        if not self._outbox and time.monotonic() >= self._sent_s + (SHIP_S if soon else self._every_s):
            self._fill()

    def _gather(self, query: HangQuery, reply: str) -> None:
        found = self._agent.hang_evidence(query.token, query.detail)
        if found is not None:
            self._evidence = (query.token, query.detail), encode_evidence(found)
            # (a newer query may have come)
            with contextlib.suppress(ValueError):
                self._hang_requests.remove((query, reply))
            self._hub.start(self._answer_part(query, reply))

    async def _answer_part(self, query: HangQuery, reply: str) -> None:
        about, some = self._evidence
        if about == (query.token, query.detail) and query.part < len(some):
            await self._hub.client.publish(reply, some[query.part])

    def _resolved(self, wanted: WantedCapture) -> WantedCapture:
        """An order in the host's own count of starts; a capture that an earlier agent has begun is resumed."""
        capture_id = wanted.request.capture_id
        if capture_id in self._begun_before:
            wanted = replace(wanted, resumed=True)
        elif capture_id not in self._begun and not wanted.resumed:
            self._note_begun(wanted.request)
        if wanted.process is None:
            return wanted
        starts = (info.attempt for info in self._agent.infos if Incarnation.of(self._boot_id, info) == wanted.process)
        return replace(wanted, generation=next(starts, NO_GENERATION))

    def _note_begun(self, request: CaptureRequest) -> None:
        """Note that a capture begins; refuse it if that fails, since the next agent might begin it again."""
        capture_id = request.capture_id
        try:
            with self._begun_file.open("a", encoding="ascii") as file:
                # (a full disk may have left part of a line)
                file.write(f"\n{capture_id}\n")
            self._begun.add(capture_id)
        except OSError as error:
            if capture_id not in self._refused:
                self._refused.add(capture_id)
                why = f"cannot record on {self._name} that it begins: {error.strerror}"
                self._report(Report(CaptureResult(capture_id, request.rank, "refused", why)))

    def _report(self, report: Report) -> None:
        if report.result.state == "stored":
            self._sending += 1
            self._hub.start(self._send(report))
        else:
            self._queue(report)

    def _queue(self, report: Report) -> None:
        if report.result.state in ENDED:
            self._reported[report.result.capture_id] = report, time.monotonic()
        self._reports.append(report)

    def _report_again(self, wanted: Mapping[str, bool]) -> None:
        """Report ended captures again whose orders still stand, unless the controller has their report."""
        for capture_id, (report, reported_s) in list(self._reported.items()):
            if capture_id not in wanted:
                del self._reported[capture_id]
            elif wanted[capture_id] or report in self._reports:
                continue
            elif time.monotonic() > reported_s + REPORT_AGAIN_S:
                del self._reported[capture_id]
                self._report(report)

    def _fill(self) -> None:
        # (an order that still stands may be of a capture whose end the controller does not know yet)
        grace_s = LAST_ANSWER_S if self._orders is not None and self._orders.captures else 0.0
        over = time.monotonic() >= self._over_s + grace_s and not self._sending
        found, self._has_read = self._agent.rows(), True
        newest = max((info.attempt for info in self._agent.infos), default=0)
        some = [
            part
            for rows in found
            # (rings of earlier starts exist until the job ends)
            if rows.generation == newest or len(rows.steps) or len(rows.device_steps or ())
            for part in parts(rows)
        ]
        reports = tuple(self._reports.popleft() for _ in range(min(len(self._reports), MAX_REPORTS)))
        counts = self._agent.telemetry()
        counts = replace(counts, problems=dict(list(counts.problems.items())[:MAX_ITEMS]))
        # (the status shows which start is the newest)
        status = self._agent.statuses()
        alone = Shipment(self._token, self._boot_id, self._process, status=status, counts=counts)
        last = msgspec.structs.replace(
            alone,
            rows=tuple(some[-1:]),
            reports=reports,
            over=over and not self._reports,
            switches=tuple(self._agent.switches()[:MAX_ITEMS]),
            ends=None if self._ends is None else replace(self._ends, margin_s=min(self._answered_s, MAX_MARGIN_S)),
        )
        if self._over_s == float("inf"):
            self._ends = None
        self._outbox.extend(msgspec.structs.replace(alone, rows=(rows,)) for rows in some[:-1])
        self._outbox.append(last)
        self._hub.soon(self._wake.set)
        if last.over:
            while self._outbox and not self._lost and not self._loop.stopping.wait(POLL_S / 5):
                pass
            self._over_reported = not self._outbox

    def _log_if_away(self) -> None:
        now_s = time.monotonic()
        connected = self._hub.connected_s is not None
        if connected and self._stores:
            if self._logged_away:
                log.warning("the hub is back after %.0f s", now_s - self._away_since_s)
                self._logged_away = False
            self._log_leader.release()
            self._away_since_s = now_s
        elif now_s > self._away_since_s + LOG_AFTER_S and not self._logged_away and self._log_leader.should_log():
            self._logged_away = True
            problem = self._hub.stores_nothing() if connected else self._hub.unreachable()
            log.warning("%s The job keeps running; its steps wait in its rings", problem)

    async def _talk(self) -> None:
        while True:
            try:
                await self._hub.connect()
                break
            except HubError as error:
                self._log_problem(str(error))
                await asyncio.sleep(READ_S)
        await self._hub.client.subscribe(self._places.down(self._token), cb=self._heard)
        await self._hub.client.subscribe(self._places.query(self._token), cb=self._queried)
        await asyncio.gather(self._publish(), self._read_orders())

    async def _publish(self) -> None:
        while True:
            since_s = self._hub.connected_s
            if self._lost:
                await asyncio.sleep(POLL_S)
                continue
            if self._known_s != since_s:
                # (an answer of the hub shows whether it still has earlier messages)
                sent = await self._sent(Shipment(self._token, self._boot_id, self._process))
                if sent and await self._checked_loss():
                    self._known_s = since_s
                else:
                    await asyncio.sleep(AGAIN_S)
                continue
            if not self._outbox:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), 2 * self._every_s)
                except (TimeoutError, asyncio.TimeoutError):  # (two classes before Python 3.11)
                    # The agent is busy with a trace, but alive.
                    await self._sent(Shipment(self._token, self._boot_id, self._process))
                continue
            if await self._sent(self._outbox[0]):
                self._outbox.popleft()
                self._sent_s = time.monotonic()
            else:
                await asyncio.sleep(AGAIN_S)

    async def _checked_loss(self) -> bool:
        """Check whether the hub has lost messages; return whether the check succeeded."""
        # The stream's numbers do not show a loss if enough messages have come since. The creation time of the bucket
        # of orders does: it is lost together with the stream, and an agent may read it.
        try:
            created = (await self._hub.js.stream_info(f"KV_{self._places.want}")).created
        except Exception as error:
            log.debug("cannot find out what the hub has: %s", error)
            return False
        self._lost = self._lost or self._kept_since not in (None, created)
        self._kept_since = created
        return True

    async def _sent(self, message: Shipment) -> bool:
        """Send a message; return whether the hub certainly has it. Sending it again is harmless."""
        since_s = self._hub.connected_s
        if since_s is None:
            return False
        # (set on sending: an outage may have delayed it)
        data = encode(msgspec.structs.replace(message, mono_ns=time.monotonic_ns(), rings_id=self._rings_id))
        if len(data) > MAX_MESSAGE_BYTES:
            self._log_problem(f"a message of more than {MAX_MESSAGE_BYTES} bytes cannot be sent", "size")
            return True
        patience_s, sent_s = PUBLISH_S + len(data) / SLOWEST_BYTES_PER_S, time.monotonic()
        sending = asyncio.ensure_future(self._hub.js.publish(self._places.up(self._token), data, timeout=patience_s))
        try:
            # (no answer comes over a connection that has broken)
            while not sending.done() and self._hub.connected_s == since_s:
                await asyncio.wait({sending}, timeout=POLL_S)
            if not sending.done():
                return False
            sequence = sending.result().seq
            self._answered_s = min(self._answered_s, time.monotonic() - sent_s)
            self._lost, self._sequence = self._lost or sequence <= self._sequence, sequence
            self._stores = True
        except Exception as error:
            self._hub.problem, self._stores = str(error) or type(error).__name__, False
            log.debug("not sent", exc_info=True)
            return False
        finally:
            sending.cancel()
        return True

    async def _read_orders(self) -> None:
        """Read the orders regularly: a change may have been published while the connection was down."""
        from nats.js.errors import KeyNotFoundError

        while True:
            again_s = READ_S
            try:
                bucket = await self._hub.js.key_value(self._places.want)
                self._take((await bucket.get(self._token)).value or b"")
            except KeyNotFoundError:
                # The orders expired because there was no controller for a while: carry on with the last ones.
                pass
            except Exception as error:
                log.debug("cannot read the orders: %s", error)
                again_s = AGAIN_S
            await asyncio.sleep(again_s)

    def _moved(self, report: Report) -> None:
        self._moved_s = time.monotonic()
        self._reports.append(report)

    async def _heard(self, message: Msg) -> None:
        self._take(message.data)

    async def _queried(self, message: Msg) -> None:
        try:
            query = decode_query(message.data)
        except SftriageError as error:
            self._log_problem(f"cannot read a query of the controller: {error}", "query")
            return
        if not message.reply:
            return
        if not isinstance(query, HangQuery):
            self._gpu_requests.append((query, message.reply))
        elif self._evidence[0] == (query.token, query.detail):
            await self._answer_part(query, message.reply)
        else:
            self._hang_requests.append((query, message.reply))

    def _take(self, data: bytes) -> None:
        try:
            orders = decode_orders(data)
        except SftriageError as error:
            self._log_problem(f"cannot read the controller's orders: {error}", "orders")
            return
        if orders.agent not in ("", self._token):
            self._log_problem(f"ignored orders for {orders.agent}", "another's")
            return
        # (a controller that has lost its lease may not know it yet)
        if self._orders is None or orders.epoch >= self._orders.epoch:
            self._orders = orders

    async def _send(self, report: Report) -> None:
        """Bring a stored capture to the controller or to the store, and report it, or why that failed."""
        run = RunName() if self._orders is None else self._orders.run
        loop, capture_id, where = asyncio.get_running_loop(), report.result.capture_id, ""
        try:
            manifest, files = await loop.run_in_executor(None, self._kept.manifest, capture_id, run)
            where = f" in {next(iter(files.values())).parent}" if files else ""
            total_bytes = sum(path.stat().st_size for path in files.values())
            copying = Transfer(report.result, f"uploading from {self._name}:", total_bytes, self._moved)
            elsewhere = await loop.run_in_executor(None, self._kept.copied, capture_id, run, copying)
            # (of a capture in a store, only the manifest goes through the hub)
            some = {} if elsewhere else files
            sending = Transfer(report.result, f"sending from {self._name}:", total_bytes, self._moved)
            while not await self._put(capture_id, manifest, some, sending):
                await asyncio.sleep(SEND_AGAIN_S)
                orders = self._orders
                if orders is not None and all(capture.request.capture_id != capture_id for capture in orders.captures):
                    raise CaptureError("the controller no longer wants it")
            report = replace(report, elsewhere=elsewhere)
        except StoredBeforeError as error:
            report = replace(report, result=replace(report.result, state="refused", detail=str(error)))
        except Exception as error:
            why = f"it is stored on {self._name}{where}, but could not be sent: {error}"
            report = replace(report, result=replace(report.result, state="failed", detail=why))
        finally:
            self._sending -= 1
        self._queue(report)

    async def _put(self, capture_id: str, manifest: bytes, files: dict[str, Path], transfer: Transfer) -> bool:
        """Put a capture on the hub; return False to retry later."""
        from nats.js.errors import APIError

        if self._hub.connected_s is None:
            return False
        bucket, sent = self._places.traces, []
        try:
            traces = await _outgoing(self._hub.js, bucket)
            if files:
                most_bytes = (await traces.status()).stream_info.config.max_bytes or -1
                size_bytes = sum(path.stat().st_size for path in files.values())
                if 0 <= most_bytes < size_bytes + SLACK_BYTES:
                    # It will never fit.
                    why = f"its {size(size_bytes)} exceed what the hub takes ({size(most_bytes - SLACK_BYTES)})"
                    raise CaptureError(f"{why}: give the job a --store, or capture fewer steps")
            for name, path in files.items():
                with path.open("rb") as file:
                    whole = traces.put(f"{capture_id}/{name}", CountedFile(file, transfer))
                    sent.append(await asyncio.wait_for(whole, OBJECT_S))
            await traces.put(f"{capture_id}/", manifest)
        except APIError as error:
            if error.err_code == FULL:
                transfer.report("waiting for room on the hub, which is full of other traces")
                # (remove the sent part: two partial captures could block each other for ever)
                for info in sent:
                    with contextlib.suppress(Exception):
                        await self._hub.js.purge_stream(f"OBJ_{bucket}", subject=f"$O.{bucket}.C.{info.nuid}")
            elif error.code != 404 and (error.code or 500) < 500:
                raise
            return False
        except Exception as error:
            lost = isinstance(error, (TimeoutError, ConnectionError))
            if isinstance(error, CaptureError) or (isinstance(error, OSError) and not lost):
                raise
            log.debug("a trace was not sent", exc_info=True)
            return False
        return True

    def _log_problem(self, problem: str, kind: str = "") -> None:
        # (under SLURM, the logs of all hosts go to one output)
        self._log_once("host %s: %s", self._name, problem, key=kind or problem)


async def _outgoing(js: JetStreamContext, bucket: str) -> ObjectStore:
    from nats.js.errors import ObjectNotFoundError
    from nats.js.object_store import ObjectStore

    class Outgoing(ObjectStore):
        async def get_info(self, *_: Any) -> Any:
            raise ObjectNotFoundError

    await js.stream_info(f"OBJ_{bucket}")
    return Outgoing(bucket, f"OBJ_{bucket}", js)
