"""Reads from outside what the kernel's scheduler does with the ranks' training threads. Nothing runs in the trainers.

The training thread is taken to be the main one of the process that writes the ring, which is nearly always so. Where it
is not, it shows by a main thread that does not run while steps are taken, and nothing is said of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic_ns

import numpy as np

from sftriage.errors import RingError
from sftriage.recorder import RingInfo
from sftriage.recorder.files import start_ticks
from sftriage.traces.disk import Counted, Do, at_once, refusal
from sftriage.windows.decoding import IntArray, StepArrays
from sftriage.windows.scheduling import SchedulingLog, none_taken, of_ranks_laid_over
from sftriage.windows.steplog import KeptSteps

KEPT_READINGS = 8
"""Readings that are remembered: steps that have just ended began after the last few."""

_STATUS_BYTES = 16384
_SWITCHES = b"nonvoluntary_ctxt_switches:"

Say = Callable[[str], None]
Reading = tuple[int, int, int, int]
"""When, and since the thread started: nanoseconds run, nanoseconds queued, times preempted."""


class TrainingThread:
    """The counters of one rank's training thread. Its files stay open: what they say is never another process's.

    Raises:
        OSError: the process is not there, or not to be seen from here; or the kernel has no such files.
    """

    def __init__(self, info: RingInfo) -> None:
        folder = Path(f"/proc/{info.pid}/task/{info.pid}")
        self._descriptors: list[int] = []
        try:
            for name in ("schedstat", "status"):
                self._descriptors.append(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC))
            # Once they are open: until then the pid could have become another process's.
            if start_ticks(info.pid) != info.pid_start_ticks:
                raise ProcessLookupError(f"process {info.pid} is not the one that records")
        except BaseException:
            self.close()
            raise

    def read(self) -> Reading | None:
        """What has been counted by now; None where the kernel counts nothing.

        Raises:
            OSError: the process has ended.
        """
        at_ns = monotonic_ns()
        counters = os.pread(self._descriptors[0], 256, 0)
        status = os.pread(self._descriptors[1], _STATUS_BYTES, 0)
        counted = parsed(counters, status)
        return None if counted is None else (at_ns, *counted)

    def close(self) -> None:
        """Close its files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def parsed(counters: bytes, status: bytes) -> tuple[int, int, int] | None:
    """Nanoseconds run and queued, and times preempted, by a thread's ``schedstat`` and ``status``.

    None where they do not say: a kernel that is built, or told, not to count shows zeros, also of a thread that has
    run, and those are no answer.
    """
    words = counters.split()
    switches = status.rpartition(_SWITCHES)[2].split()
    if len(words) < 3 or not switches or not all(word.isdigit() for word in (*words[:3], switches[0])):
        return None
    run_ns, queued_ns, timeslices = map(int, words[:3])
    return None if timeslices == 0 else (run_ns, queued_ns, int(switches[0]))


@dataclass(slots=True)
class _Rank:
    """One rank's: its thread and the file of its readings, as far as there are any, and the last few readings.

    ``unseen`` counts how often steps have come of a process that is not to be seen.
    """

    readings_TK: IntArray
    log: SchedulingLog | None = None
    thread: TrainingThread | None = None
    unseen: int = 0
    over: bool = False


class Scheduling:
    """Takes a reading of each rank whose steps have come, keeps it, and lays what passed over the steps.

    What is wrong is told to ``say``, and may be told again. ``kept``: how much is kept of them; by default all. ``do``
    is who writes.
    """

    def __init__(self, steps: Path, say: Say, kept: KeptSteps | None = None, do: Do = at_once) -> None:
        self._steps, self._say, self._kept, self._do = steps, say, kept, do
        self._ranks: dict[tuple[int, int], _Rank] = {}

    def look(self, info: RingInfo) -> None:
        """Take a reading of a rank, after its new steps have been read."""
        one = self._ranks.get((info.attempt, info.rank))
        if one is None:
            one = self._ranks[info.attempt, info.rank] = _Rank(none_taken(KEPT_READINGS))
        reading = None if one.over else self._reading(one, info)
        if reading is not None:
            self._keep(one, info, reading)
            one.readings_TK[:-1] = one.readings_TK[1:]
            one.readings_TK[-1] = reading

    def laid_over(self, attempt: int, steps: StepArrays) -> StepArrays:
        """New steps of ranks, each of which was looked at after that, with what their threads waited where it is known.

        All of them at once: those of one rank would take as long.
        """
        if not len(steps):
            return steps
        ranks = np.unique(steps.rank_B)
        readings_RTK = np.stack([self._ranks[attempt, rank].readings_TK for rank in ranks.tolist()])
        return of_ranks_laid_over(readings_RTK, np.searchsorted(ranks, steps.rank_B), steps)

    def close(self) -> None:
        """Close every file."""
        for one in self._ranks.values():
            self._leave(one)
        self._ranks.clear()

    def _reading(self, one: _Rank, info: RingInfo) -> Reading | None:
        try:
            if one.thread is None:
                one.thread = TrainingThread(info)
            reading = one.thread.read()
        except OSError:
            self._unseen(one)
            return None
        if reading is None:
            self._say("the kernel counts no time in the run queue; whether a rank waited for a CPU is not known")
            self._leave(one)
        return reading

    def _unseen(self, one: _Rank) -> None:
        """A process that has ended publishes no more steps; one that goes on is in another namespace of processes."""
        if one.thread is not None:
            self._leave(one)
            return
        one.unseen += 1
        if one.unseen > 1:
            self._say("the trainers' threads are not seen in /proc; whether a rank waited for a CPU is not known")
            self._leave(one)

    def _keep(self, one: _Rank, info: RingInfo, reading: Reading) -> None:
        self._do(partial(self._write, one, info, reading), _lane(info), Counted("readings"), waits=False)

    def _write(self, one: _Rank, info: RingInfo, reading: Reading) -> None:
        try:
            if one.log is None:
                limits = None if self._kept is None else self._kept.whole(info.world_size)
                one.log = SchedulingLog(self._steps, info, limits)
            one.log.add(reading)
        except RingError as error:
            if refusal(error) is not None:
                raise
            self._say(f"{error}; how long threads waited for a CPU is judged but not always kept")

    def _leave(self, one: _Rank) -> None:
        one.over = True
        if one.thread is not None:
            one.thread.close()
            one.thread = None
        if one.log is not None:
            # (after what waits to be written)
            self._do(one.log.close, _lane(one.log.info), waits=False)


def _lane(info: RingInfo) -> str:
    return f"scheduling of {info.rank}.{info.attempt}"
