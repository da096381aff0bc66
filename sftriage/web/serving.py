"""What listens here: who may read, the gate before every route, the server, links, a trace for Perfetto, ``/metrics``.

A Host header has to be one of ours: a page somewhere else that has its name point to this address (DNS rebinding) is
refused. A token comes as the password of HTTP Basic or as a Bearer token; never in an address, which ends up in
histories and logs. Every answer leaves with the headers that keep it in its place. A trace has a path that cannot be
guessed, and is refused to pages of any origin but the viewer's.
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
    """Whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_of(path: Path | None, variable: str) -> str | None:
    """The token in a file, or else the one in an environment variable; None where there is neither.

    It is no option itself: a command line can be read by everybody on the machine.

    Raises:
        UsageError: the file cannot be read, is no token's, or others can read it or put another in its place.
    """
    if path is None:
        return os.environ.get(variable) or None
    try:
        with path.open("rb") as file:
            _refuse_shared(path, os.fstat(file.fileno()), os.getuid())
            token = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    try:
        return token.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: a token must be printable ASCII characters") from error


def _refuse_shared(path: Path, about: os.stat_result, uid: int) -> None:
    """Refuse a token file that is not its reader's alone, with what mends it; root may share one that root owns."""
    if not stat.S_ISREG(about.st_mode):
        # A pipe from a program that knows the token.
        return
    file, mode = shlex.quote(str(path)), stat.S_IMODE(about.st_mode)
    if about.st_uid not in (uid, 0):
        raise UsageError(f"{path}: this token belongs to another user (uid {about.st_uid}); make one of your own")
    if mode & _OTHERS_WRITE or (mode & _OTHERS and about.st_uid == uid):
        raise UsageError(f"{path}: other users of this machine can use this token (mode {mode:04o}): chmod 600 {file}")
    if mode & stat.S_IROTH:
        log.warning("%s: everyone on this machine can read this token; as root: chmod o-r %s", path, file)
    for directory in {path.absolute().parent, path.resolve().parent}:
        where = directory.stat()
        # In a sticky one, as /tmp is, nobody can move what is another's.
        if where.st_uid not in (uid, 0) or (where.st_mode & _OTHERS_WRITE and not where.st_mode & stat.S_ISVTX):
            mend = f"chmod go-w {shlex.quote(str(directory))}" if where.st_uid == uid else "keep it elsewhere"
            raise UsageError(f"{path}: others can replace this token, because they can write to {directory}: {mend}")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may read.

    Attributes:
        names: what may be in a Host header, lower case, with a port or for any; addresses too, if not ``any_address``.
        any_address: any plain address is right: nobody's name can be made to point at one.
        token_sha256: the digest of the token, or None where none is required.
        any_name: any Host header is right: what comes by many names, and has a token.
    """

    names: frozenset[str]
    any_address: bool = False
    token_sha256: bytes | None = None
    any_name: bool = False

    @classmethod
    def to(cls, host: str, token: str | None, wanted: str, names: Iterable[str] = ()) -> Access:
        """What goes for what listens on ``host``; ``names`` are others that it is reached by.

        Raises:
            UsageError: it can be reached from elsewhere and there is no token, which ``wanted`` says how to give; or
                the token is easily guessed.
        """
        if token is None and not is_loopback(host):
            raise UsageError(f"other machines can reach {host}, so a token is required: {wanted}")
        if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise UsageError(f"a token must have at least {MIN_TOKEN_LENGTH} printable ASCII characters")
        known = {host.lower(), *(name.lower() for name in names)} | (_LOOPBACK_NAMES if is_loopback(host) else set())
        digest = None if token is None else hashlib.sha256(token.encode()).digest()
        return cls(frozenset(known), not is_loopback(host), digest)

    def knows(self, host: str) -> bool:
        if self.any_name or host in self.names:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].strip("[]").lower()
        if name in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address

    def admits(self, authorization: str) -> bool:
        """Whether an Authorization header holds the token. Takes as long for a wrong one as for the right one."""
        if self.token_sha256 is None:
            return True
        scheme, _, value = authorization.partition(" ")
        given = value.strip()
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode("utf-8", "replace").partition(":")[2]
            except (binascii.Error, ValueError):
                given = ""
        elif scheme.lower() != "bearer":
            given = ""
        return hmac.compare_digest(hashlib.sha256(given.encode("utf-8", "replace")).digest(), self.token_sha256)


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The viewer that a trace is handed to has to be able to answer.
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
CHALLENGE = 'Basic realm="sftriage: any user, the token as password", charset="UTF-8", Bearer realm="sftriage"'
READING = ("GET", "HEAD")
"""Nobody can change anything by a request."""


def application(
    routes: Sequence[BaseRoute],
    access: Access,
    refused: Callable[[Request, int, str], Response] | None = None,
    methods: Collection[str] = READING,
) -> ASGIApp:
    """The application that answers on some routes; ``refused`` makes the answer to what is refused, or plain text."""

    def failed(request: Request, error: Exception) -> Response:
        status, detail, headers = 500, "sftriage could not make this page; see its log.", None
        if isinstance(error, HTTPException):
            status, detail, headers = error.status_code, error.detail, error.headers
        answer = refused(request, status, detail) if refused else PlainTextResponse(f"{detail}\n", status)
        answer.headers.update(headers or {})
        return answer

    handlers: dict[Any, Any] = {HTTPException: failed, Exception: failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, access, methods)


class Gate:
    """Lets through what may be answered; see the module."""

    def __init__(self, app: ASGIApp, access: Access, methods: Collection[str]) -> None:
        self._app, self._access, self._methods = app, access, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Nobody here speaks WebSocket.
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
            return _turned_away("Read-only: send GET or HEAD.", 405, Allow=", ".join(READING))
        headers = Headers(scope=scope)
        hosts, given = headers.getlist("host"), headers.getlist("authorization")
        if len(hosts) != 1 or not self._access.knows(hosts[0]):
            return _turned_away("Unknown host name; --allow-host allows one.", 421)
        if not self._access.admits(given[0] if len(given) == 1 else ""):
            challenge = {"WWW-Authenticate": CHALLENGE}
            return _turned_away("A token is required: as the password, or as a Bearer token.", 401, **challenge)
        return None


def _turned_away(text: str, status: int, **headers: str) -> PlainTextResponse:
    # A refused client keeps no connection.
    return PlainTextResponse(f"{text}\n", status, {"Connection": "close", **headers})


STOP_GRACE_S = 3
"""How long to wait at the end for requests in progress."""

MAX_CONNECTIONS = 256
"""Requests on further connections are answered 503."""

REQUEST_S = 10.0
"""A connection without a complete request head is closed after this."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free.

    Raises:
        UsageError: the address is not this machine's, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        # (all addresses are those of both families, where both are to be had)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def address(listening: socket.socket, name: str | None = None) -> str:
    """Where a browser finds what listens there; on all addresses, by ``name`` or by one that other machines reach."""
    host, port = listening.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = name or _reached_at(listening.family)
    return f"http://{bracketed(host)}:{port}/"


