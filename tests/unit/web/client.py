"""Requests to an application without a network, and checks of the pages it returns."""

import asyncio
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser
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


def fetch(app: Any, target: str, *, method: str = "GET", headers: Sequence[Header] = LOCAL) -> Answer:
    """Send a request as a server hands it to the application: with the path decoded."""
    return asyncio.run(_fetch(app, target, method, headers))


async def _fetch(app: Any, target: str, method: str, headers: Sequence[Header]) -> Answer:
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

    messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        # The client sends nothing more, and stays until the response is complete.
        for message in messages:
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


NASTY = '<img src=x onerror="alert(1)">'
SHORT_NASTY = "<b onclick=x()>&'\""
UPWARDS = ("..", "%2e%2e", "..%2f..", "%2e%2e%2f", "..%5c..", "....//", "%252e%252e", "..%255c..", "/etc/passwd")
UPWARDS += ("%2fetc%2fpasswd", "%252Fetc", "%00", "%E2%80%AE", ".x")
FORGED = ("c-9", ".lock", ".tmp-c-1-abc", "C-1", "c-1%00", "c-1%0a", "c" * 101, "%3Cscript%3E", "c-1%20")
FORGED += ("%F0%9F%92%A5", "manifest.json")
"""Paths that would lead out of a directory, and names that no capture has."""


class Tags(HTMLParser):
    """Collects the tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def text_of(answer: Answer) -> str:
    """The visible text in one line."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", answer.text)))


def readable(html: str) -> Iterator[str]:
    """The visible text of a page without its charts, section by section."""
    beside = r'<svg.*?</svg>|<details.*?</details>|<section id="(?:timeline|heat|tracks)".*?</section>'
    html = re.sub(beside, "", html, flags=re.DOTALL)
    yield from re.findall(r'<p class="run".*?(<span class="pill [^>]*>.*?)</span>', html)
    for part in re.findall(r"<section.*?</section>", html, re.DOTALL):
        words = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", part))).strip()
        yield from textwrap.wrap(words, 160, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def harmless(answer: Answer) -> list[tuple[str, dict[str, str | None]]]:
    """The tags of a page that runs only its own scripts and loads nothing from elsewhere."""
    tags = Tags(answer.text).tags
    for tag, attributes in tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        assert tag not in ("b", "style", "iframe", "object", "embed", "base")
        if tag == "script":
            assert str(attributes["src"]).startswith("/static/")
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            assert value is None or (value.startswith(("/", "#")) and not value.startswith("//")), (tag, attributes)
    return tags
