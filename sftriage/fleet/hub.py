"""The connection to a job's hub, a NATS server with JetStream, and what lies where on it.

Of a job whose token is RUN (`Places`)::

    sft.RUN.up.AGENT      what an agent tells, in the stream sft_RUN (see `sftriage.fleet.wire`)
    sft_RUN_want AGENT    all that is wanted of an agent; a change is republished as sft.RUN.down.AGENT
    sft.RUN.ask.AGENT     what an agent is asked, and answers at once
    sft_RUN_lease leader  who leads the job; goes by itself where it is not renewed
    sft_RUN_traces        traces on their way to the controller's host
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

from sftriage.base.log_once import LogOnce
from sftriage.base.loops import start_thread
from sftriage.base.process import locked
from sftriage.errors import SftriageError, UsageError

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
    """The hub cannot be reached, or refuses us. It may be there again later."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Where the hub is, and with what it lets us in.

    Attributes:
        url: ``nats://HOST:PORT`` or ``tls://HOST:PORT``; several with commas between them.
        credentials: a file: ``USER:PASSWORD``, a token or the seed of an nkey in one line, or the credentials that
            ``nsc`` makes; or a directory of such files, see `of`.
        ca: the certificate of who signed the server's; by default those that this machine trusts.
    """

    url: str
    credentials: Path | None = None
    ca: Path | None = None

    def of(self, *names: str) -> HubAddress:
        """With the first of these files that there is, where the credentials are a directory."""
        if self.credentials is None or not self.credentials.is_dir():
            return self
        files = [self.credentials / name for name in names]
        return replace(self, credentials=next((file for file in files if file.exists()), files[-1]))

    def options(self) -> dict[str, Any]:
        """The client's options; raises UsageError where a file cannot be read, or a library is not installed."""
        found: dict[str, Any] = {"servers": self.url.split(",")}
        if self.ca is not None or self.url.startswith("tls://"):
            try:
                found["tls"] = ssl.create_default_context(cafile=self.ca)
            except OSError as error:
                raise UsageError(f"{self.ca} is no certificate of who signs the hub's: {error}") from error
        try:
            text = "" if self.credentials is None else self.credentials.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.credentials}: {error}") from error
        if text.startswith("-----BEGIN") or _SEED.fullmatch(text):
            if find_spec("nkeys") is None:
                raise UsageError(f"{self.credentials} is of an nkey, which takes: pip install nkeys")
            key = {"nkeys_seed_str": text} if _SEED.fullmatch(text) else {"user_credentials": str(self.credentials)}
            return found | key
        user, colon, password = text.partition(":")
        if colon:
            return found | {"user": user, "password": password}
        return found | ({"token": text} if text else {})


def hosts_of(urls: str) -> list[tuple[str, int]]:
    """The hosts and ports of ``nats://HOST:PORT``, several with commas between them; raises UsageError."""
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
    """The names of a job's subjects, streams and buckets on the hub, made of ``run``, a token of the job's name."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.stream = f"sft_{run}"  # of what agents send, and its consumer
        self.lead = f"sft.{run}.lead"  # prefix of the subjects on which the controller is answered
        self.want, self.lease, self.traces = (f"sft_{run}_{name}" for name in ("want", "lease", "traces"))  # buckets

    @classmethod
    def of(cls, job_id: str) -> Subjects:
        return cls(token(job_id))

    def up(self, agent: str = "*") -> str:
        return f"sft.{self.run}.up.{agent}"

    def down(self, agent: str) -> str:
        return f"sft.{self.run}.down.{agent}"

    def ask(self, agent: str) -> str:
        return f"sft.{self.run}.ask.{agent}"

    def inbox(self, agent: str) -> str:
        return f"sft.{self.run}.inbox.{agent}"


def agent_file(agent: str) -> str:
    """The file with an agent's credentials."""
    return f"agent-{agent}.nk"


def token(name: str) -> str:
    """A name as part of a subject: the same for the same name, and another one for another."""
    if _PLAIN.fullmatch(name) and not name.startswith("x-"):
        return name
    return f"x-{hashlib.blake2s(name.encode('utf-8', 'replace'), digest_size=12).hexdigest()}"


def is_token(name: str) -> bool:
    """Whether a part of a subject is one that `token` gives."""
    return _PLAIN.fullmatch(name) is not None


