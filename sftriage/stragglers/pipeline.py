"""Recorded traces of synchronous hybrid-parallel training: their operations' dependencies, and their rows as arrays.

One step of one data-parallel rank shows the order (arXiv 2505.05713). On each worker, computations, and transfers of
each type, run in the order in which they began. A computation waits for its receive, and its send waits for it. A send
and its receive are a group, and so are the members of a collective. After the last backward computation come the
gradients' collectives, clipping and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError, UsageError
from sftriage.stragglers.graph import (
    AnyFloat,
    FloatArray,
    Graph,
    IndexArray,
    Operations,
    OpType,
    batches,
    graph_of,
    latest_begins,
    timeline,
)

FORWARD, BACKWARD = "forward-compute", "backward-compute"
FORWARD_SEND, FORWARD_RECV = "forward-send", "forward-recv"
BACKWARD_SEND, BACKWARD_RECV = "backward-send", "backward-recv"
ALL_GATHER, REDUCE_SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE, LAYERNORM = "separate-grads-all-reduce", "layernorm-grads-all-reduce"
EMBEDDING, CLIP = "embedding-grads-all-reduce", "optimizer-clip-main-grad"
OPTIMIZER, GC = "optimizer", "gc"

TYPES: dict[str, OpType] = {
    op_type.name: op_type
    for op_type in (
        OpType(FORWARD, FORWARD, communication=False, phase="forward"),
        OpType(BACKWARD, BACKWARD, communication=False, phase="backward"),
        OpType(FORWARD_SEND, "forward-pp-comm", communication=True),
        OpType(FORWARD_RECV, "forward-pp-comm", communication=True),
        OpType(BACKWARD_SEND, "backward-pp-comm", communication=True),
        OpType(BACKWARD_RECV, "backward-pp-comm", communication=True),
        *(OpType(name, name, communication=True) for name in (ALL_GATHER, REDUCE_SCATTER, SEPARATE)),
        *(OpType(name, name, communication=True) for name in (LAYERNORM, EMBEDDING, CLIP)),
        OpType(OPTIMIZER, OPTIMIZER, communication=False),
        OpType(GC, GC, communication=False),
    )
}
"""All types of operations of a hybrid-parallel job."""

CLOCK_EPS_S = 5e-5
"""Maximum difference between two workers' clocks, and between a transfer and its computation on one worker."""

_PEERS = {
    FORWARD_SEND: (FORWARD_RECV, 1),
    FORWARD_RECV: (FORWARD_SEND, -1),
    BACKWARD_SEND: (BACKWARD_RECV, -1),
    BACKWARD_RECV: (BACKWARD_SEND, 1),
}
"""For each transfer between stages, its other end, and that end's distance in stages."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of the step that shows the order, with its index among the T operations; times in seconds.

    ``order`` breaks ties between types, ``seq`` counts those of a type on a worker, ``pp`` is its stage. A computation
    belongs to a ``chunk`` of the stage's layers, and to a ``model_chunk``.
    """

    index: int
    kind: str
    order: int
    seq: int
    pp: int
    start_s: float
    end_s: float
    chunk: int
    model_chunk: int

    def __str__(self) -> str:
        return f"{self.kind} {self.seq} of stage {self.pp}"


class _Stage:
    def __init__(self, pp: int, ops: Iterable[Op]) -> None:
        self.pp = pp
        self.ops = sorted(ops, key=lambda op: (op.start_s, op.seq, op.order))
        self.by_seq = {(op.kind, op.seq): op for op in self.ops}
        self.computed = self.of(FORWARD, BACKWARD)

    def of(self, *kinds: str) -> list[Op]:
        return [op for op in self.ops if op.kind in kinds]

    def first(self, kind: str) -> list[Op]:
        found = self.by_seq.get((kind, 0))
        return [] if found is None else [found]

    def in_turn(self, kind: str) -> list[Op]:
        return sorted(self.of(kind), key=lambda op: op.seq)


