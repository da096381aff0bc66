"""The connection to a job's hub, a NATS server with JetStream; its subjects there; and the lease of the leader.

The subjects and buckets of a job whose token is RUN (`Subjects`)::

    sft.RUN.up.AGENT      messages of an agent, in the stream sft_RUN (see `sftriage.fleet.wire`)
    sft_RUN_want AGENT    all orders for an agent; a change is republished as sft.RUN.down.AGENT
    sft.RUN.ask.AGENT     queries to an agent, which answers within seconds
    sft_RUN_lease leader  the job's leader; expires if it is not renewed
    sft_RUN_traces        traces in transfer to the controller's host
    sft.RUN.inbox.AGENT   answers to an agent; those to the controller come on sft.RUN.lead

docs/many-hosts.md has the permissions that an agent needs on a shared server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import ssl
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from sftriage.base.loops import LogOnce, start_thread
from sftriage.base.process import locked
from sftriage.errors import SftriageError, UsageError
from sftriage.trainer.layout import bounded_text

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext

log = logging.getLogger("sftriage")

PORT = 7422
NATS_PORT = 4222  # a NATS server's default
SCHEMES = ("nats", "tls", "ws", "wss")
CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"  # in a directory of `--tls`
CONTROLLER_FILE, AGENTS_FILE = "controller.nk", "agents.nk"  # in a directory of credentials; see `agent_file`, too
CONNECT_S, RECONNECT_S, PING_S = 3, 1, 5
_SEED = re.compile(r"SU[A-Z2-7]{56}")
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,40}")
_Of = TypeVar("_Of")


class HubError(SftriageError):
    """The hub cannot be reached, or refuses the credentials. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """The address of the hub, and credentials for it.

    Attributes:
        url: ``nats://HOST:PORT`` or ``tls://HOST:PORT``; several are separated by commas.
        credentials: a file with ``USER:PASSWORD``, a token or the seed of an nkey in one line, or with credentials
            made by ``nsc``; or a directory of such files (see `of`).
        ca: the certificate of the CA that signed the server's; by default those that this machine trusts.
    """

    url: str
    credentials: Path | None = None
    ca: Path | None = None

    def of(self, *names: str) -> HubAddress:
        """The address with the first of these files that exists, if the credentials are a directory."""
        if self.credentials is None or not self.credentials.is_dir():
            return self
        files = [self.credentials / name for name in names]
        return replace(self, credentials=next((file for file in files if file.exists()), files[-1]))

    def options(self) -> dict[str, Any]:
        """The client's options; raises UsageError if a file cannot be read, or a library is not installed."""
        found: dict[str, Any] = {"servers": self.url.split(",")}
        if self.ca is not None or self.url.startswith("tls://"):
            try:
                found["tls"] = ssl.create_default_context(cafile=self.ca)
            except OSError as error:
                raise UsageError(f"{self.ca}: not a certificate of the hub's CA: {error}") from error
        try:
            text = "" if self.credentials is None else self.credentials.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.credentials}: {error}") from error
        if text.startswith("-----BEGIN") or _SEED.fullmatch(text):
            if find_spec("nkeys") is None:
                raise UsageError(f"{self.credentials} holds an nkey, which needs: pip install nkeys")
            key = {"nkeys_seed_str": text} if _SEED.fullmatch(text) else {"user_credentials": str(self.credentials)}
            return found | key
        user, colon, password = text.partition(":")
        if colon:
            return found | {"user": user, "password": password}
        return found | ({"token": text} if text else {})


def hosts_of(urls: str) -> list[tuple[str, int]]:
    """The hosts and ports of URLs ``nats://HOST:PORT``, separated by commas; raises UsageError."""
    found = []
    for url in urls.split(","):
        parts = urlsplit(url.strip())
        try:
            wrong = parts.scheme not in SCHEMES or not parts.hostname or parts.port == 0
        except ValueError:
            wrong = True
        if wrong or parts.hostname is None:
            raise UsageError(f"--nats {url}: give it as nats://HOST:PORT or tls://HOST:PORT")
        found.append((parts.hostname, parts.port or NATS_PORT))
    return found


