"""The messages between the hosts of a job and its controller, and their encoding.

A message is ``SFT``, a byte with the version of this format, and MessagePack compressed with zlib. Decoding trusts
nothing: it refuses another version, and an invalid message as a whole.

Clocks: a rank's status holds ages. Steps are on their host's monotonic clock, and come with its offset from the epoch,
in nanoseconds. A message also has the time of sending on that clock, which relates it to the hub's clock.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sftriage import __version__
from sftriage.base.bounds import bounded, printable
from sftriage.errors import InputError, SftriageError
from sftriage.mitigate.switching import MAX_STAGES, Request, Setting, StageTimes, SwitchStatus, as_range, numbers_of
from sftriage.model.captures import CAPTURE_ID, Report, WantedCapture
from sftriage.model.ends import HostEnds
from sftriage.model.hangs import Call, GroupCalls, RankEvidence
from sftriage.model.windows import COUNTERS, GpuFindings, JobStatus, LinkUse, ReadCounts, StageSchema
from sftriage.trainer.layout import MAX_COUNT, MAX_RANKS, RingInfo, bounded_text
from sftriage.windows.decoding import FloatArray, IntArray, StepArrays, slot_bounds, slot_words
from sftriage.windows.rings import N_VALUES, Rows, bounds

VERSION = 1
MAX_MESSAGE_BYTES = 1_000_000  # a NATS server takes a mebibyte by default, with headers and all
MAX_UNPACKED_BYTES, MAX_UNPACKED_ANSWER_BYTES = 4 << 20, 1 << 20  # decoded, a message takes up to 64 times as much
MAX_ROW_BYTES = 384 << 10
"""Limit of the rows of one message, unpacked, and of their device times: incompressible ones still fit a message."""
MAX_ENDS_BYTES = 128 << 10
"""Limit of the ends of a host's ranks, packed: they are sent with steps."""
MAX_RINGS = 1 << 12
MAX_BLOCKS, MAX_PARTS, MAX_ITEMS, MAX_NAME, MAX_DEPTH = 64, 64, 1024, 100, 8
MAX_KNOWN_BYTES = 8 << 10  # up to this size, packed rings are kept with their decoded form
_MAGIC = b"SFT"
_PRELUDE = struct.Struct("3sB")
MAX_SECONDS = 1e12  # limit of every time in a message
MAX_VALUE, MAX_MOST = 1 << 16, 1 << 8


class Incarnation(NamedTuple):
    """Identifies one process of one rank, among all hosts and starts of a job."""

    boot_id: str
    pid: int
    start_ticks: int
    rank: int

    @classmethod
    def of(cls, boot_id: str, info: RingInfo) -> Incarnation:
        """The process that writes a ring."""
        return cls(boot_id, info.pid, info.pid_start_ticks, info.rank)


@dataclass(frozen=True, slots=True)
class RunName:
    """The names of a run and its job in stores of captures, and the URL of the store for copies."""

    job: str = ""
    run_id: str = ""
    store: str = ""


NO_NAME = RunName()


@dataclass(frozen=True, slots=True)
class Orders:
    """All orders for an ``agent``, and for its groups by name; a newer controller has a higher ``epoch``.

    ``broken`` are sentences on how the job broke; None before it has ended.
    """

    epoch: int
    captures: tuple[WantedCapture, ...] = ()
    agent: str = ""
    run: RunName = NO_NAME
    switches: Mapping[str, Setting] = field(default_factory=dict)
    broken: tuple[str, ...] | None = None


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """Steps: ranks as 32-bit integers; the words of slots without their checksums; and some counters, as floats.

    Words and floats are stored byte by byte, the first bytes of all values first, so that similar bytes are adjacent.
    """

    ranks: bytes
    words: bytes
    counted: bytes | None = None


