"""One host's end of a fleet: it ships what its agent has over the hub, and has the agent carry out orders.

Rows are read from the rings once those before them are on the hub, and not before: through an outage the rings hold
what comes, and what they overrun is counted as missed. No more is in memory than one reading of them. A hub that has
lost what it had gets again what the rings still hold.
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
from sftriage.fleet.transfers import CountedFile, HostCaptures, Transfer
from sftriage.fleet.wire import (
    MAX_MESSAGE_BYTES,
    MAX_TOLD,
    Incarnation,
    Orders,
    RunName,
    Shipment,
    decode_orders,
    decode_ranks,
    encode,
    parts,
)
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, Report, WantedCapture
from sftriage.words.verdicts import size

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext
    from nats.js.object_store import ObjectStore

    from sftriage.agent.agent import Agent

log = logging.getLogger("sftriage")

SHIP_S, POLL_S, LOOK_S = 1.0, 0.25, 5.0  # periods of messages, of turns, and of reading the orders
RANKS_A_SECOND, LONGEST_SHIP_S = 8192, 2.5  # a job of more ranks ships less often, see `ship_s`
PUBLISH_S, AGAIN_S = 5.0, 1.0
SLOWEST_BYTES_PER_S = 32 << 10  # on a slower link, a message is sent again
TELL_AGAIN_S = 10.0  # after which the end of a capture that is still wanted is reported again
REWOUND_ROWS = 1 << 20  # steps, over all ranks of a job, that are shipped again to a hub that has lost them
MAX_REPORTS = 32
LAST_ANSWER_S = 6.0  # patience with captures in progress once the job has ended here
SEND_AGAIN_S, OBJECT_S = 1.0, 600.0
FULL = 10077  # the hub's error where a bucket has no room
SLACK_BYTES = 1 << 20  # room that the hub needs in a bucket beside the bytes of traces
SAY_AFTER_S = 20.0  # how long the hub may be away before that is logged
NO_GENERATION = -1  # of a process that is gone


def ship_s(world_size: int) -> float:
    """Seconds between messages of an agent: the controller's cost of one depends little on its number of steps."""
    return min(max(SHIP_S, SHIP_S * world_size / RANKS_A_SECOND), LONGEST_SHIP_S)