class Subjects:
    """The names of a job's subjects, streams and buckets on the hub; ``run`` is the token of the job's name."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.stream = f"sft_{run}"  # of agents' messages, and its consumer
        self.lead = f"sft.{run}.lead"  # prefix of the subjects for answers to the controller
        self.want, self.lease, self.traces = (f"sft_{run}_{name}" for name in ("want", "lease", "traces"))  # buckets

    @classmethod
    def of(cls, job_id: str) -> Subjects:
        return cls(token(job_id))

    def up(self, agent: str = "*") -> str:
        return f"sft.{self.run}.up.{agent}"

    def down(self, agent: str) -> str:
        return f"sft.{self.run}.down.{agent}"

    def query(self, agent: str) -> str:
        return f"sft.{self.run}.ask.{agent}"

    def inbox(self, agent: str) -> str:
        return f"sft.{self.run}.inbox.{agent}"


def agent_file(agent: str) -> str:
    """The file with an agent's credentials."""
    return f"agent-{agent}.nk"


def token(name: str) -> str:
    """A name as part of a subject; different names give different tokens."""
    if _PLAIN.fullmatch(name) and not name.startswith("x-"):
        return name
    return f"x-{hashlib.blake2s(name.encode('utf-8', 'replace'), digest_size=12).hexdigest()}"


def is_token(name: str) -> bool:
    """Whether a part of a subject can come from `token`."""
    return _PLAIN.fullmatch(name) is not None


