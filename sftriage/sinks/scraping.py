"""Where metrics go: to who asks for them over HTTP, and into a file for node_exporter's textfile collector."""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app, write_to_textfile

from sftriage.access import Access
from sftriage.errors import UsageError

log = logging.getLogger("sftriage")

PATH = "/metrics"
MAX_REQUESTS = 16
"""Answered at a time; who comes on top is turned away."""
REQUEST_S = 10.0
"""How long a client may take to say what it wants."""
WRITE_EVERY_S = 5.0
CLOSE_GRACE_S = 2.0
POLL_S = 0.1
"""How often it is seen whether the end has come."""
SUFFIX = ".prom"

_HEADERS = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("Server", "sftriage"))
_Start = Callable[..., Any]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class calls it so)
        """Nobody wants to read of every scrape."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * MAX_REQUESTS

    def __init__(self, host: str, port: int) -> None:
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As WSGIServer does, but without asking a name server who we are."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if there are not too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""
        log.debug("a request for metrics failed", exc_info=True)


class Endpoint:
    """Listens from the moment it is made, so that a port that is taken is known; answers once it is told to `serve`.

    Raises:
        UsageError: the address is not this machine's, or the port is taken.
    """

    def __init__(self, host: str, port: int, access: Access) -> None:
        self._access = access
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise UsageError(
                f"metrics: cannot listen on {host} port {port}: {error.strerror or error}; see --metrics-port"
            ) from error
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}{PATH}"

    def serve(self, registry: CollectorRegistry) -> None:
        """Answer from now on, in a thread."""
        self._server.set_app(guarded(make_wsgi_app(registry), self._access))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="sftriage-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join(CLOSE_GRACE_S)
        self._server.server_close()


def guarded(app: Callable[..., Any], access: Access) -> Callable[[dict[str, Any], _Start], Iterable[bytes]]:
    """A WSGI application that passes on who may read, and asks for the metrics as a whole."""

    def answer(environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        def refuse(status: str, text: str, *headers: tuple[str, str]) -> Iterable[bytes]:
            start(status, [("Content-Type", "text/plain; charset=utf-8"), *_HEADERS, *headers])
            return [text.encode()]

        def sealed(status: str, headers: list[tuple[str, str]]) -> Any:
            return start(status, [*headers, *_HEADERS])

        # With a token there is nothing to be had by having a name point here, and scrapers come by many names.
        if access.token_sha256 is None and not access.knows(environ.get("HTTP_HOST", "")):
            return refuse("421 Misdirected Request", "Nothing of that name is here.\n")
        if not access.admits(environ.get("HTTP_AUTHORIZATION", "")):
            challenge = ("WWW-Authenticate", 'Bearer realm="sftriage"')
            return refuse("401 Unauthorized", "A token is wanted: as a Bearer token.\n", challenge)
        if environ["REQUEST_METHOD"] != "GET":
            return refuse("405 Method Not Allowed", "Metrics are only to be read.\n", ("Allow", "GET"))
        if environ["PATH_INFO"] != PATH:
            return refuse("404 Not Found", f"The metrics are at {PATH}.\n")
        answered: Iterable[bytes] = app({**environ, "QUERY_STRING": ""}, sealed)
        return answered

    return answer


class TextFile:
    """Writes the metrics into a file every few seconds, in a thread: a disk that hangs holds up nobody.

    Raises:
        UsageError: no file can be made there, or not one that is read.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != SUFFIX:
            raise UsageError(f"{path}: node_exporter reads files that end in {SUFFIX}")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{path}: no directory that can be written to; see --metrics-file")
        if path.is_dir():
            raise UsageError(f"{path}: is a directory")
        self._path = path
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._registry: CollectorRegistry | None = None
        self._failing = False

    def serve(self, registry: CollectorRegistry) -> None:
        """Write now and from now on."""
        self._registry = registry
        self._thread = threading.Thread(target=self._write_on, name="sftriage-metrics-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write once more, how it ended."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(CLOSE_GRACE_S)

    def _write_on(self) -> None:
        while True:
            # Asked before it is written: what comes after the end has been said is in the last writing.
            ended = self._end.is_set()
            self._write()
            if ended:
                return
            self._end.wait(WRITE_EVERY_S)

    def _write(self) -> None:
        """The file is replaced as a whole; who reads it meanwhile has the old one."""
        assert self._registry is not None, "served first"
        try:
            write_to_textfile(str(self._path), self._registry)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("metrics: %s cannot be written: %s; it is tried again", self._path, error.strerror)
            self._failing = True