def packed(steps: StepArrays) -> Columns:
    """Steps as columns."""
    ranks, words_WB = steps.rank_B.astype("<i4").tobytes(), steps.slots_BW[:, :-1].T
    # (differences compress to a third: values change little from step to step)
    words = shuffled(np.diff(words_WB.astype("<i8"), axis=1, prepend=0))
    return Columns(ranks, words, None if steps.counted_BC is None else shuffled(steps.counted_BC.T.astype("<f8")))


def unpacked(columns: Columns, schema: StageSchema, here: Set[int]) -> StepArrays:
    """Decode steps; raises InputError if a value is out of range or a rank is not ``here``."""
    rank_B = np.frombuffer(columns.ranks, "<i4").astype(np.int64)
    n_words, n_steps = slot_words(schema) - 1, len(rank_B)
    words_WB = _in_order(columns.words, n_words, n_steps, "<i8").cumsum(axis=1, dtype=np.int64)
    slots_BW = np.zeros((n_steps, n_words + 1), dtype=np.int64)
    slots_BW[:, :-1] = words_WB.T
    steps = StepArrays(schema, rank_B, slots_BW, _counted(columns, n_steps))
    least_W, most_W = slot_bounds(schema)
    if not (set(rank_B.tolist()) <= here and ((words_WB >= least_W) & (words_WB <= most_W)).all()):
        raise InputError("invalid steps")
    return steps


def shuffled(values_VB: IntArray | FloatArray) -> bytes:
    """The bytes of 8-byte values, the first bytes of all values first."""
    as_bytes = np.ascontiguousarray(values_VB).view(np.uint8)
    return as_bytes.reshape(*values_VB.shape, 8).transpose(0, 2, 1).tobytes()


def _in_order(shuffled: bytes, n_values: int, n_steps: int, kind: str) -> NDArray[Any]:
    if len(shuffled) != 8 * n_values * n_steps:
        raise InputError(f"{len(shuffled)} bytes are not {n_steps} steps of {n_values} values")
    bytes_VB8 = np.frombuffer(shuffled, np.uint8).reshape(n_values, 8, n_steps).transpose(0, 2, 1)
    return np.ascontiguousarray(bytes_VB8).view(kind)[:, :, 0]


def _counted(columns: Columns, n_steps: int) -> FloatArray | None:
    if columns.counted is None:
        return None
    counted_CB = _in_order(columns.counted, len(COUNTERS), n_steps, "<f8")
    # (these ignore NaN, which means unknown)
    least, most = (of.reduce(counted_CB, axis=None, initial=0.0) for of in (np.fmin, np.fmax))
    if least < 0 or most == np.inf:
        raise InputError("invalid counters")
    return np.ascontiguousarray(counted_CB.T)


class WireError(InputError):
    """A message that is invalid, or of another version."""


_Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
_WorldSize = Annotated[int, Meta(gt=0, le=MAX_RANKS)]
_Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
_Value = Annotated[int, Meta(ge=0, lt=MAX_VALUE)]
_Name = Annotated[str, Meta(max_length=MAX_NAME)]


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


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    """`Rows`, by the host's own count of starts. ``rings`` are packed `_Ring`, and mostly the same in every message."""

    generation: int
    stages: tuple[str, ...]
    sync: tuple[str, ...]
    world_size: _WorldSize
    wall_ns: Annotated[int, Meta(gt=-MAX_COUNT, lt=MAX_COUNT)]
    rings: msgspec.Raw
    steps: Columns
    device: Columns | None = None
    device_over: tuple[int, ...] = ()
    links: Annotated[tuple[LinkUse, ...], Meta(max_length=MAX_ITEMS)] = ()


class _Status(msgspec.Struct, frozen=True, array_like=True):
    """A `JobStatus`: each value for all ranks, as 64-bit integers."""

    stages: tuple[str, ...]
    sync: tuple[str, ...]
    world_size: _WorldSize
    attempt: _Count
    hosts: tuple[Annotated[str, Meta(max_length=255)], ...]
    doing: bytes


_Short = tuple[tuple[int, ...], bool]  # numbers as `as_range` encodes them


