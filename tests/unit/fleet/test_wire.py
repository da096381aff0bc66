"""What crosses between hosts arrives as it was sent, or not at all: a refusal, or nothing in it that cannot be."""

import copy
import dataclasses
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.base.bounds import MAX_TEXT
from sftriage.fleet import wire
from sftriage.fleet.wire import (
    MAX_MESSAGE_BYTES,
    MAX_UNPACKED_BYTES,
    HangQuery,
    Incarnation,
    Orders,
    RunName,
    WireError,
    decode_evidence,
    decode_findings,
    decode_orders,
    decode_query,
    decode_shipment,
    encode,
    encode_evidence,
    fitting,
    parts,
)
from sftriage.mitigate.switching import Request, Setting, StageTimes
from sftriage.model.captures import CaptureRequest, CaptureResult, Report, Trigger, WantedCapture
from sftriage.model.ends import HostEnds, RankEnd
from sftriage.model.events import Place
from sftriage.model.hangs import Call, GroupCalls, RankEvidence, SourceLine, ThreadEvidence, Wait, WorkerEvidence
from sftriage.model.windows import COUNTERS, GpuFindings, LinkUse, ReadCounts, StageSchema
from sftriage.trainer.layout import MAX_COUNT
from sftriage.windows.decoding import (
    DURATIONS,
    FLAGS,
    KIND_REST,
    READY,
    SEQ,
    START,
    STEP,
    WORK,
    StepArrays,
    slot_words,
    together,
)
from sftriage.windows.rings import Rows
from tests.unit.fleet.shipments import SCHEMA, group, info, rows, shipment, status, steps

NAMES = st.text(st.characters(categories=("L", "N", "P", "S"), exclude_characters="\x00"), max_size=20)


PIPELINE = {"stages": (StageTimes(0.01, 0.02, 0.0, 0.03, 8), StageTimes(0.01, 0.02, 0.03, 0.0, 8)), "microbatches": 4}
GROUPS = (
    group((2, 3), value=None, request=3),
    group((0, 3), ranks=(0, 4, 5, 9), value=2),
    group(name="rank-6.0.switch", ranks=range(6, 20, 2)),
    group(name="rank-7.3.switch", ranks=(7, 8), **PIPELINE),
)


@st.composite
def step_arrays(draw, schema, ranks):
    count = draw(st.integers(0, 6))
    slots_BW = np.zeros((count, slot_words(schema)), dtype=np.int64)
    columns = {SEQ: (1, 2**62 - 1), STEP: (-(2**61), 2**61), START: (0, 2**62 - 1), 3: (0, 2**55)}
    columns |= {FLAGS: (0, 3), WORK: (0, 2**62), READY: (-1, 2**55), KIND_REST: (-(2**63), 2**63 - 1)}
    columns |= dict.fromkeys(range(DURATIONS, slot_words(schema) - 1), (0, 2**55))
    for at, (least, most) in columns.items():
        slots_BW[:, at] = draw(st.lists(st.integers(least, most), min_size=count, max_size=count))
    rank_B = np.array(draw(st.lists(st.sampled_from(ranks), min_size=count, max_size=count)), dtype=np.int64)
    counted_BC = None
    if draw(st.booleans()):
        known = st.floats(0, 1e9) | st.just(float("nan"))
        counted_BC = np.full((count, len(COUNTERS)), np.nan)
        counted_BC[:, 1] = draw(st.lists(known, min_size=count, max_size=count))
        counted_BC[:, -1] = draw(st.lists(known, min_size=count, max_size=count))
    return StepArrays(schema, rank_B, slots_BW, counted_BC)


CALL = Call("all_reduce", ((3,),), ("Float",), (SourceLine("train", "/job/train.py", 91, own=True),))
GROUPS_OF_CALL = (GroupCalls("0", "", None, 9, (0,)),)
ENDS = HostEnds(
    (
        RankEnd(1, 71, "node-a", 5.5, 60, "backward", True, False, -6, False, "RuntimeError", "reset", ("a",)),
        RankEnd(
            0,
            place=Place("train", "a.py", 3),
            workers={77: -9},
            calls=(CALL,),
            groups=(GroupCalls("0", "", None, 9, (0,)),),
        ),
    ),
    *(2, 1, 4.5, 0.25, 0.125),
)


LINK = LinkUse("node-a", "10.0.0.1", "10.0.0.2", 1, 2, 3, 0.5, 6, 7e9, False, 1e10)


