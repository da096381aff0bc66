"""Listening: a socket on the address asked for, and a server that ends when it is told to."""

from __future__ import annotations

import socket
import threading
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from sftriage.errors import UsageError

STOP_GRACE_S = 3
"""How long requests under way are waited for at the end."""

MAX_CONNECTIONS = 256


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free.

    Raises:
        UsageError: the address is not this machine's, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def address(listening: socket.socket) -> str:
    """Where a browser finds what listens there."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class _Server(uvicorn.Server):
    """Lets event streams know that the end has come: they would not end by themselves."""

    def __init__(self, config: uvicorn.Config, stopping: threading.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop has come."""
        self._stopping.set()
        super().handle_exit(sig, frame)


def serve(app: ASGIApp, listening: socket.socket, stopping: threading.Event) -> None:
    """Answer requests until the process is asked to stop; then ``stopping`` is set."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )
    _Server(config, stopping).run(sockets=[listening])
