"""Whatever comes in, all that comes of it is a refusal, or a message with nothing in it that cannot be."""

import copy
import dataclasses
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.fleet import wire
from sftriage.fleet.wire import (
    MAX_UNPACKED_BYTES,
    Incarnation,
    Order,
    Orders,
    WireError,
    decode_findings,
    decode_orders,
    decode_ranks,
    decode_shipment,
    encode,
)
from sftriage.mitigate.switch_state import Setting
from sftriage.model.captures import CaptureRequest, CaptureResult, Report, Trigger, WantedCapture
from sftriage.model.windows import GpuFindings
from sftriage.recorder.layout import MAX_COUNT
from sftriage.windows.shipped import ReadCounts
from tests.unit.fleet.shipments import block, group, shipment, status

RESULT = CaptureResult("c-1", 1, "stored", "well", 3, 4, 5, {"run": 0.5}, {"mono_ns": 7})
REQUEST = CaptureRequest(
    "c-1", 1, "torch", 2, 1, 20.0, 1 << 20, {"with_stack": True, "trace": ["cuda"]}, labels={"a": "b"}
)
TRIGGER = Trigger(5, 24, "suspect", "rank", (3,), "data", 0.1, 0.2, 1.0, "p", "0" * 64, "slow")
GPUS = GpuFindings(1e9, ("it is hot",), {1: {"name": "A100", "clocks": [1, 2], "power_w": 300.5}}, "one is missing")
SENT = {
    decode_shipment: shipment(
        block(),
        status=status(),
        counts=ReadCounts(1, 2, 3, {"ring": "torn"}),
        reports=(Report(RESULT, True, 9),),
        switches=(group((0, 1)), group(ranks=(7, 3, 5), name="rank-7.0.switch")),
    ),
    decode_orders: Orders(
        7,
        (Order(WantedCapture(REQUEST, TRIGGER, 2, 59.5), Incarnation("boot", 1, 2, 3)),),
        switches={"rank-7.0.switch": Setting.of_plan((3, 2, 1))},
    ),
    decode_findings: GPUS,
    decode_ranks: (1, 2, 3),
}
PRELUDE = encode(())[:4]
HOSTILE = st.one_of(
    st.sampled_from([None, True, -1, 0, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, 1e308, float("nan")]),
    st.sampled_from([float("inf"), float("-inf"), "", "\x1b[31m", "../../x", "a\nb", "\u202eabc", "x" * 10_000, "\0"]),
    st.sampled_from([b"", b"\xff" * 9, b"\0" * 1600, [], {}, [[]] * 50, {"": {}}, msgspec.msgpack.Ext(1, b"x")]),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=9),
)


def places(value, here=()):
    """The way to every value in a message."""
    yield here
    if isinstance(value, dict | list):
        for name in list(value) if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*here, name))


def with_value(message, way, value):
    """A message with another value somewhere."""
    if not way:
        return value
    changed = copy.deepcopy(message)
    inner = changed
    for name in way[:-1]:
        inner = inner[name]
    inner[way[-1]] = value
    return changed


def plain(message):
    return msgspec.msgpack.decode(zlib.decompress(encode(message)[4:]), strict=False)


MESSAGES = {decode: plain(message) for decode, message in SENT.items()}


def packed(message):
    return PRELUDE + zlib.compress(msgspec.msgpack.encode(message), 1)


def texts_and_numbers(value):
    """All texts and numbers of a message, but for those in arrays."""
    if isinstance(value, str | int | float):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from (*texts_and_numbers(name), *texts_and_numbers(one))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from texts_and_numbers(one)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from texts_and_numbers(getattr(value, field.name))


def check(found):
    """Nothing that an agent told moves a cursor, is no number, or is too much."""
    for one in texts_and_numbers(found):
        if isinstance(one, str):
            assert one.isprintable()
            assert len(one) <= wire.MAX_TEXT
        else:
            assert np.isfinite(one)
            assert abs(one) <= MAX_COUNT


def decoded(decode, data):
    """What a message says, or why it is refused."""
    try:
        return decode(data), ""
    except WireError as error:
        return None, str(error)