def pipeline_graph(ops: Sequence[Op]) -> Graph:
    """The graph of one step of one data-parallel rank; its collectives span all ranks.

    Raises InputError if a stage computes nothing, or a transfer has no computation or no other end.
    """
    stages = [_Stage(pp, (op for op in ops if op.pp == pp)) for pp in range(1 + max(op.pp for op in ops))]
    for stage in stages:
        for kind in (FORWARD, BACKWARD):
            if not stage.of(kind):
                raise InputError(f"stage {stage.pp} has no {kind}")
    if nowhere := [op for stage in stages for op in stage.computed if op.chunk < 0 or op.model_chunk < 0]:
        raise InputError(f"{nowhere[0]} has no model chunk (mc, gmc)")
    n_chunks = len(stages) * (1 + max(op.chunk for op in ops))
    pairs: dict[tuple[int, int, str], list[Op]] = {}
    alone: list[Op] = []
    dependencies: list[tuple[Op, Op]] = []
    for stage in stages:
        matched = dict(_matched(stage, len(stages)))
        dependencies += _around_transfers(stage, matched)
        for in_turn in (stage.computed, *map(stage.of, _PEERS), stage.of(ALL_GATHER, REDUCE_SCATTER)):
            dependencies += pairwise(in_turn)
        dependencies += _after_computing(stage)
        for kind in _PEERS:
            n_paired = 0
            for op in stage.of(kind):
                computed = matched.get(op)
                if computed is None or not 0 <= computed.model_chunk + _PEERS[kind][1] < n_chunks:
                    # A recorded transfer at an end of the pipeline has no peer.
                    alone.append(op)
                    continue
                pairs.setdefault(_pair(op, n_paired, len(stages)), []).append(op)
                n_paired += 1
    for pair in pairs.values():
        if len(pair) != 2:
            raise InputError(f"{pair[0]} has no match at the other end")
    groups = [*pairs.values(), *([op] for op in alone)]
    ends = [op for stage in stages for op in stage.first(EMBEDDING)]
    joined = [[op] for op in ops if op.kind in (ALL_GATHER, REDUCE_SCATTER, SEPARATE)]
    joined += [[op for stage in stages for op in stage.first(CLIP)]]
    groups += [group for group in (ends, *joined) if group]
    spans_all = {op.index for group in joined for op in group}
    return graph_of(
        len(ops),
        [(earlier.index, later.index) for earlier, later in dependencies],
        [[op.index for op in group] for group in groups],
        [group[0].index in spans_all for group in groups],
        lambda index: str(ops[index]),
    )


def _pair(op: Op, n_th: int, n_stages: int) -> tuple[int, int, str]:
    """The key that both ends of a transfer share: its number, the sending stage, and the direction."""
    peer, distance = _PEERS[op.kind]
    sending = op.kind in (FORWARD_SEND, BACKWARD_SEND)
    sender = op.pp if sending else (op.pp + distance) % n_stages
    return n_th, sender, op.kind if sending else peer


def _matched(stage: _Stage, n_stages: int) -> Iterator[tuple[Op, Op]]:
    for kind in _PEERS:
        of_kind, transfers = (BACKWARD if kind.startswith("backward") else FORWARD), stage.of(kind)
        computed = stage.of(of_kind)
        if receives := kind in (FORWARD_RECV, BACKWARD_RECV):
            last_s = max(op.start_s for op in computed) + CLOCK_EPS_S
            transfers = [op for op in transfers if op.start_s <= last_s]
        else:
            first_s = min(op.end_s for op in computed) - CLOCK_EPS_S
            transfers = [op for op in transfers if op.end_s >= first_s]
        missing = len(computed) - len(transfers)
        at_an_end = stage.pp in (0, n_stages - 1)
        if transfers and (missing not in (0, 1) or (missing and not at_an_end)):
            raise InputError(f"stage {stage.pp} has {len(transfers)} {kind} for {len(computed)} {of_kind}")
        if not transfers and not at_an_end:
            raise InputError(f"stage {stage.pp} has no {kind}")
        # The missing one is the first receive, or the last send.
        first = missing if receives else 0
        for seq, op in enumerate(transfers, first):
            found = stage.by_seq.get((of_kind, seq))
            if found is None:
                raise InputError(f"stage {stage.pp} has no {of_kind} {seq} for {op}")
            yield op, found


