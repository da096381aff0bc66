"""What crosses between the hosts of a job and its controller, as bytes: columns, versioned and compressed.

A message is ``SFT``, a byte with the version of this format, and MessagePack that zlib has packed. Fields are only ever
added, at the end and with a default, so that neighbouring versions read each other. Nothing that comes in is trusted:
what is not as it has to be is refused as a whole, before anything is made of it.

Clocks: a rank's status holds ages. The times of steps are those of their own host, and come with what has to be added
to have nanoseconds since the epoch.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sftriage import __version__
from sftriage.counters import COUNTERS, PLACE
from sftriage.errors import InputError, SftriageError
from sftriage.recorder.layout import MAX_COUNT, RingInfo, bounded_text
from sftriage.records import GpuFindings, JobStatus, Report, StageSchema, WantedCapture
from sftriage.traces.manifest import CONTROL
from sftriage.windows.decoding import FloatArray, IntArray, StepArrays
from sftriage.windows.shipped import RankLocation, ReadCounts, Rows
from sftriage.windows.slots import UNKNOWN, slot_words

VERSION = 1
MAX_MESSAGE_BYTES = 1_000_000
"""A NATS server takes a mebibyte by default, with headers and all."""
MAX_UNPACKED_BYTES = 16 << 20
MAX_ROW_BYTES = 384 << 10
"""Rows of one message before they are packed, and as much again of device times: that is under `MAX_MESSAGE_BYTES`
even where nothing packs."""
MAX_RANKS = 1 << 17
MAX_BLOCKS, MAX_TOLD, MAX_TEXT = 64, 1024, 2000
MAX_NS = 1 << 56
_MAGIC = b"SFT"
_PRELUDE = struct.Struct("3sB")


class WireError(InputError):
    """A message that is none."""


class VersionError(WireError):
    """A message of a version that is too far from this one."""


class Incarnation(NamedTuple):
    """One process of one rank: no other one, of whatever host and start of the job, is the same."""

    boot_id: str
    pid: int
    start_ticks: int
    rank: int

    @classmethod
    def of(cls, boot_id: str, info: RingInfo) -> Incarnation:
        """That of the process that writes a ring."""
        return cls(boot_id, info.pid, info.pid_start_ticks, info.rank)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of the ranks of one host's own count of starts, and the rings that these ranks write."""

    infos: Mapping[int, RingInfo]
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Shipment:
    """What an agent tells. Without anything in it, that it is there.

    Attributes:
        agent: who.
        boot_id: of its host.
        process: of the agent itself: another one after each start of it.
        blocks: rows by the host's own count of starts.
        status: what its ranks are doing now, by that count; None where that was not looked at.
        counts: what this process has read so far.
        reports: what has become of captures.
        over: the host's part of the job has ended, and this is the last there is to tell.
        release: of sftriage.
    """

    agent: str
    boot_id: str
    process: str
    blocks: tuple[Block, ...] = ()
    status: JobStatus | None = None
    counts: ReadCounts = field(default_factory=ReadCounts)
    reports: tuple[Report, ...] = ()
    over: bool = False
    release: str = __version__


@dataclass(frozen=True, slots=True)
class Order:
    """A capture that is wanted, of this process of its rank; of whichever there is, where it is None."""

    wanted: WantedCapture
    of: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class Orders:
    """All that is wanted of one agent now. Of two, the one with the higher ``epoch`` is the newer controller's."""

    epoch: int
    captures: tuple[Order, ...] = ()
    release: str = __version__


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    """Steps: ranks as 32-bit integers; words of slots but for their checksums; and some counters, as floats.

    Of words and floats the first bytes of all come first, then the second ones: what is alike lies together.
    """

    ranks: bytes
    words: bytes
    counted: bytes = b""
    counters: tuple[str, ...] = ()


