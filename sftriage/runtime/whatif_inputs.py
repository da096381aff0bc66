"""Where a what-if replay's operations come from: a trace in Parquet, a run, an ``.npz``, heavy traces of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError, UsageError
from sftriage.frontier.clocks import timed
from sftriage.frontier.segments import complete_steps, segments
from sftriage.frontier.settings import Settings
from sftriage.records import Window
from sftriage.reduce.naming import Names
from sftriage.reduce.together import together
from sftriage.runs.recordings import detection_of, load_recording
from sftriage.runtime.reducing import read_all
from sftriage.whatif.arranging import COLUMNS, RANK, Rows, arranged
from sftriage.whatif.graph import FloatArray, Graph, graph_of
from sftriage.whatif.operations import Operations, OpType
from sftriage.windows.gather import Shape

SUFFIX = ".parquet"
ALONE = (SUFFIX, ".npz")
"""Files that are of all ranks; any other file is one rank's trace, or an archive of several."""
MAGIC = b"PAR1"
ROWS_AT_A_TIME = 1 << 20
STEPS_AT_A_TIME = 50
"""A run is read in windows of so many steps; what is left at its end is no window, and is left out."""

PHASES = {"forward": "forward", "backward": "backward"}
"""Stages by these names are compared with each other."""


def load_operations(paths: Sequence[Path]) -> Operations:
    """The operations of a recording, or of the heavy traces of all its ranks.

    Raises:
        InputError: it is none, or cannot be used; the message names what and where.
        UsageError: what reads it is not installed, or of several files each is a recording by itself.
    """
    if absent := [path for path in paths if not path.exists()]:
        raise InputError(f"{absent[0]}: no such file or directory")
    recordings = [path for path in paths if path.is_dir() or path.suffix in ALONE]
    if not recordings:
        return operations_of(_reduced(paths))
    if len(paths) > 1:
        raise UsageError(f"{recordings[0]} is a recording of all ranks: it goes alone")
    (path,) = paths
    try:
        if path.suffix == SUFFIX:
            return arranged(read_rows(path))
        return operations_of(_longest(path))
    except InputError as error:
        if str(error).startswith(str(path)):
            raise
        raise InputError(f"{path}: {error}") from error


def _reduced(paths: Sequence[Path]) -> Window:
    """The stages that heavy traces of all ranks are reduced to."""
    reduced = read_all(paths, Names(), {})
    if reduced.refused:
        raise InputError("; ".join(refusal.reason for refusal in reduced.refused))
    if len(reduced.reductions) < 2:
        raise InputError(f"{paths[0]}: one rank's trace: a replay takes those of all ranks")
    return together(reduced.reductions)


def read_rows(path: Path) -> Rows:
    """The operations of a trace in Parquet, as they are in it.

    Raises:
        InputError: not such a file, or a column is missing or of another sort.
        UsageError: the reader is not installed.
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
            there = file.schema_arrow.names
            if absent := [column for column in COLUMNS if column not in there]:
                raise InputError(f"{path}: column {', '.join(absent)} missing (columns there: {', '.join(there)})")
            wanted = [column for column in COLUMNS | RANK if column in there]
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=wanted, use_threads=False):
                for column in wanted:
                    values_E = _values(batch.column(column), names if column == "optype" else None)
                    parts.setdefault(column, []).append(values_E)
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
    except _MissingError as error:
        raise InputError(f"{path}: {column}: {error}") from error
    if not parts:
        raise InputError("no operations")
    columns = {column: np.concatenate(arrays) for column, arrays in parts.items()}
    for column, values_E in columns.items():
        seconds = column in ("start_ts", "duration")
        if values_E.dtype.kind not in ("f" if seconds else "iu"):
            meant = "seconds" if seconds else "whole numbers"
            raise InputError(f"{path}: {column}: {values_E.dtype}, and not {meant}")
    return Rows.of(columns, names)


class _MissingError(Exception):
    """A column has rows without a value."""


def _values(column: Any, names: list[str] | None) -> NDArray[Any]:
    """A column's values; of texts, where they are in ``names``, to which those not yet there are added."""
    if column.null_count:
        raise _MissingError(f"{column.null_count} values missing")
    if names is None:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    encoded = column.dictionary_encode()
    texts = [str(text) for text in encoded.dictionary.to_pylist()]
    names.extend(text for text in texts if text not in names)
    place = np.array([names.index(text) for text in texts], dtype=np.int16)
    return np.asarray(place[encoded.indices.to_numpy(zero_copy_only=False)])


def _longest(path: Path) -> Window:
    """The most steps on end of a recording, of one attempt; of a run, after its warm-up."""
    recording = load_recording(path)
    if recording.whole is not None:
        return recording.whole
    shape = Shape(STEPS_AT_A_TIME, STEPS_AT_A_TIME, detection_of(path).warmup_steps)
    stretches: list[list[Window]] = []
    for window in recording.windows(shape):
        if stretches and _continues(stretches[-1][-1], window):
            stretches[-1].append(window)
        else:
            stretches.append([window])
    if not stretches:
        raise InputError(f"{path}: no steps yet")
    return Window.joined(max(stretches, key=len))


