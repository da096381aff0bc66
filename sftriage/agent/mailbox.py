"""The controller's end of a rank's mailbox; `sftriage.trainer.executor` says what lies where in the file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from sftriage.base.process import locked_file
from sftriage.errors import CaptureError, RingError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.windows import plain
from sftriage.trainer import executor as mailbox
from sftriage.trainer import layout
from sftriage.trainer.executor import MAX_MESSAGE_BYTES, State
from sftriage.trainer.layout import LIVE_AT, MAILBOX_MAGIC, MAX_COUNT, RING_MAGIC, WORD_BYTES, OpenFile

_LIVE = struct.Struct("=13q")
_WORD = struct.Struct("=q")


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """How far a rank is with the latest request: what its executor does, and how many steps it has recorded.

    It is ``idle`` too while it has not looked at the request yet; ``answered`` where no request is without a result.
    """

    state: State
    steps: int
    answered: bool


class MailboxClient(OpenFile):
    """The controller's end of a rank's mailbox.

    Every method raises RingError where the file is foreign, truncated, damaged, or of another version or byte order.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, os.O_RDWR)
        self._polled = 0
        self._ring: OpenFile | None = None
        try:
            self.info = self.checked_header(MAILBOX_MAGIC).info
            if (found := self.length_bytes()) != mailbox.SIZE_BYTES:
                raise RingError(f"{path}: truncated or foreign: {found} bytes of {mailbox.SIZE_BYTES}")
        except BaseException:
            self.close()
            raise

    def post(self, request: CaptureRequest) -> int:
        """Hand over a request, and return its number; raises CaptureError where it does not fit, or another waits."""
        body = json.dumps(plain(request)).encode("ascii")
        if request.rank != self.info.rank:
            raise CaptureError(f"a request for rank {request.rank} in the mailbox of rank {self.info.rank}")
        if len(body) > MAX_MESSAGE_BYTES:
            raise CaptureError(f"a request of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} fit")
        with self._locked() as live:
            if live[mailbox.RESULT_SEQ] != live[mailbox.REQUEST_SEQ]:
                raise CaptureError(f"rank {self.info.rank} has not answered its last request yet")
            seq = live[mailbox.REQUEST_SEQ] + 1
            self._write(mailbox.REQUEST_AT, body)
            self._store(mailbox.REQUEST_BYTES, len(body))
            self._store(mailbox.REQUEST_CRC, crc32(body))
            self._store(mailbox.REQUEST_SEQ, seq)
            self._knock(live[mailbox.DOORBELL] + 1)
        return seq

    def cancel(self, capture_id: str) -> bool:
        """Call a request off; whether it is the one under way, so that a result is still to come."""
        return self._mark(mailbox.CANCEL_SEQ, capture_id)

    def allow(self, capture_id: str) -> bool:
        """Say that what a request waits for is there; whether it is the one under way."""
        return self._mark(mailbox.ALLOW_SEQ, capture_id)

    def poll(self) -> CaptureResult | None:
        """The latest result, once: None until the next one. A new client sees the last result again."""
        live = self._live()
        seq = live[mailbox.RESULT_SEQ]
        if seq == self._polled:
            return None
        message = self._message(mailbox.RESULT_AT, live[mailbox.RESULT_BYTES], live[mailbox.RESULT_CRC])
        try:
            result = CaptureResult(**message)
        except TypeError as error:
            raise RingError(f"{self.path}: not a capture result: {error}") from error
        self._polled = seq
        return result

    def result_of(self, capture_id: str) -> CaptureResult | None:
        """The latest result, as `poll` has it, if it is that of this request."""
        result = self.poll()
        return result if result is not None and result.capture_id == capture_id else None

    def latest(self) -> str | None:
        """The id of the latest request, answered or not; None where there was none."""
        live = self._live()
        if not live[mailbox.REQUEST_SEQ]:
            return None
        return str(self._request(live).get("capture_id"))

    def progress(self) -> CaptureProgress:
        live = self._live()
        state, steps = live[mailbox.STATE], live[mailbox.STEPS]
        if not (0 <= state < len(mailbox.STATES) and 0 <= steps < MAX_COUNT):
            raise RingError(f"{self.path}: state {state}, {steps} steps")
        return CaptureProgress(mailbox.STATES[state], steps, live[mailbox.RESULT_SEQ] == live[mailbox.REQUEST_SEQ])

    def _mark(self, word: int, capture_id: str) -> bool:
        """Put the number of the request under way into a word, if it is this one, and ring."""
        with self._locked() as live:
            if live[mailbox.RESULT_SEQ] == live[mailbox.REQUEST_SEQ]:
                return False
            if self._request(live).get("capture_id") != capture_id:
                return False
            self._store(word, live[mailbox.REQUEST_SEQ])
            self._knock(live[mailbox.DOORBELL] + 1)
        return True

    def close(self) -> None:
        super().close()
        if self._ring is not None:
            self._ring.close()

    @contextmanager
    def _locked(self) -> Iterator[tuple[int, ...]]:
        """The live words, with other clients kept out: a person's request and the controller's must not mix."""
        if self._ring is None:
            self._ring = OpenFile(self.path.with_suffix(".ring"), os.O_RDWR)
            self._ring.checked_header(RING_MAGIC)
        with locked_file(self._descriptor):
            yield self._live()

    def _knock(self, count: int) -> None:
        """Set both doorbells to ``count``: the trainer reads the ring's."""
        assert self._ring is not None, "it is locked"
        self._store(mailbox.DOORBELL, count)
        self._ring.write_at(_WORD.pack(count), LIVE_AT + layout.DOORBELL * WORD_BYTES)

    def _live(self) -> tuple[int, ...]:
        found = self.read_at(_LIVE.size, LIVE_AT)
        if len(found) < _LIVE.size:
            raise RingError(f"{self.path}: truncated: its header has become shorter")
        live: tuple[int, ...] = _LIVE.unpack(found)
        if not all(0 <= live[word] < MAX_COUNT for word in (mailbox.DOORBELL, mailbox.REQUEST_SEQ, mailbox.RESULT_SEQ)):
            raise RingError(f"{self.path}: its counts of requests and results cannot be")
        return live

    def _request(self, live: tuple[int, ...]) -> Mapping[str, Any]:
        return self._message(mailbox.REQUEST_AT, live[mailbox.REQUEST_BYTES], live[mailbox.REQUEST_CRC])

    def _message(self, offset: int, length: int, checksum: int) -> Mapping[str, Any]:
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise RingError(f"{self.path}: a message of {length} bytes")
        body = self.read_at(length, offset)
        if crc32(body) != checksum:
            raise RingError(f"{self.path}: a message does not match its checksum")
        message: Mapping[str, Any] = json.loads(body)
        return message

    def _store(self, word: int, value: int) -> None:
        self._write(LIVE_AT + word * WORD_BYTES, _WORD.pack(value))

    def _write(self, offset: int, data: bytes) -> None:
        # Checked, because pwrite past the end of a truncated file would make it grow again, with holes.
        if self.length_bytes() != mailbox.SIZE_BYTES:
            raise RingError(f"{self.path}: truncated")
        self.write_at(data, offset)
