"""A recording's stages as the operations of a what-if replay: of a run, an ``.npz``, or any window."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sftriage.counters import MOST_FRACTION
from sftriage.decisions import Verdict
from sftriage.errors import InputError
from sftriage.events import WindowJudged
from sftriage.frontier.segments import complete_steps, segments
from sftriage.records import Window
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal
from sftriage.runs.outlook import DISTURBED
from sftriage.runs.recordings import detection_of, load_recording
from sftriage.verdicts.clocks import timed
from sftriage.verdicts.settings import Settings
from sftriage.verdicts.system import HeldBack
from sftriage.whatif.graph import FloatArray, Graph, graph_of
from sftriage.whatif.operations import Named, Operations, OpType
from sftriage.windows.gather import Shape

STEPS_AT_A_TIME = 50
"""A run is read in windows of so many steps; what is left at its end is no window, and is left out."""

PHASES = {"forward": "forward", "backward": "backward"}
"""Stages by these names are compared with each other."""


def operations_in(path: Path) -> Operations:
    """The operations of a run, or of an ``.npz``: of its longest stretch of steps on end.

    Of a run whose newest verdict names somebody they are those of the steps that it is about, since that began.

    Raises:
        InputError: it is none, or cannot be used.
    """
    verdict = _verdict(path)
    judged = None if verdict is None else _judged(path, verdict)
    return operations_of(_longest(path)) if judged is None else operations_of(judged, verdict)


def _verdict(path: Path) -> Verdict | None:
    """The newest verdict of a run that no capture disturbed, if it names somebody."""
    journal = RunDirectory(path).decisions
    if not journal.is_file():
        return None
    verdicts = (one.verdict for one in read_journal(journal) if isinstance(one, WindowJudged))
    newest = max(
        (one for one in verdicts if one.reasons != DISTURBED),
        key=lambda one: (one.attempt, one.last_step),
        default=None,
    )
    return newest if newest is not None and newest.label == "suspect" and newest.suspects[0].ranks else None


def _judged(path: Path, verdict: Verdict) -> Window | None:
    """The steps that a verdict is about, from the onset of who is named on; None if they are not kept."""
    first, last, n_steps = verdict.first_step, verdict.last_step, verdict.last_step - verdict.first_step + 1

    def begun(warmup_steps: int) -> Window | None:
        """The first window of the verdict's attempt after so many steps."""
        windows = load_recording(path).windows(Shape(n_steps, n_steps, warmup_steps))
        return next((one for one in windows if one.attempt == verdict.attempt), None)

    opening = begun(0)
    window = None if opening is None or opening.first_step > first else begun(first - opening.first_step)
    if window is None or (window.first_step, window.last_step) != (first, last):
        return None
    onset = verdict.suspects[0].onset_step
    return window.steps(onset, last) if onset is not None and first < onset < last else window


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


def operations_of(window: Window, verdict: Verdict | None = None) -> Operations:
    """A recording's stages as operations: a rank is a worker, its cohort a stage of the pipeline.

    A step runs from the end of the last sync of the step before to that of its own, where the ranks are together; what
    they did after their own last sync belongs to the next one. Without a sync stage nobody waits for anybody.
    Whom the ``verdict`` on these steps names is who is named here too.

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
    ranks = {(dp, pp): int(workers[pp, dp]) for pp in range(n_pp) for dp in range(n_dp)}
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
        ranks=ranks,
        named=None if verdict is None else _named(verdict, ranks),
    )


def _named(verdict: Verdict, ranks: Mapping[tuple[int, int], int]) -> Named:
    suspect, step_s = verdict.suspects[0], verdict.numbers.get("slow_step_s", verdict.exposed_s)
    workers = tuple(worker for worker, rank in ranks.items() if rank in suspect.ranks)
    held_back = suspect.by_system is not None
    return Named(workers, suspect.stage or "", suspect.gain_s, step_s, held_back=held_back)


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
            name, phase = f"{stage} {len(types)}", PHASES.get(stage, "")
            types.append(OpType(name, stage, communication=False, phase=phase, of_peers=True))
            values_KNR.append(np.asarray(values_NR))
        if part.own is None:
            measured_N += arrived_NR.max(axis=1)
            continue
        name, left_NR = f"{stages[part.own.stage]} (together)", arrived_NR + part.own.at((rows_N - part.own.offset,))
        measured_N += left_NR.max(axis=1)
        together_NR = np.maximum(left_NR - arrived_NR.max(axis=1, keepdims=True), 0.0)
        # What the ranks compute in it while they are together is in there, too, if the last gradient is not known.
        mixed = part.own.over_NR is None or _waits_for_cpus(window, rows_N, together_NR.max(axis=1))
        types.append(OpType(f"{name} {len(types)}", name, communication=True, mixed=mixed))
        values_KNR.append(together_NR)
    return types, np.stack(values_KNR), measured_N


def _waits_for_cpus(window: Window, rows_N: NDArray[np.intp], together_N: FloatArray) -> bool:
    """Whether some rank's waiting for a CPU may be most of what a sync stage takes longer than it mostly does."""
    held, longer_N = HeldBack.of(window, limited=False), np.clip(together_N - np.median(together_N), 0.0, None)
    if held is None:
        return False
    waits_N = (held.stopped_NR + held.waited_NR)[rows_N].max(axis=1)
    return float(np.minimum(waits_N, longer_N).sum()) >= MOST_FRACTION * float(longer_N.sum())


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
