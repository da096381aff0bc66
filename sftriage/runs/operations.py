"""Recordings as operations, for a what-if replay: the stages of a run, an ``.npz`` or heavy traces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError, UsageError
from sftriage.model.events import WindowJudged
from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import MOST_FRACTION, Window
from sftriage.reduce.stages import Names
from sftriage.reduce.together import read_all, together
from sftriage.runs.decisions import DISTURBED
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal
from sftriage.runs.recordings import detection_of, load_recording
from sftriage.stragglers.graph import Graph, NamedOperations, Operations, OpType, graph_of
from sftriage.stragglers.pipeline import arranged, read_rows
from sftriage.verdict.accounting import FloatArray, complete_steps, segments, timed
from sftriage.verdict.units import HeldBack
from sftriage.windows.gather import Shape

STEPS_AT_A_TIME = 50
"""A run is read in windows of this many steps; an incomplete one at its end is left out."""

PHASES = {"forward": "forward", "backward": "backward"}
"""Stages with these names are compared with each other."""


def operations_in(path: Path) -> Operations:
    """The operations of a run or an ``.npz``, from its longest sequence of consecutive steps.

    If the run's newest verdict names a suspect, they are from the steps since that began.

    Raises:
        InputError: it is neither, or cannot be used.
    """
    verdict = _verdict(path)
    judged = None if verdict is None else _judged(path, verdict)
    return operations_of(_longest(path)) if judged is None else operations_of(judged, verdict)


def _verdict(path: Path) -> Verdict | None:
    journal = RunDirectory(path).decisions
    if not journal.is_file():
        return None
    judged = (event.verdict for event in read_journal(journal) if isinstance(event, WindowJudged))
    informative = (verdict for verdict in judged if verdict.reasons != DISTURBED)
    newest = max(informative, key=lambda verdict: (verdict.attempt, verdict.last_step), default=None)
    return newest if newest is not None and newest.label == "suspect" and newest.suspects[0].ranks else None


def _judged(path: Path, verdict: Verdict) -> Window | None:
    """The steps of a verdict from its suspect's onset; None if they are not kept."""
    first, last, n_steps = verdict.first_step, verdict.last_step, verdict.last_step - verdict.first_step + 1

    def begun(warmup_steps: int) -> Window | None:
        """The first window of the verdict's attempt after ``warmup_steps`` steps."""
        windows = load_recording(path).windows(Shape(n_steps, n_steps, warmup_steps))
        return next((window for window in windows if window.attempt == verdict.attempt), None)

    opening = begun(0)
    window = None if opening is None or opening.first_step > first else begun(first - opening.first_step)
    if window is None or (window.first_step, window.last_step) != (first, last):
        return None
    onset = verdict.suspects[0].onset_step
    return window.steps(onset, last) if onset is not None and first < onset < last else window


def _longest(path: Path) -> Window:
    recording = load_recording(path)
    if recording.whole is not None:
        return recording.whole
    shape = Shape(STEPS_AT_A_TIME, STEPS_AT_A_TIME, detection_of(path).warmup_steps)
    stretches: list[list[Window]] = []
    for window in recording.windows(shape):
        before = stretches[-1][-1] if stretches else None
        follows = before and (before.attempt, before.last_step + 1, before.schema)
        if follows == (window.attempt, window.first_step, window.schema):
            stretches[-1].append(window)
        else:
            stretches.append([window])
    if not stretches:
        raise InputError(f"{path}: no steps yet")
    return Window.joined(max(stretches, key=len))


def operations_of(window: Window, verdict: Verdict | None = None) -> Operations:
    """A recording's stages as operations: a rank is a worker, its cohort a stage of the pipeline.

    A step ends where its last sync stage does, since the ranks are together there; the stages after it belong to the
    next step. Without a sync stage no rank waits for another. The suspect of the
    ``verdict`` on these steps is the named worker.

    Raises:
        InputError: fewer than two steps in a row that are complete and ordinary.
    """
    clocked = timed(window, Settings())
    window = clocked.window
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
    ranks = {(dp, pp): int(workers[pp, dp]) for pp in range(n_pp) for dp in range(n_dp)}
    n_left = len(complete_N) - len(rows_N) - late
    if n_left:
        notes = (*notes, f"{n_left} of {len(complete_N) - late} steps left out: incomplete, or of another kind")
    if clocked.limited:
        notes = (*notes, "by the hosts' clock only, which on devices shows launches and waiting")
    named = None
    if verdict is not None:
        suspect, step_s = verdict.suspects[0], verdict.numbers.get("slow_step_s", verdict.exposed_s)
        slow = tuple(worker for worker, rank in ranks.items() if rank in suspect.ranks)
        held_back = suspect.by_system is not None
        named = NamedOperations(slow, suspect.stage or "", suspect.gain_s, step_s, held_back=held_back)
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
        ranks=ranks,
        named=named,
    )