@st.composite
def shipments(draw):
    some = []
    for attempt in range(draw(st.integers(0, 2))):
        names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True))
        schema = StageSchema.closed(tuple(names), tuple(draw(st.lists(st.sampled_from(names), unique=True))))
        ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
        made = Rows(
            generation=attempt,
            schema=schema,
            world_size=10,
            ranks={rank: info(rank, world_size=10, attempt=attempt, schema=schema) for rank in ranks},
            steps=draw(step_arrays(schema, ranks)),
            device_steps=draw(st.none() | step_arrays(schema, ranks)),
            device_over=tuple(draw(st.lists(st.sampled_from(ranks), unique=True))),
            wall_ns=draw(st.integers(-(2**61), 2**61)),
            links=draw(st.sampled_from([(), (LINK,)])),
        )
        some.append(made)
    result = CaptureResult("c-1", 1, "stored", draw(NAMES), 3, 4, 5, {"run": 0.5}, {"mono_ns": 7})
    return shipment(
        *some,
        status=draw(st.none() | st.just(status())),
        counts=ReadCounts(
            *draw(st.tuples(*[st.integers(0, 2**60)] * 3)), draw(st.dictionaries(NAMES, NAMES, max_size=2))
        ),
        reports=draw(st.sampled_from([(), (Report(result, hangs=True, stored_bytes=9),)])),
        over=draw(st.booleans()),
        switches=draw(st.sampled_from([None, (), GROUPS])),
        ends=draw(st.sampled_from([None, HostEnds(), ENDS])),
    )


