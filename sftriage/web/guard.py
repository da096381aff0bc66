"""Who may look: every request passes here first, and every answer leaves with the headers that keep it in its place.

Only GET and HEAD are answered, so that nobody can change anything by a request. Names and tokens are checked as
`sftriage.access` has it; browsers ask for the password of HTTP Basic by themselves, and send it along with event
streams and downloads.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sftriage.access import Access

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