class HostEnd:
    """Ships what an agent has, and carries out orders, in threads of its own between `start` and `close`.

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
        self._log_leader, self._logged_away = log_leader, False
        self._begun_before = frozenset(begun.read_text(encoding="ascii").split()) if begun.exists() else frozenset()
        self._begun = set(self._begun_before)
        self._orders: Orders | None = None
        self._reports: deque[Report] = deque()
        # Requests for what GPUs of some ranks show, and where the answers go.
        self._gpu_requests: deque[tuple[tuple[int, ...], str]] = deque(maxlen=16)
        # What is on its way: one reading of the rings at most.
        self._outbox: deque[Shipment] = deque()
        self._wake = asyncio.Event()
        self._sent_s, self._every_s = -LONGEST_SHIP_S, SHIP_S
        self._sending = 0
        # By which connection the hub was last known to have what it got, up to which message of its stream,
        # and since when it keeps things for the job; and whether it has lost that, and is to get it again.
        self._known_s: float | None = None
        self._sequence, self._lost = 0, False
        self._kept_since: datetime | None = None
        self._away_since_s = time.monotonic()
        self._log_once = LogOnce(log)
        # Captures refused, since their begin could not be noted; the reports on those that have ended, and when made.
        self._refused: set[str] = set()
        self._has_read = False
        self._reported: dict[str, tuple[Report, float]] = {}
        # From when on the host's part of the job is over, and whether that was reported.
        self._over_s, self._over_reported = float("inf"), False
        # When a trace has last moved.
        self._moved_s = 0.0
        self._loop = Loop(
            *("host", self.turn, POLL_S),
            failing=f"host {self._name}: a turn of the agent failed",
            backoff=Backoff(POLL_S, POLL_S),
        )

    def start(self) -> None:
        """Begin. A hub that cannot be reached is waited for."""
        self._hub.start(self._talk())
        self._loop.start()

    def finish(self, patience_s: float) -> bool:
        """Send what is left, and that the job has ended here; whether in time, which is extended while traces move."""
        self._over_s = time.monotonic()
        while not self._over_reported and time.monotonic() < max(self._over_s, self._moved_s) + patience_s:
            time.sleep(POLL_S / 5)
        return self._over_reported

    def close(self) -> None:
        """Let go of the agent and of the hub; what has not ended is called off."""
        # (it may be in the middle of something on a disk that hangs)
        self._loop.stop(LAST_ANSWER_S)
        self._hub.close()
        self._agent.close()

    def turn(self) -> None:
        """Do what is wanted, hear what has become of it, and fill the outbox once that is empty and it is time."""
        orders = self._orders
        # (before that it is not known which ranks are there)
        if orders is not None and self._has_read:
            wanted = [self._wanted(one) for one in orders.captures]
            self._agent.want([one for one in wanted if one.request.capture_id not in self._refused])
            self._report_again({one.request.capture_id: one.heard for one in orders.captures})
            if orders.switches:
                self._agent.switch(orders.switches)
        for report in self._agent.reports():
            self._report(report)
        if self._gpu_requests and (found := self._agent.gpus(self._gpu_requests[0][0])) is not None:
            self._hub.start(self._hub.client.publish(self._gpu_requests.popleft()[1], encode(found)))
        self._log_if_away()
        self._every_s = ship_s(max((info.world_size for info in self._agent.infos), default=0))
        if self._lost:
            # The rings are read again, as by another process: older steps of the same one would be passed over.
            self._agent.rewind(REWOUND_ROWS // max((info.world_size for info in self._agent.infos), default=1))
            self._process = secrets.token_hex(8)
            self._outbox.clear()
            self._lost = False
        soon = self._reports or time.monotonic() >= self._over_s
        if not self._outbox and time.monotonic() >= self._sent_s + (SHIP_S if soon else self._every_s):
            self._fill()

    def _wanted(self, wanted: WantedCapture) -> WantedCapture:
        """A capture in the host's own count of starts; one begun before this process is resumed."""
        capture_id = wanted.request.capture_id
        if capture_id in self._begun_before:
            wanted = replace(wanted, resumed=True)
        elif capture_id not in self._begun and not wanted.resumed:
            self._note_begun(wanted.request)
        if wanted.process is None:
            return wanted
        its = (info.attempt for info in self._agent.infos if Incarnation.of(self._boot_id, info) == wanted.process)
        return replace(wanted, generation=next(its, NO_GENERATION))

    def _note_begun(self, request: CaptureRequest) -> None:
        """Note that a capture begins, or refuse it: the next agent might begin it again."""
        capture_id = request.capture_id
        try:
            with self._begun_file.open("a", encoding="ascii") as file:
                # (what a full disk has left of a line is none of this one)
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
        """Report captures again that are still wanted, unless the controller has heard."""
        for capture_id, (report, reported_s) in list(self._reported.items()):
            if capture_id not in wanted:
                del self._reported[capture_id]
            elif wanted[capture_id] or report in self._reports:
                continue
            elif time.monotonic() > reported_s + TELL_AGAIN_S:
                del self._reported[capture_id]
                self._report(report)

    def _fill(self) -> None:
        # (what has ended and is wanted still, the controller has not heard of)
        grace_s = LAST_ANSWER_S if self._orders is not None and self._orders.captures else 0.0
        over = time.monotonic() >= self._over_s + grace_s and not self._sending
        found, self._has_read = self._agent.rows(), True
        newest = max((info.attempt for info in self._agent.infos), default=0)
        some = [
            part
            for rows in found
            # (rings of earlier starts lie there until the job ends)
            if rows.generation == newest or len(rows.steps) or len(rows.device_steps or ())
            for part in parts(rows)
        ]
        reports = tuple(self._reports.popleft() for _ in range(min(len(self._reports), MAX_REPORTS)))
        counts = self._agent.telemetry()
        counts = replace(counts, problems=dict(list(counts.problems.items())[:MAX_TOLD]))
        # (by what its ranks are doing it is known which start is the newest)
        status = self._agent.statuses()
        alone = Shipment(self._token, self._boot_id, self._process, status=status, counts=counts)
        last = msgspec.structs.replace(
            alone,
            rows=tuple(some[-1:]),
            reports=reports,
            over=over and not self._reports,
            switches=tuple(self._agent.switches()[:MAX_TOLD]),
        )
        self._outbox.extend(msgspec.structs.replace(alone, rows=(rows,)) for rows in some[:-1])
        self._outbox.append(last)
        self._hub.soon(self._wake.set)
        if last.over:
            while self._outbox and not self._lost and not self._loop.stopping.wait(POLL_S / 5):
                pass
            self._over_reported = not self._outbox

    def _log_if_away(self) -> None:
        now_s = time.monotonic()
        if self._hub.connected_s is not None:
            if self._logged_away:
                log.warning("the hub is back after %.0f s", now_s - self._away_since_s)
                self._logged_away = False
            self._log_leader.release()
            self._away_since_s = now_s
        elif now_s > self._away_since_s + SAY_AFTER_S and not self._logged_away and self._log_leader.should_log():
            self._logged_away = True
            log.warning("%s The job keeps running; its steps wait in its rings", self._hub.unreachable())

    async def _talk(self) -> None:
        while True:
            try:
                await self._hub.connect()
                break
            except HubError as error:
                self._log_problem(str(error))
                await asyncio.sleep(LOOK_S)
        await self._hub.client.subscribe(self._places.down(self._token), cb=self._heard)
        await self._hub.client.subscribe(self._places.ask(self._token), cb=self._gpu_requested)
        await asyncio.gather(self._publish(), self._look())

    async def _publish(self) -> None:
        while True:
            since_s = self._hub.connected_s
            if self._lost:
                await asyncio.sleep(POLL_S)
                continue
            if self._known_s != since_s:
                # (what the hub answers to anything shows whether it still has what it got before)
                sent = await self._sent(Shipment(self._token, self._boot_id, self._process))
                if sent and await self._looked_for_loss():
                    self._known_s = since_s
                else:
                    await asyncio.sleep(AGAIN_S)
                continue
            if not self._outbox:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), 2 * self._every_s)
                except (TimeoutError, asyncio.TimeoutError):  # another one before Python 3.11
                    # The agent is busy with a trace, but still there.
                    await self._sent(Shipment(self._token, self._boot_id, self._process))
                continue
            if await self._sent(self._outbox[0]):
                self._outbox.popleft()
                self._sent_s = time.monotonic()
            else:
                await asyncio.sleep(AGAIN_S)

    async def _looked_for_loss(self) -> bool:
        """Find out whether the hub has lost messages; whether that could be found out."""
        # A number of its stream does not show it where others have sent more since than there was before. The time at
        # which the bucket of orders was made does: it goes with the stream, and an agent may read it.
        try:
            created = (await self._hub.js.stream_info(f"KV_{self._places.want}")).created
        except Exception as error:
            log.debug("cannot find out what the hub has: %s", error)
            return False
        self._lost = self._lost or self._kept_since not in (None, created)
        self._kept_since = created
        return True

    async def _sent(self, message: Shipment) -> bool:
        """Whether the hub certainly has a message. One that it may have is sent again: its steps are known."""
        since_s = self._hub.connected_s
        if since_s is None:
            return False
        # (an outage may lie between its making and its sending)
        data = encode(msgspec.structs.replace(message, mono_ns=time.monotonic_ns(), rings_id=self._rings_id))
        if len(data) > MAX_MESSAGE_BYTES:
            self._log_problem(f"a message of more than {MAX_MESSAGE_BYTES} bytes cannot be sent", "size")
            return True
        patience_s = PUBLISH_S + len(data) / SLOWEST_BYTES_PER_S
        sending = asyncio.ensure_future(self._hub.js.publish(self._places.up(self._token), data, timeout=patience_s))
        try:
            # (nobody answers on a connection that has broken since)
            while not sending.done() and self._hub.connected_s == since_s:
                await asyncio.wait({sending}, timeout=POLL_S)
            if not sending.done():
                return False
            sequence = sending.result().seq
            self._lost, self._sequence = self._lost or sequence <= self._sequence, sequence
        except Exception as error:
            self._hub.problem = str(error) or type(error).__name__
            log.debug("not sent", exc_info=True)
            return False
        finally:
            sending.cancel()
        return True

    async def _look(self) -> None:
        """Read the orders regularly: a change may have been published while the connection was down."""
        from nats.js.errors import KeyNotFoundError

        while True:
            again_s = LOOK_S
            try:
                want = await self._hub.js.key_value(self._places.want)
                self._take((await want.get(self._token)).value or b"")
            except KeyNotFoundError:
                # It expires without a controller for a while, which is no order to end anything.
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

    async def _gpu_requested(self, message: Msg) -> None:
        try:
            ranks = decode_ranks(message.data)
            if message.reply:
                self._gpu_requests.append((ranks, message.reply))
        except SftriageError as error:
            self._log_problem(f"cannot read a query of the controller: {error}", "ask")

    def _take(self, data: bytes) -> None:
        try:
            orders = decode_orders(data)
        except SftriageError as error:
            self._log_problem(f"cannot read the controller's orders: {error}", "want")
            return
        if orders.agent not in ("", self._token):
            self._log_problem(f"ignored orders for {orders.agent}", "another's")
            return
        # (of a controller that has lost its lease, and does not know yet)
        if self._orders is None or orders.epoch >= self._orders.epoch:
            self._orders = orders

    async def _send(self, report: Report) -> None:
        """Bring a stored capture to where the controller finds it, and report that, or why it has failed."""
        run = RunName() if self._orders is None else self._orders.run
        loop, capture_id, where = asyncio.get_running_loop(), report.result.capture_id, ""
        try:
            manifest, files = await loop.run_in_executor(None, self._kept.manifest, capture_id, run)
            where = f" in {next(iter(files.values())).parent}" if files else ""
            total_bytes = sum(path.stat().st_size for path in files.values())
            copying = Transfer(report.result, f"uploading from {self._name}:", total_bytes, self._moved)
            elsewhere = await loop.run_in_executor(None, self._kept.copied, capture_id, run, copying)
            # (of what is in a store, only the manifest goes through the hub)
            some = {} if elsewhere else files
            sending = Transfer(report.result, f"sending from {self._name}:", total_bytes, self._moved)
            while not await self._put(capture_id, manifest, some, sending):
                await asyncio.sleep(SEND_AGAIN_S)
                orders = self._orders
                if orders is not None and all(one.request.capture_id != capture_id for one in orders.captures):
                    raise CaptureError("the controller no longer wants it")
            report = replace(report, elsewhere=elsewhere)
        except Exception as error:
            why = f"it is stored on {self._name}{where}, but could not be sent: {error}"
            report = replace(report, result=replace(report.result, state="failed", detail=why))
        finally:
            self._sending -= 1
        self._queue(report)

    async def _put(self, capture_id: str, manifest: bytes, files: dict[str, Path], transfer: Transfer) -> bool:
        """Put a capture onto the hub; False if it has to be tried again."""
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
                    # It would never find room there.
                    why = f"its {size(size_bytes)} exceed what the hub takes ({size(most_bytes - SLACK_BYTES)})"
                    raise CaptureError(f"{why}: give the job a --store, or capture fewer steps")
            for name, path in files.items():
                with path.open("rb") as file:
                    whole = traces.put(f"{capture_id}/{name}", CountedFile(file, transfer))
                    sent.append(await asyncio.wait_for(whole, OBJECT_S))
            await traces.put(f"{capture_id}/", manifest)
        except APIError as error:
            if error.err_code == FULL:
                transfer.say("waiting for room on the hub, which is full of other traces")
                # (of two that are there in part, neither would ever find room for the rest)
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
        # (what all hosts say goes into one output, under SLURM)
        self._log_once("host %s: %s", self._name, problem, key=kind or problem)


async def _outgoing(js: JetStreamContext, bucket: str) -> ObjectStore:
    from nats.js.errors import ObjectNotFoundError
    from nats.js.object_store import ObjectStore

    class Outgoing(ObjectStore):
        async def get_info(self, *_: Any) -> Any:
            raise ObjectNotFoundError

    await js.stream_info(f"OBJ_{bucket}")
    return Outgoing(bucket, f"OBJ_{bucket}", js)
