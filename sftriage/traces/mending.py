"""JSON whose strings were written as they were: quotes, backslashes and control characters that nobody escaped.

torch.profiler writes names so, and metadata. Where such a string ends, the next key shows: a quote ends it that is
followed by a comma and a key, or by the end of the object. Of several such places the first counts from which on all
else can be read, and each key of the object is one that may be there, and is there once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import msgspec

MAX_MENDED_BYTES = 1 << 20
"""A longer object is not looked into: no event, and nothing beside the events, has so much text."""

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_MAX_VALUES = 100_000
"""Values that are read in all attempts: each place where a string may end is one."""

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_KEY_TEXT: Final = r'"((?:[^"\\\x00-\x1f]|\\["\\/bfnrt]){0,200})"[ \t\r\n]*:'
_KEY: Final = re.compile(rf"[ \t\r\n]*{_KEY_TEXT}")
_WORD: Final = re.compile(r'[^\s"{}\[\],:]+')
_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_CLOSES: Final = {"{": "}", "[": "]"}
_FOLLOWS: Final = {
    "{": re.compile(rf"[ \t\r\n]*(?:\}}|,[ \t\r\n]*{_KEY_TEXT})"),
    "[": re.compile(r"[ \t\r\n]*[,\]]"),
}
"""What is behind the last quote of a string, by what the string is in."""


def whole(text: bytes) -> bool:
    """Whether this is one JSON value, by the standard."""
    try:
        msgspec.json.decode(text)
    except UNDECODABLE:
        return False
    return True


def mended(text: bytes, keys: Collection[str] | None = None, needs: Collection[str] = ()) -> bytes | None:
    """One JSON object with all escaped in its strings that should have been; None where it cannot be read as one.

    Args:
        text: the object, from its first bracket to its last.
        keys: the keys that it may have; None for any. Those of the objects in it are not looked at.
        needs: the keys that it has to have, where anything had to be mended.
    """
    if whole(text):
        return text
    if len(text) > MAX_MENDED_BYTES:
        return None
    source = text.decode("utf-8", "replace")
    found = _Reading(source, keys, frozenset(needs)).strings()
    if found is None:
        return None
    parts, until = [], 0
    for start, end in found:
        parts += [source[until:start], _escaped(source[start:end])]
        until = end
    again = "".join((*parts, source[until:])).encode()
    return again if whole(again) else None


def _escaped(written: str) -> str:
    if not written.startswith('"'):
        return json.dumps(written, ensure_ascii=False)
    # Who escapes nothing has written each backslash as it was.
    return written if whole(written.encode()) else json.dumps(written[1:-1], ensure_ascii=False)


_Spans = tuple["_Spans", int, int] | tuple[()]
"""From where to where there are strings, the last of them first."""


@dataclass(slots=True)
class _Way:
    """One way to read the object, up to ``at``: which brackets are open there, and where the string it is in began."""

    at: int = 0
    opened: str = ""
    seen: frozenset[str] = frozenset()
    strings: _Spans = ()
    string: int = -1


class _Reading:
    """Reads an object; wherever that cannot go on, the last string that may end elsewhere is read anew."""

    def __init__(self, source: str, keys: Collection[str] | None, needs: frozenset[str]) -> None:
        self._source, self._keys, self._needs = source, keys, needs
        self._ways = [_Way()]
        self._left = _MAX_VALUES

    def strings(self) -> list[tuple[int, int]] | None:
        if not self._source.startswith("{"):
            return None
        while self._ways and self._left > 0:
            way = self._ways.pop()
            if self._leads_through(way):
                spans, found = way.strings, []
                while spans:
                    spans, start, end = spans
                    found.append((start, end))
                return found[::-1]
        return None

    def _leads_through(self, way: _Way) -> bool:
        while self._left > 0 and self._value(way):
            self._left -= 1
            more = self._more(way)
            if more is None:
                return self._skip(way.at) == len(self._source) and self._needs <= way.seen
            if not more:
                return False
        return False

    def _value(self, way: _Way) -> bool:
        source = self._source
        while way.string < 0:
            way.at = self._skip(way.at)
            sign = source[way.at : way.at + 1]
            if sign == '"':
                way.string, way.at = way.at, way.at + 1
            elif sign in ("{", "["):
                way.opened, way.at = way.opened + sign, self._skip(way.at + 1)
                if source.startswith(_CLOSES[sign], way.at):
                    return True
                if sign == "{" and not self._key(way):
                    return False
            else:
                word = _WORD.match(source, way.at)
                if word is None:
                    return False
                if not _SCALAR.fullmatch(word.group()):
                    way.strings = (way.strings, *word.span())
                way.at = word.end()
                return True
        follows = _FOLLOWS[way.opened[-1]]
        end = source.find('"', way.at)
        while end >= 0 and not follows.match(source, end + 1):
            end = source.find('"', end + 1)
        if end < 0:
            return False
        self._ways.append(replace(way, at=end + 1))
        way.strings, way.at, way.string = (way.strings, way.string, end + 1), end + 1, -1
        return True

    def _more(self, way: _Way) -> bool | None:
        while way.opened:
            at = self._skip(way.at)
            sign, way.at = self._source[at : at + 1], at + 1
            if sign == ",":
                return way.opened[-1] == "[" or self._key(way)
            if sign != _CLOSES[way.opened[-1]]:
                return False
            way.opened = way.opened[:-1]
        return None

    def _key(self, way: _Way) -> bool:
        key = _KEY.match(self._source, way.at)
        if key is None:
            return False
        if len(way.opened) == 1:
            name = key.group(1)
            if name in way.seen or (self._keys is not None and name not in self._keys):
                return False
            way.seen |= {name}
        way.at = key.end()
        return True

    def _skip(self, at: int) -> int:
        return _SPACE.match(self._source, at).end()  # type: ignore[union-attr]  # it matches nothing, too
