import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.model.windows import MAX_STAGE_NAME_BYTES, MAX_STAGES, OTHER, StageSchema
from sftriage.trainer.layout import (
    BLOCK_WORDS,
    HEADER_BYTES,
    LOG_MAGIC,
    RING_MAGIC,
    Header,
    bounded_text,
    decode_header,
    encode_header,
)

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]{0,30}", fullmatch=True).filter(lambda name: name != OTHER)


@st.composite
def schemas(draw):
    stages = tuple(draw(st.lists(names, min_size=1, max_size=MAX_STAGES - 1, unique=True)))
    sync = tuple(name for name in stages if draw(st.booleans()))
    return StageSchema.closed(stages, sync)


@given(schema=schemas(), host=st.text(max_size=300), blocks=st.integers(1, 1 << 20))
def test_a_header_says_the_same_when_it_is_read(make_info, schema, host, blocks):
    info = make_info(schema=schema, host=bounded_text(host))
    header = encode_header(RING_MAGIC, info, log_words=blocks * BLOCK_WORDS)
    # THEN nothing has changed, and the header has its fixed size
    assert decode_header(RING_MAGIC, header, "x") == Header(info, log_words=blocks * BLOCK_WORDS)
    assert len(header) == HEADER_BYTES


def test_the_largest_header_fits(make_info):
    # GIVEN as many stages as there may be, all sync, with the longest names, and texts that JSON makes longer still
    stages = tuple(f"{index:02d}".ljust(MAX_STAGE_NAME_BYTES, "x") for index in range(MAX_STAGES - 1))
    quotes = '"' * 255
    info = make_info(schema=StageSchema.closed(stages, stages), job=quotes, host=quotes, cohort=quotes)
    # THEN it is encoded without overlapping the live words
    header = encode_header(RING_MAGIC, info, log_words=BLOCK_WORDS)
    assert decode_header(RING_MAGIC, header, "x") == Header(info, log_words=BLOCK_WORDS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda header: b"", "not a ring"),
        (lambda header: b"\x7fELF" + header[4:], "not a ring"),
        (lambda header: LOG_MAGIC + header[8:], "not a ring"),
        (lambda header: header[:100], "truncated"),
        (lambda header: header[:8] + header[8:12][::-1] + header[12:], "another byte order"),
        (lambda header: header[:12] + struct.pack("=I", 9) + header[16:], "format version 9"),
        (lambda header: header[:16] + struct.pack("=I", 1 << 31) + header[20:], "a document of"),
        (lambda header: header.replace(b"node-a", b"node-b"), "checksum"),
    ],
)
def test_a_header_that_is_wrong_is_refused_by_what_is_wrong(make_info, damage, message):
    # GIVEN a good header THEN, damaged, it is refused with the file's name and the reason, on one line
    header = encode_header(RING_MAGIC, make_info(), log_words=BLOCK_WORDS)
    with pytest.raises(RingError, match=rf"^some\.ring: .*{message}") as caught:
        decode_header(RING_MAGIC, damage(header), "some.ring")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 8},
        {"rank": -1},
        {"world_size": True},
        {"attempt": 1.0},
        {"pid": 1 << 63},
        {"host": "x" * 256},
        {"job": "a\nb"},
        {"cohort": None},
        {"writer": "a\nb"},
    ],
)
def test_an_info_that_cannot_be_is_refused(make_info, changes):
    with pytest.raises(RingError):
        make_info(**changes)


def test_texts_are_cut_at_a_whole_character():
    # GIVEN a text of 2-byte characters whose limit falls in the middle of one
    assert bounded_text("é" * 200) == "é" * 127
    assert bounded_text("a\x1b[31mb\udc80") == "a?[31mb?"
