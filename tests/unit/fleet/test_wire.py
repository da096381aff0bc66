"""What crosses between hosts arrives as it was sent, or not at all."""

import dataclasses
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import SftriageError
from sftriage.fleet import wire
from sftriage.fleet.wire import (
    MAX_MESSAGE_BYTES,
    Block,
    Incarnation,
    Order,
    Orders,
    RunName,
    Shipment,
    VersionError,
    WireError,
    decode_orders,
    decode_shipment,
    encode,
    parts,
)
from sftriage.mitigate.switch_state import Request, Setting, StageTimes
from sftriage.model.captures import CaptureRequest, CaptureResult, Report, Trigger, WantedCapture
from sftriage.model.counters import COUNTERS
from sftriage.model.windows import StageSchema
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
from sftriage.windows.shipped import RankLocation, ReadCounts, Rows
from tests.unit.fleet.shipments import SCHEMA, block, group, info, shipment, status, steps

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
    """Any steps that there can be."""
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


@st.composite
def shipments(draw):
    """Anything that an agent may tell."""
    blocks = []
    for attempt in range(draw(st.integers(0, 2))):
        names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=5, unique=True))
        schema = StageSchema.closed(tuple(names), tuple(draw(st.lists(st.sampled_from(names), unique=True))))
        ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
        infos = {rank: info(rank, world_size=10, attempt=attempt, schema=schema) for rank in ranks}
        rows = Rows(
            generation=attempt,
            schema=schema,
            world_size=10,
            ranks={rank: RankLocation("node-a") for rank in ranks},
            steps=draw(step_arrays(schema, ranks)),
            device_steps=draw(st.none() | step_arrays(schema, ranks)),
            device_over=tuple(draw(st.lists(st.sampled_from(ranks), unique=True))),
            wall_ns=draw(st.integers(-(2**61), 2**61)),
        )
        blocks.append(Block(infos, rows))
    result = CaptureResult("c-1", 1, "stored", draw(NAMES), 3, 4, 5, {"run": 0.5}, {"mono_ns": 7})
    return shipment(
        *blocks,
        status=draw(st.none() | st.just(status())),
        counts=ReadCounts(
            *draw(st.tuples(*[st.integers(0, 2**60)] * 3)), draw(st.dictionaries(NAMES, NAMES, max_size=2))
        ),
        reports=draw(st.sampled_from([(), (Report(result, hangs=True, stored_bytes=9),)])),
        over=draw(st.booleans()),
        switches=draw(st.sampled_from([None, (), GROUPS])),
    )


def same_steps(one, other):
    if one is None or other is None:
        return one is other
    np.testing.assert_array_equal(one.slots_BW, other.slots_BW)
    np.testing.assert_array_equal(one.rank_B, other.rank_B)
    if one.counted_BC is None or other.counted_BC is None:
        return one.counted_BC is other.counted_BC
    np.testing.assert_array_equal(one.counted_BC, other.counted_BC)
    return True


def listed(switches):
    """Groups, with their ranks as they are, and not as they cross."""
    return switches and [dataclasses.replace(one, ranks=[*one.ranks], here=[*one.here]) for one in switches]


def assert_same(one: Shipment, other: Shipment):
    assert listed(one.switches) == listed(other.switches)
    plain = [dataclasses.replace(each, blocks=(), status=None, switches=None) for each in (one, other)]
    doing = [each.status and (each.status.schema, each.status.attempt, each.status.ranks) for each in (one, other)]
    assert doing[0] == doing[1]
    for field in dataclasses.fields(Shipment):
        assert getattr(plain[0], field.name) == getattr(plain[1], field.name)
    for mine, its in zip(one.blocks, other.blocks, strict=True):
        assert mine.infos == its.infos
        assert same_steps(mine.rows.steps, its.rows.steps)
        assert same_steps(mine.rows.device_steps, its.rows.device_steps)
        rest = [dataclasses.replace(each.rows, steps=None, device_steps=None) for each in (mine, its)]
        assert all(getattr(rest[0], f.name) == getattr(rest[1], f.name) for f in dataclasses.fields(Rows))


@settings(max_examples=25)
@given(sent=shipments())
def test_what_an_agent_tells_arrives_as_it_was(sent):
    assert_same(decode_shipment(encode(sent)), sent)


WANTED = WantedCapture(
    CaptureRequest(
        "w5-24-r3-slow-1", 3, "nsys", 2, 1, 20.0, 1 << 20, {"trace": ["cuda"], "deep": True}, labels={"a": "b"}
    ),
    Trigger(5, 24, "suspect", "rank", (3,), "data", 0.1, 0.2, 1.0, "p", "0" * 64, "slow"),
    generation=2,
    expires_s=59.5,
)