def _reached_at(family: int) -> str:
    """An address of this machine that others reach: the one by which it would reach them. Nothing is sent."""
    far, loopback = ("2001:db8::1", "::1") if family == socket.AF_INET6 else ("192.0.2.1", "127.0.0.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((far, 9))
        return str(asking.getsockname()[0])
    return loopback


class _TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a time limit on request heads: uvicorn limits only the pause between two requests."""

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
    """Answers requests in a daemon thread, from `start` (or the beginning of a ``with`` block) to `close` (or its end).

    Requests under way have ``grace_s`` to end.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket, grace_s: int = STOP_GRACE_S) -> None:
        self._listening, self._grace_s = listening, grace_s
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_TimedProtocol,
                limit_concurrency=MAX_CONNECTIONS,
                # Whoever sends nonsense writes no lines on our terminal.
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
        """Stop listening, and wait for requests in progress: for ``wait_s``, or for their grace period."""
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
"""Shows a link, at a port of this machine, to whoever is there, or says that they have to open it."""


def has_browser(environment: Mapping[str, str], platform: str) -> bool:
    """Whether a browser can be shown here: not over SSH, nor in a container."""
    if platform in ("darwin", "win32"):
        return True
    return any(environment.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"))


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def tunnel(host: str, port: int, environment: Mapping[str, str]) -> str:
    """How a page that this machine alone can open is opened from another."""
    # (who asked, from which port, and where this machine was found)
    found = environment.get("SSH_CONNECTION", "").split()
    here = found[2] if len(found) == 4 else socket.gethostname()
    return f"from another machine: ssh -L {port}:{bracketed(host)}:{port} {here}, and open the same link there"


def browser_starter(wanted: bool, say: Callable[[str], None]) -> Starter:
    """What opens a link in a browser, if that is ``wanted``."""

    def start(link: str, port: int) -> None:
        if not wanted:
            return
        if not has_browser(os.environ, sys.platform):
            say("cannot open a browser here: open the link in yours")
            if os.environ.get("SSH_CONNECTION"):
                say(tunnel("127.0.0.1", port, os.environ))
            return
        # One that runs in the terminal returns when it is left; the file is served meanwhile.
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
"""The one port of this machine that the viewer's own rules (its Content-Security-Policy) let it ask."""

HINT_S, LATE_HINT_S = 2.5, 20.0
"""Without a request by then, a hint says what may be wrong: the later time is for a link that is opened by hand."""
_OFFLINE = "`sftriage traces open --offline` shows the capture on a local page, which needs no other host"
_BLOCKED = (
    "the viewer has not fetched it yet: the browser must be online, and allow the page to reach this machine "
    f"(Chrome and Edge prompt for this; Safari never allows it). {_OFFLINE}"
)

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """A file, and where it is served, under a name that is plain enough to be part of an address.

    Attributes:
        secret: the part of the path that cannot be guessed.
        asked: set once a browser has requested it.
        fetched: set once a browser has all of it but the last piece, which is on its way.
        opened_at: what of it the viewer is to show first, as parameters of its link.
    """

    file: Path
    name: str
    port: int
    opened_at: str = ""
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    asked: threading.Event = field(default_factory=threading.Event)
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
        """Wait until the file has been fetched, and say soon what is in the way, or may be.

        ``started`` says whether a browser was sent here; who opens the link by hand needs longer. ``away`` says why
        the viewer cannot be reached from this machine, or nothing.
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
            if self.asked.is_set():
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
        asked = request.scope["raw_path"] + (b"?" + query if (query := request.scope["query_string"]) else b"")
        # As quick for a path that is nearly right as for any other.
        if not hmac.compare_digest(asked, self.path.encode()):
            raise HTTPException(404, "Not found.")
        # What is no web page (curl) names no origin.
        origins, modes = request.headers.getlist("origin"), request.headers.getlist("sec-fetch-mode")
        # Nor does a page that only embeds a file (as a picture, say), but its browser says so.
        if origins not in ([], [VIEWER]) or "no-cors" in modes:
            raise HTTPException(403, "Only the viewer may fetch this.")
        headers = {"Access-Control-Allow-Origin": VIEWER, "Vary": "Origin"}
        if request.method == "OPTIONS":
            # A preflight: whether its page may send a request, and whether a page from outside may reach this machine.
            allowed = {"Access-Control-Allow-Methods": "GET, HEAD", "Access-Control-Allow-Private-Network": "true"}
            return Response(status_code=204, headers={**headers, **allowed})
        size_bytes = self.file.stat().st_size
        headers["Content-Length"] = str(size_bytes)
        if request.method == "HEAD":
            return Response(headers=headers, media_type="application/octet-stream")
        self.asked.set()
        return StreamingResponse(self._pieces(size_bytes), headers=headers, media_type="application/octet-stream")

    def _pieces(self, size_bytes: int) -> Iterator[bytes]:
        with self.file.open("rb") as file:
            for _ in range(0, size_bytes - _CHUNK_BYTES, _CHUNK_BYTES):
                yield file.read(_CHUNK_BYTES)
            # Taken once nearly all before it has been sent, and not at all where who asked has gone by then. After the
            # last piece it would be too late to ask: who has all of it may go before the server comes back here.
            yield b""
            self.fetched.set()
            yield file.read()


def unreachable() -> str:
    """Why the viewer cannot be reached from this machine; nothing where it can, or where a proxy is asked for it."""
    if urllib.request.getproxies():
        return ""
    try:
        with socket.create_connection((VIEWER.removeprefix("https://"), 443), timeout=HINT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def listen_for_viewer(port: int) -> socket.socket:
    """A socket for the viewer to ask on.

    Raises:
        UsageError: it cannot be had, with what to do about it where the port is taken.
    """
    try:
        return listen(HOST, port)
    except UsageError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        what = (
            f"stop what listens there (`ss -ltnp 'sport = :{port}'` shows it; often a trace_processor, or another "
            "`traces open`), or use --offline: the viewer's own rules allow no other port of this machine"
            if port == VIEWER_PORT
            else "choose another"
        )
        raise UsageError(f"port {port} of {HOST} is taken: {what}") from error


METRICS_PATH = "/metrics"
METRICS_GRACE_S = 2


def metrics_app(registry: CollectorRegistry, access: Access) -> ASGIApp:
    """What answers, in the format that is asked for; always with all metrics."""
    # Whoever made the registry has imported it, as the metrics of one process.
    from prometheus_client.exposition import choose_encoder

    def metrics(request: Request) -> Response:
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=media_type)

    route = Route(METRICS_PATH, metrics, middleware=[Middleware(GZipMiddleware)])
    # With a token there is nothing to be had by having a name point here, and scrapers come by many names.
    return application([route], replace(access, any_name=access.token_sha256 is not None))


def metrics_server(registry: CollectorRegistry, host: str, port: int, access: Access) -> tuple[BackgroundServer, str]:
    """What serves metrics, and its URL. It listens already, so that a port that is taken is known.

    Raises:
        UsageError: the address is not this machine's, or the port is taken.
    """
    try:
        listening = listen(host, port)
    except UsageError as error:
        raise UsageError(f"{error}; see --metrics-port") from error
    server = BackgroundServer(metrics_app(registry, access), listening, METRICS_GRACE_S)
    return server, f"{address(listening)}{METRICS_PATH[1:]}"