def _around_transfers(stage: _Stage, matched: dict[Op, Op]) -> Iterator[tuple[Op, Op]]:
    """A send waits for its computation; a computation for its receive, which starts one computation ahead."""
    for op, computed in matched.items():
        if op.kind in (FORWARD_SEND, BACKWARD_SEND):
            yield computed, op
            continue
        yield op, computed
        if (before := stage.by_seq.get((computed.kind, computed.seq - 1))) is not None:
            yield before, op
    # The first backward transfer waits for the second last forward computation before the first backward one.
    kinds = [op.kind for op in stage.computed]
    first_back = kinds.index(BACKWARD)
    if first_back >= 2:
        for kind in (BACKWARD_RECV, BACKWARD_SEND):
            for op in stage.first(kind):
                yield stage.computed[first_back - 2], op


def _after_computing(stage: _Stage) -> Iterator[tuple[Op, Op]]:
    """Parameters arrive before their chunk's first forward; gradients and the optimizer follow the last backward."""
    gathers = {op.chunk: op for op in stage.in_turn(ALL_GATHER)}
    for chunk, gather in gathers.items():
        forwards = [op for op in stage.of(FORWARD) if op.chunk == chunk]
        if forwards:
            yield gather, forwards[0]
    scatters = stage.in_turn(REDUCE_SCATTER)
    last = max(stage.computed, key=lambda op: op.end_s)
    separate = stage.first(SEPARATE)
    end = stage.first(GC) or [last]
    yield from pairwise([last, *stage.first(GC)])
    if separate:
        # Gradients leave while backward still computes: each chunk's first after the chunk's last computation.
        for chunk in {op.chunk for op in scatters}:
            backwards = [op for op in stage.of(BACKWARD) if op.chunk == chunk]
            if backwards:
                yield max(backwards, key=lambda op: op.end_s), next(op for op in scatters if op.chunk == chunk)
    final = [*stage.first(CLIP), *stage.first(OPTIMIZER)]
    middle = [*stage.first(LAYERNORM), *stage.first(EMBEDDING)]
    tail = [*middle, *(separate or scatters), *final]
    for op in [*end, *(scatters[-1:] if separate else [])]:
        yield from pairwise([op, *tail[:1]])
    yield from pairwise(tail)


CLOCK_ERROR_S = 1e-2
"""A transfer that ended this much before the last of its group began, by their clocks, took no time; a single operation
never ends this much before it began."""

COARSE_S = 1e-3
"""Start times that resolve less than this are reported."""

MAX_TIMES_MEDIAN = 10.0
"""A step that takes this many times the median one is damaged, or no step of training."""

MAX_CELLS = 1 << 24
"""A file with more combinations of types, sequences and stages is damaged."""

MAX_SPARSE = 16
"""Each worker's steps must have at least one in this many of all operations."""

