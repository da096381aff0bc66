"""Who leads a job, and what the leader makes on the hub: the stream, its consumer, and the buckets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from sftriage.errors import UsageError
from sftriage.fleet.hub import Hub, HubError, Subjects
from sftriage.trainer.layout import bounded_text

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger("sftriage")

TTL_S, RENEW_S = 9.0, 3.0  # of a lease: it ends if it is not renewed
PATIENCE_S = 10.0
WANT_TTL_S = 60.0
TRACE_TTL_S = 3600.0
MAX_AGE_S, MAX_STREAM_BYTES, MAX_TRACE_BYTES = 6 * 3600.0, 1 << 30, 4 << 30
ACK_WAIT_S = 3600.0  # a message that comes again is known by its number
REMOVED_S, _STORE_FAILED = 5.0, 10049  # a busy server may still be removing files of the same name
_KEY = "leader"


class Leader(msgspec.Struct, frozen=True):
    """Who leads: of which run, where, and in which process."""

    run_id: str
    host: str
    pid: int


class Lease:
    """The right to lead a job, renewed by the hub's thread until it is ``lost`` (why; "" while it is held) or let go.

    ``run_id`` is that of the run that leads; ``epoch`` increases with each holder, even if the hub has lost its data.
    Making one raises UsageError where another controller leads the job, HubError where the hub does not answer.
    """

    def __init__(self, hub: Hub, places: Subjects, leader: Leader) -> None:
        self._hub, self._places, self._leader = hub, places, leader
        self._revision, self.epoch, self.lost = 0, 0, ""
        # A renewal that is under way when the lease is let go would take it once more.
        self._turn = asyncio.Lock()
        self.run_id = leader.run_id
        self._value = msgspec.json.encode(leader)
        hub.call(self._take(), TTL_S + 4 * RENEW_S)
        hub.start(self._hold())

    def let_go(self) -> None:
        if not self.lost:
            self.lost = "it was let go"
            with contextlib.suppress(Exception):
                self._hub.call(self._remove(), RENEW_S)

    async def _take(self) -> None:
        from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

        bucket = await _bucket(self._hub.js, self._places.lease, ttl=TTL_S)
        deadline_s = time.monotonic() + TTL_S + RENEW_S
        while True:
            try:
                return await self._hold_from(await bucket.create(_KEY, self._value))
            except (KeyWrongLastSequenceError, KeyNotFoundError) as error:
                # (the second one: it was there, and has gone before it could be asked whose it is)
                if time.monotonic() > deadline_s:
                    raise await self._taken(bucket) from error
            await asyncio.sleep(RENEW_S / 3)

    async def _taken(self, bucket: Any) -> UsageError:
        other = None
        with contextlib.suppress(Exception):
            other = _leader((await bucket.get(_KEY)).value)
        if other is None:
            return UsageError("another controller leads this job; two jobs on one hub need a --job-id each")
        where = f"{other.host!r}, process {other.pid}"
        if other.run_id == self._leader.run_id:
            return UsageError(f"this job is led by another controller of the same run, on {where}")
        return UsageError(f"another job has this --job-id: run {other.run_id!r} on {where}; give each job its own")

    async def _hold_from(self, revision: int) -> None:
        """Hold it since a revision. The hub says when that was, which no later holder has."""
        stored = await self._hub.js.get_msg(f"KV_{self._places.lease}", seq=revision)
        at_us = 0 if stored.time is None else int(stored.time.timestamp() * 1e6)
        self._revision, self.epoch = revision, max(self.epoch + 1, at_us)

    async def _hold(self) -> None:
        while not self.lost:
            await asyncio.sleep(RENEW_S)
            if self._hub.connected_s is not None:
                await self._renew()

    async def _renew(self) -> None:
        from nats.js.errors import KeyWrongLastSequenceError, NotFoundError

        async with self._turn:
            if self.lost:
                return
            try:
                try:
                    bucket = await self._hub.js.key_value(self._places.lease)
                    self._revision = await bucket.update(_KEY, self._value, last=self._revision)
                except (KeyWrongLastSequenceError, NotFoundError):
                    await self._retake()
            except Exception as error:
                log.debug("the lease was not renewed: %s", error)

    async def _retake(self) -> None:
        from nats.js.errors import KeyWrongLastSequenceError

        bucket = await _bucket(self._hub.js, self._places.lease, ttl=TTL_S)
        try:
            revision = await bucket.create(_KEY, self._value)
        except KeyWrongLastSequenceError:
            found = await bucket.get(_KEY)
            if _leader(found.value) is None:
                # (nobody leads by that)
                revision = await bucket.update(_KEY, self._value, last=found.revision)
            elif found.value != self._value:
                self.lost = str(await self._taken(bucket))
                return
            else:
                # (renewed, and the answer was lost)
                revision = found.revision
        await self._hold_from(revision)

    async def _remove(self) -> None:
        async with self._turn:
            bucket = await self._hub.js.key_value(self._places.lease)
            await bucket.delete(_KEY, last=self._revision)


def _leader(value: bytes | None) -> Leader | None:
    try:
        found = msgspec.json.decode(value or b"", type=Leader)
    except (ValueError, RecursionError):
        return None
    return msgspec.structs.replace(found, run_id=bounded_text(found.run_id), host=bounded_text(found.host))


async def make_places(hub: Hub, places: Subjects, run_id: str) -> None:
    """Make what a run has on the hub, and remove what another run of the job has left; raises HubError without room."""
    from nats.js.errors import Error, NotFoundError, ServerError

    deadline_s = time.monotonic() + REMOVED_S
    try:
        with contextlib.suppress(NotFoundError):
            found = await hub.js.stream_info(places.stream)
            if found.config.description != run_id:
                await remove_places(hub, places, lease=False)
        while True:
            try:
                return await _make(hub.js, places, run_id)
            except ServerError as error:
                if error.err_code != _STORE_FAILED or time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(REMOVED_S / 50)
    except Error as error:
        raise HubError(f"the hub at {hub.address.url} has no room for this job: {error}") from error


async def _make(js: JetStreamContext, places: Subjects, run_id: str) -> None:
    from nats.js.api import DiscardPolicy, RePublish, StorageType, StreamConfig
    from nats.js.errors import NotFoundError

    config = StreamConfig(
        name=places.stream,
        description=run_id,
        subjects=[places.up()],
        storage=StorageType.FILE,
        max_age=MAX_AGE_S,
        max_bytes=MAX_STREAM_BYTES,
        max_msg_size=1 << 20,
        discard=DiscardPolicy.OLD,
    )
    await js.add_stream(config)
    republish = RePublish(src=f"$KV.{places.want}.*", dest=places.down("{{wildcard(1)}}"))
    await _bucket(js, places.want, ttl=WANT_TTL_S, republish=republish, direct=True)
    try:
        await js.object_store(places.traces)
    except NotFoundError:
        await js.create_object_store(places.traces, ttl=TRACE_TTL_S, max_bytes=MAX_TRACE_BYTES)


async def remove_places(hub: Hub, places: Subjects, *, lease: bool = True) -> None:
    """Remove what a job has on the hub."""
    from nats.js.errors import Error

    js = hub.js
    streams = [places.stream, f"KV_{places.want}", f"OBJ_{places.traces}", *([f"KV_{places.lease}"] if lease else [])]
    for stream in streams:
        with contextlib.suppress(Error):
            await js.delete_stream(stream)


async def taken_up(hub: Hub, places: Subjects, first: int) -> Any:
    """The stream from the first message on that no controller has acknowledged, as a pull subscription.

    What an earlier controller was given, and did not acknowledge, the hub would keep from us until it gives up on that
    one; and what it has given to us over a connection that broke, too. So the consumer is made anew, where the
    acknowledgements of the one before it end; or, where there is none, at the ``first`` message that is not settled.
    Raises NotFoundError, of nats, without a stream.
    """
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
    from nats.js.errors import NotFoundError

    js, start = hub.js, first
    with contextlib.suppress(NotFoundError):
        info = await js.consumer_info(places.stream, places.stream)
        start = (info.ack_floor.stream_seq if info.ack_floor else 0) + 1
        await js.delete_consumer(places.stream, places.stream)
    config = ConsumerConfig(
        durable_name=places.stream,
        ack_policy=AckPolicy.ALL,
        ack_wait=ACK_WAIT_S,
        max_ack_pending=-1,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=start,
    )
    await js.add_consumer(places.stream, config)
    return await js.pull_subscribe_bind(durable=places.stream, stream=places.stream)


async def _bucket(js: JetStreamContext, name: str, **how: Any) -> Any:
    from nats.js.api import KeyValueConfig, StorageType
    from nats.js.errors import NotFoundError

    try:
        return await js.key_value(name)
    except NotFoundError:
        return await js.create_key_value(KeyValueConfig(name, storage=StorageType.FILE, **how))
