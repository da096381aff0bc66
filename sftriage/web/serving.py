"""HTTP servers of sftriage: access control, the server thread, links to open, a trace for Perfetto, ``/metrics``.

`sftriage ui`, `traces open` and `--metrics-port` use it. A request's Host header must be known, which stops pages that
let their own name point here (DNS rebinding). A token is the password of HTTP Basic or a Bearer token, never part of an
address, which would end up in histories and logs. A trace is served at a secret path, and to the viewer's origin only.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import shlex
import socket
import stat
import sys
import threading
import urllib.request
import webbrowser
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sftriage.base.loops import start_thread
from sftriage.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger("sftriage")

MIN_TOKEN_LENGTH = 16
MAX_TOKEN_BYTES = 4096

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(\d{1,5}))?")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine only."""
    address = _ip_address(host)
    return host == "localhost" if address is None else address.is_loopback


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def token_of(path: Path | None, variable: str) -> str | None:
    """The token in a file, else the one in an environment variable, else None.

    It is no option itself: everyone on the machine can read a command line. Raises UsageError if the file cannot be
    read, is no text, or others can read or replace it.
    """
    if path is None:
        return os.environ.get(variable) or None
    try:
        with path.open("rb") as file:
            _refuse_shared(path, os.fstat(file.fileno()), os.getuid())
            return file.read(MAX_TOKEN_BYTES + 1).decode("ascii").strip()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: a token must be printable ASCII characters") from error


