"""Rings as the recorder writes them, made of records, and their words."""

import struct
from pathlib import Path

from sftriage.model.windows import StepRecord
from sftriage.trainer.layout import (
    BEGIN,
    BLOCK,
    BLOCK_WORDS,
    CLAIMED,
    CODE_AT,
    END,
    LIVE_AT,
    NUMBER,
    OPENED,
    RING_MAGIC,
    WORD_BYTES,
    RingInfo,
    encode_header,
)


def write_ring(directory: Path, info: RingInfo, *records: StepRecord) -> Path:
    """A ring of one block with these steps: the stages in their order, ``outside_ns`` before each sync stage."""
    moments, now_ns = [(BLOCK, 0)], 0
    for record in records:
        now_ns += record.between_ns
        moments += [(NUMBER, record.step), (BEGIN, now_ns)]
        outside_ns = dict(zip(info.schema.sync_in_order, record.outside_ns, strict=True))
        ends_ns = now_ns + sum(record.durations_ns)
        for number, stage in enumerate(info.schema.stages[:-1], start=1):
            now_ns += outside_ns.get(stage, 0)
            moments.append((2 * number, now_ns))
            now_ns += record.durations_ns[number - 1]
            moments.append((2 * number + 1, now_ns))
        now_ns = ends_ns
        moments.append((END, now_ns))
    words = [code << CODE_AT | value for code, value in moments]
    assert len(words) <= BLOCK_WORDS
    content = bytearray(encode_header(RING_MAGIC, info, log_words=2 * BLOCK_WORDS)) + bytes(4096)
    content += struct.pack(f"={len(words)}Q", *words).ljust(2 * BLOCK_WORDS * WORD_BYTES, b"\0")
    for live in (CLAIMED, OPENED):
        struct.pack_into("=q", content, LIVE_AT + live * WORD_BYTES, BLOCK_WORDS)
    path = directory / info.file_name("ring")
    path.write_bytes(content)
    return path


def word(data: bytes, index: int) -> int:
    """A live word of a ring's bytes."""
    return int(struct.unpack_from("=q", data, LIVE_AT + index * WORD_BYTES)[0])