class Hub:
    """A connection, in an event loop with a thread of its own, which reconnects whenever it breaks.

    Answers come on subjects that begin with ``inbox``, which no other client may read. ``connected_s`` is when the
    connection was made, on the monotonic clock (None: not connected, because of ``problem``).
    """

    def __init__(self, address: HubAddress, name: str, inbox: str = "_INBOX") -> None:
        self.address, self.problem = address, ""
        self.connected_s: float | None = None
        self._options = address.options() | {"name": name, "inbox_prefix": inbox}
        self._client: Client | None = None
        self._refused = False
        self._log_once = LogOnce(log)
        self._loop = asyncio.new_event_loop()
        # (started with its first task: a launcher may have to fork before)
        self._thread: threading.Thread | None = None

    @property
    def js(self) -> JetStreamContext:
        """JetStream; only for use in the loop."""
        assert self._client is not None, "not connected"
        return self._client.jetstream(timeout=CONNECT_S)

    @property
    def was_connected(self) -> bool:
        return self._client is not None

    @property
    def refused(self) -> bool:
        """Whether the hub refuses the credentials."""
        return self._refused

    @property
    def client(self) -> Client:
        """The NATS client; only for use in the loop."""
        assert self._client is not None, "not connected"
        return self._client

    def call(self, task: Coroutine[Any, Any, _Of], timeout_s: float) -> _Of:
        """Run a coroutine in the loop, and wait for its result; raises HubError on a timeout."""
        future = self.later(task)
        try:
            return future.result(timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:  # (two classes before Python 3.11)
            future.cancel()
            raise HubError(self.unreachable()) from error

    def later(self, task: Coroutine[Any, Any, _Of]) -> Future[_Of]:
        """Run a coroutine in the loop."""
        if self._thread is None:
            self._thread = start_thread("hub", self._loop.run_forever)
        return asyncio.run_coroutine_threadsafe(task, self._loop)

    def start(self, task: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the loop, and log what it raises."""
        self.later(self._logged(task))

    def soon(self, function: Any, *arguments: Any) -> None:
        """Call a function in the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    async def connect(self) -> None:
        """Connect, with retries until it succeeds; raises HubError if the hub refuses the credentials."""
        while True:
            client = _steady_client()
            try:
                await client.connect(
                    **self._options,
                    connect_timeout=CONNECT_S,
                    reconnect_time_wait=RECONNECT_S,
                    ping_interval=PING_S,
                    max_outstanding_pings=2,
                    max_reconnect_attempts=-1 if self._client is not None else 1,
                    # (pending messages would arrive late, but look current)
                    pending_size=8 << 20,
                    error_cb=self._failed,
                    disconnected_cb=self._lost,
                    reconnected_cb=self._again,
                )
            except Exception as error:
                await self._failed(error)
                with contextlib.suppress(Exception):
                    await client.close()
                if self._refused:
                    raise HubError(self._refusal) from error
                await asyncio.sleep(RECONNECT_S)
                continue
            client.options["max_reconnect_attempts"] = -1
            self._client = client
            await self._again()
            return

    def unreachable(self) -> str:
        """A line that says why the hub cannot be reached, or refuses the credentials, and what to do."""
        if self._refused:
            # (the next attempt may fail without a reason)
            return f"{self._refusal}."
        why = f" ({self.problem})" if self.problem else ""
        fix = "is its host up, and can this host reach it?"
        if "CERTIFICATE" in self.problem.upper():
            fix = "ca.pem in the --tls directory must be of the CA that signed its certificate, and that for this name"
        return f"the hub at {self.address.url} cannot be reached{why}: {fix}"

    def stores_nothing(self) -> str:
        """A line for a hub that is connected but acknowledges nothing, like a server that cannot write."""
        why = self.problem.removeprefix("nats: ")
        return (
            f"the hub at {self.address.url} stores nothing ({why}): is its disk full, or its account's limit reached?"
        )

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._thread is None or not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):
            self.call(self._close(), 2 * CONNECT_S)
        self.soon(self._loop.stop)
        self._thread.join(CONNECT_S)

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            # (a task that is connecting takes a while)
            await asyncio.wait(tasks, timeout=1.0)
        if self._client is not None:
            await self._client.close()

    async def _logged(self, task: Coroutine[Any, Any, Any]) -> None:
        try:
            await task
        except Exception as error:
            log.error("%s: %s", type(error).__name__, error)
            log.debug("it failed", exc_info=True)

    @property
    def _refusal(self) -> str:
        file = self.address.credentials
        refused = "connections without credentials: give --creds FILE" if file is None else f"the credentials in {file}"
        return f"the hub at {self.address.url} refuses {refused}"

    async def _failed(self, error: Exception) -> None:
        from nats.errors import NoServersError

        self._refused |= "authorization" in str(error).lower()
        # (the failure of the last server says more than this one)
        if not (isinstance(error, NoServersError) and self.problem):
            problem = str(error).removeprefix("nats: ") or type(error).__name__
            self.problem = "nothing listens there" if isinstance(error, ConnectionRefusedError) else problem
        if "permissions violation" in self.problem:
            self._log_once("permission denied by the hub: %s. See docs/many-hosts.md", self.problem)
        log.debug("hub: %s", self.problem)

    async def _lost(self) -> None:
        self.connected_s = None

    async def _again(self) -> None:
        self.connected_s, self.problem, self._refused = time.monotonic(), "", False


def _steady_client() -> Client:
    # A subject or a header may be any bytes. Some of them silently end the reader of nats-py (2.16) for good, and the
    # stream delivers them again to the next client. (Imported here, because that takes a while.)
    from nats.aio.client import Client

    class SteadyClient(Client):
        _logged = False

        async def _process_msg(self, *message: Any) -> None:
            try:
                await super()._process_msg(*message)
            except Exception as error:
                if not self._logged:
                    log.warning("cannot read a message from the hub: %s", type(error).__name__)
                self._logged = True

    return SteadyClient()


class LogLeader:
    """Lets one of the processes that share a file log, until it releases it or dies; without a file, each logs."""

    def __init__(self, path: Path) -> None:
        self._path, self._held, self._leads = path, contextlib.ExitStack(), False

    def should_log(self) -> bool:
        """Whether this process logs; from now on, if no other does."""
        if not self._leads:
            try:
                self._held.enter_context(locked(self._path))
            except BlockingIOError:
                return False
            except OSError:
                pass
            self._leads = True
        return True

    def release(self) -> None:
        self._held.close()
        self._leads = False


TTL_S, RENEW_S = 9.0, 3.0  # of a lease, which ends if it is not renewed
ORDERS_TTL_S = 60.0
TRACE_TTL_S = 3600.0
MAX_AGE_S, MAX_STREAM_BYTES, MAX_TRACE_BYTES = 6 * 3600.0, 1 << 30, 4 << 30
ACK_WAIT_S = 3600.0  # (a redelivered message is recognised by its number)
REMOVED_S, _STORE_FAILED = 5.0, 10049  # a busy server may still be removing files of the same name
_KEY = "leader"


class Leader(msgspec.Struct, frozen=True):
    """The controller that leads a job: its run, host and process."""

    run_id: str
    host: str
    pid: int


class Lease:
    """The right to lead a job, until it is let go or ``lost`` (the reason; "" while it is held).

    The hub's thread renews it. ``run_id`` is that of the leading run; ``epoch`` increases with each holder, even if the
    hub has lost its data. The constructor raises UsageError if another controller leads the job, and HubError if the
    hub does not answer.
    """

    def __init__(self, hub: Hub, places: Subjects, leader: Leader) -> None:
        self.hub, self.places, self._leader = hub, places, leader
        self._revision, self.epoch, self.lost = 0, 0, ""
        # (a renewal in progress while the lease is let go would take it again)
        self._turn = asyncio.Lock()
        self.run_id = leader.run_id
        self._value = msgspec.json.encode(leader)
        hub.call(self._take(), TTL_S + 4 * RENEW_S)
        hub.start(self._hold())

    def let_go(self) -> None:
        if not self.lost:
            self.lost = "it was released"
            with contextlib.suppress(Exception):
                self.hub.call(self._remove(), RENEW_S)

    async def _take(self) -> None:
        from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError

        bucket = await _bucket(self.hub.js, self.places.lease, ttl=TTL_S)
        deadline_s = time.monotonic() + TTL_S + RENEW_S
        while True:
            try:
                return await self._hold_from(await bucket.create(_KEY, self._value))
            except (KeyWrongLastSequenceError, KeyNotFoundError) as error:
                # (the second one: the lease existed, but expired before its holder could be read)
                if time.monotonic() > deadline_s:
                    raise await self._taken(bucket) from error
            await asyncio.sleep(RENEW_S / 3)

    async def _taken(self, bucket: Any) -> UsageError:
        other = None
        with contextlib.suppress(Exception):
            other = _leader((await bucket.get(_KEY)).value)
        if other is None:
            return UsageError("another controller leads this job; give each job on a hub its own --job-id")
        where = f"{other.host!r}, process {other.pid}"
        if other.run_id == self._leader.run_id:
            return UsageError(f"this job is led by another controller of the same run, on {where}")
        return UsageError(f"another job has this --job-id: run {other.run_id!r} on {where}; give each job its own")

    async def _hold_from(self, revision: int) -> None:
        """Hold it from a revision on; the epoch is the hub's time of that revision, which is unique."""
        stored = await self.hub.js.get_msg(f"KV_{self.places.lease}", seq=revision)
        at_us = 0 if stored.time is None else int(stored.time.timestamp() * 1e6)
        self._revision, self.epoch = revision, max(self.epoch + 1, at_us)

    async def _hold(self) -> None:
        while not self.lost:
            await asyncio.sleep(RENEW_S)
            if self.hub.connected_s is not None:
                await self._renew()

    async def _renew(self) -> None:
        from nats.js.errors import KeyWrongLastSequenceError, NotFoundError

        async with self._turn:
            if self.lost:
                return
            try:
                try:
                    bucket = await self.hub.js.key_value(self.places.lease)
                    self._revision = await bucket.update(_KEY, self._value, last=self._revision)
                except (KeyWrongLastSequenceError, NotFoundError):
                    await self._retake()
            except Exception as error:
                log.debug("the lease was not renewed: %s", error)

    async def _retake(self) -> None:
        from nats.js.errors import KeyWrongLastSequenceError

        bucket = await _bucket(self.hub.js, self.places.lease, ttl=TTL_S)
        try:
            revision = await bucket.create(_KEY, self._value)
        except KeyWrongLastSequenceError:
            found = await bucket.get(_KEY)
            if _leader(found.value) is None:
                # (the value is not a leader)
                revision = await bucket.update(_KEY, self._value, last=found.revision)
            elif found.value != self._value:
                self.lost = str(await self._taken(bucket))
                return
            else:
                # (the renewal succeeded, but its answer was lost)
                revision = found.revision
        await self._hold_from(revision)

    async def _remove(self) -> None:
        async with self._turn:
            bucket = await self.hub.js.key_value(self.places.lease)
            await bucket.delete(_KEY, last=self._revision)


def _leader(value: bytes | None) -> Leader | None:
    try:
        found = msgspec.json.decode(value or b"", type=Leader)
    except (ValueError, RecursionError):
        return None
    return msgspec.structs.replace(found, run_id=bounded_text(found.run_id), host=bounded_text(found.host))


async def make_places(hub: Hub, places: Subjects, run_id: str) -> None:
    """Create a run's streams and buckets, and remove those of the job's earlier runs; HubError if the hub is full."""
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
    await _bucket(js, places.want, ttl=ORDERS_TTL_S, republish=republish, direct=True)
    try:
        await js.object_store(places.traces)
    except NotFoundError:
        await js.create_object_store(places.traces, ttl=TRACE_TTL_S, max_bytes=MAX_TRACE_BYTES)


async def remove_places(hub: Hub, places: Subjects, *, lease: bool = True) -> None:
    """Remove a job's streams and buckets from the hub."""
    from nats.js.errors import Error

    js = hub.js
    streams = [places.stream, f"KV_{places.want}", f"OBJ_{places.traces}", *([f"KV_{places.lease}"] if lease else [])]
    for stream in streams:
        with contextlib.suppress(Error):
            await js.delete_stream(stream)


async def taken_up(hub: Hub, places: Subjects, first: int) -> Any:
    """A pull subscription to the stream, from the first message that no controller has acknowledged.

    The hub would hold back unacknowledged messages that it has delivered to an earlier controller, or over a broken
    connection. So this creates a new consumer where the acknowledgements of the previous one end; or, without one, at
    the ``first`` message that is not settled. Raises NotFoundError, of nats, without a stream.
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
