"""One file, served on this machine alone to the one web page that it is meant for.

Whoever may have the file knows its path, which cannot be guessed, and asks for it under this address's own name: a page
that has its own name point here (DNS rebinding) does not. A page of another origin than the one it is meant for is
refused, and its browser is told not to let it read the answer.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

HOST = "127.0.0.1"
SILENCE_S = 30.0
"""How long a connection may say nothing, or take nothing."""


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Leave no copy of a trace behind when somebody else ends us."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_METHODS = ("GET", "HEAD", "OPTIONS")
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Door:
    """What a request has to say to be let in.

    Attributes:
        name: the file's name, plain enough to be part of an address.
        origin: the web page that it is meant for.
        port: where it is served.
        secret: the part of the path that cannot be guessed.
    """

    name: str
    origin: str
    port: int
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @property
    def path(self) -> str:
        """Where the file is."""
        return f"/{self.secret}/{self.name}"

    @property
    def url(self) -> str:
        """Its whole address."""
        return f"http://{HOST}:{self.port}{self.path}"

    def answer(
        self, method: str, path: str, hosts: Sequence[str], origins: Sequence[str], modes: Sequence[str] = ()
    ) -> HTTPStatus:
        """How a request is answered: ``OK``, ``NO_CONTENT`` for leave to ask (a CORS preflight), or a refusal.

        Args:
            method: what is to be done.
            path: the path that is asked for, as it was sent.
            hosts: its Host headers.
            origins: its Origin headers; what no web page asks for (curl) has none.
            modes: its Sec-Fetch-Mode headers: a page that only embeds a file names no origin.
        """
        if list(hosts) != [f"{HOST}:{self.port}"]:
            return HTTPStatus.MISDIRECTED_REQUEST
        if method not in _METHODS:
            return HTTPStatus.METHOD_NOT_ALLOWED
        # As quick for a path that is nearly right as for any other.
        if not hmac.compare_digest(path.encode("utf-8", "replace"), self.path.encode()):
            return HTTPStatus.NOT_FOUND
        if (origins and list(origins) != [self.origin]) or "no-cors" in modes:
            return HTTPStatus.FORBIDDEN
        return HTTPStatus.NO_CONTENT if method == "OPTIONS" else HTTPStatus.OK


class FileServer(ThreadingHTTPServer):
    """Serves one file. `fetched` is set once somebody has got all of it, and `asked` once it was asked for.

    Args:
        file: the file; it stays as it is meanwhile.
        door: who gets it, and where.

    Raises:
        OSError: the port is taken, or cannot be had.
    """

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, file: Path, door: Door) -> None:
        self.file, self.door = file, door
        self.asked, self.fetched = threading.Event(), threading.Event()
        super().__init__((HOST, door.port), _Handler)

    @contextlib.contextmanager
    def serving(self) -> Iterator[FileServer]:
        """Answer requests, as long as the block lasts."""
        thread = threading.Thread(target=self.serve_forever, name="loopback", kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke is no news: whoever still wants the file asks again."""


class _Handler(BaseHTTPRequestHandler):
    """One connection, and one request on it."""

    server: FileServer
    timeout = SILENCE_S
    server_version, sys_version = "sftriage", ""

    def do_GET(self) -> None:
        """The file."""
        if not self._let_in():
            return
        self.server.asked.set()
        with self.server.file.open("rb") as file:
            left = self._headed(HTTPStatus.OK)
            while left and (chunk := file.read(min(_CHUNK_BYTES, left))):
                self.wfile.write(chunk)
                left -= len(chunk)
        if not left:
            self.server.fetched.set()

    def do_HEAD(self) -> None:
        """What the file is."""
        if self._let_in():
            self._headed(HTTPStatus.OK)

    def do_OPTIONS(self) -> None:
        """A browser asks whether its page may ask, and whether a page from outside may ask this machine."""
        if self._let_in():
            self._headed(HTTPStatus.NO_CONTENT)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS

    def _let_in(self) -> bool:
        headers = self.headers
        hosts, origins = headers.get_all("Host", []), headers.get_all("Origin", [])
        modes = headers.get_all("Sec-Fetch-Mode", [])
        status = self.server.door.answer(self.command, self.path, hosts, origins, modes)
        if status < HTTPStatus.BAD_REQUEST:
            return True
        self._refuse(status)
        return False

    def _headed(self, status: HTTPStatus) -> int:
        """Send the head of an answer; how many bytes are to follow."""
        size_bytes = self.server.file.stat().st_size
        self.send_response(status)
        self.send_header("Access-Control-Allow-Origin", self.server.door.origin)
        self.send_header("Vary", "Origin")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.NO_CONTENT:
            self.send_header("Access-Control-Allow-Methods", "GET, HEAD")
            self.send_header("Access-Control-Allow-Private-Network", "true")
        else:
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size_bytes))
        self.end_headers()
        return size_bytes

    def _refuse(self, status: HTTPStatus) -> None:
        said = f"{status.phrase}\n".encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(said)))
        self.send_header("Connection", "close")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        """Nobody wants to read a line a request."""