def comparable(value):
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        fields = dataclasses.fields if dataclasses.is_dataclass(value) else msgspec.structs.fields
        return {field.name: comparable(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    return [comparable(one) for one in value] if isinstance(value, tuple | list | range) else value


@settings(max_examples=25)
@given(sent=shipments())
def test_what_an_agent_tells_arrives_as_it_was(sent):
    np.testing.assert_equal(comparable(decode_shipment(encode(sent))), comparable(sent))


REQUEST = CaptureRequest("c-1", 1, "nsys", 2, 1, 20.0, 1 << 20, {"trace": ["cuda"], "deep": True}, labels={"a": "b"})
TRIGGER = Trigger(5, 24, "suspect", "rank", (3,), "data", 0.1, 0.2, 1.0, "p", "0" * 64, "slow")
WANTED = WantedCapture(REQUEST, TRIGGER, generation=2, expires_s=59.5)
OF_A_PROCESS = dataclasses.replace(WANTED, process=Incarnation("boot", 1, 2, 3))


def test_what_is_wanted_arrives_as_it_was():
    captures, run = (OF_A_PROCESS, dataclasses.replace(WANTED, resumed=True)), RunName("job", "run-7", "s3://kept/here")
    switches = {"ranks-0.abcd": Setting(3), "rank-7.3.switch": Setting.of_plan((5, 1))}
    for orders in (Orders(7, captures), Orders(7, captures, "host-0", run, switches)):
        assert decode_orders(encode(orders)) == orders


@settings(max_examples=25)
@given(count=st.integers(1, 400), device=st.integers(0, 400), ranks=st.integers(1, 3), room=st.integers(1, 40))
def test_many_rows_are_sent_in_parts_that_are_them(count, device, ranks, room):
    # GIVEN more rows than a message has room for
    names, before = range(ranks), wire.MAX_ROW_BYTES
    device_steps = steps(names, 0, device) if device else None
    whole = rows(names, 0, count, device_steps=device_steps, device_over=(0,))
    wire.MAX_ROW_BYTES = room * (8 * (slot_words(SCHEMA) + len(COUNTERS)) + 4)
    try:
        sent = list(parts(whole))
    finally:
        wire.MAX_ROW_BYTES = before
    # THEN no part has more than twice that, and together they are all rows, in the order of steps
    lots = [one.steps for one in sent], [one.device_steps for one in sent if one.device_steps is not None]
    assert all(len(lot) <= max(room, ranks * count if len(sent) == 1 else 0) for each in lots for lot in each)
    for lot, all_of_it in zip(lots, (whole.steps, whole.device_steps), strict=True):
        if all_of_it is not None:
            np.testing.assert_array_equal(together(lot).in_order().slots_BW, all_of_it.in_order().slots_BW)
    # AND the end of device times comes only with the last of them
    assert [one.device_over for one in sent] == [()] * (len(sent) - 1) + [(0,)]


def test_ends_that_are_too_large_for_a_message_lose_their_calls_first_and_then_earlier_attempts():
    random = np.random.default_rng(1)

    def ended(rank, attempt, n_bytes):
        return RankEnd(rank, attempt=attempt, message=random.bytes(n_bytes).hex()[:n_bytes])

    with_calls = dataclasses.replace(ended(0, 1, 9), calls=(CALL,), groups=GROUPS_OF_CALL)
    assert fitting(HostEnds((with_calls,))).ranks == (with_calls,)
    large = dataclasses.replace(with_calls, calls=(dataclasses.replace(CALL, op=random.bytes(1 << 18).hex()),))
    (found,) = fitting(HostEnds((large,))).ranks
    assert found == dataclasses.replace(with_calls, calls=(), groups=())
    many = HostEnds(tuple(ended(rank, attempt, 9000) for rank in range(8) for attempt in range(9)))
    assert [end.attempt for end in fitting(many).ranks] == [8] * 8
    assert fitting(HostEnds(tuple(ended(rank, 0, 9000) for rank in range(99)))).ranks == ()


def test_rows_that_nothing_packs_have_room_in_a_message():
    wide = StageSchema.closed(tuple(f"s{n}" for n in range(31)), tuple(f"s{n}" for n in range(31)))
    random = np.random.default_rng(1)
    many = steps((0,), 0, 5000, wide)
    many.slots_BW[:, DURATIONS:-1] = random.integers(0, 2**55, many.slots_BW[:, DURATIONS:-1].shape)
    whole = Rows(0, wide, 4, {0: info(schema=wide)}, many, many)
    sizes = [len(encode(shipment(one))) for one in parts(whole)]
    assert max(sizes) < MAX_MESSAGE_BYTES
    assert len(sizes) > 5


RESULT = CaptureResult("c-1", 1, "stored", "well", 3, 4, 5, {"run": 0.5}, {"mono_ns": 7})
GPUS = GpuFindings(1e9, ("it is hot",), {1: {"name": "A100", "clocks": [1, 2], "power_w": 300.5}}, "one is missing")
SENT = {
    decode_shipment: shipment(
        rows(),
        status=status(),
        counts=ReadCounts(1, 2, 3, {"ring": "torn"}),
        reports=(Report(RESULT, True, 9),),
        switches=(group((0, 1)), group(ranks=(7, 3, 5), name="rank-7.0.switch")),
        ends=ENDS,
    ),
    decode_orders: Orders(
        7, (OF_A_PROCESS,), switches={"rank-7.0.switch": Setting.of_plan((3, 2, 1))}, broken=("a", "b")
    ),
    decode_findings: GPUS,
    decode_query: (1, 2, 3),
}
PRELUDE = encode(())[:4]
CHECKED = (decode_shipment, decode_findings, decode_evidence)
HOSTILE = st.one_of(
    st.sampled_from([None, True, -1, 0, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 0.5, 1e308, float("nan")]),
    st.sampled_from([float("inf"), float("-inf"), "", "\x1b[31m", "../../x", "a\nb", "\u202eabc", "x" * 10_000, "\0"]),
    st.sampled_from([b"", b"\xff" * 9, b"\0" * 1600, [], {}, [[]] * 50, {"": {}}, msgspec.msgpack.Ext(1, b"x")]),
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=9),
)


def places(value, here=()):
    yield here
    if isinstance(value, dict | list):
        for name in list(value) if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*here, name))


def with_value(message, way, value):
    if not way:
        return value
    changed = copy.deepcopy(message)
    inner = changed
    for name in way[:-1]:
        inner = inner[name]
    inner[way[-1]] = value
    return changed