class _Switch(msgspec.Struct, frozen=True, array_like=True):
    """A `SwitchStatus` as it is sent."""

    name: _Name
    ranks: _Short
    here: _Short
    round: _Count
    all_begun: _Count
    value: _Value | None
    since_step: Annotated[int, Meta(ge=-1, lt=MAX_COUNT)]
    request: Request
    exchange_s: float
    exchanged_bytes: _Count
    stages: tuple[StageTimes, ...]
    microbatches: _Count


_SAME_IN_SWITCH = [name for name in _Switch.__struct_fields__ if name not in ("ranks", "here")]
_RowsT = TypeVar("_RowsT")
_StatusT = TypeVar("_StatusT")
_SwitchT = TypeVar("_SwitchT")


class _Message(msgspec.Struct, Generic[_RowsT, _StatusT, _SwitchT], frozen=True, array_like=True):
    """A message of an agent; an empty one shows that it is alive. Status and switches are None if unknown."""

    agent: _Name
    boot_id: _Name
    process: _Name  # of the agent, new at each of its starts
    rows: Annotated[tuple[_RowsT, ...], Meta(max_length=MAX_BLOCKS)] = ()
    status: _StatusT | None = None
    counts: ReadCounts = msgspec.field(default_factory=ReadCounts)  # of this process
    reports: Annotated[tuple[Report, ...], Meta(max_length=MAX_ITEMS)] = ()
    over: bool = False  # the job has ended on the host, and this is the last message
    mono_ns: _Count = 0  # the host's monotonic clock as the message is sent
    rings_id: _Name = ""  # of the directory of rings: another directory counts starts anew
    switches: Annotated[tuple[_SwitchT, ...], Meta(max_length=MAX_ITEMS)] | None = None
    ends: HostEnds | None = None  # once the job has ended on the host


Shipment = _Message[Rows, JobStatus, SwitchStatus]
_Packed = _Message[_Rows, _Status, _Switch]


def _checked_switch(switch: _Switch) -> SwitchStatus:
    ranks = numbers_of(switch.ranks, MAX_COUNT)
    here = numbers_of(switch.here, len(ranks))
    times_s = [switch.exchange_s, *(took_s for stage in switch.stages for took_s in stage[:-1])]
    if not (all(0 <= n < MAX_COUNT for n in switch.request) and all(0 <= took_s < MAX_SECONDS for took_s in times_s)):
        raise ValueError("a group with invalid numbers")
    if not ranks or not switch.name.isprintable() or switch.request.value >= MAX_VALUE:
        raise ValueError("an invalid group")
    limit = [stage.most for stage in switch.stages]
    if len(limit) != (len(ranks) if switch.microbatches else 0) or not all(0 <= value < MAX_MOST for value in limit):
        raise ValueError("an invalid pipeline")
    return SwitchStatus(ranks=ranks, here=here, **{name: getattr(switch, name) for name in _SAME_IN_SWITCH})


_Ranks = Annotated[tuple[_Rank, ...], Meta(max_length=MAX_RANKS)]
_Positions = tuple[Annotated[int, Meta(ge=0)], ...]


class HangQuery(msgspec.Struct, frozen=True):
    """A query for a part of the evidence of an agent's ranks (see `Fleet.hang_evidence`); the parts count from 0."""

    token: Annotated[str, Meta(pattern=rf"^{CAPTURE_ID.pattern}\Z", max_length=MAX_NAME)]
    detail: _Ranks = ()
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)] = 0


class _Evidence(msgspec.Struct, frozen=True, array_like=True):
    """A part of an agent's evidence. Ranks of a host mostly call the same: equal calls and groups are sent once.

    Of each rank, ``ranks`` has the evidence without calls and groups, and their positions in ``calls`` and ``groups``.
    """

    parts: Annotated[int, Meta(gt=0, le=MAX_PARTS)]
    calls: tuple[Call, ...]
    groups: tuple[GroupCalls, ...]
    ranks: Annotated[tuple[tuple[RankEvidence, _Positions, _Positions], ...], Meta(max_length=MAX_RINGS)]