def _refuse_shared(path: Path, status: os.stat_result, uid: int) -> None:
    """Refuse a token file that others can read or replace, with the fix; root may share one that root owns."""
    if not stat.S_ISREG(status.st_mode):
        # A pipe, for example.
        return
    file, mode = shlex.quote(str(path)), stat.S_IMODE(status.st_mode)
    if status.st_uid not in (uid, 0):
        raise UsageError(f"{path}: this token belongs to another user (uid {status.st_uid}); make one of your own")
    if mode & _OTHERS_WRITE or (mode & _OTHERS and status.st_uid == uid):
        raise UsageError(f"{path}: other users of this machine can use this token (mode {mode:04o}): chmod 600 {file}")
    if mode & stat.S_IROTH:
        log.warning("%s: everyone on this machine can read this token; as root: chmod o-r %s", path, file)
    for directory in {path.absolute().parent, path.resolve().parent}:
        above = directory.stat()
        # In a sticky one, such as /tmp, users cannot move each other's files.
        if above.st_uid not in (uid, 0) or (above.st_mode & _OTHERS_WRITE and not above.st_mode & stat.S_ISVTX):
            fix = f"chmod go-w {shlex.quote(str(directory))}" if above.st_uid == uid else "keep it elsewhere"
            raise UsageError(f"{path}: others can replace this token, because they can write to {directory}: {fix}")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may read.

    Attributes:
        names: allowed Host headers, lower case, with a port or for any port.
        any_address: any plain IP address is allowed too: DNS rebinding needs a name.
        token_sha256: the digest of the required token, or None.
        any_name: every Host header is allowed; only safe with a token.
    """

    names: frozenset[str]
    any_address: bool = False
    token_sha256: bytes | None = None
    any_name: bool = False

    @classmethod
    def to(cls, host: str, token: str | None, advice: str, names: Iterable[str] = ()) -> Access:
        """The access to a server that listens on ``host``; clients may call it by the other ``names`` as well.

        Raises UsageError if other machines can reach it and there is no token (``advice`` says how to set one), or the
        token is easily guessed.
        """
        if token is None and not is_loopback(host):
            raise UsageError(f"other machines can reach {host}, so a token is required: {advice}")
        if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise UsageError(f"a token must have at least {MIN_TOKEN_LENGTH} printable ASCII characters")
        known = {host.lower(), *(name.lower() for name in names)} | (_LOOPBACK_NAMES if is_loopback(host) else set())
        digest = None if token is None else hashlib.sha256(token.encode()).digest()
        return cls(frozenset(known), not is_loopback(host), digest)

    def knows(self, host: str) -> bool:
        if self.any_name or host in self.names:
            return True
        name = found[1].strip("[]").lower() if (found := _HOST.fullmatch(host)) else ""
        return bool(name) and (name in self.names or (self.any_address and _ip_address(name) is not None))

    def admits(self, authorization: str) -> bool:
        """Whether an Authorization header holds the token, in constant time."""
        if self.token_sha256 is None:
            return True
        scheme, _, value = authorization.partition(" ")
        token = value.strip()
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode("utf-8", "replace").partition(":")[2]
            except (binascii.Error, ValueError):
                token = ""
        elif scheme.lower() != "bearer":
            token = ""
        return hmac.compare_digest(hashlib.sha256(token.encode("utf-8", "replace")).digest(), self.token_sha256)


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Perfetto's window must be able to answer the page that opened it.
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
CHALLENGE = 'Basic realm="sftriage: any user, the token as password", charset="UTF-8", Bearer realm="sftriage"'
READING = ("GET", "HEAD")


def application(
    routes: Sequence[BaseRoute],
    access: Access,
    refused: Callable[[Request, int, str], Response] | None = None,
    methods: Collection[str] = READING,
) -> ASGIApp:
    """The application of some routes behind the gate; ``refused`` renders errors, else they are plain text."""

    def failed(request: Request, error: Exception) -> Response:
        status, detail, headers = 500, "sftriage could not make this page; see its log.", None
        if isinstance(error, HTTPException):
            status, detail, headers = error.status_code, error.detail, error.headers
        response = refused(request, status, detail) if refused else PlainTextResponse(f"{detail}\n", status)
        response.headers.update(headers or {})
        return response

    handlers: dict[Any, Any] = {HTTPException: failed, Exception: failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, access, methods)


class Gate:
    """Checks method, Host and token of each request, and adds the security headers to each response."""

    def __init__(self, app: ASGIApp, access: Access, methods: Collection[str]) -> None:
        self._app, self._access, self._methods = app, access, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # There is no WebSocket here.
            await send({"type": "websocket.close", "code": 1008})
            return

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, sealed)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        if scope["method"] not in self._methods:
            return _refused("Read-only: send GET or HEAD.", 405, Allow=", ".join(READING))
        headers = Headers(scope=scope)
        hosts, tokens = headers.getlist("host"), headers.getlist("authorization")
        if len(hosts) != 1 or not self._access.knows(hosts[0]):
            return _refused("Unknown host name; --allow-host allows one.", 421)
        if not self._access.admits(tokens[0] if len(tokens) == 1 else ""):
            challenge = {"WWW-Authenticate": CHALLENGE}
            return _refused("A token is required: as the password, or as a Bearer token.", 401, **challenge)
        return None


def _refused(text: str, status: int, **headers: str) -> PlainTextResponse:
    # A refused client keeps no connection.
    return PlainTextResponse(f"{text}\n", status, {"Connection": "close", **headers})


STOP_GRACE_S = 3
"""How long `close` waits for requests in progress."""
MAX_CONNECTIONS = 256
"""Requests on further connections get a 503."""
REQUEST_S = 10.0
"""A connection without a complete request head is closed after this."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens (port 0: any free one); UsageError if the address is not ours, or the port is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        dual = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def address(listening: socket.socket, name: str | None = None) -> str:
    """The URL of what listens there; if it listens on all addresses, by ``name`` or an address others can reach."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = name or _reached_at(listening.family)
    return f"http://{bracketed(host)}:{port}/"


def _reached_at(family: int) -> str:
    """An address of this machine that others can reach: that of its own route to them. Nothing is sent."""
    far, loopback = ("2001:db8::1", "::1") if family == socket.AF_INET6 else ("192.0.2.1", "127.0.0.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        return str(probe.getsockname()[0])
    return loopback


class _TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a time limit on request heads: uvicorn only limits the pause between requests."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._timer = self.loop.call_later(REQUEST_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()

    def on_response_complete(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(REQUEST_S, self.transport.abort)
        super().on_response_complete()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class BackgroundServer:
    """A server in a daemon thread, from `start` to `close` or for a ``with`` block."""

    def __init__(self, app: ASGIApp, listening: socket.socket, grace_s: int = STOP_GRACE_S) -> None:
        self._listening, self._grace_s = listening, grace_s
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_TimedProtocol,
                limit_concurrency=MAX_CONNECTIONS,
                # A client's nonsense must not fill our terminal.
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=grace_s,
            )
        )
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread("http", self._server.run, [self._listening])

    def close(self, wait_s: float | None = None) -> None:
        """Stop listening, and wait for requests in progress for ``wait_s``, by default their grace period."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(self._grace_s + 1.0 if wait_s is None else wait_s)
        self._listening.close()

    def __enter__(self) -> BackgroundServer:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After Ctrl-C, do not wait for another client's request.
        self.close(None if kind is None else 0.5)


