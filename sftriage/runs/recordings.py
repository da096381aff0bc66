"""Recordings to analyse offline: a run directory, or an ``.npz`` of durations measured elsewhere.

`sftriage analyze`, policy tests, replays and what-if read them. The ranks of a run are read side by side, a few steps
at a time, so that memory grows with the window and not with the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from sftriage.errors import InputError, RingError
from sftriage.model.windows import Window
from sftriage.policy.in_force import load
from sftriage.policy.schema import Detection
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.trainer.layout import RingInfo, find_rings
from sftriage.windows.decoding import StepArrays, together
from sftriage.windows.gather import LEAST_WINDOW_STEPS, Gatherer, Shape, pace_s
from sftriage.windows.log_files import LogFiles, find_logs
from sftriage.windows.logs import LOG_KIND, LogReader, Thinning, kept_readings, thinning_of
from sftriage.windows.npz import load_npz
from sftriage.windows.rings import Ring, Rows
from sftriage.windows.steplog import COUNTERS_KIND, stay

_MIN_STEPS_AT_A_TIME = 32
_MAX_STEPS_AT_A_TIME = 4096
"""Steps of a rank per read: few enough for many ranks, enough that reading takes less time than judging."""


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The files with one rank's steps: its log, and its ring with the steps that a killed agent had not read.

    ``readings`` are those of its counters. ``of_device``: the times are device times.
    """

    info: RingInfo
    log: LogFiles | None = None
    readings: LogFiles | None = None
    ring: Path | None = None
    of_device: bool = False

    def steps(self, at_a_time: int) -> Iterator[StepArrays]:
        """The steps in the order in which they were written, ``at_a_time``.

        Raises:
            RingError: a file can no longer be read.
        """
        last: int | None = None
        if self.log is not None:
            log = LogReader(self.log, LOG_KIND if self.of_device else "steps")
            readings = kept_readings(self.readings, self.info)
            while steps := log.read(at_a_time):
                last = int(steps.step_B[-1])
                yield steps if readings is None else readings.laid_over(steps)
        # If the job has ended meanwhile, the log has everything.
        if self.ring is None or not self.ring.exists():
            return
        with Ring(self.ring) as ring:
            batch = ring.read()
        steps = batch.device if self.of_device else batch.steps
        if last is not None:
            steps = steps[steps.step_B > last]
        for at in range(0, len(steps), at_a_time):
            yield steps[at : at + at_a_time]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRun:
    """A recording to cut windows from: one array, or the files of each rank, by attempt.

    ``on_device`` has the files of device times, and ``thinned`` the attempts whose older steps are thinned.
    """

    source: Path
    whole: Window | None
    ranks: Mapping[int, Mapping[int, RankSteps]]
    on_device: Mapping[int, Mapping[int, RankSteps]] = field(default_factory=dict)
    thinned: Mapping[int, Thinning] = field(default_factory=dict)

    def windows(self, shape: Shape) -> Iterator[Window]:
        """Windows in order. A recording shorter than a window is one window; an empty one has none.

        Among thinned steps, only windows without a missing step count.

        Raises:
            InputError: a file of the run can no longer be read.
        """
        if self.whole is not None:
            yield from _cut(self.whole, shape)
            return
        for attempt, ranks in sorted(self.ranks.items()):
            thinned = self.thinned.get(attempt)
            for window in self._of_attempt(attempt, ranks, shape):
                steps_N = window.first_step + np.arange(len(window.durations_NRS))
                whole = thinned is None or window.first_step >= thinned.whole_from_step
                if whole or stay(steps_N).all() or np.isfinite(window.durations_NRS).all():
                    yield window

    def _of_attempt(self, attempt: int, ranks: Mapping[int, RankSteps], shape: Shape) -> Iterator[Window]:
        info = next(iter(ranks.values())).info
        thinned, on_device = self.thinned.get(attempt), self.on_device.get(attempt, {})
        side_by_side, device = _side_by_side(_Unread(ranks, shape), shape), _Unread(on_device, shape)
        try:
            if thinned is not None and thinned.first_step and (opening := next(side_by_side, None)):
                # If the first steps were removed, cut the same windows as in the run; none is warm-up.
                warmup_steps = int(shape.warmup_steps - opening.step_B.min()) % shape.stride_steps
                shape = replace(shape, warmup_steps=warmup_steps, shrinks=shape.shrinks - {"warmup_steps"})
                side_by_side = chain([opening], side_by_side)
            gatherer = Gatherer(info.schema, info.world_size, shape, attempt=attempt)
            rings = {rank: steps.info for rank, steps in ranks.items()}
            for host in side_by_side:
                beside = together([host[:0], *device.up_to(int(host.step_B.max()))]) if on_device else None
                gatherer.take([Rows(attempt, info.schema, info.world_size, rings, host, beside)])
                yield from gatherer.ready()
        except RingError as error:
            raise InputError(str(error)) from error
        yield from gatherer.ready(ended=True)


def detection_of(path: Path) -> Detection:
    """The detection settings of a run; for anything else, the defaults of a policy."""
    policy_file = RunDirectory(path).policy_file
    return load(policy_file).policy.spec.detection if policy_file.is_file() else Detection()


