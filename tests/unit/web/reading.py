"""What a page says, to a person and to a program."""

import re
from html import unescape
from html.parser import HTMLParser

from tests.unit.web.asking import Answer

NASTY = '<img src=x onerror="alert(1)">'
SHORT_NASTY = "<b onclick=x()>&'\""


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
