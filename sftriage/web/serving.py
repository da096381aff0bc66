"""A listening socket, a server on it, in the foreground or in a thread of its own, and links for browsers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TypeAlias

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from sftriage.base.loops import start_thread
from sftriage.errors import UsageError

STOP_GRACE_S = 3
"""How long requests under way are waited for at the end."""

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


class _Server(uvicorn.Server):
    """Lets event streams know that the end has come: they would not end by themselves."""

    def __init__(self, config: uvicorn.Config, stopping: threading.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop has come."""
        self._stopping.set()
        super().handle_exit(sig, frame)


def _config(app: ASGIApp, max_connections: int, grace_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_TimedProtocol,
        limit_concurrency=max_connections,
        # Whoever sends nonsense writes no lines on our terminal.
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=grace_s,
    )


def serve(app: ASGIApp, listening: socket.socket, stopping: threading.Event) -> None:
    """Answer requests until the process is asked to stop; then ``stopping`` is set."""
    _Server(_config(app, MAX_CONNECTIONS, STOP_GRACE_S), stopping).run(sockets=[listening])


class BackgroundServer:
    """Answers requests in a daemon thread, from `start` (or the beginning of a ``with`` block) to `close` (or its end).

    At most ``max_connections`` are open at a time; requests under way have ``grace_s`` to end.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        max_connections: int = MAX_CONNECTIONS,
        grace_s: int = STOP_GRACE_S,
    ) -> None:
        self._listening, self._grace_s = listening, grace_s
        self._server = uvicorn.Server(_config(app, max_connections, grace_s))
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer from now on."""
        self._thread = start_thread("http", self._server.run, [self._listening])

    def close(self, wait_s: float | None = None) -> None:
        """Listen no more, and wait for requests under way: for so long, or for as long as they are given."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(self._grace_s + 1.0 if wait_s is None else wait_s)
        self._listening.close()

    def __enter__(self) -> BackgroundServer:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # A person who wants it to end does not wait for somebody else's request.
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
            say("no browser can be shown here: open the link in one of yours")
            if os.environ.get("SSH_CONNECTION"):
                say(tunnel("127.0.0.1", port, os.environ))
            return
        # One that runs in the terminal returns when it is left; the file is served meanwhile.
        start_thread("browser", _start, link, say)

    return start


def _start(link: str, say: Callable[[str], None]) -> None:
    try:
        started = webbrowser.open(link)
    except webbrowser.Error:
        started = False
    if not started:
        say("no browser could be started: open the link in one of yours")