def load_recording(path: Path) -> RecordedRun:
    """Read a run directory, a directory of step logs or rings, or an ``.npz``.

    Raises:
        InputError: it is neither, or its content cannot be used; the message names what and where.
    """
    if path.is_dir():
        return _load_run(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    return RecordedRun(path, load_npz(path), {})


def _load_run(path: Path) -> RecordedRun:
    steps_directory, directory = _places(path)
    host: defaultdict[int, dict[int, RankSteps]] = defaultdict(dict)
    device: defaultdict[int, dict[int, RankSteps]] = defaultdict(dict)
    try:
        kinds = ("steps", LOG_KIND, COUNTERS_KIND)
        found = {kind: find_logs(steps_directory, kind) if steps_directory.is_dir() else [] for kind in kinds}
        readings = {(log.attempt, log.rank): log for log in found[COUNTERS_KIND]}
        for log in found["steps"]:
            info = LogReader(log.newest).info
            host[info.attempt][info.rank] = RankSteps(info, log, readings.get((log.attempt, log.rank)))
        for log in found[LOG_KIND]:
            info = LogReader(log.newest, LOG_KIND).info
            device[info.attempt][info.rank] = RankSteps(info, log, of_device=True)
        for ring_path in find_rings(directory) if directory.is_dir() else ():
            with Ring(ring_path) as ring:
                ring.status()
                info, into_each = ring.info, (host, device) if ring.on_device else (host,)
            for into in into_each:
                known = into[info.attempt].get(info.rank, RankSteps(info, of_device=into is device))
                into[info.attempt][info.rank] = replace(known, ring=ring_path)
    except (RingError, OSError) as error:
        raise InputError(str(error)) from error
    for attempt, ranks in host.items():
        infos = [steps.info for steps in (*ranks.values(), *device.get(attempt, {}).values())]
        if len({(info.schema, info.world_size) for info in infos}) > 1:
            raise InputError(f"{steps_directory}: the ranks recorded different stages or world sizes")
    thinned = {}
    for attempt, ranks in host.items():
        logs = [steps.log for steps in ranks.values() if steps.log is not None and not steps.log.all_there]
        if (gone := thinning_of([LogReader(log) for log in logs])) is not None:
            thinned[attempt] = gone
    return RecordedRun(path, None, host, device, thinned)


def _places(path: Path) -> tuple[Path, Path]:
    """Where a run's step logs and rings are; without a run, both are in the directory itself."""
    run = RunDirectory(path)
    alone = not run.info_file.exists() and (find_logs(path) or find_rings(path))
    return (path, path) if alone else (run.steps, Path(read_info(run).rings))


class _Unread:
    def __init__(self, ranks: Mapping[int, RankSteps], shape: Shape) -> None:
        at_a_time = min(max(shape.window_steps, _MIN_STEPS_AT_A_TIME), _MAX_STEPS_AT_A_TIME)
        self._unread = {rank: steps.steps(at_a_time) for rank, steps in ranks.items()}
        self._held: dict[int, StepArrays] = {}

    def held(self) -> Mapping[int, StepArrays]:
        for rank in [rank for rank in self._unread if rank not in self._held]:
            steps = next(self._unread[rank], None)
            if steps:
                self._held[rank] = steps
            else:
                del self._unread[rank]
        return self._held

    def up_to(self, last: int) -> list[StepArrays]:
        taken: list[StepArrays] = []
        more = True
        while more:
            held, more = list(self.held().items()), False
            for rank, steps in held:
                take_B = steps.step_B <= last
                n_taken = int(np.count_nonzero(take_B))
                if n_taken:
                    # Steps that are in order, as most are, need no copy.
                    in_order = bool(take_B[:n_taken].all())
                    taken.append(steps[:n_taken] if in_order else steps[take_B])
                    self._held[rank] = steps[n_taken:] if in_order else steps[~take_B]
                if n_taken == len(steps):
                    # This rank's next steps may belong here too.
                    del self._held[rank]
                    more = True
        return taken


def _side_by_side(unread: _Unread, shape: Shape) -> Iterator[StepArrays]:
    """All ranks' steps by step number, at most one stride at a time."""
    while held := unread.held():
        # No rank will yield a step before the last one that it holds.
        last = min(int(steps.step_B.max()) for steps in held.values())
        first = min(int(steps.step_B.min()) for steps in held.values())
        yield together(unread.up_to(min(last, first + shape.stride_steps - 1)))


def _cut(whole: Window, shape: Shape) -> Iterator[Window]:
    def at(step: int) -> Shape:
        step_s = pace_s(whole.durations_NRS[step : step + LEAST_WINDOW_STEPS])
        return shape.at(step_s, min(whole.first_step + step, n_steps - step))

    n_steps = len(whole.durations_NRS)
    cut = at(0)
    first = min(cut.warmup_steps, max(0, n_steps - cut.window_steps))
    length = min((cut := at(first)).window_steps, n_steps)
    while first + length <= n_steps:
        start = whole.first_step + first
        yield whole.steps(start, start + length - 1)
        first += cut.stride_steps
        length = (cut := at(first)).window_steps
