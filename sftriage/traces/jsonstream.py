"""Reads a Chrome trace as a stream: its events in batches, and a few other values; mends damaged names.

The document is never in memory as a whole. A piece of the event list ends at a seam, where one event seems to end and
the next to begin, and is decoded as if it were the whole list. It decodes only if the seam was right: a cut inside an
event leaves brackets open. In a valid document no string looks like a seam.

torch.profiler does not escape quotes, backslashes and control characters in names and metadata. If a piece does not
decode, its events are therefore mended or dropped one by one. In a damaged object, a string ends at a quote that is
followed by a comma and a key, or by the end of the object. Among several such quotes, the first one is taken after
which the rest can be read with known keys, each of them once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final, Literal

import msgspec

from sftriage.errors import InputError
from sftriage.words.verdicts import counted

PIECE_BYTES = 1 << 17  # of the event list, decoded at once: its events should stay in the processor's cache
MAX_VALUE_BYTES = 64 << 20  # of one event, or of all that comes before or after the events
MEND_BYTES = 1 << 20  # to read before mending a piece; also the limit of an object to mend

EVENT_KEYS = frozenset({
    *("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id", "id2", "s", "bp", "tts", "tdur", "scope", "cname"),
    *("bind_id", "flow_in", "flow_out", "sf", "esf", "stack", "estack", "local"),
})  # fmt: skip
"""The keys of an event, by the Trace Event Format."""

# Replaces an event that cannot be mended; no viewer shows it.
DROPPED = b'{"ph": "M", "name": "damaged event", "pid": 0, "tid": 0, "args": {}}'

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_CUTS = 4  # how many seams to try as the end of a piece
_JOINED = 16  # maximum number of parts of an event: its name may contain false seams
_TAIL_BYTES = 4096  # the end of a piece, where to search for seams first
_MAX_VALUES = 100_000  # of a damaged object, in all attempts: each possible end of a string counts
_GAP: Final = re.compile(rb"[ \t\r\n,]*")
_COMMA: Final = re.compile(rb"[ \t\r\n]*,")
_OPENING: Final = re.compile(rb'"traceEvents"[ \t\r\n]*:[ \t\r\n]*\[')
_NEXT = rb'\s*,\s*\{\s*"(?:' + "|".join(sorted(EVENT_KEYS)).encode() + rb')"\s*:|\s*\]\s*,\s*"[^"]{1,99}"\s*:'
_SEAMS: Final = re.compile(rb"\}(?=" + _NEXT + rb")")
"""The seam after an event: before another one, or at the end of the list."""
_LAST_SEAMS: Final = tuple(
    re.compile(rb"\}(?=" + _NEXT + end + rb")") for end in (rb"|\s*\]\s*\}\s*\Z", rb"|\s*,?\s*\]?\s*\Z")
)
"""The end of the list, if all has been read: in a document, and of a bare list."""
_LIST_ENDS: Final = re.compile(rb'\](?=\s*(?:,\s*"[^"]*"\s*:|\}\s*\Z))')
_MAY_END: Final = re.compile(rb"\}(?=\s*\])")

_NO_EVENTS, _NOTHING = b'"traceEvents":[]}', b'{"":0'  # complete the text before the events, and after them
Edit = Callable[[int, int, bytes], None]  # gets the first and last byte to replace in a document, and the new text
Damaged = Literal["name", "event", "rest"]  # a repaired name, a lost event, and text after the trace


@dataclass(slots=True)
class Damage:
    """The damage of a document: by kind, how often, and at which byte first."""

    found: dict[Damaged, tuple[int, int]] = field(default_factory=dict)

    def note(self, kind: Damaged, at: int) -> None:
        """Count damage at a byte."""
        n, first = self.found.get(kind, (0, at))
        self.found[kind] = (n + 1, first)

    @property
    def dropped(self) -> int:
        """Number of events that are lost."""
        return self.found.get("event", (0, 0))[0]

    @property
    def words(self) -> tuple[str, ...]:
        """A sentence for each kind."""
        return tuple(
            f"ignored what follows the trace, from byte {first}"
            if kind == "rest"
            else f"{counted(n, kind)} {'repaired' if kind == 'name' else 'dropped'}"
            + (f" at byte {first}" if n == 1 else f", the first at byte {first}")
            for kind, (n, first) in self.found.items()
        )


class TraceReader:
    """Reads one trace.

    Args:
        stream: the document, not compressed.
        source: the name of the document in messages.
        take: takes a list of events as JSON, or raises one of `UNDECODABLE` and takes none of them.
        take_odd: takes one event of valid JSON that ``take`` refused; returns False if it is not an event.
        values: gets the values beside ``traceEvents`` for its keys.
        edit: called with each change that makes the document valid JSON, in order.
    """

    def __init__(
        self,
        stream: IO[bytes],
        source: str,
        take: Callable[[bytes], None],
        take_odd: Callable[[bytes], bool],
        values: dict[str, Any],
        edit: Edit = lambda start, end, instead: None,
    ) -> None:
        self._stream, self._source = stream, source
        self._take, self._take_odd, self._values, self._edit = take, take_odd, values, edit
        self.damage = Damage()
        # `_passed` bytes of the stream are done, and then those of `_text` before `_at`.
        self._text, self._at, self._passed, self._ended = b"", 0, 0, False
        self._one_by_one: list[tuple[int, bytes]] = []

    def read(self) -> None:
        """Read the document; raises InputError if it is not a trace, or ends too early."""
        self._fill()
        head = self._text[:4]
        if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in head:
            raise InputError(f"{self._source}: not UTF-8 text (UTF-16 or binary); a trace is JSON in UTF-8")
        if self._text.startswith(b"\xef\xbb\xbf"):
            self._at = 3
        while not (start := self._text[self._at :].lstrip(b" \t\r\n")) and not self._ended:
            self._fill()
        self._at = len(self._text) - len(start)
        if start.startswith(b"["):
            # The format's other form: only the list of events, perhaps without its closing bracket.
            self._at += 1
            self._events(bare=True)
            self._pass_rest()
        elif start.startswith(b"{"):
            self._head()
            self._events(bare=False)
            self._tail()
        elif not start:
            raise self._cut_short()
        else:
            raise InputError(f"{self._source}: not JSON: it begins with {start[:20]!r}")

    def _head(self) -> None:
        while True:
            start = self._at
            openings = [*_OPENING.finditer(self._text, start)][:_JOINED]
            heads = [(opening, self._text[start : opening.start()] + _NO_EVENTS) for opening in openings]
            for opening, head in heads:
                if self._keep(head):
                    self._at = opening.end()
                    return
            enough = self._ended or len(self._text) >= MEND_BYTES
            for opening, head in heads if enough else ():
                if (fixed := mended(head)) is not None:
                    self._damaged("name", start, opening.start(), fixed.removesuffix(_NO_EVENTS))
                    self._keep(fixed)
                    self._at = opening.end()
                    return
            if self._ended:
                if self._keep(self._text[start:]):
                    raise InputError(f"{self._source}: JSON, but not a trace: it has no traceEvents")
                raise self._malformed(self._text[start:])
            if len(self._text) > MAX_VALUE_BYTES:
                raise self._too_large()
            self._fill()

    def _tail(self) -> None:
        """Read the text after the events, mending it if needed; ignores what follows the document."""
        while not self._ended:
            if len(self._text) - self._at > MAX_VALUE_BYTES:
                raise self._too_large()
            self._fill()
        tail = self._text[self._at :].rstrip()
        if self._keep(_NOTHING + tail):
            self._at = len(self._text)
            return
        fixed = mended(_NOTHING + tail) if tail.endswith(b"}") else None
        if fixed is not None:
            self._damaged("name", self._at, self._at + len(tail), fixed.removeprefix(_NOTHING))
            self._keep(fixed)
            self._at = len(self._text)
            return
        try:
            # (in latin-1, positions of characters are those of bytes)
            _, end = json.JSONDecoder().raw_decode((_NOTHING + tail).decode("latin-1"))
        except (ValueError, RecursionError):
            raise self._malformed(_NOTHING + tail) from None
        self._keep((_NOTHING + tail)[:end])
        self._at += end - len(_NOTHING)
        self._pass_rest()

    def _keep(self, document: bytes) -> bool:
        """Keep the requested values of a document; return False if it is not a JSON object."""
        try:
            made = msgspec.json.decode(document)
        except UNDECODABLE:
            return False
        self._values.update((name, value) for name, value in made.items() if name in self._values)
        return True

    def _pass_rest(self) -> None:
        start, rest = self._passed + self._at, b""
        while not (rest := rest or self._text[self._at :].strip(b" \t\r\n\x00")) or not self._ended:
            if self._ended:
                return
            self._at = len(self._text)
            self._fill()
        self.damage.note("rest", start)
        self._edit(start, self._passed + len(self._text), b"")

    def _events(self, *, bare: bool) -> None:
        """Read the list of events, from after its opening bracket to after its closing one."""
        want = PIECE_BYTES
        while True:
            while len(self._text) - self._at < want and not self._ended:
                self._fill()
            self._skip_gap()
            if self._at == len(self._text) and self._ended:
                if bare:
                    return
                raise self._cut_short()
            if self._text[self._at : self._at + 1] == b"]":
                self._at += 1
                return
            here = len(self._text) - self._at
            if self._cut(bare=bare) or ((self._ended or here >= MEND_BYTES) and self._mend(bare=bare)):
                want = PIECE_BYTES
                continue
            if self._ended:
                raise self._cut_short()
            want = 2 * max(want, here)
            if want > 2 * MAX_VALUE_BYTES:
                raise self._too_large()

    def _skip_gap(self) -> None:
        self._at = _GAP.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too

    def _cut(self, *, bare: bool) -> bool:
        """Take the events up to one of the last seams of a piece; return False if they do not decode."""
        begin, text = self._at, self._text
        until = min(len(text), begin + 2 * PIECE_BYTES)
        seams = _LAST_SEAMS[bare] if self._ended and until == len(text) else _SEAMS
        since, window = until, _TAIL_BYTES
        ends: list[int] = []
        while since > begin and not ends:
            since, window = max(begin, until - window), 8 * window
            ends = [seam.end() for seam in seams.finditer(text, since, until)]
        for end in ends[: -_CUTS - 1 : -1]:
            if self._taken(text[begin:end]):
                self._at = end
                return True
        return False

    def _taken(self, events: bytes) -> bool:
        try:
            self._take(b"[" + events + b"]")
        except UNDECODABLE:
            return False
        return True

    def _mend(self, *, bare: bool) -> bool:
        """Take the events of this piece one by one, by their seams; return False if no event has an end.

        Mends damaged events, and drops those that cannot be mended, up to where the next one begins.
        """
        before, text = self._at, self._text
        seams = _LAST_SEAMS[bare] if self._ended else _SEAMS
        ends = [seam.end() for seam in seams.finditer(text, before)]
        ends = ends or [end.end() for end in _MAY_END.finditer(text, before)]
        if not ends and self._ended and not bare and text.rstrip().endswith(b"}"):
            # The last event has no visible end, but the list and the document have.
            ends = [close.start() for close in _LIST_ENDS.finditer(text, before)][-1:]
        first = 0
        while first < len(ends) and (self._ended or first == 0 or first + _JOINED <= len(ends)):
            self._skip_gap()
            # (a seam may belong to a list after that of the events)
            if text.startswith(b"]", self._at) or not (count := self._take_event(ends[first : first + _JOINED])):
                break
            first += count
            self._at = ends[first - 1]
        self._take_noted()
        return first > 0

    def _take_event(self, ends: Sequence[int]) -> int:
        """Take or drop the event that begins here; return the number of its parts, by ``ends`` (0: not known yet)."""
        start, text, lost = self._at, self._text, self._ended
        for count, end in enumerate(ends, 1):
            event = _event(text[start:end])
            if event is not None:
                self._note(start, end, event)
                return count
            if count < len(ends) and _event(text[end : ends[count]].lstrip(b" \t\r\n,")) is not None:
                lost = True
                break
        if whole(alone := text[start : ends[0]]):
            # It is valid JSON.
            self._note(start, ends[0], alone)
            return 1
        if not lost:
            return 0
        commas = (count for count, end in enumerate(ends, 1) if _COMMA.match(text, end))
        count = next(commas, 1)
        self._damaged("event", start, ends[count - 1], DROPPED)
        return count

    def _note(self, start: int, end: int, event: bytes) -> None:
        self._one_by_one.append((self._passed + start, event))
        if event != self._text[start:end]:
            self._damaged("name", start, end, event)

    def _take_noted(self) -> None:
        events, self._one_by_one = self._one_by_one, []
        if self._taken(b",".join(event for _, event in events)):
            return
        for at, event in events:
            if not (self._taken(event) or self._take_odd(event)):
                self.damage.note("event", at)

    def _damaged(self, kind: Damaged, start: int, end: int, instead: bytes) -> None:
        self.damage.note(kind, self._passed + start)
        self._edit(self._passed + start, self._passed + end, instead)

    def _fill(self) -> None:
        more = self._stream.read(max(PIECE_BYTES, len(self._text) - self._at))
        self._passed += self._at
        self._text = self._text[self._at :] + more
        self._at = 0
        self._ended = not more

    def _too_large(self) -> InputError:
        at = self._passed + self._at
        return InputError(f"{self._source}: not JSON: a value of more than {MAX_VALUE_BYTES >> 20} MiB at byte {at}")

    def _malformed(self, document: bytes) -> InputError:
        try:
            msgspec.json.decode(document)
        except UNDECODABLE as error:
            if "truncated" not in str(error):
                reason = str(error).removeprefix("JSON is malformed: ")
                return InputError(f"{self._source}: not JSON: {reason}")
        return self._cut_short()

    def _cut_short(self) -> InputError:
        if self._passed + len(self._text) == 0:
            return InputError(f"{self._source}: the file is empty")
        return InputError(
            f"{self._source}: cut short: it ends at byte {self._passed + len(self._text)}, in the middle of a value; "
            "events are not in order of time, so no step of it can be trusted"
        )


def _event(text: bytes) -> bytes | None:
    if _complete(text):
        return text
    for needs in (("ph", "ts"), ("ph",)):  # (metadata has no time)
        event = mended(text, EVENT_KEYS, needs)
        if event is not None and _complete(event):
            return event
    return None


def _complete(text: bytes) -> bool:
    try:
        made = msgspec.json.decode(text)
    except UNDECODABLE:
        return False
    phase = made.get("ph") if isinstance(made, dict) else None
    return isinstance(phase, str) and len(phase) == 1 and (phase == "M" or "ts" in made)


_SPACE: Final = re.compile(r"[ \t\r\n]*")
_KEY_TEXT: Final = r'"((?:[^"\\\x00-\x1f]|\\["\\/bfnrt]){0,200})"[ \t\r\n]*:'
_KEY: Final = re.compile(rf"[ \t\r\n]*{_KEY_TEXT}")
_WORD: Final = re.compile(r'[^\s"{}\[\],:]+')
_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_CLOSES: Final = {"{": "}", "[": "]"}
_FOLLOWS: Final = {"{": re.compile(rf"[ \t\r\n]*(?:\}}|,[ \t\r\n]*{_KEY_TEXT})"), "[": re.compile(r"[ \t\r\n]*[,\]]")}
"""What follows the closing quote of a string, by the bracket around it."""


def whole(text: bytes) -> bool:
    """Whether this is one valid JSON value."""
    try:
        msgspec.json.decode(text)
    except UNDECODABLE:
        return False
    return True


def mended(text: bytes, keys: Collection[str] | None = None, needs: Collection[str] = ()) -> bytes | None:
    """A damaged JSON object with its strings escaped; None if it cannot be read as an object.

    ``keys`` are the keys that it may have (None: any), without those of nested objects. If anything is mended, it must
    have the keys that it ``needs``.
    """
    if whole(text):
        return text
    if len(text) > MEND_BYTES:
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
    # (a writer that escapes nothing writes each backslash as it is)
    return written if whole(written.encode()) else json.dumps(written[1:-1], ensure_ascii=False)


_Spans = tuple["_Spans", int, int] | tuple[()]  # begin and end of strings, the last string first


@dataclass(slots=True)
class _Way:
    """A way to read the object up to ``at``: the open brackets there, and the beginning of the current string."""

    at: int = 0
    opened: str = ""
    keys: frozenset[str] = frozenset()
    strings: _Spans = ()
    string: int = -1


class _Reading:
    """Reads an object with backtracking: on an error, it lets the last string end at another quote."""

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
                return self._skip(way.at) == len(self._source) and self._needs <= way.keys
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
            if name in way.keys or (self._keys is not None and name not in self._keys):
                return False
            way.keys |= {name}
        way.at = key.end()
        return True

    def _skip(self, at: int) -> int:
        return _SPACE.match(self._source, at).end()  # type: ignore[union-attr]  # it matches nothing, too