Starter: TypeAlias = Callable[[str, int], None]
"""Opens a link to a port of this machine, or explains how to."""


def has_browser(environment: Mapping[str, str], platform: str) -> bool:
    """Whether a browser can open here, unlike over SSH or in a container."""
    if platform in ("darwin", "win32"):
        return True
    return any(environment.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))


def bracketed(host: str) -> str:
    """A host as a URL has it."""
    return f"[{host}]" if ":" in host else host


def tunnel(host: str, port: int, environment: Mapping[str, str]) -> str:
    """How to open a page of this machine's loopback address from another machine."""
    # client address, client port, server address, server port
    connection = environment.get("SSH_CONNECTION", "").split()
    here = connection[2] if len(connection) == 4 else socket.gethostname()
    return f"from another machine: ssh -L {port}:{bracketed(host)}:{port} {here}, and open the same link there"


def browser_starter(enabled: bool, say: Callable[[str], None]) -> Starter:
    """Opens links in a browser if ``enabled``, else does nothing."""

    def start(link: str, port: int) -> None:
        if not enabled:
            return
        if not has_browser(os.environ, sys.platform):
            say("cannot open a browser here: open the link in yours")
            if os.environ.get("SSH_CONNECTION"):
                say(tunnel("127.0.0.1", port, os.environ))
            return
        # A browser in the terminal returns when the user quits it; the file must be served meanwhile.
        start_thread("browser", opened, link)

    def opened(link: str) -> None:
        try:
            started = webbrowser.open(link)
        except webbrowser.Error:
            started = False
        if not started:
            say("could not start a browser: open the link in yours")

    return start


VIEWER = "https://ui.perfetto.dev"
HOST = "127.0.0.1"
VIEWER_PORT = 9001
"""The only local port that the viewer's own Content-Security-Policy lets it fetch from."""