CALLS = (
    Call("all_reduce", ((3, 4), ()), ("Float",), (SourceLine("train", "/w/train.py", 91, "loss.backward()", True),)),
    Call("barrier"),
)
GROUP = GroupCalls("0", "default_pg", ((0, 4, 1),), 7, (0, 1, -1, 0), (10,))
LOCKED = Wait("S", "futex", "futex_wait", "", "self._lock", "loader", CALLS[0].frames[0], 3, 0.5)
HANGS = (
    RankEvidence(
        *(0, "node-a", 4000, 60, "data", 12.5, True, False, True, "", CALLS, (GROUP,)),
        threads=(ThreadEvidence("MainThread", True, CALLS[0].frames, LOCKED),),
        workers=(WorkerEvidence(4001, "T", "do_signal_stop", (), "it is stopped", -9),),
        timeout_s=1800.0,
        state="S",
        wchan="futex_wait",
    ),
    RankEvidence(1, "node-a", 4010, answered=True, calls=CALLS[::-1], groups=(GROUP,)),
    RankEvidence(2, "node-a", 4020, alive=None, problem="its process is stopped", exit_status=-9),
)
PACKED = {decode: encode(message) for decode, message in SENT.items()} | {decode_evidence: encode_evidence(HANGS)[0]}
MESSAGES = {decode: msgspec.msgpack.decode(zlib.decompress(data[4:]), strict=False) for decode, data in PACKED.items()}


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
    elif dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        yield from texts_and_numbers(comparable(value))


def check(found):
    """No text of an agent moves a cursor, no value is NaN, and no value is too large."""
    for one in texts_and_numbers(found):
        if isinstance(one, str):
            assert one.isprintable()
            assert len(one) <= MAX_TEXT
        else:
            assert np.isfinite(one)
            assert abs(one) <= MAX_COUNT
    for its in getattr(found, "rows", ()):
        assert set(its.steps.rank_B.tolist()) <= set(its.ranks)
        assert (its.steps.times_ns_BV >= 0).all()
        assert (its.steps.durations_ns_BS.sum(axis=1) >= 0).all()


def decoded(decode, data):
    try:
        return decode(data), ""
    except WireError as error:
        return None, str(error)


@pytest.mark.parametrize("decode", PACKED, ids=lambda one: one.__name__)
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
    if decode in CHECKED:
        check(found)


def deep(levels):
    return b"\x91" * levels + b"\xc0"


RING = MESSAGES[decode_shipment][3][0][5][0]
RANK = {"rank": 0, "host": "", "pid": 0}
THREAD = {"name": "", "main": True, "frames": []}
GROUPLESS = ["a", "b", "c", [], None, {}, [], False, 0, ""]
MANY_RANKS = ["g", [[0, 32766, 1], True], [[0, 32766, 1], True], 0, 0, 0, 0, [0, 0, 0], 0.0, 0, [], 0]
BOMBS = {
    "zeros": (decode_shipment, b"\0" * (1 << 25)),
    "an array that says it is long": (decode_shipment, b"\xdd\xff\xff\xff\xff\x01"),
    "many rings": (decode_shipment, ["a", "b", "c", [[0, ["s"], [], 4, 0, [RING] * 60_000, [b"", b""]]]]),
    "many rows": (decode_shipment, ["a", "b", "c", [[0, ["s"], [], 4, 0, [], [b"", b""]]] * 200_000]),
    "many groups of many ranks": (decode_shipment, [*GROUPLESS, [MANY_RANKS] * 60_000]),
    "many stages": (decode_shipment, ["a", "b", "c", [[0, [""] * 4_000_000, [], 4, 0, [], [b"", b""]]]]),
    "many ranks that are over": (
        decode_shipment,
        ["a", "b", "c", [[0, ["s"], [], 4, 0, [], [b"", b""], None, [1] * 4_000_000]]],
    ),
    "options without an end": (decode_orders, b"\x82\xa5epoch\x01\xa8captures" + deep(4_000_000)),
    "findings of nothing": (decode_findings, {"time_s": 1.0, "gpus": {1: {"a": [[]] * 1_040_000}}}),
    "findings without an end": (decode_findings, b"\x82\xa6time_s\x01\xa4gpus\x81\x01\x81\xa1a" + deep(900)),
    "ranks": (decode_query, [1] * 1_000_000),
    "evidence of many ranks": (decode_evidence, [1, [], [], [[{"rank": 0, "host": "", "pid": 0}, [], []]] * 60_000]),
    "evidence of many threads": (
        decode_evidence,
        [1, [], [], [[{"rank": 0, "host": "", "pid": 0, "threads": [THREAD] * 150_000}, [], []]]],
    ),
    "evidence of many calls": (decode_evidence, [1, [{"op": ""}], [], [[RANK, [1] * 3_900_000, []]]]),
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
    data = packed([*GROUPLESS, [MANY_RANKS] * wire.MAX_ITEMS])
    tracemalloc.start()
    found = decode_shipment(data)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.switches) == wire.MAX_ITEMS
    assert most_bytes < MAX_UNPACKED_BYTES


