"""One trace for Perfetto's viewer, whose web page fetches it from this machine.

Whoever may have the file knows its path, which cannot be guessed, and asks for it under this address's own name: a
page that has its own name point here (DNS rebinding) does not. A page of another origin than the viewer's is refused,
and its browser is told not to let it read the answer.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.base.loops import start_thread
from sftriage.errors import UsageError
from sftriage.web.serving import READING, Access, application, listen

VIEWER = "https://ui.perfetto.dev"
HOST = "127.0.0.1"
VIEWER_PORT = 9001
"""The one port of this machine that the viewer's own rules (its Content-Security-Policy) let it ask."""

HINT_S = 2.5
"""After so long without a request it is said what is in the way, where a browser was started, or is known to fail."""
LATE_HINT_S = 20.0
"""And here where somebody opens the link by hand."""
_OFFLINE = "`sftriage traces open --offline` shows the capture on a page of its own, which asks no other host"
_BLOCKED = (
    "nothing has asked for it yet: the browser has to be online, and to let the page ask this machine "
    f"(Chrome and Edge ask you; Safari never does). {_OFFLINE}"
)

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ServedTrace:
    """A file, and where it is served, under a name that is plain enough to be part of an address.

    Attributes:
        secret: the part of the path that cannot be guessed.
        asked: set once somebody has asked for it.
        fetched: set once somebody has got all of it but the last piece, which is on its way.
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
            reason = why.result() if why.done() else "it does not answer"
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
            raise HTTPException(403, "Only the viewer may have it.")
        headers = {"Access-Control-Allow-Origin": VIEWER, "Vary": "Origin"}
        if request.method == "OPTIONS":
            # A browser asks whether its page may ask, and whether a page from outside may ask this machine.
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
            f"end what listens there (`ss -ltnp 'sport = :{port}'` says what; often a trace_processor, or another "
            "`traces open`), or use --offline: the viewer's own rules let it ask this machine on no other port"
            if port == VIEWER_PORT
            else "take another"
        )
        raise UsageError(f"port {port} of {HOST} is taken: {what}") from error