def _grid(window: Window) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    n_ranks = window.durations_NRS.shape[1]
    of_rank = window.cohorts or ("",) * n_ranks
    members = [[rank for rank in range(n_ranks) if of_rank[rank] == cohort] for cohort in dict.fromkeys(of_rank)]
    if len({len(ranks) for ranks in members}) == 1:
        return np.array(members, dtype=np.intp), ()
    return np.arange(n_ranks, dtype=np.intp)[None, :], ("cohorts of different sizes: treated as one",)


def _columns(window: Window, rows_N: NDArray[np.intp]) -> tuple[list[OpType], FloatArray, FloatArray]:
    """The columns of all segments in order: their types, times (K × N × R), and the step times by them (N).

    The time of a sync stage counts from the arrival of the last rank.
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
            name, phase = f"{stage} {len(types)}", PHASES.get(stage, "")
            types.append(OpType(name, stage, communication=False, phase=phase, of_peers=True))
            values_KNR.append(np.asarray(values_NR))
        if part.own is None:
            measured_N += arrived_NR.max(axis=1)
            continue
        name, left_NR = f"{stages[part.own.stage]} (together)", arrived_NR + part.own.at((rows_N - part.own.offset,))
        measured_N += left_NR.max(axis=1)
        together_NR = np.maximum(left_NR - arrived_NR.max(axis=1, keepdims=True), 0.0)
        # If the last gradient is not on record, this includes what the ranks compute while they are together.
        mixed = part.own.over_NR is None or _waits_for_cpus(window, rows_N, together_NR.max(axis=1))
        types.append(OpType(f"{name} {len(types)}", name, communication=True, mixed=mixed))
        values_KNR.append(together_NR)
    return types, np.stack(values_KNR), measured_N


def _waits_for_cpus(window: Window, rows_N: NDArray[np.intp], together_N: FloatArray) -> bool:
    """Whether waiting for a CPU may explain most of a sync stage's time over its median."""
    held, longer_N = HeldBack.of(window, limited=False), np.clip(together_N - np.median(together_N), 0.0, None)
    if held is None:
        return False
    waits_N = (held.stopped_NR + held.waited_NR)[rows_N].max(axis=1)
    return float(np.minimum(waits_N, longer_N).sum()) >= MOST_FRACTION * float(longer_N.sum())


def _chains(types: list[OpType], n_pp: int) -> Graph:
    """Each rank's columns in sequence; the ranks of all stages enter a sync stage together."""
    n_columns = len(types)
    chains = [range(pp * n_columns, (pp + 1) * n_columns) for pp in range(n_pp)]
    synced = [index for index, kind in enumerate(types) if kind.communication]
    return graph_of(
        n_pp * n_columns,
        [pair for chain in chains for pair in pairwise(chain)],
        [[chain[index] for chain in chains] for index in synced],
        [True] * len(synced),
    )


SUFFIX = ".parquet"
ALONE = (SUFFIX, ".npz")
"""Files with all ranks; any other file is one rank's trace, or an archive of several."""


def load_operations(paths: Sequence[Path]) -> Operations:
    """The operations of a recording, or of the heavy traces of all its ranks."""
    if absent := [path for path in paths if not path.exists()]:
        raise InputError(f"{absent[0]}: no such file or directory")
    recordings = [path for path in paths if path.is_dir() or path.suffix in ALONE]
    if not recordings:
        reduced = read_all(paths, Names(), {})
        if reduced.refused:
            raise InputError("; ".join(refusal.reason for refusal in reduced.refused))
        if len(reduced.reductions) < 2:
            raise InputError(f"{paths[0]}: one rank's trace; a replay needs the traces of all ranks")
        return operations_of(together(reduced.reductions))
    if len(paths) > 1:
        raise UsageError(f"{recordings[0]} is a recording of all ranks: pass it alone")
    (path,) = paths
    try:
        if path.suffix == SUFFIX:
            return arranged(read_rows(path))
        return operations_in(path)
    except InputError as error:
        if str(error).startswith(str(path)):
            raise
        raise InputError(f"{path}: {error}") from error
