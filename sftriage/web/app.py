"""The one application that answers requests, whatever it shows: routes behind one gate.

The pages about a run or a store (`run_page`, `store_page`), one trace for Perfetto's viewer (`viewer`) and `metrics`
give it their routes. Every request passes the gate first, and every answer leaves with the headers that keep it in its
place. Names and tokens are checked as `access` has it; browsers ask for the password of HTTP Basic by themselves, and
send it along with event streams and downloads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sftriage.web.access import Access

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


def _plain(_: Request, status: int, detail: str) -> Response:
    return PlainTextResponse(f"{detail}\n", status)


def application(
    routes: Sequence[BaseRoute],
    access: Access,
    refused: Callable[[Request, int, str], Response] = _plain,
    methods: Collection[str] = READING,
) -> ASGIApp:
    """The application that answers on some routes; ``refused`` makes the answer that says what is the matter."""

    def failed(request: Request, error: Exception) -> Response:
        status, detail, headers = 500, "This could not be made.", None
        if isinstance(error, HTTPException):
            status, detail, headers = error.status_code, error.detail, error.headers
        answer = refused(request, status, detail)
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
        """Answer one request, or refuse it."""
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
            return _turned_away("This is only to be read.", 405, Allow=", ".join(READING))
        headers = Headers(scope=scope)
        hosts, given = headers.getlist("host"), headers.getlist("authorization")
        if len(hosts) != 1 or not self._access.knows(hosts[0]):
            return _turned_away("Nothing of that name is here; of the page, see --allow-host.", 421)
        if not self._access.admits(given[0] if len(given) == 1 else ""):
            challenge = {"WWW-Authenticate": CHALLENGE}
            return _turned_away("A token is wanted: as the password, or as a Bearer token.", 401, **challenge)
        return None


def _turned_away(said: str, status: int, **headers: str) -> PlainTextResponse:
    # Whoever is not let in holds no connection.
    return PlainTextResponse(f"{said}\n", status, {"Connection": "close", **headers})
