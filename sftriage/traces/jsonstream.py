"""A Chrome trace as a stream: its events in batches, and the few values beside them, whatever their order.

The document is never in memory whole. A piece of the stream is cut behind what looks like the end of an event, and
decoded as if it were the whole list: it decodes just when the cut was right, since one that fell into a string or into
an event leaves brackets open. The look is a search for the bytes that stood between the first two events, so nearly all
of the work is done by the decoder; where it is of no use (events written in more than one style), brackets are counted.

Where strings are written unescaped, neither helps: from there on, as far as the text is here, events are told by how
the next one begins, and each is mended or dropped by itself (`mending`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

import msgspec

from sftriage.errors import InputError
from sftriage.traces.mending import UNDECODABLE, mended, whole
from sftriage.words.amounts import counted

PIECE_BYTES = 1 << 17
"""Of the event list, decoded at once: its events take a few times as much, and are to stay in the processor's cache."""

MAX_VALUE_BYTES = 64 << 20
"""One event, or one value beside the events: nothing that a profiler writes comes near."""

MEND_BYTES = 1 << 20
"""What is read before events are told by how the next one begins; and what may be before or behind the events to be
mended."""

EVENT_KEYS = frozenset({
    *("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id", "id2", "s", "bp", "tts", "tdur", "scope", "cname"),
    *("bind_id", "flow_in", "flow_out", "sf", "esf", "stack", "estack", "local"),
})  # fmt: skip
"""The keys of an event, by the Trace Event Format."""

DROPPED = b'{"ph": "M", "name": "damaged event", "pid": 0, "tid": 0, "args": {}}'
"""What stands in a copy for an event that could not be mended: no viewer shows it."""

_GUESSES = 4
_JOINED = 16
"""In so many events one may seem to fall apart: its name may hold what looks like the end of it."""
_SPACED = re.compile(rb"[ \t\r\n]*")
_BETWEEN = re.compile(rb"[ \t\r\n,]*")
_BEHIND = re.compile(rb"\s*(,(?=\s*(?:\{|\Z))|\]|\Z)")
_COMMA = re.compile(rb"[ \t\r\n]*,")
# A string that does not end in the piece ends in nothing, or in half an escape.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)\\?|[\[\]{}]', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]+")
_EVENTS_KEY = b'"traceEvents"'
_OPENING = re.compile(rb'"traceEvents"[ \t\r\n]*:[ \t\r\n]*\[')
_LIST_ENDS = re.compile(rb'\](?=\s*(?:,\s*"[^"]*"\s*:|\}\s*\Z))')
_NEXT = rb'\s*,\s*\{\s*"(?:' + "|".join(sorted(EVENT_KEYS)).encode() + rb')"\s*:|\s*\]\s*,\s*"[^"]{1,99}"\s*:'
_SEAMS = re.compile(rb"\}(?=" + _NEXT + rb")")
_LAST_SEAMS = tuple(
    re.compile(rb"\}(?=" + _NEXT + end + rb")") for end in (rb"|\s*\]\s*\}\s*\Z", rb"|\s*,?\s*\]?\s*\Z")
)
"""Where an event seems to end: before another one, or at the end of the list. The last two are for what is read to its
end, of a document and of a bare list."""

_NO_EVENTS, _NOTHING = b'"traceEvents":[]}', b'{"":0'
"""What makes a document of that before the events, and of that behind them."""

Edit = Callable[[int, int, bytes], None]
"""Takes from which byte of the document to which one something else is to stand in a copy of it."""


Damaged = Literal["name", "event", "rest"]
"""A name, which was repaired; an event, which was not; and what is behind the trace."""

_ENDED = {"name": "repaired", "event": "dropped"}


@dataclass(slots=True)
class Damage:
    """What was damaged in a document: of each kind how often, and at which byte first."""

    found: dict[Damaged, tuple[int, int]] = field(default_factory=dict)

    def note(self, what: Damaged, at: int) -> None:
        """Something was damaged at a byte."""
        n, first = self.found.get(what, (0, at))
        self.found[what] = (n + 1, first)

    @property
    def dropped(self) -> int:
        """How many events are lost."""
        return self.found.get("event", (0, 0))[0]

    @property
    def words(self) -> tuple[str, ...]:
        """It in words."""
        return tuple(_damage(what, n, first) for what, (n, first) in self.found.items())


