"""Rings of version 2, which no recorder of today writes, and a trainer's are read all the same."""

import json
import struct
from array import array
from pathlib import Path
from zlib import crc32

from sftriage.recorder import RingInfo
from sftriage.recorder.layout import HEADER_BYTES, LIVE_AT, LOG_MAGIC, RING_MAGIC, WORD_BYTES, encode_header
from sftriage.windows.slots import slot_bytes


class SlotRing:
    """A ring of so many slots, as the recorder of version 2 wrote it."""

    def __init__(self, directory: Path, info: RingInfo, slots: int) -> None:
        self.path = directory / info.file_name("ring")
        self._info, self._slots = info, slots
        log = encode_header(LOG_MAGIC, info)
        length = struct.unpack_from("=I", log, 16)[0]
        body = json.dumps(json.loads(log[24 : 24 + length]) | {"slots": slots}).encode()
        head = struct.pack("=8sIIII", RING_MAGIC, 0x01020304, 2, len(body), crc32(body)) + body
        self._size = slot_bytes(info.schema)
        self.path.write_bytes(head.ljust(HEADER_BYTES, b"\0") + bytes(slots * self._size))
        self.live = array("q", [0, -1, 0, 0, 0, 0, 0, -1, 0])
        self.store()

    def publish(self, slot: bytes) -> None:
        seq = struct.unpack_from("=q", slot)[0]
        self._write(HEADER_BYTES + (seq - 1) % self._slots * self._size, slot)
        self.live[0] = seq
        self.store()

    def store(self) -> None:
        """Write the live words."""
        self._write(LIVE_AT, self.live.tobytes())

    def _write(self, at: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(data)


def word(data: bytes, index: int) -> int:
    """A live word of a ring's bytes."""
    return int(struct.unpack_from("=q", data, LIVE_AT + index * WORD_BYTES)[0])