class Hub:
    """A connection that is kept, and made again whenever it breaks, by an event loop in a thread of its own.

    Answers come on subjects that begin with ``inbox``, where no other client may listen. ``connected_s`` is since when
    there is a connection, on the monotonic clock (None: there is none, because of ``problem``).
    """

    def __init__(self, address: HubAddress, name: str, inbox: str = "_INBOX") -> None:
        self.address, self.problem = address, ""
        self.connected_s: float | None = None
        self._options = address.options() | {"name": name, "inbox_prefix": inbox}
        self._client: Client | None = None
        self._refused = False
        self._log_once = LogOnce(log)
        self._loop = asyncio.new_event_loop()
        # (started once there is something to be done: a launcher may have to be forked before)
        self._thread: threading.Thread | None = None

    @property
    def js(self) -> JetStreamContext:
        """JetStream; in the loop."""
        assert self._client is not None, "nobody has connected"
        return self._client.jetstream(timeout=CONNECT_S)

    @property
    def was_connected(self) -> bool:
        return self._client is not None

    @property
    def client(self) -> Client:
        """The connection itself; in the loop."""
        assert self._client is not None, "nobody has connected"
        return self._client

    def call(self, what: Coroutine[Any, Any, _Of], timeout_s: float) -> _Of:
        """Run a coroutine in the loop, and wait for its result; raises HubError where that takes too long."""
        future = self.later(what)
        try:
            return future.result(timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:  # another one before Python 3.11
            future.cancel()
            raise HubError(self.unreachable()) from error

    def later(self, what: Coroutine[Any, Any, _Of]) -> Future[_Of]:
        """Run a coroutine in the loop."""
        if self._thread is None:
            self._thread = start_thread("hub", self._loop.run_forever)
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def start(self, what: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the loop, and log what it raises."""
        self.later(self._logged(what))

    def soon(self, what: Any, *arguments: Any) -> None:
        """Call a function in the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)

    async def connect(self) -> None:
        """Connect, and retry until that succeeds; raises HubError where the hub refuses the credentials."""
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
                    # What waits here would be sent late, and be told as if it were so now.
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
        """That the hub cannot be reached, or has not let us in, in a line that says what to do."""
        if self._refused:
            # (it may just close the connection the next time)
            return f"{self._refusal}."
        why = f" ({self.problem})" if self.problem else ""
        ask = "is its host up, and may this one connect to it?"
        if "CERTIFICATE" in self.problem.upper():
            ask = "ca.pem in the directory of --tls has to be of who signed its certificate, and that for this name"
        return f"the hub at {self.address.url} cannot be reached{why}: {ask}"

    def close(self) -> None:
        """Let go of the connection. A second call does nothing."""
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
            # (one in the middle of connecting takes its time)
            await asyncio.wait(tasks, timeout=1.0)
        if self._client is not None:
            await self._client.close()

    async def _logged(self, what: Coroutine[Any, Any, Any]) -> None:
        try:
            await what
        except Exception as error:
            log.error("%s: %s", type(error).__name__, error)
            log.debug("it failed", exc_info=True)

    @property
    def _refusal(self) -> str:
        file = self.address.credentials
        whom = "us without credentials: give --creds FILE" if file is None else f"the credentials in {file}"
        return f"the hub at {self.address.url} refuses {whom}"

    async def _failed(self, error: Exception) -> None:
        from nats.errors import NoServersError

        self._refused |= "authorization" in str(error).lower()
        # (that there are no servers says less than why the last one is none)
        if not (isinstance(error, NoServersError) and self.problem):
            said = str(error).removeprefix("nats: ") or type(error).__name__
            self.problem = "nothing listens there" if isinstance(error, ConnectionRefusedError) else said
        if "permissions violation" in self.problem:
            self._log_once("the hub does not let us do what has to be done: %s. See docs/many-hosts.md", self.problem)
        log.debug("hub: %s", self.problem)

    async def _lost(self) -> None:
        self.connected_s = None

    async def _again(self) -> None:
        self.connected_s, self.problem, self._refused = time.monotonic(), "", False


def _steady_client() -> Client:
    # A subject or a header may be any bytes. Some of them end the reading of nats-py (2.16) for good and in silence,
    # and a stream delivers them again to whoever connects next. (Importing it takes a while.)
    from nats.aio.client import Client

    class SteadyClient(Client):
        _logged = False

        async def _process_msg(self, *message: Any) -> None:
            try:
                await super()._process_msg(*message)
            except Exception as error:
                if not self._logged:
                    log.warning("a message that the hub has passed on cannot be read: %s", type(error).__name__)
                self._logged = True

    return SteadyClient()


class LogLeader:
    """Lets one of the processes that share a file log, until it releases it or dies; without the file, each logs."""

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