_QUERIES: msgspec.msgpack.Decoder[tuple[int, ...] | HangQuery] = msgspec.msgpack.Decoder(_Ranks | HangQuery)
_EVIDENCE = msgspec.msgpack.Decoder(_Evidence)
_RINGS: msgspec.msgpack.Decoder[tuple[_Ring, ...]] = msgspec.msgpack.Decoder(
    Annotated[tuple[_Ring, ...], Meta(max_length=MAX_RINGS)]
)
_FINDINGS = msgspec.msgpack.Decoder(GpuFindings)
_PACKER = msgspec.msgpack.Encoder()
_SHIPMENTS = msgspec.msgpack.Decoder(_Packed)
_ORDERS = msgspec.msgpack.Decoder(Orders)
_asdict: Callable[[_Ring], dict[str, Any]] = msgspec.structs.asdict
_Of = TypeVar("_Of")


def encode(message: msgspec.Struct | Orders | GpuFindings | tuple[int, ...]) -> bytes:
    """A message as bytes."""
    if isinstance(message, _Message):
        status, switches = message.status, message.switches
        message = msgspec.structs.replace(
            message,
            rows=tuple(map(_packed_rows, message.rows)),
            status=None if status is None else _packed_status(status),
            switches=None if switches is None else tuple(map(_packed_switch, switches)),
        )
    return _framed(_PACKER.encode(message))


def _framed(packed: bytes) -> bytes:
    return _PRELUDE.pack(_MAGIC, VERSION) + zlib.compress(packed, 1)


def _packed_rows(rows: Rows) -> _Rows:
    rings = (_Ring(**{name: getattr(info, name) for name in _Ring.__struct_fields__}) for info in rows.ranks.values())
    return _Rows(
        generation=rows.generation,
        stages=rows.schema.stages,
        sync=rows.schema.sync,
        world_size=rows.world_size,
        wall_ns=rows.wall_ns,
        rings=msgspec.Raw(_PACKER.encode(tuple(rings))),
        steps=packed(rows.steps),
        device=None if rows.device_steps is None else packed(rows.device_steps),
        device_over=rows.device_over,
        links=rows.links[:MAX_ITEMS],
    )


def _packed_status(status: JobStatus) -> _Status:
    about = status.schema.stages, status.schema.sync, status.world_size, status.attempt, status.hosts
    return _Status(*about, status.doing_VR.astype("<i8").tobytes())


def _packed_switch(status: SwitchStatus) -> _Switch:
    same = {name: getattr(status, name) for name in _SAME_IN_SWITCH}
    return _Switch(ranks=as_range(status.ranks), here=as_range(status.here), **same)


def decode_shipment(data: bytes) -> Shipment:
    """Decode an agent's message; raises WireError."""
    return decoded(data, lambda unpacked: _checked(_SHIPMENTS.decode(unpacked)))


def decode_orders(data: bytes) -> Orders:
    """Decode the orders of an agent; raises WireError."""
    orders = decoded(data, _ORDERS.decode)
    ages = [capture.expires_s for capture in orders.captures if capture.expires_s is not None]
    if not 0 <= orders.epoch < MAX_COUNT or not all(0 <= age_s < MAX_SECONDS for age_s in ages):
        raise WireError("invalid orders")
    for value, ahead_S in orders.switches.values():
        if not 0 <= value < MAX_VALUE or len(ahead_S) > MAX_STAGES or not all(0 < n < MAX_MOST for n in ahead_S):
            raise WireError("invalid settings")
    broken = None if orders.broken is None else tuple(map(printable, orders.broken[:MAX_ITEMS]))
    return replace(orders, broken=broken)


def decode_query(data: bytes) -> tuple[int, ...] | HangQuery:
    """Decode a query to an agent: the ranks of whose GPUs it is, or a `HangQuery`; raises WireError."""
    return decoded(data, _QUERIES.decode, MAX_UNPACKED_ANSWER_BYTES)


