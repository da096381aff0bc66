"""What each rank of a synchronous job does by itself, and the job that comes of it: the same, with the waiting put in.

A rank's time in a sync stage is its own part (until its last gradient is ready), then waiting for whoever arrives last,
then the sync's own work. `own_times` takes the waiting out of a recorded window. `OwnTimes.window` puts in what follows
from the own times: everybody goes on when the last one has arrived and the work is done. So a delay put into the own
times (`faults.slowed`) makes the others wait exactly as long as the rank that has it is the last, what comes after the
last sync of a step delays the first sync of the next, and ranks recorded apart wait for each other once they are put
side by side. What is put in is never negative.

The ranks do not leave a sync at one instant: ``rest_NRG`` is by how much each stayed longer than the median rank, or
less long. It is kept as recorded, so that taking the waiting out and putting it in again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.records import OTHER, StageSchema, Window, axes_of
from sftriage.windows.counting import counted_of

FloatArray = NDArray[np.float64]
Index = slice | NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class OwnTimes:
    """N steps × R ranks without their waiting, in seconds. S stages, of which G are sync stages.

    Attributes:
        local_NRS: what each stage takes a rank by itself; of ``other`` what comes after the last sync.
        outside_NRG: time outside the stages before each sync.
        between_NR: time between the step before and this one.
        sync_NG: the work of each sync, once all have arrived.
        rest_NRG: by how much a rank stays longer in it than the median rank; may be negative.
        work_NR: how much work the step is; 0 where nobody says.
        kinds_N: of what kind it is.
        queued_NR: how long the rank waited for a CPU; NaN where nobody knows.
        preempted_NR: how often one was taken from it; NaN where nobody knows.
        hosts_R: where the ranks are.
        split: whether the moment of the last ready gradient is known.
    """

    schema: StageSchema
    local_NRS: FloatArray
    outside_NRG: FloatArray
    between_NR: FloatArray
    sync_NG: FloatArray
    rest_NRG: FloatArray
    work_NR: FloatArray
    kinds_N: NDArray[np.str_]
    queued_NR: FloatArray
    preempted_NR: FloatArray
    hosts_R: NDArray[np.str_]
    split: bool

    def __len__(self) -> int:
        return len(self.between_NR)

    @property
    def n_ranks(self) -> int:
        return int(self.between_NR.shape[1])

    @property
    def sync_columns(self) -> list[int]:
        """Which stages are sync stages, in the order of the step."""
        return [self.schema.stages.index(stage) for stage in self.schema.sync_in_order]

    @property
    def tail_NR(self) -> FloatArray:
        """What comes after a step's last sync, and holds up the first sync of the next step."""
        tail_NR: FloatArray = self.local_NRS[:, :, self.sync_columns[-1] + 1 :].sum(axis=2)
        return tail_NR

    def steps(self, index: Index) -> OwnTimes:
        """Some of the steps, in the order given."""
        return self._taken("N", index)

    def ranks(self, index: NDArray[np.intp]) -> OwnTimes:
        """Some of the ranks, in the order given."""
        return self._taken("R", index)

    def arrivals_NRG(self, before_R: FloatArray | None = None) -> FloatArray:
        """When each rank is ready for each sync, since all were together at the end of the sync before.

        ``before_R`` is what came after the last sync of the step before these.
        """
        tail_NR = self.tail_NR
        before_NR = np.concatenate([np.zeros((1, self.n_ranks)) if before_R is None else before_R[None], tail_NR[:-1]])
        arrivals = []
        first = 0
        for g, sync in enumerate(self.sync_columns):
            arrival_NR = self.local_NRS[:, :, first : sync + 1].sum(axis=2) + self.outside_NRG[:, :, g]
            arrivals.append(arrival_NR + before_NR + self.between_NR if g == 0 else arrival_NR)
            first = sync + 1
        return np.stack(arrivals, axis=2)

    def exposed_N(self, before_R: FloatArray | None = None) -> FloatArray:
        """What each step takes, from the end of the last sync before it to that of its own."""
        exposed_N: FloatArray = (self.arrivals_NRG(before_R).max(axis=1) + self.sync_NG).sum(axis=1)
        return exposed_N

    def led_and_waited(self, ranks: Sequence[int]) -> tuple[float, float]:
        """By how much of a step some ranks held up all others, and which part of their lateness they waited for a CPU.

        Means over all steps: of the lead of the last of these ranks over the last of all others, as a fraction of the
        step; and, where it was counted, of the ranks' run-queue wait over the others', as a fraction of their time over
        the others'. 0 where they were not late, or it was not.
        """
        others_R = ~np.isin(np.arange(self.n_ranks), ranks)
        arrivals_NRG = self.arrivals_NRG()
        lead_NG = arrivals_NRG[:, ~others_R].max(axis=1) - arrivals_NRG[:, others_R].max(axis=1)
        known_N = np.isfinite(self.queued_NR).all(axis=1)
        late_s, waited_s = (
            float(values_NR[known_N][:, ~others_R].sum() / (~others_R).sum())
            - float(values_NR[known_N][:, others_R].sum() / others_R.sum())
            for values_NR in (arrivals_NRG.sum(axis=2), self.queued_NR)
        )
        led_s = float(np.clip(lead_NG, 0.0, None).sum(axis=1).mean())
        waited = max(0.0, waited_s / late_s) if late_s > 0.0 else 0.0
        return led_s / float(self.exposed_N().mean()), waited

    def window(self, first_step: int = 0, before_R: FloatArray | None = None) -> Window:
        """The steps as the ranks would have recorded them."""
        arrivals_NRG = self.arrivals_NRG(before_R)
        # The ranks of a stage lie side by side in memory, as in a window that was gathered.
        durations_SNR = self.local_NRS.transpose(2, 0, 1).copy()
        for g, sync in enumerate(self.sync_columns):
            waits_NR = arrivals_NRG[:, :, g].max(axis=1, keepdims=True) - arrivals_NRG[:, :, g]
            after_NR = waits_NR + self.sync_NG[:, g, None] + self.rest_NRG[:, :, g]
            durations_SNR[sync] += np.maximum(after_NR, 0.0)
        ready_NR = self.local_NRS[:, :, self.sync_columns[0]].copy() if self.split else None
        durations_SNR[-1] += self.outside_NRG.sum(axis=2)
        kinds = tuple(self.kinds_N.tolist())
        return Window(
            schema=self.schema,
            first_step=first_step,
            durations_NRS=durations_SNR.transpose(1, 2, 0),
            outside_NRG=self.outside_NRG,
            between_NR=self.between_NR,
            ready_NR=ready_NR,
            hosts=tuple(self.hosts_R.tolist()),
            kinds=kinds if any(kinds) else None,
            work_NR=self.work_NR if self.work_NR.any() else None,
            counted_NRC=counted_of({"queued_s": self.queued_NR, "preempted": self.preempted_NR})
            if np.isfinite(self.queued_NR).any()
            else None,
        )

    def _taken(self, axis: str, index: Index) -> OwnTimes:
        taken: dict[str, Any] = {}
        for name in OwnTimes.__dataclass_fields__:
            if axis in axes_of(name):
                along = axes_of(name).index(axis)
                taken[name] = getattr(self, name)[(slice(None),) * along + (index,)]
        return replace(self, **taken)