def _continues(before: Window, after: Window) -> bool:
    return (before.attempt, before.last_step + 1, before.schema) == (after.attempt, after.first_step, after.schema)


def operations_of(window: Window) -> Operations:
    """A recording's stages as operations: a rank is a worker, its cohort a stage of the pipeline.

    A step runs from the end of the last sync of the step before to that of its own, where the ranks are together; what
    they did after their own last sync belongs to the next one. Without a sync stage nobody waits for anybody.

    Raises:
        InputError: fewer than two steps in a row that are complete and ordinary.
    """
    seen = timed(window, Settings())
    window = seen.window
    parts, complete_N = segments(window), complete_steps(window)
    if window.kinds is not None:
        complete_N &= np.array([not kind for kind in window.kinds])
    late = any(column.offset for part in parts for column in part.columns)
    rows_N = np.flatnonzero(complete_N[1:] & complete_N[:-1]) + 1 if late else np.flatnonzero(complete_N)
    if not len(rows_N):
        raise InputError("no two complete, ordinary steps in a row" if late else "no complete, ordinary step")
    workers, notes = _grid(window)
    types, values_KNR, measured_N = _columns(window, rows_N)
    n_columns, (n_pp, n_dp) = len(types), workers.shape
    graph = _chains(types, n_pp)
    n_left = len(complete_N) - len(rows_N) - late
    if n_left:
        notes = (*notes, f"{n_left} of {len(complete_N) - late} steps left out: not complete, or of another kind")
    if seen.limited:
        notes = (*notes, "by the hosts' clock alone, which on devices shows launches and waiting")
    return Operations(
        graph=graph,
        types=tuple(types),
        type_T=np.tile(np.arange(n_columns), n_pp),
        # Stage by stage its columns, and of each the ranks of that stage.
        work_TNW=np.concatenate([values_KNR[:, :, ranks] for ranks in workers]),
        dp_TW=np.arange(n_dp)[None, :],
        pp_TW=np.repeat(np.arange(n_pp), n_columns)[:, None],
        steps=tuple((window.first_step + rows_N).tolist()),
        measured_N=measured_N,
        chunk_T=np.zeros(n_pp * n_columns, dtype=np.intp),
        microbatch_T=np.zeros(n_pp * n_columns, dtype=np.intp),
        final_T=np.ones(n_pp * n_columns, dtype=np.bool_),
        notes=notes,
        ranks={(dp, pp): int(workers[pp, dp]) for pp in range(n_pp) for dp in range(n_dp)},
    )


def _grid(window: Window) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    """The ranks by cohort, and in each by number; all in one where there are none, or not as many in each."""
    n_ranks = window.durations_NRS.shape[1]
    cohorts = list(dict.fromkeys(window.cohorts or ("",)))
    members = [[rank for rank in range(n_ranks) if (window.cohorts or ("",) * n_ranks)[rank] == one] for one in cohorts]
    if len({len(ranks) for ranks in members}) == 1:
        return np.array(members, dtype=np.intp), ()
    return np.arange(n_ranks, dtype=np.intp)[None, :], ("cohorts of different sizes: taken as one",)


def _columns(window: Window, rows_N: NDArray[np.intp]) -> tuple[list[OpType], FloatArray, FloatArray]:
    """The columns of all segments in order: what each is, its times (K × N × R), and what the steps took by them (N).

    The time of a sync stage is from when the last rank came to it.
    """
    stages = window.schema.stages
    types: list[OpType] = []
    values_KNR: list[FloatArray] = []
    measured_N = np.zeros(len(rows_N))
    for part in segments(window):
        arrived_NR = np.zeros((len(rows_N), part.n_ranks))
        for column in part.local:
            values_NR = column.at((rows_N - column.offset,))
            arrived_NR += values_NR
            stage = stages[column.stage]
            types.append(OpType(f"{stage} {len(types)}", stage, communication=False, phase=PHASES.get(stage, "")))
            values_KNR.append(np.asarray(values_NR))
        if part.own is None:
            measured_N += arrived_NR.max(axis=1)
            continue
        # What the ranks compute in it while they are together is in there, too.
        name = f"{stages[part.own.stage]} (together)"
        left_NR = arrived_NR + part.own.at((rows_N - part.own.offset,))
        measured_N += left_NR.max(axis=1)
        types.append(OpType(f"{name} {len(types)}", name, communication=True))
        values_KNR.append(np.maximum(left_NR - arrived_NR.max(axis=1, keepdims=True), 0.0))
    return types, np.stack(values_KNR), measured_N


def _chains(types: list[OpType], n_pp: int) -> Graph:
    """Each rank's columns one after the other; into a sync stage the ranks of all stages go together."""
    n_columns = len(types)
    chains = [range(pp * n_columns, (pp + 1) * n_columns) for pp in range(n_pp)]
    synced = [index for index, one in enumerate(types) if one.communication]
    return graph_of(
        n_pp * n_columns,
        [pair for chain in chains for pair in pairwise(chain)],
        [[chain[index] for chain in chains] for index in synced],
        [True] * len(synced),
    )