class _Ring(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    local_rank: int
    host: str
    cohort: str
    job: str
    pid: int
    pid_start_ticks: int
    started_mono_ns: int
    started_wall_ns: int
    writer: str = ""
    locked: bool = False


class _Block(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    stages: tuple[str, ...]
    sync: tuple[str, ...]
    world_size: int
    wall_ns: int
    rings: tuple[_Ring, ...]
    steps: _Columns
    device: _Columns | None = None
    device_over: tuple[int, ...] = ()


class _Shipment(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    boot_id: str
    process: str
    blocks: tuple[_Block, ...] = ()
    status: JobStatus | None = None
    counts: tuple[int, int, int] = (0, 0, 0)
    problems: dict[str, str] = {}
    reports: tuple[Report, ...] = ()
    over: bool = False
    release: str = ""


_RANKS = msgspec.msgpack.Decoder(tuple[int, ...])
_FINDINGS = msgspec.msgpack.Decoder(GpuFindings)
_PACKER = msgspec.msgpack.Encoder()
_SHIPMENTS = msgspec.msgpack.Decoder(_Shipment)
_ORDERS = msgspec.msgpack.Decoder(Orders)
_asdict: Callable[[_Ring], dict[str, Any]] = msgspec.structs.asdict
_Of = TypeVar("_Of")


def encode(message: Shipment | Orders | GpuFindings | tuple[int, ...]) -> bytes:
    """A message as bytes."""
    values = _plain(message) if isinstance(message, Shipment) else message
    return _PRELUDE.pack(_MAGIC, VERSION) + zlib.compress(_PACKER.encode(values), 1)


def decode_shipment(data: bytes) -> Shipment:
    """What an agent has sent.

    Raises:
        WireError: it is nothing that an agent sends; `VersionError` where it is too old or too new.
    """
    return _decoded(data, lambda unpacked: _checked(_SHIPMENTS.decode(unpacked)))


def decode_orders(data: bytes) -> Orders:
    """What a controller wants of an agent.

    Raises:
        WireError: it is nothing that a controller writes; `VersionError` where it is too old or too new.
    """
    return _decoded(data, _ORDERS.decode)


def decode_ranks(data: bytes) -> tuple[int, ...]:
    """The ranks that an agent is asked about.

    Raises:
        WireError: they are none.
    """
    return _decoded(data, _RANKS.decode)


def decode_findings(data: bytes) -> GpuFindings:
    """What an agent answers of their GPUs.

    Raises:
        WireError: it is nothing of the sort.
    """

    def checked(unpacked: bytes) -> GpuFindings:
        found = _FINDINGS.decode(unpacked)
        said = tuple(bounded_text(remark) for remark in found.remarks[:MAX_TOLD])
        return replace(found, remarks=said, problem=bounded_text(found.problem))

    return _decoded(data, checked)


def parts(block: Block) -> Iterator[Block]:
    """A block as blocks that a message has room for, the steps of all ranks going on together."""
    rows = block.rows
    width = max(1, MAX_ROW_BYTES // (8 * (slot_words(rows.schema) + len(COUNTERS)) + 4))
    steps, device = rows.steps, rows.device_steps
    if len(steps) + (0 if device is None else len(device)) <= width:
        yield block
        return
    # Of each step the host's times come before those of the device, as `Gatherer.add_device` has to have them.
    steps, rest = steps.in_order(), None if device is None else device.in_order()
    for start in range(0, len(steps), width):
        some = steps[start : start + width]
        last = start + width >= len(steps)
        mine = None
        if rest is not None:
            upto = len(rest) if last else int(np.searchsorted(rest.step_B, some.step_B[-1]))
            mine, rest = rest[: min(upto, width)], rest[min(upto, width) :]
        yield replace(block, rows=replace(rows, steps=some, device_steps=mine, device_over=()))
    while rest is not None and len(rest):
        mine, rest = rest[:width], rest[width:]
        yield replace(block, rows=replace(rows, steps=steps[:0], device_steps=mine, device_over=()))
    yield replace(block, rows=replace(rows, steps=steps[:0], device_steps=None if device is None else device[:0]))


def _decoded(data: bytes, decode: Callable[[bytes], _Of]) -> _Of:
    if len(data) < _PRELUDE.size or len(data) > MAX_MESSAGE_BYTES + _PRELUDE.size:
        raise WireError(f"{len(data)} bytes are no message")
    magic, version = _PRELUDE.unpack_from(data)
    if magic != _MAGIC:
        raise WireError("not a message of sftriage")
    if abs(version - VERSION) > 1:
        raise VersionError(
            f"messages of version {version}, where this sftriage ({__version__}) reads version {VERSION}"
        )
    try:
        unpacker = zlib.decompressobj()
        unpacked = unpacker.decompress(data[_PRELUDE.size :], MAX_UNPACKED_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            raise WireError("it does not end where it should, or is too large")
        return decode(unpacked)
    except WireError:
        raise
    except (ValueError, OverflowError, RecursionError, zlib.error, SftriageError) as error:
        raise WireError(f"it makes no sense: {error}") from error


def _plain(message: Shipment) -> _Shipment:
    counts = message.counts
    return _Shipment(
        agent=message.agent,
        boot_id=message.boot_id,
        process=message.process,
        blocks=tuple(_plain_block(block) for block in message.blocks),
        status=message.status,
        counts=(counts.steps, counts.missed, counts.torn),
        problems=dict(list(counts.problems.items())[:MAX_TOLD]),
        reports=message.reports,
        over=message.over,
        release=message.release,
    )


def _plain_block(block: Block) -> _Block:
    rows = block.rows
    rings = (_Ring(**{name: getattr(info, name) for name in _Ring.__struct_fields__}) for info in block.infos.values())
    return _Block(
        generation=rows.generation,
        stages=rows.schema.stages,
        sync=rows.schema.sync,
        world_size=rows.world_size,
        wall_ns=rows.wall_ns,
        rings=tuple(rings),
        steps=_packed(rows.steps),
        device=None if rows.device_steps is None else _packed(rows.device_steps),
        device_over=rows.device_over,
    )


def _packed(steps: StepArrays) -> _Columns:
    ranks, words_WB = steps.rank_B.astype("<i4").tobytes(), steps.slots_BW[:, :-1].T
    # (what changes little from step to step packs to a third)
    words = _shuffled(np.diff(words_WB.astype("<i8"), axis=1, prepend=0))
    if steps.counted_BC is None:
        return _Columns(ranks, words)
    return _Columns(ranks, words, _shuffled(steps.counted_BC.T.astype("<f8")), COUNTERS)


def _shuffled(values_VB: IntArray | FloatArray) -> bytes:
    as_bytes = np.ascontiguousarray(values_VB).view(np.uint8)
    return as_bytes.reshape(*values_VB.shape, 8).transpose(0, 2, 1).tobytes()


def _in_order(shuffled: bytes, n_values: int, n_steps: int, kind: str) -> NDArray[Any]:
    if len(shuffled) != 8 * n_values * n_steps:
        raise WireError(f"{len(shuffled)} bytes are not {n_steps} steps of {n_values} values")
    bytes_VB8 = np.frombuffer(shuffled, np.uint8).reshape(n_values, 8, n_steps).transpose(0, 2, 1)
    return np.ascontiguousarray(bytes_VB8).view(kind)[:, :, 0]


def _checked(found: _Shipment) -> Shipment:
    if len(found.blocks) > MAX_BLOCKS or max(len(found.reports), len(found.problems)) > MAX_TOLD:
        raise WireError("more than one message tells")
    if min(found.counts) < 0 or max(found.counts) >= MAX_COUNT:
        raise WireError("counts that cannot be")
    blocks = tuple(_checked_block(block) for block in found.blocks)
    if found.status is not None:
        _check_status(found.status)
    return Shipment(
        agent=found.agent,
        boot_id=found.boot_id,
        process=found.process,
        blocks=blocks,
        status=found.status,
        counts=ReadCounts(*found.counts, {_printable(name): _printable(why) for name, why in found.problems.items()}),
        reports=tuple(
            replace(one, result=replace(one.result, detail=_printable(one.result.detail))) for one in found.reports
        ),
        over=found.over,
        release=found.release,
    )


def _printable(text: str) -> str:
    # (it is printed on terminals one day)
    return CONTROL.sub("?", text[:MAX_TEXT])


def _check_status(status: JobStatus) -> None:
    ranks = [one.rank for one in status.ranks]
    ages = [number for one in status.ranks for number in (one.stage_age_ns, one.step_age_ns)]
    others = [number for one in status.ranks for number in (abs(one.step), one.published)]
    if len(set(ranks)) < len(ranks) or any(not 0 <= rank < status.world_size <= MAX_RANKS for rank in ranks):
        raise WireError("a status of ranks that cannot be")
    if any(abs(age) >= MAX_COUNT for age in ages) or any(not 0 <= one < MAX_COUNT for one in others):
        raise WireError("a status with numbers that cannot be")
    if any(one.stage is not None and one.stage not in status.schema.stages for one in status.ranks):
        raise WireError("a status in a stage that there is not")
    if any(len(one.host) > 255 or not one.host.isprintable() for one in status.ranks):
        raise WireError("a status of a host with no name")


def _checked_block(found: _Block) -> Block:
    if not 0 < found.world_size <= MAX_RANKS or abs(found.wall_ns) >= MAX_COUNT or len(found.rings) > MAX_RANKS:
        raise WireError(f"a world of {found.world_size} ranks, or a time that cannot be")
    schema = StageSchema(found.stages, found.sync)
    infos = {ring.rank: _info(ring, found.world_size, found.generation, schema) for ring in found.rings}
    here = np.fromiter(infos, np.int64, len(infos))
    steps = _unpacked(found.steps, schema, here)
    if not set(found.device_over) <= set(infos):
        raise WireError("device times of ranks that are not there")
    rows = Rows(
        generation=found.generation,
        schema=schema,
        world_size=found.world_size,
        ranks={rank: RankLocation(info.host, info.cohort) for rank, info in infos.items()},
        steps=steps,
        device_steps=None if found.device is None else _unpacked(found.device, schema, here),
        device_over=found.device_over,
        wall_ns=found.wall_ns,
    )
    return Block(infos, rows)


@lru_cache(maxsize=1 << 15)
def _info(ring: _Ring, world_size: int, generation: int, schema: StageSchema) -> RingInfo:
    # (the same with every message, and much to check)
    return RingInfo(world_size=world_size, attempt=generation, schema=schema, **_asdict(ring))


def _unpacked(columns: _Columns, schema: StageSchema, here: IntArray) -> StepArrays:
    """Steps that hold what can be, of ranks that are there; no arithmetic further on meets anything else."""
    rank_B = np.frombuffer(columns.ranks, "<i4").astype(np.int64)
    n_words, n_steps = slot_words(schema) - 1, len(rank_B)
    words_WB = _in_order(columns.words, n_words, n_steps, "<i8").cumsum(axis=1, dtype=np.int64)
    slots_BW = np.zeros((n_steps, n_words + 1), dtype=np.int64)
    slots_BW[:, :-1] = words_WB.T
    steps = StepArrays(schema, rank_B, slots_BW, _counted(columns, n_steps))
    sound = np.isin(rank_B, here).all() and ((steps.seq_B >= 1) & (steps.seq_B < MAX_COUNT)).all()
    sound = sound and (np.abs(steps.step_B.astype(np.float64)) < MAX_COUNT).all()
    sound = sound and ((steps.start_ns_B >= 0) & (steps.start_ns_B < MAX_COUNT)).all()
    sound = sound and ((steps.between_ns_B >= 0) & (steps.between_ns_B < MAX_NS)).all()
    sound = sound and ((steps.work_B >= 0) & (steps.ready_ns_B >= UNKNOWN)).all()
    sound = sound and ((steps.times_ns_BV >= 0) & (steps.times_ns_BV < MAX_NS)).all()
    if not sound:
        raise WireError("steps that cannot be")
    return steps


def _counted(columns: _Columns, n_steps: int) -> FloatArray | None:
    """What was counted, by this version's counters: those that it does not have are left out."""
    if not columns.counters:
        return None
    counted_CB = _in_order(columns.counted, len(columns.counters), n_steps, "<f8")
    if (counted_CB < 0).any() or np.isinf(counted_CB).any():
        raise WireError("counters that cannot be")
    counted_BC = np.full((n_steps, len(COUNTERS)), np.nan)
    for name, column_B in zip(columns.counters, counted_CB, strict=True):
        if name in PLACE:
            counted_BC[:, PLACE[name]] = column_B
    return counted_BC