def own_times(window: Window) -> OwnTimes:
    """A recorded window without its waiting. It is of complete steps, its schema closed and with a sync stage.

    Raises:
        ValueError: it is not.
    """
    schema = window.schema
    if not schema.sync or schema.stages[-1] != OTHER or not np.isfinite(window.durations_NRS).all():
        raise ValueError("a window to take the waiting out of has a sync stage, ends in other, and lacks no step")
    n_steps, n_ranks, _ = window.durations_NRS.shape
    outside_NRG = np.zeros((n_steps, n_ranks, len(schema.sync))) if window.outside_NRG is None else window.outside_NRG
    local_NRS = np.array(window.durations_NRS)
    local_NRS[:, :, -1] = np.maximum(local_NRS[:, :, -1] - outside_NRG.sum(axis=2), 0.0)
    split = window.ready_NR is not None and bool(np.isfinite(window.ready_NR).any())
    syncs = [schema.stages.index(stage) for stage in schema.sync_in_order]
    left_NRG = local_NRS[:, :, syncs].copy()
    local_NRS[:, :, syncs] = 0.0
    if split and window.ready_NR is not None:
        # A step whose moment was not seen is taken to have had it when the rank usually has.
        usual_R = np.nanmedian(window.ready_NR, axis=0)
        ready_NR = np.where(np.isfinite(window.ready_NR), window.ready_NR, usual_R)
        local_NRS[:, :, syncs[0]] = np.minimum(ready_NR, left_NRG[:, :, 0])
        left_NRG[:, :, 0] -= local_NRS[:, :, syncs[0]]
    zeros_NRG, unknown_NR = np.zeros_like(outside_NRG), np.full((n_steps, n_ranks), np.nan)
    alone = OwnTimes(
        schema=schema,
        local_NRS=local_NRS,
        outside_NRG=outside_NRG,
        between_NR=np.zeros((n_steps, n_ranks)) if window.between_NR is None else window.between_NR,
        sync_NG=zeros_NRG[:, 0],
        rest_NRG=zeros_NRG,
        work_NR=np.zeros((n_steps, n_ranks)) if window.work_NR is None else window.work_NR,
        kinds_N=np.array(window.kinds or ("",) * n_steps),
        queued_NR=unknown_NR if window.counted_NRC is None else window.counted("queued_s"),
        preempted_NR=unknown_NR if window.counted_NRC is None else window.counted("preempted"),
        hosts_R=np.array(window.hosts or ("",) * n_ranks),
        split=split,
    )
    arrivals_NRG = alone.arrivals_NRG()
    after_NRG = left_NRG - (arrivals_NRG.max(axis=1, keepdims=True) - arrivals_NRG)
    sync_NG = np.maximum(np.median(after_NRG, axis=1), 0.0)
    return replace(alone, sync_NG=sync_NG, rest_NRG=after_NRG - sync_NG[:, None])


def side_by_side(parts: Sequence[OwnTimes]) -> OwnTimes:
    """Ranks recorded apart as the ranks of one job, each part on a host of its own: as many steps of each.

    A sync's own work is that of the slowest part: an all-reduce is over when its last share is.
    """
    across = {name: axes_of(name).index("R") for name in OwnTimes.__dataclass_fields__ if "R" in axes_of(name)}
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=axis) for name, axis in across.items()
    }
    joined["sync_NG"] = np.max([part.sync_NG for part in parts], axis=0)
    joined["hosts_R"] = np.repeat([f"host-{number}" for number in range(len(parts))], [part.n_ranks for part in parts])
    return replace(parts[0], **joined)


def one_after_the_other(parts: Sequence[OwnTimes]) -> OwnTimes:
    """Steps of the same ranks, joined."""
    along = [name for name in OwnTimes.__dataclass_fields__ if "N" in axes_of(name)]
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in along}
    return replace(parts[0], **joined)