COLUMNS = {
    "dp_rank": "dp_E",
    "stage": "pp_E",
    "step": "step_E",
    "optype": "optype_E",
    "start_ts": "start_E",
    "duration": "duration_E",
    "seq_id": "seq_E",
    "mc": "chunk_E",
    "mb_id": "microbatch_E",
    "gmc": "model_chunk_E",
}
"""The columns of the published format, and their fields in `TraceRows`."""
RANK = {"rank": "rank_E"}
"""An optional column that names the worker's global rank and decides nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRows:
    """Operations in any order (E), types as indices into ``optypes``; seconds since a fixed moment of the step."""

    optypes: Sequence[str]
    optype_E: NDArray[Any]
    dp_E: NDArray[Any]
    pp_E: NDArray[Any]
    step_E: NDArray[Any]
    start_E: AnyFloat
    duration_E: AnyFloat
    seq_E: NDArray[Any]
    chunk_E: NDArray[Any]
    microbatch_E: NDArray[Any]
    model_chunk_E: NDArray[Any]
    rank_E: NDArray[Any] | None = None

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any]], optypes: Sequence[str]) -> TraceRows:
        """From columns by their names in the published format (`COLUMNS`, and `RANK` if present)."""
        return cls(optypes, **{field: columns[name] for name, field in (COLUMNS | RANK).items() if name in columns})


def arranged(rows: TraceRows) -> Operations:
    """The operations of all steps in which every worker has the same operations.

    Raises InputError if there are none, or if they form no step of hybrid-parallel training.
    """
    _check(rows)
    (steps, step_E), (dps, dp_E) = _places(rows.step_E), _places(rows.dp_E)
    ops, op_E = _numbered(rows)
    n_steps, n_dps = len(steps), len(dps)
    cell_E = step_E * n_dps + dp_E
    usual_K, whole_N = _usual(op_E, cell_E, len(ops), n_steps, n_dps)
    if not whole_N.any():
        raise InputError("in no step do all data-parallel ranks have the same operations")
    # Unusual operations, and steps without all of the usual ones, are left out.
    place_K = np.full(len(ops), -1)
    place_K[usual_K] = np.arange(len(usual_K))
    column_N = np.cumsum(whole_N) - 1
    n_ops, n_whole = len(usual_K), int(whole_N.sum())
    flat_E = (place_K[op_E] * n_whole + column_N[step_E]) * n_dps + dp_E
    if not whole_N.all():
        kept_E = whole_N[step_E]
        there = {name: getattr(rows, name) for name in TraceRows.__slots__ if name != "optypes"}
        kept = {name: values[kept_E] for name, values in there.items() if values is not None}
        flat_E, rows = flat_E[kept_E], TraceRows(rows.optypes, **kept)

    def laid_out(values_E: NDArray[Any]) -> NDArray[Any]:
        laid = np.empty((n_ops, n_whole, n_dps), dtype=values_E.dtype)
        laid.ravel()[flat_E] = values_E
        return laid

    start_TNW, duration_TNW = laid_out(rows.start_E), laid_out(rows.duration_E)
    at_T = laid_out(np.arange(len(flat_E)))[:, 0, 0]
    return _operations(rows, at_T, steps[whole_N], dps, start_TNW, duration_TNW, int(n_steps - n_whole))


def _check(rows: TraceRows) -> None:
    if not len(rows.step_E):
        raise InputError("no operations")
    present = [rows.optypes[index] for index in np.unique(rows.optype_E)]
    if unknown := [name for name in present if name not in TYPES]:
        raise InputError(f"unknown optype {', '.join(unknown)}; expected {', '.join(TYPES)}")
    for name, values in (("start_ts", rows.start_E), ("duration", rows.duration_E)):
        if not np.isfinite(values).all():
            raise InputError(f"{name}: not a finite number")
    if (rows.duration_E <= -CLOCK_ERROR_S).any():
        raise InputError("duration: negative")
    for name, values in (("seq_id", rows.seq_E), ("stage", rows.pp_E), ("dp_rank", rows.dp_E)):
        if values.min() < 0:
            raise InputError(f"{name}: negative")
    n_stages = int(rows.pp_E.max()) + 1
    if (absent := n_stages - len(np.unique(rows.pp_E))) > 0:
        raise InputError(f"stage: {absent} of {n_stages} stages have no operations")


def _places(values_E: NDArray[Any]) -> tuple[NDArray[Any], IndexArray]:
    """The distinct values in order, and each row's index among them. Most rows repeat the value before."""
    starts = np.concatenate([[0], np.flatnonzero(values_E[1:] != values_E[:-1]) + 1])
    values, place = np.unique(values_E[starts], return_inverse=True)
    return values, np.repeat(place.ravel(), np.diff(np.append(starts, len(values_E))))


def _numbered(rows: TraceRows) -> tuple[NDArray[Any], IndexArray]:
    n_seq, n_stages = int(rows.seq_E.max()) + 1, int(rows.pp_E.max()) + 1
    if len(rows.optypes) * n_seq * n_stages > MAX_CELLS:
        raise InputError(f"too many operations in a step: seq_id up to {n_seq - 1} in {n_stages} stages")
    code_E = (rows.optype_E.astype(np.intp) * n_seq + rows.seq_E) * n_stages + rows.pp_E
    occurs = np.bincount(code_E) > 0
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[code_E]