HINT_S, LATE_HINT_S = 2.5, 20.0
"""Without a request by then, a hint says what may be wrong; the later time is for links opened by hand."""
_OFFLINE = "`sftriage traces open --offline` shows the capture on a local page, which needs no other host"
_BLOCKED = (
    "the viewer has not fetched it yet: the browser must be online, and allow the page to reach this machine "
    f"(Chrome and Edge prompt for this; Safari never allows it). {_OFFLINE}"
)

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """A trace served to Perfetto's viewer; ``name`` is URL-safe.

    Attributes:
        opened_at: link parameters that tell the viewer what to show first.
        secret: the part of the path that cannot be guessed.
        requested: set once a browser has requested it.
        fetched: set once a browser has received all but the last piece.
    """

    file: Path
    name: str
    port: int
    opened_at: str = ""
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    requested: threading.Event = field(default_factory=threading.Event)
    fetched: threading.Event = field(default_factory=threading.Event)

    @property
    def path(self) -> str:
        return f"/{self.secret}/{self.name}"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}{self.path}"

    @property
    def link(self) -> str:
        return f"{VIEWER}/#!/?url={self.url}" + (f"&{self.opened_at}" if self.opened_at else "")

    def wait(self, wait_s: float, say: Callable[[str], None], *, started: bool, away: Callable[[], str]) -> bool:
        """Wait until the file has been fetched, for at most ``wait_s``; ``say`` gets hints on what may be wrong.

        ``started``: sftriage opened the link in a browser. ``away`` returns why the viewer is unreachable, or "".
        """
        why: Future[str] = Future()
        start_thread("viewer", lambda: why.set_result(away()))
        waited_s = 0.0
        for hint_s in (HINT_S, LATE_HINT_S):
            if self.fetched.wait(min(wait_s, hint_s) - waited_s):
                return True
            waited_s = hint_s
            if wait_s <= hint_s:
                return False
            if self.requested.is_set():
                break
            reason = why.result() if why.done() else "no answer"
            if reason or started or hint_s == LATE_HINT_S:
                say(f"{VIEWER} cannot be reached from this machine: {reason}. {_OFFLINE}" if reason else _BLOCKED)
                break
        return self.fetched.wait(wait_s - waited_s)

    def app(self) -> ASGIApp:
        access = Access(frozenset({f"{HOST}:{self.port}"}))
        methods = (*READING, "OPTIONS")
        return application([Route("/{path:path}", self._answer, methods=methods)], access, methods=methods)

    async def _answer(self, request: Request) -> Response:
        target = request.scope["raw_path"] + (b"?" + query if (query := request.scope["query_string"]) else b"")
        if not hmac.compare_digest(target, self.path.encode()):
            raise HTTPException(404, "Not found.")
        # Programs such as curl send no origin, and neither does a page that embeds the file, with mode no-cors.
        origins, modes = request.headers.getlist("origin"), request.headers.getlist("sec-fetch-mode")
        if origins not in ([], [VIEWER]) or "no-cors" in modes:
            raise HTTPException(403, "Only the viewer may fetch this.")
        headers = {"Access-Control-Allow-Origin": VIEWER, "Vary": "Origin"}
        if request.method == "OPTIONS":
            # A preflight, also of Private Network Access.
            allowed = {"Access-Control-Allow-Methods": "GET, HEAD", "Access-Control-Allow-Private-Network": "true"}
            return Response(status_code=204, headers={**headers, **allowed})
        size_bytes = self.file.stat().st_size
        headers["Content-Length"] = str(size_bytes)
        if request.method == "HEAD":
            return Response(headers=headers, media_type="application/octet-stream")
        self.requested.set()
        return StreamingResponse(self._pieces(size_bytes), headers=headers, media_type="application/octet-stream")

    def _pieces(self, size_bytes: int) -> Iterator[bytes]:
        with self.file.open("rb") as file:
            for _ in range(0, size_bytes - _CHUNK_BYTES, _CHUNK_BYTES):
                yield file.read(_CHUNK_BYTES)
            # The server takes this empty piece only once the ones before are sent and the client is still there. After
            # the last piece it would be too late: a client that has everything may be gone.
            yield b""
            self.fetched.set()
            yield file.read()


def unreachable() -> str:
    """Why this machine cannot reach the viewer; "" if it can, or if it uses a proxy."""
    if urllib.request.getproxies():
        return ""
    try:
        with socket.create_connection((VIEWER.removeprefix("https://"), 443), timeout=HINT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def listen_for_viewer(port: int) -> socket.socket:
    """A socket for the viewer's request; UsageError, with what to do about it, if the port is taken."""
    try:
        return listen(HOST, port)
    except UsageError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        advice = (
            f"stop what listens there (`ss -ltnp 'sport = :{port}'` shows it; often a trace_processor, or another "
            "`traces open`), or use --offline: the viewer's own rules allow no other port of this machine"
            if port == VIEWER_PORT
            else "choose another"
        )
        raise UsageError(f"port {port} of {HOST} is taken: {advice}") from error


METRICS_PATH = "/metrics"
METRICS_GRACE_S = 2


def metrics_app(registry: CollectorRegistry, access: Access) -> ASGIApp:
    """The application that serves a registry's metrics in the format that the client accepts."""
    from prometheus_client.exposition import choose_encoder

    def metrics(request: Request) -> Response:
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=media_type)

    route = Route(METRICS_PATH, metrics, middleware=[Middleware(GZipMiddleware)])
    # Scrapers come by many names, and a token stops DNS rebinding as well.
    return application([route], replace(access, any_name=access.token_sha256 is not None))


def metrics_server(registry: CollectorRegistry, host: str, port: int, access: Access) -> tuple[BackgroundServer, str]:
    """The metrics server, not started but listening already, and its URL; raises UsageError as `listen` does."""
    try:
        listening = listen(host, port)
    except UsageError as error:
        raise UsageError(f"{error}; see --metrics-port") from error
    server = BackgroundServer(metrics_app(registry, access), listening, METRICS_GRACE_S)
    return server, f"{address(listening)}{METRICS_PATH[1:]}"
