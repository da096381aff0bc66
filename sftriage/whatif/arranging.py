"""Rows of a recorded hybrid-parallel trace, one an operation, laid side by side: by operation, step and worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.whatif.graph import AnyFloat, IndexArray, latest_begins
from sftriage.whatif.operations import Operations
from sftriage.whatif.pipeline import OPTIMIZER, TYPES, Op, pipeline_graph

CLOCK_ERROR_S = 1e-2
"""A transfer that ended so much before the last of its group began, by their clocks, took no time; no one operation
ends so much before it began."""

MAX_CELLS = 1 << 24
"""More numbers of types, sequences and stages are not looked through: such a file is damaged."""

MAX_SPARSE = 16
"""Of operations that occur at all, each worker's steps have at least one in so many."""

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
"""The columns of the published format, and where they are in `Rows`."""
RANK = {"rank": "rank_E"}
"""One more, which says who a worker is and decides nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRows:
    """Operations in any order (E), their types as indices into ``optypes``; seconds since some moment of the step."""

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
        """From columns by their names in the published format (`COLUMNS`; `RANK` where it is there)."""
        return cls(optypes, **{field: columns[name] for name, field in (COLUMNS | RANK).items() if name in columns})


def arranged(rows: TraceRows) -> Operations:
    """The operations of all steps that every worker went through with the same operations.

    Raises InputError where there are none, or they are no step of hybrid-parallel training.
    """
    _check(rows)
    (steps, step_E), (dps, dp_E) = _places(rows.step_E), _places(rows.dp_E)
    ops, op_E = _numbered(rows)
    n_steps, n_dps = len(steps), len(dps)
    cell_E = step_E * n_dps + dp_E
    usual_K, whole_N = _usual(op_E, cell_E, len(ops), n_steps, n_dps)
    if not whole_N.any():
        raise InputError("no step in which all data-parallel ranks went through the same operations")
    # What is not of the usual operations, or of a step without all of them, is left out.
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
        raise InputError(f"optype {', '.join(unknown)}: not one of {', '.join(TYPES)}")
    for name, values in (("start_ts", rows.start_E), ("duration", rows.duration_E)):
        if not np.isfinite(values).all():
            raise InputError(f"{name}: not a finite number")
    if (rows.duration_E <= -CLOCK_ERROR_S).any():
        raise InputError("duration: less than 0")
    for name, values, least in (("seq_id", rows.seq_E, 0), ("stage", rows.pp_E, 0), ("dp_rank", rows.dp_E, 0)):
        if values.min() < least:
            raise InputError(f"{name}: less than {least}")
    n_stages = int(rows.pp_E.max()) + 1
    if (absent := n_stages - len(np.unique(rows.pp_E))) > 0:
        raise InputError(f"stage: {absent} of {n_stages} stages have no operation")


def _places(values_E: NDArray[Any]) -> tuple[NDArray[Any], IndexArray]:
    """The values that occur, in order, and of each row which it is. Rows mostly have the value of the one before."""
    starts = np.concatenate([[0], np.flatnonzero(values_E[1:] != values_E[:-1]) + 1])
    values, place = np.unique(values_E[starts], return_inverse=True)
    return values, np.repeat(place.ravel(), np.diff(np.append(starts, len(values_E))))


def _numbered(rows: TraceRows) -> tuple[NDArray[Any], IndexArray]:
    n_seq, n_stages = int(rows.seq_E.max()) + 1, int(rows.pp_E.max()) + 1
    if len(rows.optypes) * n_seq * n_stages > MAX_CELLS:
        raise InputError(f"seq_id up to {n_seq - 1} of {n_stages} stages: too many operations in a step")
    code_E = (rows.optype_E.astype(np.intp) * n_seq + rows.seq_E) * n_stages + rows.pp_E
    ops = np.flatnonzero(np.bincount(code_E, minlength=len(rows.optypes) * n_seq * n_stages))
    place = np.full(len(rows.optypes) * n_seq * n_stages, -1)
    place[ops] = np.arange(len(ops))
    return ops, place[code_E]


def _usual(
    op_E: IndexArray, cell_E: IndexArray, n_ops: int, n_steps: int, n_dps: int
) -> tuple[IndexArray, NDArray[np.bool_]]:
    """The operations that most ranks' steps consist of, and the steps in which all ranks went through just those."""
    if n_steps * n_dps * n_ops > MAX_SPARSE * len(op_E):
        raise InputError("the steps have hardly any operations in common")
    count_CK = np.bincount(cell_E * n_ops + op_E, minlength=n_steps * n_dps * n_ops).reshape(n_steps * n_dps, n_ops)
    if (count_CK > 1).any():
        raise InputError("an operation is there twice: the same optype, seq_id, stage, dp_rank and step")
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
    # A transfer ends its own work after the last of its group began.
    work_TNW = end_TNW - latest_begins(graph, start_TNW)
    work_TNW[work_TNW <= -CLOCK_ERROR_S] = 0
    alone_T = graph.group_T < 0
    work_TNW[alone_T] = duration_TNW[alone_T]
    types = [one for one in TYPES.values() if one.name in names]
    index_of = {one.name: index for index, one in enumerate(types)}
    final = OPTIMIZER if OPTIMIZER in names else None
    return Operations(
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
        notes=(f"{n_left_out} of {n_left_out + len(steps)} steps left out: not all operations are there",)
        * bool(n_left_out),
        ranks=_ranks(rows),
    )


def _ranks(rows: TraceRows) -> dict[tuple[int, int], int]:
    if rows.rank_E is None:
        return {}
    n_stages = int(rows.pp_E.max()) + 1
    worker_E = rows.dp_E.astype(np.intp) * n_stages + rows.pp_E
    workers, at = np.unique(worker_E, return_index=True)
    return {divmod(int(worker), n_stages): int(rank) for worker, rank in zip(workers, rows.rank_E[at], strict=True)}