def _usual(
    op_E: IndexArray, cell_E: IndexArray, n_ops: int, n_steps: int, n_dps: int
) -> tuple[IndexArray, NDArray[np.bool_]]:
    """The operations of most ranks' steps, and the steps in which all ranks have exactly these."""
    if n_steps * n_dps * n_ops > MAX_SPARSE * len(op_E):
        raise InputError("the steps have too few operations in common")
    count_CK = np.bincount(cell_E * n_ops + op_E, minlength=n_steps * n_dps * n_ops).reshape(n_steps * n_dps, n_ops)
    if (count_CK > 1).any():
        raise InputError("duplicate operation: same optype, seq_id, stage, dp_rank and step")
    if count_CK.all():
        return np.arange(n_ops), np.ones(n_steps, dtype=np.bool_)
    sets, which_C, n_of = np.unique(count_CK.astype(np.bool_), axis=0, return_inverse=True, return_counts=True)
    usual = int(n_of.argmax())
    whole_N = (which_C.ravel() == usual).reshape(n_steps, n_dps).all(axis=1)
    return np.flatnonzero(sets[usual]), whole_N


def _operations(
    rows: TraceRows,
    at_T: IndexArray,
    steps: NDArray[Any],
    dps: NDArray[Any],
    start_TNW: AnyFloat,
    duration_TNW: AnyFloat,
    n_left_out: int,
) -> Operations:
    end_TNW = start_TNW + duration_TNW
    names = [rows.optypes[index] for index in rows.optype_E[at_T]]
    ops = [
        Op(
            index=index,
            kind=name,
            order=int(rows.optype_E[at]),
            seq=int(rows.seq_E[at]),
            pp=int(rows.pp_E[at]),
            start_s=float(start_TNW[index, 0, 0]),
            end_s=float(end_TNW[index, 0, 0]),
            chunk=int(rows.chunk_E[at]),
            model_chunk=int(rows.model_chunk_E[at]),
        )
        for index, (name, at) in enumerate(zip(names, at_T, strict=True))
    ]
    graph = pipeline_graph(ops)
    # A transfer works from when the last of its group began.
    work_TNW = end_TNW - latest_begins(graph, start_TNW)
    work_TNW[work_TNW <= -CLOCK_ERROR_S] = 0
    alone_T = graph.group_T < 0
    work_TNW[alone_T] = duration_TNW[alone_T]
    types = [op_type for op_type in TYPES.values() if op_type.name in names]
    index_of = {op_type.name: index for index, op_type in enumerate(types)}
    final = OPTIMIZER if OPTIMIZER in names else None
    left_out = f"{n_left_out} of {n_left_out + len(steps)} steps left out: they lack operations"
    coarse_s = float(np.spacing(np.median(np.abs(start_TNW))))
    coarse = f"start_ts: {start_TNW.dtype} resolves only {coarse_s:.3g} s here; subtract the start of the step first"
    operations = Operations(
        graph=graph,
        types=tuple(types),
        type_T=np.array([index_of[name] for name in names], dtype=np.intp),
        work_TNW=work_TNW,
        dp_TW=dps[None, :].astype(np.intp),
        pp_TW=rows.pp_E[at_T][:, None].astype(np.intp),
        steps=tuple(steps.tolist()),
        measured_N=np.asarray(end_TNW.max(axis=(0, 2)) - start_TNW.min(axis=(0, 2)), dtype=np.float64),
        chunk_T=rows.chunk_E[at_T],
        microbatch_T=rows.microbatch_E[at_T],
        final_T=np.array([final is None or name == final for name in names]),
        notes=(*[left_out] * bool(n_left_out), *[coarse] * (coarse_s > COARSE_S)),
        ranks=_ranks(rows),
    )
    return replace(operations, off_N=_replay_errors(operations, end_TNW))