def test_what_is_wanted_arrives_as_it_was():
    orders = Orders(7, (Order(WANTED, Incarnation("boot", 1, 2, 3)), Order(dataclasses.replace(WANTED, resumed=True))))
    assert decode_orders(encode(orders)) == orders
    # AND with what their run is called
    named = dataclasses.replace(orders, run=RunName("job", "run-7", "s3://kept/here"))
    assert decode_orders(encode(named)) == named
    # AND with what groups of ranks are to have in force
    asked = dataclasses.replace(
        named, switches={"ranks-0.abcd": Setting(3), "rank-7.3.switch": Setting.of_plan((5, 1))}
    )
    assert decode_orders(encode(asked)) == asked


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "\x1b[2J"},
        {"name": "x" * 101},
        {"ranks": ((), False)},
        {"ranks": ((0, 1 << 40, 1), True)},
        {"ranks": ((0, 4, 0), True)},
        {"ranks": ((0, 4), True)},
        {"ranks": ((0, 4, 1, 1), True)},
        {"ranks": ((3, 2, 1, 3), False)},
        {"ranks": ((-1, 2), False)},
        {"here": ((4,), False)},
        {"here": ((2, 5, 1), True)},
        {"round": -1},
        {"since_step": -2},
        {"value": 1 << 16},
        {"value": -1},
        {"request": Request(0, 0, 1 << 16)},
        {"request": Request(-1, 0, 0)},
        {"exchange_s": float("nan")},
        {"exchange_s": -0.1},
        {"microbatches": 4},
        {"stages": (StageTimes(0.1, 0.1, 0.1, 0.1, 8),) * 4},
        {"stages": (StageTimes(0.1, 0.1, 0.1, 0.1, 300),) * 4, "microbatches": 4},
        {"stages": (StageTimes(0.1, -0.1, 0.1, 0.1, 8),) * 4, "microbatches": 4},
    ],
    ids=str,
)
def test_a_group_that_cannot_be_is_refused(changes):
    def sent(**changes):
        found = msgspec.msgpack.decode(
            zlib.decompress(encode(shipment(switches=(group((2, 3)),)))[4:]), type=wire._Shipment
        )
        told = msgspec.structs.replace(found.switches[0], **changes)
        return SENT[:4] + zlib.compress(msgspec.msgpack.encode(msgspec.structs.replace(found, switches=(told,))))

    assert not refused(sent())
    assert refused(sent(**changes))


@pytest.mark.parametrize(
    "setting", [Setting(-1), Setting(1 << 16), Setting(3, (0,)), Setting(3, (256,)), Setting(3, (1,) * 57)]
)
def test_a_setting_that_cannot_be_is_refused(setting):
    assert refused(encode(Orders(7, switches={"ranks-0.abcd": setting})), decode_orders)


@settings(max_examples=25)
@given(count=st.integers(1, 400), device=st.integers(0, 400), ranks=st.integers(1, 3), room=st.integers(1, 40))
def test_a_long_block_is_sent_in_parts_that_are_it(count, device, ranks, room):
    # GIVEN more rows than a message has room for
    names, before = range(ranks), wire.MAX_ROW_BYTES
    whole = block(names, 0, count)
    rows = dataclasses.replace(whole.rows, device_steps=steps(names, 0, device) if device else None, device_over=(0,))
    wire.MAX_ROW_BYTES = room * (8 * (slot_words(SCHEMA) + len(COUNTERS)) + 4)
    try:
        sent = list(parts(dataclasses.replace(whole, rows=rows)))
    finally:
        wire.MAX_ROW_BYTES = before
    # THEN no part has more than twice that, and together they are the block, in the order of steps
    lots = [
        [one.rows.steps for one in sent],
        [one.rows.device_steps for one in sent if one.rows.device_steps is not None],
    ]
    assert all(len(lot) <= max(room, ranks * count if len(sent) == 1 else 0) for each in lots for lot in each)
    for lot, all_of_it in zip(lots, (rows.steps, rows.device_steps), strict=True):
        if all_of_it is not None:
            np.testing.assert_array_equal(together(lot).in_order().slots_BW, all_of_it.in_order().slots_BW)
    # AND that device times are over is said with the last of them alone
    assert [one.rows.device_over for one in sent] == [()] * (len(sent) - 1) + [(0,)]