def changed(part, **changes):
    """The shipment with other values in its first rows, or its first group of ranks."""
    found = msgspec.msgpack.decode(zlib.decompress(encode(SENT[decode_shipment])[4:]), type=wire._Packed)
    first = msgspec.structs.replace(getattr(found, part)[0], **changes)
    return packed(msgspec.structs.replace(found, **{part: (first,)}))


def with_word(at, value):
    made = steps((0, 1), 0, 3)
    made.slots_BW[2, at] = value
    return wire.packed(made)


def counting(value):
    made = wire.packed(steps((0, 1), 0, 3))
    return msgspec.structs.replace(made, counted=wire.shuffled(np.full((len(COUNTERS), 6), value)))


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("switches", {"name": "\x1b[2J"}),
        ("switches", {"name": "x" * 101}),
        ("switches", {"ranks": ((), False)}),
        ("switches", {"ranks": ((0, 1 << 40, 1), True)}),
        ("switches", {"ranks": ((0, 4, 0), True)}),
        ("switches", {"ranks": ((0, 4), True)}),
        ("switches", {"ranks": ((0, 4, 1, 1), True)}),
        ("switches", {"ranks": ((3, 2, 1, 3), False)}),
        ("switches", {"ranks": ((-1, 2), False)}),
        ("switches", {"here": ((4,), False)}),
        ("switches", {"here": ((2, 5, 1), True)}),
        ("switches", {"round": -1}),
        ("switches", {"since_step": -2}),
        ("switches", {"value": 1 << 16}),
        ("switches", {"value": -1}),
        ("switches", {"request": Request(0, 0, 1 << 16)}),
        ("switches", {"request": Request(-1, 0, 0)}),
        ("switches", {"exchange_s": float("nan")}),
        ("switches", {"exchange_s": -0.1}),
        ("switches", {"microbatches": 4}),
        ("switches", {"stages": (StageTimes(0.1, 0.1, 0.1, 0.1, 8),) * 4}),
        ("switches", {"stages": (StageTimes(0.1, 0.1, 0.1, 0.1, 300),) * 4, "microbatches": 4}),
        ("switches", {"stages": (StageTimes(0.1, -0.1, 0.1, 0.1, 8),) * 4, "microbatches": 4}),
        ("rows", {"world_size": 1 << 40}),
        ("rows", {"world_size": 1}),
        ("rows", {"stages": ("a", "a")}),
        ("rows", {"generation": -1}),
        ("rows", {"wall_ns": 1 << 63}),
        ("rows", {"device_over": (3,)}),
        ("rows", {"rings": ()}),
        ("rows", {"steps": with_word(SEQ, 0)}),
        ("rows", {"steps": with_word(STEP, 2**62)}),
        ("rows", {"steps": with_word(START, -1)}),
        ("rows", {"steps": with_word(DURATIONS, -1)}),
        ("rows", {"steps": with_word(DURATIONS, 2**60)}),
        ("rows", {"steps": with_word(READY, -2)}),
        ("rows", {"steps": with_word(WORK, -1)}),
        ("rows", {"steps": wire.Columns(b"\0" * 4, b"")}),
        ("rows", {"steps": wire.Columns(b"", b"", b"\0" * 8)}),
        ("rows", {"steps": counting(-1.0)}),
        ("rows", {"steps": counting(float("inf"))}),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(part, changes):
    assert decoded(decode_shipment, changed(part))[1] == ""
    assert decoded(decode_shipment, changed(part, **changes))[0] is None


def test_evidence_arrives_as_it_was_and_equal_calls_once():
    # GIVEN evidence of ranks that mostly call the same
    (data,) = encode_evidence(HANGS)
    assert decode_evidence(data) == (1, HANGS)
    # THEN its calls are sent once, and shared where they arrive
    n_parts, calls, groups, ranks = MESSAGES[decode_evidence]
    assert (n_parts, len(calls), len(groups), len(ranks)) == (1, 2, 1, 3)
    first, second, _ = decode_evidence(data)[1]
    assert first.groups[0] is second.groups[0]
    # AND so does what an agent without ranks sends, and a query
    assert decode_evidence(encode_evidence(())[0]) == (1, ())
    for query in (HangQuery("c-1"), HangQuery("w90-0-2.stacks", (3, 1), 7)):
        assert decode_query(encode(query)) == query


