"""A job of many ranks, made up step by step: all leave `backward` together, and one of them becomes slow in `data`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sftriage.model.windows import COUNTERS, JobStatus, RankStatus, StageSchema
from sftriage.trainer.layout import RingInfo
from sftriage.windows.decoding import BETWEEN, DURATIONS, READY, SEQ, START, STEP, StepArrays, slot_words
from sftriage.windows.rings import status_of

SCHEMA = StageSchema.closed(("data", "h2d", "forward", "backward", "clip", "optimizer"), ("backward",))
SHARES = {"data": 0.15, "h2d": 0.03, "forward": 0.25, "backward": 0.40, "clip": 0.02, "optimizer": 0.08, "other": 0.02}
"""Of a healthy step; the rest is waiting for the last of all ranks."""
SYNC, SLOW_STAGE = SCHEMA.stages.index("backward"), SCHEMA.stages.index("data")
JITTER, SLOW_SHARE = 0.005, 0.12
S_NS = 1_000_000_000
BOOTED_S = 1000.0
"""Hosts have been up for so long when the job begins."""


@dataclass(frozen=True)
class Shape:
    """A job of so many ranks at so many steps a second, of which one is slow from a step on."""

    ranks: int
    ranks_per_agent: int
    steps_per_second: float
    slow_rank: int
    slow_from: int

    @property
    def agents(self) -> int:
        return -(-self.ranks // self.ranks_per_agent)

    def ranks_of(self, agent: int) -> range:
        return range(agent * self.ranks_per_agent, min((agent + 1) * self.ranks_per_agent, self.ranks))


class Job:
    """Steps from the moment ``begin_s`` (of the epoch) on; whoever makes one of the same shape makes the same steps.

    Attributes:
        slots: of each of the newest steps, by number, what a recorder has written of every rank (R, W).
        ends_s: when the last rank was through with each.
    """

    def __init__(self, shape: Shape, begin_s: float) -> None:
        self.shape, self.begin_s = shape, begin_s
        self.slots: dict[int, np.ndarray] = {}
        self.ends_s: list[float] = []
        self._kept_steps = 16 + round(60 * shape.steps_per_second)
        self._random = np.random.default_rng(7)
        # All times from here on are nanoseconds since the begin of the job.
        self._synced_ns = 0.0
        self._own_S = np.array([SHARES[name] for name in SCHEMA.stages]) / shape.steps_per_second * S_NS
        self._carried_R = np.zeros(shape.ranks)
        self._counted_RC = np.zeros((shape.ranks, len(COUNTERS)))
        self._counted_RC[:, COUNTERS.index("run_s")] = 0.5 / shape.steps_per_second
        self._counted_RC[:, COUNTERS.index("woken")] = 12.0

    def advance(self, now_s: float) -> None:
        while self.begin_s + self._synced_ns / S_NS + 1 / self.shape.steps_per_second < now_s:
            self._step()

    def steps(self, ranks: range, first: int, last: int) -> StepArrays:
        some = np.stack([self.slots[step][ranks.start : ranks.stop] for step in range(first, last)], axis=1)
        slots_BW = some.reshape(-1, some.shape[2])
        rank_B = np.repeat(np.arange(ranks.start, ranks.stop), last - first)
        return StepArrays(SCHEMA, rank_B, slots_BW, self._counted_RC[rank_B])

    def status(self, infos: list[RingInfo], now_s: float) -> JobStatus:
        age_ns = max(0, round((now_s - self.begin_s) * S_NS - self._synced_ns))
        done = len(self.ends_s)
        ranks = (
            RankStatus(one.rank, one.host, "backward" if done else None, age_ns, done, age_ns, done, False, True)
            for one in infos
        )
        return status_of(SCHEMA, self.shape.ranks, tuple(ranks))

    def _step(self) -> None:
        step, n_ranks = len(self.ends_s), self.shape.ranks
        jitter_RS = 1.0 + JITTER * self._random.standard_normal((n_ranks, len(SCHEMA.stages)))
        own_RS = self._own_S * np.clip(jitter_RS, 0.9, None)
        if step >= self.shape.slow_from:
            own_RS[self.shape.slow_rank, SLOW_STAGE] += SLOW_SHARE / self.shape.steps_per_second * S_NS
        ready_R = own_RS[:, SYNC].copy()
        arrived_R = self._carried_R + own_RS[:, : SYNC + 1].sum(axis=1)
        # What the exchange itself takes, beyond the last gradient of the last rank.
        synced_ns = float(arrived_R.max()) + 0.02 / self.shape.steps_per_second * S_NS
        own_RS[:, SYNC] += synced_ns - arrived_R
        slots_RW = np.zeros((n_ranks, slot_words(SCHEMA)), dtype=np.int64)
        slots_RW[:, SEQ], slots_RW[:, STEP], slots_RW[:, READY] = step + 1, step, ready_R
        slots_RW[:, START] = BOOTED_S * S_NS + self._synced_ns + self._carried_R
        slots_RW[:, BETWEEN] = 0
        slots_RW[:, DURATIONS : DURATIONS + len(SCHEMA.stages)] = own_RS
        self._carried_R = own_RS[:, SYNC + 1 :].sum(axis=1)
        self._synced_ns += synced_ns
        self.slots[step] = slots_RW
        self.slots.pop(step - self._kept_steps, None)
        self.ends_s.append(self.begin_s + (self._synced_ns + float(self._carried_R.max())) / S_NS)