def test_rows_that_nothing_packs_have_room_in_a_message():
    wide = StageSchema.closed(tuple(f"s{n}" for n in range(31)), tuple(f"s{n}" for n in range(31)))
    random = np.random.default_rng(1)
    many = steps((0,), 0, 5000, wide)
    many.slots_BW[:, DURATIONS:-1] = random.integers(0, 2**55, many.slots_BW[:, DURATIONS:-1].shape)
    rows = Rows(0, wide, 4, {0: RankLocation("node-a")}, many, many)
    sizes = [len(encode(shipment(one))) for one in parts(Block({0: info(schema=wide)}, rows))]
    assert max(sizes) < MAX_MESSAGE_BYTES
    assert len(sizes) > 5


SENT = encode(shipment(block(), status=status(), reports=(Report(CaptureResult("c-1", 1, "running")),)))


def refused(data, decode=decode_shipment):
    """Nothing but a refusal, or else something whole, comes of any bytes."""
    try:
        decode(data)
    except WireError:
        return True
    return False


@given(data=st.binary(max_size=200))
def test_garbage_is_refused(data):
    assert refused(data)
    assert refused(SENT[:4] + data)
    assert refused(SENT[:4] + zlib.compress(data), decode_orders)


@given(data=st.data())
def test_damage_is_refused_or_harmless(data):
    # GIVEN the unpacked message with some of its bytes changed, cut, or put in twice
    unpacked = bytearray(zlib.decompress(SENT[4:]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(unpacked) - 1))
        unpacked[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    # THEN nothing but a refusal comes of it, or else steps that can be, of ranks that are there
    damaged = SENT[:4] + zlib.compress(bytes(unpacked))
    if not refused(damaged):
        for one in decode_shipment(damaged).blocks:
            assert set(one.rows.steps.rank_B.tolist()) <= set(one.infos)
            assert (one.rows.steps.times_ns_BV >= 0).all()
            assert (one.rows.steps.durations_ns_BS.sum(axis=1) >= 0).all()


def changed(**changes):
    """The message with other values in its first block."""
    found = msgspec.msgpack.decode(zlib.decompress(SENT[4:]), type=wire._Shipment)
    first = msgspec.structs.replace(found.blocks[0], **changes)
    return SENT[:4] + zlib.compress(msgspec.msgpack.encode(msgspec.structs.replace(found, blocks=(first,))))


def with_word(at, value):
    made = steps((0, 1), 0, 3)
    made.slots_BW[2, at] = value
    return wire.packed(made)


def counting(value):
    made = wire.packed(steps((0, 1), 0, 3))
    return msgspec.structs.replace(made, counted=wire.shuffled(np.full((len(COUNTERS), 6), value)))


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 1 << 40},
        {"world_size": 1},
        {"stages": ("a", "a")},
        {"generation": -1},
        {"wall_ns": 1 << 63},
        {"device_over": (3,)},
        {"rings": ()},
        {"steps": with_word(SEQ, 0)},
        {"steps": with_word(STEP, 2**62)},
        {"steps": with_word(START, -1)},
        {"steps": with_word(DURATIONS, -1)},
        {"steps": with_word(DURATIONS, 2**60)},
        {"steps": with_word(READY, -2)},
        {"steps": with_word(WORK, -1)},
        {"steps": wire.Columns(b"\0" * 4, b"")},
        {"steps": wire.Columns(b"", b"", b"\0" * 8)},
        {"steps": counting(-1.0)},
        {"steps": counting(float("inf"))},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(changes):
    assert not refused(changed())
    assert refused(changed(**changes))


def test_a_small_message_of_much_is_refused():
    assert refused(SENT[:4] + zlib.compress(b"\0" * (wire.MAX_UNPACKED_BYTES + 1)))
    assert refused(SENT[:4] + b"\0" * (MAX_MESSAGE_BYTES + 1))


def test_a_host_whose_name_moves_a_cursor_is_refused():
    with pytest.raises(SftriageError):
        decode_shipment(encode(shipment(status=dataclasses.replace(status(), hosts=("\x1b[2Jnode",)))))


def test_what_moves_a_cursor_is_no_part_of_a_reason():
    # GIVEN reasons that would clear the terminal on which they are printed one day
    report = Report(CaptureResult("c-1", 0, "failed", "\x1b[2Jno room"))
    counts = ReadCounts(problems={"rank-0\r": "\x07gone"})
    # WHEN they arrive THEN they are what can be read of them
    told = decode_shipment(encode(shipment(reports=(report,), counts=counts)))
    assert [one.result.detail for one in told.reports] == ["?[2Jno room"]
    assert told.counts.problems == {"rank-0?": "?gone"}


@pytest.mark.parametrize("version", [0, 2, 3, 255])
def test_another_version_is_refused_in_words(version):
    with pytest.raises(VersionError, match=f"messages of version {version}, where this sftriage"):
        decode_shipment(SENT[:3] + bytes([version]) + SENT[4:])