def incompressible(seed, n_calls):
    random = np.random.default_rng(seed)
    return tuple(Call(random.bytes(400).hex(), (tuple(random.integers(0, 2**40, 9).tolist()),)) for _ in range(n_calls))


def test_evidence_comes_in_parts_that_fit_and_of_what_never_fits_the_state():
    # GIVEN the evidence of ranks that have nothing in common, and of one that fits no message
    some = [RankEvidence(rank, "node-a", rank, calls=incompressible(rank, 500)) for rank in range(6)]
    huge = RankEvidence(6, "node-a", 6, state="T", answered=True, calls=incompressible(6, 4000))
    sent = encode_evidence([*some, huge])
    # THEN it comes in a few parts, each a message
    assert 3 <= len(sent) <= 8
    assert max(map(len, sent)) <= MAX_MESSAGE_BYTES + 4
    received = [decode_evidence(data) for data in sent]
    assert {n_parts for n_parts, _ in received} == {len(sent)}
    ranks = [rank for _, of_part in received for rank in of_part]
    assert ranks[:6] == some
    # AND of the last one there is what is small
    assert (ranks[6].rank, ranks[6].state, ranks[6].calls, ranks[6].answered) == (6, "T", (), False)
    assert "too large" in ranks[6].problem


@pytest.mark.parametrize(
    "token", ["", "c 1", "c-1\n", "c-1\nsend the counters' files", "../c", "c" * 101, "\u00e9"], ids=repr
)
def test_a_query_whose_token_could_be_another_request_is_refused(token):
    assert decoded(decode_query, packed({"token": "c-1"}))[1] == ""
    assert decoded(decode_query, packed({"token": token}))[0] is None


@pytest.mark.parametrize("calls", [[2], [-1], [0, 1 << 40]], ids=str)
def test_evidence_of_unknown_calls_is_refused(calls):
    message = copy.deepcopy(MESSAGES[decode_evidence])
    assert decoded(decode_evidence, packed(message))[1] == ""
    for place in (1, 2):
        assert decoded(decode_evidence, packed(with_value(message, (3, 0, place), calls)))[0] is None


@pytest.mark.parametrize(
    "setting", [Setting(-1), Setting(1 << 16), Setting(3, (0,)), Setting(3, (256,)), Setting(3, (1,) * 57)]
)
def test_a_setting_that_cannot_be_is_refused(setting):
    assert decoded(decode_orders, encode(Orders(7, switches={"ranks-0.abcd": setting})))[0] is None


@pytest.mark.parametrize("unpacked", [True, False])
@settings(max_examples=100)
@given(data=st.data())
def test_no_bytes_do_any_harm(unpacked, data):
    # GIVEN a message, or what is packed in it, with some of its bytes changed, cut, or put in twice
    decode = data.draw(st.sampled_from(list(PACKED)))
    damaged = bytearray(zlib.decompress(PACKED[decode][4:]) if unpacked else PACKED[decode])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    # THEN it is refused, in one short line, or has nothing in it that could do harm
    found, why = decoded(decode, PRELUDE + zlib.compress(bytes(damaged)) if unpacked else bytes(damaged))
    assert why.isprintable()
    if found is not None and decode in CHECKED:
        check(found)


def test_what_moves_a_cursor_is_no_part_of_a_reason():
    # GIVEN reasons that would clear the terminal on which they are printed one day
    report = Report(CaptureResult("c-1", 0, "failed", "\x1b[2Jno room"))
    counts = ReadCounts(problems={"rank-0\r": "\x07gone"})
    # WHEN they arrive THEN they are what can be read of them
    received = decode_shipment(encode(shipment(reports=(report,), counts=counts)))
    assert [one.result.detail for one in received.reports] == ["?[2Jno room"]
    assert received.counts.problems == {"rank-0?": "?gone"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        *((b"SFT" + bytes([one]), f"messages of version {one}, where this sftriage") for one in (0, 2, 3, 255)),
        # (before it is unpacked)
        (PRELUDE + bytes(MAX_MESSAGE_BYTES + 1), f"{MAX_MESSAGE_BYTES + 5} bytes are not a message"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_another_version_and_a_message_that_is_too_long_are_refused_in_words(data, why):
    with pytest.raises(WireError, match=why):
        decode_shipment(data)
