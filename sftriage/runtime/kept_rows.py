"""The steps of all hosts of a job, kept in the run directory as one host's are kept there: a log a rank.

A large job has more logs than a process may have open files, and than are to be written every second: no file is open
between two writes, and the logs of a host are written once its turn comes, with all that has come by then. Those of a
small job are written at once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from sftriage.agent.reading import RankLog
from sftriage.recorder import RingInfo
from sftriage.traces.disk import Counted, Disk, at_once
from sftriage.windows.decoding import StepArrays, together
from sftriage.windows.logs import LOG_KIND
from sftriage.windows.steplog import KeptSteps, blocks_of, find_segments

LOGS_PER_SECOND = 256
"""So many logs are written a second, if there are so many."""
MAX_LANES = 128
"""While the disk has so much to do, nothing is asked of it that has time."""
MAX_HELD_BYTES = 32 << 20
"""Of what waits for its turn: with more, others are written sooner than that."""


@dataclass(slots=True)
class _Held:
    """What waits to be written of one agent's ranks, in one generation: the first of it was at ``position``."""

    agent: str
    generation: int
    position: int
    infos: Mapping[int, RingInfo]
    parts: dict[str, list[StepArrays]] = field(default_factory=dict)
    n_steps: int = 0
    size_bytes: int = 0


class KeptRows:
    """Keeps steps of all ranks for `sftriage.fleet.over_nats.NatsFleet`; nothing else writes to the logs' directory.

    ``say`` gets what cannot be kept at all; ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        steps: Path,
        kept: KeptSteps | None,
        disk: Disk,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._kept, self._disk, self._say, self._clock = steps, kept, disk, say, clock
        self._held: OrderedDict[tuple[int, str], _Held] = OrderedDict()
        self._held_bytes = 0
        self._room, self._looked_s = float(LOGS_PER_SECOND), clock()
        self._blocks: defaultdict[int, set[int]] = defaultdict(set)
        # Of the disk's thread: the logs that are written to, all that were, and those that an earlier controller left.
        self._logs: dict[tuple[int, int, str], RankLog] = {}
        self._made: set[tuple[int, int, str]] = set()
        self._newest = 0
        self._left: dict[tuple[int, int], dict[str, list[Path]]] | None = None
        self._lock = threading.Lock()
        disk.holds_back(self._write_all)

    @property
    def position(self) -> int | None:
        """Where in the stream the first of what waits is; None where nothing does."""
        first = next(iter(self._held.values()), None)
        return None if first is None else first.position

    def take(
        self,
        agent: str,
        position: int,
        generation: int,
        infos: Mapping[int, RingInfo],
        steps: StepArrays,
        device: StepArrays | None,
    ) -> None:
        """Take steps, and device times where there are any, of ranks of one agent, which are of one generation."""
        with self._lock:
            held = self._held.get((generation, agent))
            if held is not None and held.infos is not infos and held.infos != infos:
                self._have_written([self._pop((generation, agent))])
                held = None
            if held is None:
                held = self._held[generation, agent] = _Held(agent, generation, position, infos)
            for kind, part in (("steps", steps), (LOG_KIND, device)):
                if part is None:
                    continue
                # (what was counted is in no log of steps)
                held.parts.setdefault(kind, []).append(replace(part, counted_BC=None))
                held.n_steps += len(part)
                held.size_bytes += part.slots_BW.nbytes
                self._held_bytes += part.slots_BW.nbytes
            if steps.capturing_B.any():
                self._blocks[generation] |= blocks_of(steps)
                # These are looked into once the capture is stored.
                self._have_written([self._pop((generation, agent))], last=False)

    def turn(self) -> None:
        """Have written what is due."""
        now_s = self._clock()
        self._room = min(LOGS_PER_SECOND, self._room + (now_s - self._looked_s) * LOGS_PER_SECOND)
        self._looked_s = now_s
        self._room -= self._write(self._room if self._disk.lanes < MAX_LANES else 0)

    def _write_all(self) -> None:
        self._write(float("inf"))

    def _write(self, n_logs: float) -> int:
        with self._lock:
            some: list[_Held] = []
            number = 0
            while self._held and (number < n_logs or self._held_bytes > MAX_HELD_BYTES):
                some.append(self._pop(next(iter(self._held))))
                number += len(some[-1].infos)
            self._have_written(some)
            return number

    def _pop(self, at: tuple[int, str]) -> _Held:
        held = self._held.pop(at)
        self._held_bytes -= held.size_bytes
        return held

    def _have_written(self, some: Sequence[_Held], *, last: bool = True) -> None:
        for held in some:
            counted = Counted("steps", held.n_steps, held.size_bytes)
            blocks = frozenset(self._blocks[held.generation])
            lane = f"steps of {held.agent} in {held.generation}"
            self._disk.do(partial(self._append, held, blocks), lane, counted, waits=False, last=last)

    def _append(self, held: _Held, blocks: frozenset[int]) -> None:
        """In the disk's thread. What the disk refuses is tried again, and what is in a log by then is left out."""
        if held.generation > self._newest:
            self._newest = held.generation
            for old in [at for at in self._logs if at[0] < self._newest - 1]:
                self._logs.pop(old).close()
        for kind, parts in held.parts.items():
            steps = together(parts)
            order_B = np.argsort(steps.rank_B, kind="stable")
            steps = steps[order_B]
            ranks = list(held.infos)
            begin_K, end_K = (np.searchsorted(steps.rank_B, ranks, side) for side in ("left", "right"))
            for rank, begin, end in zip(ranks, begin_K.tolist(), end_K.tolist(), strict=True):
                info = held.infos[rank]
                log = self._log(held.generation, info, kind)
                log.take(steps[begin:end], blocks, info.cohort)
                log.rest()

    def _log(self, generation: int, info: RingInfo, kind: str) -> RankLog:
        at = generation, info.rank, kind
        if at not in self._logs:
            if self._left is None:
                self._left = defaultdict(dict)
                for name, path in find_segments(self._steps):
                    self._left[name.attempt, name.rank].setdefault(name.kind, []).append(path)
            # (one that was written to before has more files by now)
            there = None if at in self._made else self._left.get((generation, info.rank), {})
            self._made.add(at)
            self._logs[at] = RankLog(self._steps, info, kind, self._kept, at_once, self._say, there)
        return self._logs[at]
