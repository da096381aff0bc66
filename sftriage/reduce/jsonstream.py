"""A Chrome trace as a stream: its events in batches, and the few values beside them, whatever their order.

The document is never in memory whole. A piece of the stream is cut behind what looks like the end of an event, and
decoded as if it were the whole list: it decodes just when the cut was right, since one that fell into a string or into
an event leaves brackets open. The look is a search for the bytes that stood between the first two events, so nearly all
of the work is done by the decoder; where it is of no use (events written in more than one style), brackets are counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import IO, Any

import msgspec

from sftriage.errors import InputError

PIECE_BYTES = 1 << 17
"""Of the event list, decoded at once: its events take a few times as much, and are to stay in the processor's cache."""

MAX_VALUE_BYTES = 64 << 20
"""One event, or one value beside the events: nothing that a profiler writes comes near."""

_GUESSES = 4
_SPACED = re.compile(rb"[ \t\r\n]*")
_BETWEEN = re.compile(rb"[ \t\r\n,]*")
# A string that does not end in the piece ends in nothing, or in half an escape.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)\\?|[\[\]{}]', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]+")
_EVENTS_KEY = b'"traceEvents"'
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class TraceReader:
    """Reads one trace.

    Args:
        stream: the document, not compressed.
        source: names the document in messages.
        take: takes a list of events as JSON, or raises one of `UNDECODABLE` and takes nothing of it.
        take_odd: takes events one by one, each its own JSON, which is well or badly formed.
        values: the values that are wanted beside ``traceEvents``, by key; those that are there are put into it.
    """

    def __init__(
        self,
        stream: IO[bytes],
        source: str,
        take: Callable[[bytes], None],
        take_odd: Callable[[list[bytes]], None],
        values: dict[str, Any],
    ) -> None:
        self._stream, self._source = stream, source
        self._take, self._take_odd, self._values = take, take_odd, values
        # What has been read of the stream and not been dealt with is the text from there on.
        self._text, self._at = b"", 0
        self._passed = self._lists = 0
        self._ended = False
        self._between: bytes | None = None

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
            self._at += 1
            self._members()
        else:
            raise InputError(f"{self._source}: not JSON: it begins with {self._text[self._at : self._at + 20]!r}")
        if not self._lists:
            raise InputError(f"{self._source}: JSON, but not a trace: it has no traceEvents")

    def _members(self) -> None:
        """The keys and values of the document."""
        while True:
            sign = self._peek(rb",")
            if sign == b"}":
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
                continue
            name = str(self._decoded(key))
            value = self._value(keep=name in self._values)
            if name in self._values:
                self._values[name] = self._decoded(value)

    def _decoded(self, value: bytes) -> Any:
        try:
            return msgspec.json.decode(value)
        except UNDECODABLE:
            # It is beside the events, which are what matters.
            return None

    def _value(self, *, keep: bool) -> bytes:
        """Pass over one value; its text if that is to be kept."""
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
        """Pass over a number or a word."""
        while True:
            scalar = _SCALAR.match(self._text, self._at)
            if scalar is None:
                raise self._malformed("a value was expected")
            if scalar.end() < len(self._text) or self._ended:
                self._at = scalar.end()
                return scalar.group()
            self._fill()

    def _events(self, *, may_end: bool) -> None:
        """The list of events, from behind its opening bracket to behind its closing one."""
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
            if self._guess():
                want = PIECE_BYTES
                continue
            ends, closed = self._count(self._at)
            if ends:
                self._take_counted(ends)
                want = PIECE_BYTES
            elif closed:
                raise self._malformed("an event was expected")
            else:
                if self._ended:
                    raise self._cut_short()
                want = 2 * max(want, len(self._text) - self._at)
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
            try:
                self._take(b"[" + self._text[self._at : until + 1] + b"]")
            except UNDECODABLE:
                continue
            self._at = until + 1
            return True
        return False

    def _count(self, at: int) -> tuple[list[int], bool]:
        """Where the events end that are here whole, by counting brackets; and whether the list ends behind them."""
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
                return ends, True
            if depth == 0:
                ends.append(token.end())
                # The first two show what stands between events here.
                if token.end() - at > PIECE_BYTES or (self._between is None and len(ends) == 2):
                    break
        return ends, False

    def _take_counted(self, ends: list[int]) -> None:
        """Events whose ends were counted: all at once, or one by one if something in them is odd."""
        try:
            self._take(b"[" + self._text[self._at : ends[-1]] + b"]")
        except UNDECODABLE:
            whole = zip([self._at, *ends[:-1]], ends, strict=True)
            self._take_odd([self._text[start:end].lstrip(b" \t\r\n,") for start, end in whole])
        if len(ends) > 1:
            gap = _BETWEEN.match(self._text, ends[0])
            if gap and self._text[gap.end() : gap.end() + 1] == b"{":
                self._between = self._text[ends[0] - 1 : gap.end() + 1]
        self._at = ends[-1]

    def _peek(self, also: bytes = b"") -> bytes:
        """The next sign that is not white space (nor any of ``also``), which is not passed."""
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
