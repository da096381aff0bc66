"""Recordings to analyse offline: a run directory, or an ``.npz`` of durations that somebody else measured.

A run is read as it is judged, all its ranks side by side and a few steps at a time: memory goes with the window, not
with the length of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sftriage.agent.gather import Gatherer, Shape
from sftriage.agent.npz import load_npz
from sftriage.agent.rows import IntArray, slots_of, together
from sftriage.errors import InputError, RingError
from sftriage.recorder import LogReader, RingInfo, RingReader, find_rings
from sftriage.recorder.layout import STEP
from sftriage.records import Window
from sftriage.traces.rundir import RunDirectory, read_info

_MAX_SLOTS_AT_A_TIME = 4096


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Where one rank's steps are: in its log, and in its ring what an agent that was killed had not taken yet."""

    info: RingInfo
    log: Path | None = None
    ring: Path | None = None

    def slots(self, at_a_time: int) -> Iterator[IntArray]:
        """The slots in the order in which they were written, a few (B, W) at a time.

        Raises:
            RingError: a file cannot be read any more.
        """
        last: int | None = None
        if self.log is not None:
            log = LogReader(self.log)
            while raw := log.read(at_a_time):
                slots_BW = slots_of(raw, self.info)
                last = int(slots_BW[-1, STEP])
                yield slots_BW
        # Of a job that has ended since the run was looked at, the log has everything.
        if self.ring is None or not self.ring.exists():
            return
        with RingReader(self.ring) as ring:
            slots_BW = slots_of(ring.read().raw, self.info)
        if last is not None:
            slots_BW = slots_BW[slots_BW[:, STEP] > last]
        for at in range(0, len(slots_BW), at_a_time):
            yield slots_BW[at : at + at_a_time]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recording whose windows can be cut: one array, or where the steps of each rank are, by attempt."""

    source: Path
    whole: Window | None
    ranks: Mapping[int, Mapping[int, RankSteps]]

    def windows(self, shape: Shape) -> Iterator[Window]:
        """Windows in order. A recording shorter than a window is one window; one of no steps has none.

        Raises:
            InputError: a file of the run cannot be read any more.
        """
        if self.whole is not None:
            yield from _cut(self.whole, shape)
            return
        for attempt, ranks in sorted(self.ranks.items()):
            info = next(iter(ranks.values())).info
            gatherer = Gatherer(info.schema, info.world_size, shape, attempt=attempt)
            for rank, steps in ranks.items():
                gatherer.describe(rank, steps.info.host, steps.info.cohort)
            try:
                for batch in _side_by_side(ranks, shape):
                    gatherer.add(*batch)
                    yield from gatherer.ready()
            except RingError as error:
                raise InputError(str(error)) from error
            yield from gatherer.ready(ended=True)


def load_recording(path: Path) -> Recording:
    """Read a run directory or an ``.npz``.

    Raises:
        InputError: it is neither, or what is in it cannot be used; the message names what and where.
    """
    if path.is_dir():
        return _load_run(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    return Recording(path, load_npz(path), {})


def _load_run(path: Path) -> Recording:
    run = RunDirectory(path)
    rings = Path(read_info(run).rings)
    attempts: dict[int, dict[int, RankSteps]] = {}
    infos: dict[int, list[RingInfo]] = {}
    try:
        for log in sorted(run.steps.glob("rank-*.steps")):
            info = LogReader(log).info
            attempts.setdefault(info.attempt, {})[info.rank] = RankSteps(info, log=log)
            infos.setdefault(info.attempt, []).append(info)
        for ring in find_rings(rings) if rings.is_dir() else ():
            with RingReader(ring) as reader:
                info = reader.info
            ranks = attempts.setdefault(info.attempt, {})
            ranks[info.rank] = replace(ranks.get(info.rank, RankSteps(info)), ring=ring)
            infos.setdefault(info.attempt, []).append(info)
    except RingError as error:
        raise InputError(str(error)) from error
    for of_attempt in infos.values():
        if len({(info.schema, info.world_size) for info in of_attempt}) > 1:
            raise InputError(f"{run.steps}: the ranks recorded different stages or world sizes")
    return Recording(path, None, attempts)


def _side_by_side(ranks: Mapping[int, RankSteps], shape: Shape) -> Iterator[tuple[IntArray, IntArray]]:
    """All ranks' steps by step number, no more steps at once than lie between two windows."""
    at_a_time = min(shape.window_steps, _MAX_SLOTS_AT_A_TIME)
    unread = {rank: steps.slots(at_a_time) for rank, steps in ranks.items()}
    held: dict[int, IntArray] = {}
    while True:
        for rank in [rank for rank in unread if rank not in held]:
            slots_BW = next(unread[rank], np.zeros((0, 0), dtype=np.int64))
            if len(slots_BW):
                held[rank] = slots_BW
            else:
                del unread[rank]
        if not held:
            return
        # No rank has an earlier step to come than the last one it holds.
        last = min(int(slots_BW[:, STEP].max()) for slots_BW in held.values())
        first = min(int(slots_BW[:, STEP].min()) for slots_BW in held.values())
        last = min(last, first + shape.stride_steps - 1)
        yield together([(rank, slots_BW[slots_BW[:, STEP] <= last]) for rank, slots_BW in held.items()])
        rest = {rank: slots_BW[slots_BW[:, STEP] > last] for rank, slots_BW in held.items()}
        held = {rank: slots_BW for rank, slots_BW in rest.items() if len(slots_BW)}


def _cut(whole: Window, shape: Shape) -> Iterator[Window]:
    n_steps = len(whole.durations_NRS)
    length = min(shape.window_steps, n_steps)
    for first in range(min(shape.warmup_steps, n_steps - length), n_steps - length + 1, shape.stride_steps):
        steps = slice(first, first + length)
        yield replace(
            whole,
            first_step=whole.first_step + first,
            durations_NRS=whole.durations_NRS[steps],
            outside_NRG=None if whole.outside_NRG is None else whole.outside_NRG[steps],
            between_NR=None if whole.between_NR is None else whole.between_NR[steps],
            ready_NR=None if whole.ready_NR is None else whole.ready_NR[steps],
            kinds=None if whole.kinds is None else whole.kinds[steps],
            work_NR=None if whole.work_NR is None else whole.work_NR[steps],
        )
