"""The operations of a job's steps, measured: who did what, how long it took by itself, and what it waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.whatif.graph import AnyFloat, BoolArray, FloatArray, Graph, IndexArray, Spans, spans

IntArray = NDArray[Any]


@dataclass(frozen=True, slots=True)
class OpType:
    """A type of operation.

    Attributes:
        name: of which all operations have one ideal duration.
        part: the name of its share of the slowdown: a transfer's two ends go together.
        communication: its ideal is the median; that of computing is the mean.
        phase: whether it is a forward or a backward computation, "" for neither.
        of_peers: its ideal is what its worker's peers mostly take, as a straggler is much of the mean of few workers.
        mixed: communication that has what workers compute meanwhile in it.
    """

    name: str
    part: str
    communication: bool
    phase: str = ""
    of_peers: bool = False
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class NamedOperations:
    """The verdict's ``workers`` (dp, pp), slow in ``part`` ("": in all).

    Mending them saves ``saves_s`` of the ``step_s`` of a step that they slow down. Where the system holds them back
    (``held_back``), what they add to communication is in there too.
    """

    workers: tuple[tuple[int, int], ...]
    part: str
    saves_s: float
    step_s: float
    held_back: bool = False


@dataclass(frozen=True)
class Operations:
    """T operations of each step (N) in each column of workers (W).

    Attributes:
        graph: what they wait for.
        types: of operations, by ``type_T``.
        work_TNW: seconds that each takes by itself; a transfer, from when the last of its group began.
        dp_TW, pp_TW: their workers, each T × W or what broadcasts to that.
        steps, measured_N: the number of each step, and the seconds that it took.
        chunk_T, microbatch_T: which part of the stage's layers it is of, and which microbatch; -1 for neither.
        final_T: operations that end a step.
        notes: what of the recording was left out, in words.
        ranks: the global rank of each worker (dp, pp), where it is known.
        named: the verdict on these steps, if there is one.
    """

    graph: Graph
    types: tuple[OpType, ...]
    type_T: IndexArray
    work_TNW: AnyFloat
    dp_TW: IntArray
    pp_TW: IntArray
    steps: tuple[int, ...]
    measured_N: FloatArray
    chunk_T: IntArray
    microbatch_T: IntArray
    final_T: BoolArray
    notes: Sequence[str] = ()
    ranks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    named: NamedOperations | None = None

    @cached_property
    def dp_ranks(self) -> tuple[int, ...]:
        """The data-parallel ranks."""
        return tuple(np.unique(self.dp_TW).tolist())

    @cached_property
    def pp_ranks(self) -> tuple[int, ...]:
        """The pipeline-parallel ranks: the stages."""
        return tuple(np.unique(self.pp_TW).tolist())

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """T, N, W."""
        n_ops, n_steps, n_columns = self.work_TNW.shape
        return n_ops, n_steps, n_columns

    @cached_property
    def ideal_T(self) -> FloatArray:
        """The ideal duration of each operation: its type's mean for computing, its median else.

        What peers mostly take is the lower median of a stage: of two workers, the faster one's.
        """
        ideal_T = np.empty(len(self.type_T))
        for index, of_type in enumerate(self.types):
            ops_T = self.type_T == index
            if of_type.of_peers:
                usual_MW = np.sort(np.median(self.work_TNW[ops_T], axis=1), axis=1)
                ideal_T[ops_T] = usual_MW[:, (usual_MW.shape[1] - 1) // 2].mean()
            elif ops_T.any():
                values = self.work_TNW[ops_T]
                ideal_T[ops_T] = np.median(values) if of_type.communication else values.mean(dtype=np.float64)
        return ideal_T

    def of_types(self, *indices: int) -> BoolArray:
        """The operations of some types (T × 1)."""
        return np.isin(self.type_T, indices)[:, None]

    def of_workers(self, workers: Sequence[tuple[int, int]]) -> BoolArray:
        """The operations of some workers (dp, pp), as they broadcast to T × W."""
        of_TW: BoolArray = np.zeros((1, 1), dtype=np.bool_)
        for dp, pp in workers:
            of_TW = of_TW | ((self.dp_TW == dp) & (self.pp_TW == pp))
        return of_TW

    def at_ideal(self, mended_TW: BoolArray) -> AnyFloat:
        """What was measured, with some operations at their ideal (T × N × W)."""
        return np.where(mended_TW[:, None, :], self.ideal_T.astype(self.work_TNW.dtype)[:, None, None], self.work_TNW)

    def replay(self, kept_TW: BoolArray, work_TNW: AnyFloat | None = None) -> Spans:
        """Replay all steps: what is in ``kept_TW`` as measured (or as in ``work_TNW``), all else at its ideal."""
        n_ops, n_steps, n_columns = self.shape
        measured_TNW = self.work_TNW if work_TNW is None else work_TNW
        kept_TW = np.broadcast_to(kept_TW, (n_ops, n_columns))
        ideal_T11 = self.ideal_T[:, None, None]

        def fill(some: slice, work_TBW: FloatArray) -> None:
            np.copyto(work_TBW, ideal_T11)
            np.copyto(work_TBW, measured_TNW[:, some], where=kept_TW[:, None, :])

        return spans(self.graph, fill, n_steps, n_columns, self.final_T)

    def ideal_step_s(self) -> float:
        """What a step takes with all operations at their ideal; all steps take the same."""

        def fill(_: slice, work_TBW: FloatArray) -> None:
            np.copyto(work_TBW, self.ideal_T[:, None, None])

        return float(spans(self.graph, fill, 1, 1, self.final_T).finish_N[0])

    def each_column_alone(self) -> FloatArray:
        """Seconds of each step (N) with one column (W) as measured and all others, which are alike, at their ideal."""
        n_ops, n_steps, n_columns = self.shape
        if n_columns == 1:
            return self.replay(np.ones((1, 1), dtype=np.bool_)).finish_N[:, None]
        work_TX = self.work_TNW.reshape(n_ops, n_steps * n_columns)

        def fill(some: slice, work_TB2: FloatArray) -> None:
            work_TB2[:, :, 0] = work_TX[:, some]
            work_TB2[:, :, 1] = self.ideal_T[:, None]

        finish_X = spans(self.graph, fill, n_steps * n_columns, 2, self.final_T).finish_N
        return finish_X.reshape(n_steps, n_columns)
