"""Who may look: every request passes here first, and every answer leaves with the headers that keep it in its place.

Only GET and HEAD are answered, so that nobody can change anything by a request. The Host header has to be one of ours:
a page somewhere else that has its name point to this address (DNS rebinding) is refused. Where a token is wanted it
comes as the password of HTTP Basic, which browsers ask for by themselves and send along with event streams and
downloads, or as a Bearer token; never in an address, which ends up in histories and logs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sftriage.errors import UsageError

MIN_TOKEN_LENGTH = 16

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(\d{1,5}))?")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

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


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may look.

    Attributes:
        names: what the page may be called in a Host header, lower case; addresses too, if not on ``any_address``.
        any_address: any plain address is right: nobody's name can be made to point at one.
        token_sha256: the digest of the token, or None where none is wanted.
    """

    names: frozenset[str]
    any_address: bool = False
    token_sha256: bytes | None = None

    @classmethod
    def to(cls, host: str, token: str | None, names: Iterable[str] = ()) -> Access:
        """What goes for a page that listens on ``host``; ``names`` are others that it is reached by.

        Raises:
            UsageError: it can be reached from elsewhere and there is no token, or the token is easily guessed.
        """
        if token is None and not is_loopback(host):
            raise UsageError(
                f"{host} can be reached from other machines, so the page wants a token: "
                "give one with --token-file, or in SFTRIAGE_UI_TOKEN"
            )
        if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise UsageError(f"a token is at least {MIN_TOKEN_LENGTH} printable ASCII characters")
        known = {host.lower(), *(name.lower() for name in names)} | (_LOOPBACK_NAMES if is_loopback(host) else set())
        digest = None if token is None else hashlib.sha256(token.encode()).digest()
        return cls(frozenset(known), not is_loopback(host), digest)

    def knows(self, host: str) -> bool:
        """Whether a Host header names this page."""
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


class Guard:
    """Lets through what may be answered; see the module."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
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
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is only to be read.\n", 405, {"Allow": "GET, HEAD"})
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._access.knows(hosts[0]):
            return PlainTextResponse("No page of that name is here; see --allow-host.\n", 421)
        given = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        if not self._access.admits(given[0] if len(given) == 1 else ""):
            challenge = {"WWW-Authenticate": 'Basic realm="sftriage: any user, the token as password", charset="UTF-8"'}
            return PlainTextResponse("A token is wanted: as the password, or as a Bearer token.\n", 401, challenge)
        return None
