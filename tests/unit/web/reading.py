"""What a page says, to a person and to a program."""

import re
from html import unescape
from html.parser import HTMLParser

from tests.unit.web.asking import Answer

NASTY = '<img src=x onerror="alert(1)">'
SHORT_NASTY = "<b onclick=x()>&'\""
UPWARDS = ("..", "%2e%2e", "..%2f..", "%2e%2e%2f", "..%5c..", "....//", "%252e%252e", "..%255c..", "/etc/passwd")
UPWARDS += ("%2fetc%2fpasswd", "%252Fetc", "%00", "%E2%80%AE", ".x")
FORGED = ("c-9", ".lock", ".tmp-c-1-abc", "C-1", "c-1%00", "c-1%0a", "c" * 101, "%3Cscript%3E", "c-1%20")
FORGED += ("%F0%9F%92%A5", "manifest.json")
"""Ways out of a directory, and names that no capture has."""


class Seen(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def text_of(answer: Answer) -> str:
    """What a person reads, in one line."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", answer.text)))


def harmless(answer: Answer) -> list[tuple[str, dict[str, str | None]]]:
    """The tags of a page, in which nothing runs but its own scripts, and which asks nobody else."""
    tags = Seen(answer.text).tags
    for tag, attributes in tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        assert tag not in ("b", "style", "iframe", "object", "embed", "base")
        if tag == "script":
            assert str(attributes["src"]).startswith("/static/")
        for name in ("src", "href", "action"):
            value = attributes.get(name)
            assert value is None or (value.startswith(("/", "#")) and not value.startswith("//")), (tag, attributes)
    return tags
