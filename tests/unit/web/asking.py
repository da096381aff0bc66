"""A browser's request, without a browser and without a network."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Header = tuple[str, str]
LOCAL: tuple[Header, ...] = (("host", "127.0.0.1:8080"),)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(app: Any, target: str, *, method: str = "GET", headers: Sequence[Header] = LOCAL) -> Answer:
    """Ask for something, as a server hands it to the application: the path is decoded, and may hold anything."""
    return asyncio.run(_ask(app, target, method, headers))


async def _ask(app: Any, target: str, method: str, headers: Sequence[Header]) -> Answer:
    raw, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(raw),
        "raw_path": raw.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    started: list[dict[str, Any]] = []
    body: list[bytes] = []

    asked = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        # Whoever asks has nothing more to say, and stays until the answer is whole.
        for message in asked:
            return message
        return await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            started.append(message)
        else:
            body.append(message.get("body", b""))

    await asyncio.wait_for(app(scope, receive, send), timeout=60)
    (start,) = started
    return Answer(start["status"], {k.decode(): v.decode() for k, v in start["headers"]}, b"".join(body))