def decode_findings(data: bytes) -> GpuFindings:
    """Decode an agent's answer about GPUs; raises WireError."""
    found = decoded(data, _FINDINGS.decode, MAX_UNPACKED_ANSWER_BYTES)
    remarks = tuple(bounded_text(remark) for remark in found.remarks[:MAX_ITEMS])
    if not 0 <= found.time_s < MAX_SECONDS or not all(0 <= rank < MAX_RANKS for rank in found.gpus):
        raise WireError("invalid findings")
    return replace(found, remarks=remarks, problem=bounded_text(found.problem), gpus=_tame(found.gpus))


def encode_evidence(evidence: Sequence[RankEvidence]) -> list[bytes]:
    """An agent's evidence in parts, each a message. Of a rank that does not fit, only its state is sent."""
    some = _split(evidence)[:MAX_PARTS]
    return [_framed(_packed_evidence(ranks, len(some))) for ranks in some]


def _split(evidence: Sequence[RankEvidence]) -> list[Sequence[RankEvidence]]:
    packed = _packed_evidence(evidence, MAX_PARTS)
    if len(packed) <= MAX_UNPACKED_BYTES and len(_framed(packed)) <= MAX_MESSAGE_BYTES:
        return [evidence]
    if len(evidence) == 1:
        return [[_without_details(evidence[0])]]
    middle = len(evidence) // 2
    return _split(evidence[:middle]) + _split(evidence[middle:])


def _without_details(evidence: RankEvidence) -> RankEvidence:
    why = "what it knows is too large to be sent"
    return replace(evidence, calls=(), groups=(), threads=(), workers=(), facts={}, answered=False, problem=why)


def _packed_evidence(evidence: Sequence[RankEvidence], n_parts: int) -> bytes:
    calls, groups = dict[Call, int](), dict[GroupCalls, int]()
    ranks = tuple(
        (
            replace(rank, calls=(), groups=()),
            tuple(calls.setdefault(call, len(calls)) for call in rank.calls),
            tuple(groups.setdefault(group, len(groups)) for group in rank.groups),
        )
        for rank in evidence
    )
    return _PACKER.encode(_Evidence(n_parts, tuple(calls), tuple(groups), ranks))


def decode_evidence(data: bytes) -> tuple[int, tuple[RankEvidence, ...]]:
    """Decode a part of an agent's evidence, and how many parts there are; raises WireError."""
    return decoded(data, lambda unpacked: _checked_evidence(_EVIDENCE.decode(unpacked)))


def _checked_evidence(found: _Evidence) -> tuple[int, tuple[RankEvidence, ...]]:
    calls, groups, ranks = bounded(found.calls), bounded(found.groups), []
    for rank, of_calls, of_groups in found.ranks:
        if max(of_calls, default=-1) >= len(calls) or max(of_groups, default=-1) >= len(groups):
            raise ValueError("unknown calls")
        if max(map(len, (rank.threads, rank.workers, rank.facts))) > MAX_ITEMS:
            raise ValueError("too many threads, workers or facts")
        its_calls, its_groups = tuple(calls[at] for at in of_calls), tuple(groups[at] for at in of_groups)
        ranks.append(replace(bounded(rank), calls=its_calls, groups=its_groups))
    return found.parts, tuple(ranks)


def fitting(ends: HostEnds) -> HostEnds:
    """Ends that fit a message: where they are too large, without calls, then without earlier attempts."""
    bare = tuple(replace(end, calls=(), groups=()) for end in ends.ranks)
    newest = max((end.attempt for end in bare), default=0)
    for ranks in (ends.ranks, bare, tuple(end for end in bare if end.attempt == newest)):
        some = replace(ends, ranks=ranks)
        if len(_framed(_PACKER.encode(some))) <= MAX_ENDS_BYTES:
            return some
    return replace(ends, ranks=())