@pytest.mark.parametrize("decode", SENT, ids=lambda one: one.__name__)
@settings(max_examples=300)
@given(values=st.lists(st.tuples(st.integers(0, 10_000), HOSTILE), min_size=1, max_size=3))
def test_any_value_in_any_place_is_refused_or_harmless(decode, values):
    # GIVEN a real message, of which a few values are others
    message = MESSAGES[decode]
    for number, value in values:
        ways = list(places(message))
        message = with_value(message, ways[number % len(ways)], value)
    # WHEN it comes in THEN it is refused, in one short line, or has nothing in it that could do harm
    found, why = decoded(decode, packed(message))
    assert len(why) < 400
    assert why.isprintable()
    if decode in (decode_shipment, decode_findings):
        check(found)


def test_what_is_hostile_is_found_by_this():
    with pytest.raises(AssertionError):
        check(GpuFindings(1.0, ("\x1b[31m",)))
    with pytest.raises(AssertionError):
        check(Report(dataclasses.replace(RESULT, timings_s={"run": float("nan")})))


def deep(levels):
    return b"\x91" * levels + b"\xc0"


RING = MESSAGES[decode_shipment][3][0][5][0]
GROUPLESS = ["a", "b", "c", [], None, [0, 0, 0], {}, [], False, 0, ""]
MANY_RANKS = ["g", [[0, 32766, 1], True], [[0, 32766, 1], True], 0, 0, 0, 0, [0, 0, 0], 0.0, 0, [], 0]
BOMBS = {
    "zeros": (decode_shipment, b"\0" * (1 << 25)),
    "an array that says it is long": (decode_shipment, b"\xdd\xff\xff\xff\xff\x01"),
    "many rings": (decode_shipment, ["a", "b", "c", [[0, ["s"], [], 4, 0, [RING] * 60_000, [b"", b""]]]]),
    "many blocks": (decode_shipment, ["a", "b", "c", [[0, ["s"], [], 4, 0, [], [b"", b""]]] * 200_000]),
    "many groups of many ranks": (decode_shipment, [*GROUPLESS, [MANY_RANKS] * 60_000]),
    "many stages": (decode_shipment, ["a", "b", "c", [[0, [""] * 4_000_000, [], 4, 0, [], [b"", b""]]]]),
    "many ranks that are over": (
        decode_shipment,
        ["a", "b", "c", [[0, ["s"], [], 4, 0, [], [b"", b""], None, [1] * 4_000_000]]],
    ),
    "options without an end": (decode_orders, b"\x82\xa5epoch\x01\xa8captures" + deep(4_000_000)),
    "findings of nothing": (decode_findings, {"time_s": 1.0, "gpus": {1: {"a": [[]] * 1_040_000}}}),
    "findings without an end": (decode_findings, b"\x82\xa6time_s\x01\xa4gpus\x81\x01\x81\xa1a" + deep(900)),
    "ranks": (decode_ranks, [1] * 1_000_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_message_of_much_takes_no_more_than_a_bound(name):
    # GIVEN a message that is small until it is unpacked
    decode, message = BOMBS[name]
    raw = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    data = PRELUDE + zlib.compress(raw, 9)
    assert len(data) <= wire.MAX_MESSAGE_BYTES + 4
    del raw
    # WHEN it comes in THEN it is refused, for no more memory than what the largest message of all may take
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(data)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most_bytes < 64 * MAX_UNPACKED_BYTES


def test_groups_of_many_ranks_take_no_room_however_many_a_message_tells_of():
    data = packed([*GROUPLESS, [MANY_RANKS] * wire.MAX_TOLD])
    tracemalloc.start()
    found = decode_shipment(data)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.switches) == wire.MAX_TOLD
    assert most_bytes < MAX_UNPACKED_BYTES


@settings(max_examples=100)
@given(data=st.data())
def test_no_bytes_do_any_harm(data):
    decode = data.draw(st.sampled_from(list(SENT)))
    whole = bytearray(encode(SENT[decode]))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    assert decoded(decode, bytes(whole))[1].isprintable()