def _damage(what: Damaged, n: int, first: int) -> str:
    if what == "rest":
        return f"what follows the trace from byte {first} on was not read"
    where = f" at byte {first}" if n == 1 else f", the first at byte {first}"
    return f"{counted(n, what)} {_ENDED[what]}{where}"


class TraceReader:
    """Reads one trace.

    Args:
        stream: the document, not compressed.
        source: names the document in messages.
        take: takes a list of events as JSON, or raises one of `UNDECODABLE` and takes nothing of it.
        take_odd: takes one event that is JSON and that ``take`` did not take; False if it is no event.
        values: the values that are wanted beside ``traceEvents``, by key; those that are there are put into it.
        edit: told of each change that makes the document valid JSON, in its order.

    Attributes:
        damage: what was damaged in it.
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
        # What has been read of the stream and not been dealt with is the text from there on.
        self._text, self._at = b"", 0
        self._passed = self._lists = 0
        self._ended = False
        self._between: bytes | None = None
        self._one_by_one: list[tuple[int, bytes]] = []

    def read(self) -> None:
        """Read it all.

        Raises:
            InputError: it is not a trace, or it ends too early.
        """
        self._fill()
        head = self._text[:4]
        if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in head:
            raise InputError(f"{self._source}: not UTF-8 text (UTF-16 or binary); a trace is JSON in UTF-8")
        if self._text.startswith(b"\xef\xbb\xbf"):
            self._at = 3
        opening = self._peek()
        if opening == b"[":
            # The format's other form: nothing but events, and the closing bracket may be missing.
            self._at += 1
            self._events(may_end=True)
        elif opening == b"{":
            self._mend_head()
            self._members()
        else:
            raise InputError(f"{self._source}: not JSON: it begins with {self._text[self._at : self._at + 20]!r}")
        if not self._lists:
            raise InputError(f"{self._source}: JSON, but not a trace: it has no traceEvents")
        self._pass_rest()

    def _mend_head(self) -> None:
        while len(self._text) < MEND_BYTES and not self._ended and not _OPENING.search(self._text):
            self._fill()
        start = self._at
        heads = [(one.start(), self._text[start : one.start()]) for one in _OPENING.finditer(self._text)][:_JOINED]
        if any(whole(head + _NO_EVENTS) for _, head in heads):
            self._at += 1
            return
        for end, head in heads:
            fixed = mended(head + _NO_EVENTS)
            if fixed is not None:
                self._damaged("name", start, end, fixed.removesuffix(_NO_EVENTS))
                self._keep(fixed)
                self._at = end
                return
        self._at += 1

    def _members(self) -> None:
        while True:
            sign = self._peek(rb",")
            if sign == b"}":
                self._at += 1
                return
            if sign != b'"':
                raise self._malformed("a key was expected")
            key = self._value(keep=True)
            if self._peek() != b":":
                raise self._malformed("a colon was expected")
            self._at += 1
            sign = self._peek()
            if key == _EVENTS_KEY and sign == b"[":
                self._at += 1
                self._events(may_end=False)
                if self._mend_tail():
                    return
                continue
            name = str(self._decoded(key))
            value = self._value(keep=name in self._values)
            if name in self._values:
                self._values[name] = self._decoded(value)

    def _mend_tail(self) -> bool:
        while len(self._text) - self._at < MEND_BYTES and not self._ended:
            self._fill()
        tail = self._text[self._at :].rstrip()
        if not self._ended or not tail.endswith(b"}") or whole(_NOTHING + tail):
            return False
        fixed = mended(_NOTHING + tail)
        if fixed is None:
            return False
        self._damaged("name", self._at, self._at + len(tail), fixed.removeprefix(_NOTHING))
        self._keep(fixed)
        self._at = len(self._text)
        return True

    def _keep(self, document: bytes) -> None:
        self._values.update((name, value) for name, value in self._decoded(document).items() if name in self._values)

    def _pass_rest(self) -> None:
        start, rest = self._passed + self._at, b""
        while not (rest := rest or self._text[self._at :].strip(b" \t\r\n\x00")) or not self._ended:
            if self._ended:
                return
            self._at = len(self._text)
            self._fill()
        self.damage.note("rest", start)
        self._edit(start, self._passed + len(self._text), b"")

    def _decoded(self, value: bytes) -> Any:
        try:
            return msgspec.json.decode(value)
        except UNDECODABLE:
            # It is beside the events, which are what matters.
            return None

    def _value(self, *, keep: bool) -> bytes:
        if self._peek() not in b'"[{':
            return self._scalar()
        kept: list[bytes] = []
        kept_bytes = depth = 0
        while True:
            whole = True
            begin = done = self._at
            for token in _TOKEN.finditer(self._text, begin):
                sign = token.group()[:1]
                if sign == b'"' and not token.group("end"):
                    whole, done = False, token.start()
                    break
                done = token.end()
                depth += (sign in b"[{") - (sign in b"]}")
                if depth <= 0:
                    break
            else:
                done = len(self._text) if depth else done
            self._at = done
            if keep:
                kept.append(self._text[begin:done])
                kept_bytes += done - begin
            if whole and depth <= 0:
                return b"".join(kept)
            if max(kept_bytes, len(self._text) - self._at) > MAX_VALUE_BYTES:
                raise self._malformed(f"a value of more than {MAX_VALUE_BYTES >> 20} MiB")
            if self._ended:
                raise self._cut_short()
            self._fill()

    def _scalar(self) -> bytes:
        while True:
            scalar = _SCALAR.match(self._text, self._at)
            if scalar is None:
                raise self._malformed("a value was expected")
            if scalar.end() < len(self._text) or self._ended:
                self._at = scalar.end()
                return scalar.group()
            self._fill()

    def _events(self, *, may_end: bool) -> None:
        self._lists += 1
        want = PIECE_BYTES
        while True:
            while len(self._text) - self._at < want and not self._ended:
                self._fill()
            self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at == len(self._text) and self._ended:
                if may_end:
                    return
                raise self._cut_short()
            if self._text[self._at : self._at + 1] == b"]":
                self._at += 1
                return
            if self._guess() or self._take_counted(self._count(self._at)):
                want = PIECE_BYTES
                continue
            here = len(self._text) - self._at
            if self._ended or here >= MEND_BYTES:
                if self._mend(bare=may_end):
                    want = PIECE_BYTES
                    continue
                if self._ended:
                    raise self._cut_short()
            want = 2 * max(want, here)
            if want > 2 * MAX_VALUE_BYTES:
                raise self._malformed(f"an event of more than {MAX_VALUE_BYTES >> 20} MiB")

    def _guess(self) -> bool:
        """Cut behind the last event that can be seen, by the bytes that stand between events here."""
        if self._between is None:
            return False
        until = min(len(self._text), self._at + 2 * PIECE_BYTES)
        for _ in range(_GUESSES):
            until = self._text.rfind(self._between, self._at, until)
            if until < 0:
                return False
            if self._taken(self._text[self._at : until + 1]):
                self._at = until + 1
                return True
        return False

    def _count(self, at: int) -> list[int]:
        ends: list[int] = []
        depth = 0
        for token in _TOKEN.finditer(self._text, at, min(len(self._text), at + max(PIECE_BYTES, 2 * MAX_VALUE_BYTES))):
            sign = token.group()[:1]
            if sign == b'"':
                if not token.group("end"):
                    break
                continue
            depth += 1 if sign in b"[{" else -1
            if depth < 0:
                if not ends and sign == b"]":
                    ends.append(token.start())
                break
            if depth == 0:
                ends.append(token.end())
                # The first two show what stands between events here.
                if token.end() - at > PIECE_BYTES or (self._between is None and len(ends) == 2):
                    break
        return ends

    def _take_counted(self, ends: list[int]) -> bool:
        while ends and not self._may_end(([self._at, *ends])[-2], ends[-1]):
            ends = ends[:-1]
        if not ends:
            return False
        if not self._taken(self._text[self._at : ends[-1]]):
            began = self._at
            for end in ends:
                event = self._text[self._at : end].lstrip(b" \t\r\n,")
                sound = _complete(event) and self._may_end(self._at, end)
                if not sound or not (self._taken(event) or self._take_odd(event)):
                    break
                self._at = end
            return self._at > began
        if len(ends) > 1:
            gap = _BETWEEN.match(self._text, ends[0])
            if gap and self._text[gap.end() : gap.end() + 1] == b"{":
                self._between = self._text[ends[0] - 1 : gap.end() + 1]
        self._at = ends[-1]
        return True

    def _may_end(self, start: int, end: int) -> bool:
        """Whether an event that was counted ends where it seems to: its name may hold what looks like the end of it."""
        behind = _BEHIND.match(self._text, end)
        sign = behind.group(1) if behind else None
        if sign == b"]":
            # (of an event that lacks something, and is the last, `_mend` finds out whether it really is)
            last = self._text[start:end].lstrip(b" \t\r\n,")
            return _complete(last)
        return sign == b"," or (sign == b"" and self._ended)

    def _taken(self, events: bytes) -> bool:
        try:
            self._take(b"[" + events + b"]")
        except UNDECODABLE:
            return False
        return True

    def _mend(self, *, bare: bool) -> bool:
        """Take the events that are here one by one, by where each seems to end; False if none can be told.

        What is damaged is mended; what cannot be mended is dropped, up to where the next event begins.
        """
        before = self._at
        seams = _LAST_SEAMS[bare] if self._ended else _SEAMS
        ends = [seam.end() for seam in seams.finditer(self._text, before)]
        if not ends and self._ended and not bare and self._text.rstrip().endswith(b"}"):
            # The last event has no end that shows; the list and the document have theirs.
            ends = [close.start() for close in _LIST_ENDS.finditer(self._text, before)][-1:]
        first = 0
        while first < len(ends) and (self._ended or first == 0 or first + _JOINED <= len(ends)):
            self._at = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            count = self._one(ends[first : first + _JOINED])
            if not count:
                break
            first += count
            self._at = ends[first - 1]
        self._take_noted()
        return first > 0

    def _one(self, ends: Sequence[int]) -> int:
        """Take or drop the event that begins here; which of some places it ends at (0: that cannot be told yet)."""
        start, text, lost = self._at, self._text, self._ended
        for count, end in enumerate(ends, 1):
            event = _event(text[start:end])
            if event is not None:
                self._note(start, end, event)
                return count
            if count < len(ends) and _event(text[end : ends[count]].lstrip(b" \t\r\n,")) is not None:
                lost = True
                break
        alone = text[start : ends[0]]
        if whole(alone):
            # Nothing is the matter with it as JSON.
            self._note(start, ends[0], alone)
            return 1
        if not lost:
            return 0
        commas = (count for count, end in enumerate(ends, 1) if _COMMA.match(text, end))
        count = next(commas, 1)
        self._note(start, ends[count - 1], None)
        return count

    def _note(self, start: int, end: int, event: bytes | None) -> None:
        if event is None:
            self._damaged("event", start, end, DROPPED)
            return
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

    def _damaged(self, what: Damaged, start: int, end: int, instead: bytes) -> None:
        self.damage.note(what, self._passed + start)
        self._edit(self._passed + start, self._passed + end, instead)

    def _peek(self, also: bytes = b"") -> bytes:
        pattern = _BETWEEN if also else _SPACED
        while True:
            self._at = pattern.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self._at < len(self._text):
                return self._text[self._at : self._at + 1]
            if self._ended:
                raise self._cut_short()
            self._fill()

    def _fill(self) -> None:
        more = self._stream.read(max(PIECE_BYTES, len(self._text) - self._at))
        self._passed += self._at
        self._text = self._text[self._at :] + more
        self._at = 0
        self._ended = not more

    def _malformed(self, why: str) -> InputError:
        return InputError(f"{self._source}: not JSON: {why} at byte {self._passed + self._at}")

    def _cut_short(self) -> InputError:
        if self._passed + len(self._text) == 0:
            return InputError(f"{self._source}: the file is empty")
        return InputError(
            f"{self._source}: cut short: it ends at byte {self._passed + len(self._text)}, in the middle of a value; "
            "events are in no order of time, so no step of it can be trusted"
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