def _checked_ends(ends: HostEnds) -> HostEnds:
    times_s = [end.time_s or 0.0 for end in ends.ranks] + [ends.signalled_s or 0.0, ends.ahead_s, ends.margin_s]
    if not all(abs(time_s) < MAX_SECONDS for time_s in times_s) or not 0 < ends.world_size <= MAX_RANKS:
        raise WireError("ends with invalid numbers")
    if not all(0 <= end.rank < MAX_RANKS and 0 <= end.attempt < MAX_COUNT for end in ends.ranks):
        raise WireError("ends of invalid ranks")
    return bounded(ends)


def parts(rows: Rows) -> Iterator[Rows]:
    """Split rows into parts that fit a message; each part has a range of steps of all ranks."""
    width = max(1, MAX_ROW_BYTES // (8 * (slot_words(rows.schema) + len(COUNTERS)) + 4))
    steps, device = rows.steps, rows.device_steps
    if len(steps) + (0 if device is None else len(device)) <= width:
        yield rows
        return
    # The host times of a step come before its device times, as `Gatherer.add_device` requires.
    steps, rest = steps.in_order(), None if device is None else device.in_order()
    for start in range(0, len(steps), width):
        some = steps[start : start + width]
        last = start + width >= len(steps)
        mine = None
        if rest is not None:
            upto = len(rest) if last else int(np.searchsorted(rest.step_B, some.step_B[-1]))
            mine, rest = rest[: min(upto, width)], rest[min(upto, width) :]
        yield replace(rows, steps=some, device_steps=mine, device_over=())
    while rest is not None and len(rest):
        mine, rest = rest[:width], rest[width:]
        yield replace(rows, steps=steps[:0], device_steps=mine, device_over=())
    yield replace(rows, steps=steps[:0], device_steps=None if device is None else device[:0])


def decoded(data: bytes, decode: Callable[[bytes], _Of], most_bytes: int = MAX_UNPACKED_BYTES) -> _Of:
    """Decode a message with a function that raises ValueError if it is invalid; raises WireError."""
    if len(data) < _PRELUDE.size or len(data) > MAX_MESSAGE_BYTES + _PRELUDE.size:
        raise WireError(f"{len(data)} bytes are not a message")
    magic, version = _PRELUDE.unpack_from(data)
    if magic != _MAGIC:
        raise WireError("not a message of sftriage")
    if version != VERSION:
        raise WireError(f"messages of version {version}, where this sftriage ({__version__}) reads version {VERSION}")
    try:
        unpacker = zlib.decompressobj()
        unpacked = unpacker.decompress(data[_PRELUDE.size :], most_bytes)
        if not unpacker.eof or unpacker.unused_data:
            raise WireError("it is truncated or too large")
        return decode(unpacked)
    except WireError:
        raise
    except (ValueError, OverflowError, RecursionError, zlib.error, SftriageError) as error:
        # (the error may quote a piece of the message)
        raise WireError(f"it is invalid: {bounded_text(str(error))}") from error


def _checked(found: _Packed) -> Shipment:
    counts = found.counts
    if not all(name.isprintable() for name in (found.agent, found.boot_id, found.process, found.rings_id)):
        raise WireError("invalid names")
    if not all(0 <= number < MAX_COUNT for number in (counts.steps, counts.missed, counts.torn)):
        raise WireError("invalid counts")
    if len(counts.problems) > MAX_ITEMS:
        raise WireError("too many problems")
    problems = {printable(name): printable(why) for name, why in counts.problems.items()}
    values: Any = found
    checked: Shipment = msgspec.structs.replace(
        values,
        rows=tuple(map(_checked_rows, found.rows)),
        status=None if found.status is None else _checked_status(found.status),
        counts=replace(counts, problems=problems),
        reports=tuple(map(_checked_report, found.reports)),
        switches=None if found.switches is None else tuple(map(_checked_switch, found.switches)),
        ends=None if found.ends is None else _checked_ends(found.ends),
    )
    return checked


def _tame(value: Any, depth: int = 0) -> Any:
    """A value of any shape, with printable texts and finite numbers."""
    if depth > MAX_DEPTH or (isinstance(value, list | dict) and len(value) > MAX_ITEMS):
        raise WireError("a value out of range")
    if isinstance(value, int | float) and not abs(value) < MAX_COUNT:
        raise WireError("an invalid value")
    if isinstance(value, str):
        return bounded_text(value)
    if isinstance(value, dict):
        return {_tame(name, depth): _tame(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_tame(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise WireError("an invalid value")


def _checked_report(report: Report) -> Report:
    result = report.result
    numbers = [report.stored_bytes, result.size_bytes, *result.clock.values()]
    numbers += [step for step in (result.first_step, result.last_step) if step is not None]
    if not CAPTURE_ID.fullmatch(result.capture_id) or not 0 <= result.rank < MAX_RANKS:
        raise WireError("a report of an invalid capture")
    if not all(0 <= number < MAX_COUNT for number in numbers) or len(result.clock) + len(result.timings_s) > MAX_NAME:
        raise WireError("a report with invalid numbers")
    if not all(0 <= took_s < MAX_SECONDS for took_s in result.timings_s.values()):
        raise WireError("a report with invalid times")
    if not all(len(name) <= MAX_NAME and name.isprintable() for name in (*result.clock, *result.timings_s)):
        raise WireError("a report with invalid names")
    return replace(report, result=replace(result, detail=printable(result.detail)))


def _checked_status(found: _Status) -> JobStatus:
    if len(found.doing) % (8 * N_VALUES):
        raise WireError("an invalid status")
    doing_VR = np.frombuffer(found.doing, "<i8").reshape(N_VALUES, -1)
    status = JobStatus(_schema(found.stages, found.sync), found.world_size, found.hosts, doing_VR, found.attempt)
    least_V, most_V = bounds(found.world_size, len(found.hosts), len(found.stages))
    if not ((doing_VR >= least_V) & (doing_VR <= most_V)).all() or len(set(status.rank_R.tolist())) < doing_VR.shape[1]:
        raise WireError("a status with invalid ranks or numbers")
    if not all(host.isprintable() for host in found.hosts):
        raise WireError("a status of a host without a name")
    return status


def _checked_link(use: LinkUse) -> LinkUse:
    rates = use.delivered_bits_per_s, use.speed_bits_per_s
    if min(use.begin_ns, use.end_ns, use.sent_bytes, use.busy_s, use.again, *rates) < 0:
        raise WireError("invalid numbers of a link")
    return bounded(use)


def _checked_rows(found: _Rows) -> Rows:
    schema, as_sent = _schema(found.stages, found.sync), bytes(found.rings)
    of = _rings if len(as_sent) <= MAX_KNOWN_BYTES else _rings.__wrapped__
    infos = of(as_sent, found.world_size, found.generation, schema)
    if not set(found.device_over) <= set(infos):
        raise WireError("device times of unknown ranks")
    return Rows(
        generation=found.generation,
        schema=schema,
        world_size=found.world_size,
        ranks=infos,
        steps=unpacked(found.steps, schema, infos.keys()),
        device_steps=None if found.device is None else unpacked(found.device, schema, infos.keys()),
        device_over=found.device_over,
        wall_ns=found.wall_ns,
        links=tuple(map(_checked_link, found.links)),
    )


@lru_cache(maxsize=1 << 14)
def _rings(as_sent: bytes, world_size: int, generation: int, schema: StageSchema) -> Mapping[int, RingInfo]:
    # (cached: they are the same in every message, and take long to check)
    found = (
        RingInfo(world_size=world_size, attempt=generation, schema=schema, **_asdict(ring))
        for ring in _RINGS.decode(as_sent)
    )
    return {info.rank: info for info in found}


_schema = lru_cache(maxsize=64)(StageSchema)