def _replay_errors(operations: Operations, end_TNW: AnyFloat) -> FloatArray:
    """How far the replay of each step is from its recording: the length of the step, or the place of a computation."""
    computes_T = operations.phase_T != ""
    measured_N, off_N = operations.measured_N, np.empty(len(operations.steps))
    for batch in batches(*operations.shape):
        start_TBW, replayed_TBW = timeline(operations.graph, operations.work_TNW[:, batch])
        took_B = replayed_TBW.max(axis=(0, 2)) - start_TBW.min(axis=(0, 2))
        moved_CBW = end_TNW[computes_T, batch] - replayed_TBW[computes_T]
        # A step's recording may begin before its first computation: only what moves against the others is wrong.
        moved_CBW -= np.median(moved_CBW, axis=(0, 2), keepdims=True)
        wrong_B = np.maximum(np.abs(moved_CBW).max(axis=(0, 2)), np.abs(measured_N[batch] - took_B))
        off_N[batch] = wrong_B / np.maximum(np.maximum(measured_N[batch], took_B), np.finfo(np.float64).tiny)
    off_N[measured_N > MAX_TIMES_MEDIAN * np.median(measured_N)] = 1.0
    return np.nan_to_num(off_N, nan=1.0, posinf=1.0)


def _ranks(rows: TraceRows) -> dict[tuple[int, int], int]:
    if rows.rank_E is None:
        return {}
    n_stages = int(rows.pp_E.max()) + 1
    worker_E = rows.dp_E.astype(np.intp) * n_stages + rows.pp_E
    workers, at = np.unique(worker_E, return_index=True)
    return {divmod(int(worker), n_stages): int(rank) for worker, rank in zip(workers, rows.rank_E[at], strict=True)}


MAX_OPERATIONS, MAX_UNPACKED_BYTES = 30_000_000, 2 << 30
"""Maximum size of a trace in Parquet: all its operations are in memory at once."""
MAGIC = b"PAR1"
ROWS_AT_A_TIME = 1 << 20


def read_rows(path: Path) -> TraceRows:
    """The rows of a trace in Parquet.

    Raises:
        InputError: the file is not such a trace, or too large.
        UsageError: pyarrow is missing.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if magic != MAGIC:
        raise InputError(f"{path}: not a Parquet file")
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UsageError(f"{path}: a trace in Parquet needs pyarrow: pip install 'sftriage[whatif]'") from None
    names: list[str] = []
    parts: dict[str, list[NDArray[Any]]] = {}
    try:
        with ParquetFile(path) as file:
            present = file.schema_arrow.names
            if absent := [column for column in COLUMNS if column not in present]:
                raise InputError(f"{path}: column {', '.join(absent)} missing (columns there: {', '.join(present)})")
            about = file.metadata
            unpacked_bytes = sum(about.row_group(n).total_byte_size for n in range(about.num_row_groups))
            if about.num_rows > MAX_OPERATIONS or unpacked_bytes > MAX_UNPACKED_BYTES:
                raise InputError(
                    f"{path}: {about.num_rows:,} operations, {unpacked_bytes:,} bytes unpacked; the limits "
                    f"are {MAX_OPERATIONS:,} and {MAX_UNPACKED_BYTES:,}"
                )
            wanted = [column for column in COLUMNS | RANK if column in present]
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=wanted, use_threads=False):
                for column in wanted:
                    if missing := batch.column(column).null_count:
                        raise InputError(f"{path}: {column}: {missing} values missing")
                    values_E = _values(batch.column(column), names if column == "optype" else None)
                    parts.setdefault(column, []).append(values_E)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    if not parts:
        raise InputError("no operations")
    columns = {column: np.concatenate(arrays) for column, arrays in parts.items()}
    for column, values_E in columns.items():
        seconds = column in ("start_ts", "duration")
        if values_E.dtype.kind not in ("f" if seconds else "iu"):
            meant = "seconds" if seconds else "whole numbers"
            raise InputError(f"{path}: {column}: {values_E.dtype}, expected {meant}")
    return TraceRows.of(columns, names)


def _values(column: Any, names: list[str] | None) -> NDArray[Any]:
    """A column's values; for texts, their indices in ``names``, to which new ones are added."""
    if names is None:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    encoded = column.dictionary_encode()
    texts = [str(text) for text in encoded.dictionary.to_pylist()]
    names.extend(text for text in texts if text not in names)
    place = np.array([names.index(text) for text in texts], dtype=np.int16)
    return np.asarray(place[encoded.indices.to_numpy(zero_copy_only=False)])
