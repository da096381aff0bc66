"""Windows of a job from what its agents send, one generation after the other; and a suspect's peers in one."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from sftriage.model.events import Span
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import Window
from sftriage.verdict.accounting import known_medians
from sftriage.windows.decoding import together
from sftriage.windows.gather import Gatherer, Shape, StepTimes
from sftriage.windows.rings import Rows

log = logging.getLogger("sftriage")

HELD_BYTES = 64 << 20
"""Size of the windows that are held while a capture runs: its steps are read once it is stored."""

Kept = Callable[[int, int, int], "Window | None"]
"""Steps that are held no longer: by generation, first and last step; None where they are not there either."""


class WindowAssembly:
    """Puts windows together, of every generation until another one has followed it.

    ``kept`` gives steps that are held no longer. ``judged`` has the first and last step of the last window that an
    earlier controller has judged, by generation.
    """

    def __init__(
        self,
        shape: Shape,
        kept: Kept = lambda generation, first_step, last_step: None,
        judged: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self._shape, self._kept = shape, kept
        self._due = {
            generation: first + shape.stride_after(last - first + 1) for generation, (first, last) in judged.items()
        }
        self._gatherers: dict[int, Gatherer] = {}
        self._foreign: set[tuple[int, tuple[int, ...]]] = set()
        self._on_device: set[int] = set()
        self._times = StepTimes(2 * shape.window_steps)
        self._held: deque[Window] = deque()
        # Of each agent's rows that windows to come may need: generation and last step, and position.
        self._needed: defaultdict[str, deque[tuple[tuple[int, int], int]]] = defaultdict(deque)

    def add(self, sent: Sequence[Rows], *, ended: bool = False, hold: bool = False) -> list[Window]:
        """Take rows; the windows that are ready by them. With ``ended``, the job's last ones too.

        With ``hold``, `steps` has those of the newest windows at once; without, none are held but for windows to come.
        """
        of_generation: dict[int, list[Rows]] = {}
        for rows in sent:
            of_generation.setdefault(rows.generation, []).append(rows)
            if len(rows.steps):
                last_step = rows.generation, int(rows.steps.step_B.max())
                self._needed[rows.agent].append((last_step, rows.position))
        for _, some in sorted(of_generation.items()):
            self._take(some)
        windows = []
        for generation, gatherer in sorted(self._gatherers.items()):
            # A generation that another one has followed is over.
            over = generation < max(self._gatherers)
            windows += gatherer.ready(ended=ended or over)
            if over:
                del self._gatherers[generation]
        if not hold:
            self._held.clear()
            return windows
        self._held += windows
        while len(self._held) > 1 and sum(one.durations_NRS.nbytes for one in self._held) > HELD_BYTES:
            self._held.popleft()
        return windows

    def settled(self, window: Window) -> Mapping[str, int]:
        """A window is on record: up to which position each agent's rows are in no window to come.

        A controller that takes over sees the steps after these first, and passes over as many as its warm-up has.
        """
        stride = self._shape.stride_after(len(window.durations_NRS))
        next_step = (window.attempt, window.first_step + stride - self._shape.warmup_steps)
        positions: dict[str, int] = {}
        for agent, needed in self._needed.items():
            while needed and needed[0][0] < next_step:
                _, positions[agent] = needed.popleft()
        return positions

    def spans(self, window: Window) -> Mapping[int, Span]:
        """From when to when each step of a window was, by number, as far as that is known."""
        return self._times.of(window.attempt, window.first_step, window.last_step)

    def steps(self, generation: int, first_step: int, last_step: int) -> Window | None:
        """Some of the newest steps; None where they are not there."""
        gatherer = self._gatherers.get(generation)
        held = None if gatherer is None else gatherer.cut(first_step, last_step)
        if held is not None:
            return held
        for window in reversed(self._held):
            if window.attempt == generation and window.first_step <= first_step <= last_step <= window.last_step:
                return window.steps(first_step, last_step)
        if gatherer is None or generation in self._on_device:
            return None
        return self._kept(generation, first_step, last_step)

    def _take(self, sent: Sequence[Rows]) -> None:
        """Take rows of one generation, of all hosts at once: no window is given up for steps that are there."""
        first = sent[0]
        if first.generation < max(self._gatherers, default=first.generation):
            return
        gatherer = self._gatherers.get(first.generation)
        if gatherer is None:
            due = self._due.get(first.generation)
            gatherer = Gatherer(first.schema, first.world_size, self._shape, attempt=first.generation, due=due)
            self._gatherers[first.generation] = gatherer
        sent = [rows for rows in sent if self._belongs(rows, gatherer)]
        if not sent:
            return
        for rows in sent:
            for rank, place in rows.ranks.items():
                gatherer.describe(rank, place.host, place.cohort)
            if rows.away:
                gatherer.away(rows.away)
        steps = together([rows.steps for rows in sent])
        self._times.note(
            first.generation, steps, np.repeat([rows.wall_ns for rows in sent], [len(rows.steps) for rows in sent])
        )
        of_devices = [rows.device_steps for rows in sent if rows.device_steps is not None]
        if not of_devices:
            gatherer.add(steps)
            return
        self._on_device.add(first.generation)
        gatherer.runs_on_device()
        gatherer.add_both(steps, together(of_devices))
        for rank in (rank for rows in sent for rank in rows.device_over):
            gatherer.device_over(rank)

    def _belongs(self, rows: Rows, gatherer: Gatherer) -> bool:
        """Whether rows are of the stages of their generation. Ranks that record others count as missing."""
        if gatherer.takes(rows.schema, rows.world_size):
            return True
        who = rows.generation, tuple(sorted(rows.ranks))
        if who not in self._foreign:
            self._foreign.add(who)
            log.warning("ranks %s record other stages than the others; they count as missing", who[1])
        return False


def peers_of(verdict: Verdict, window: Window | None, ranks: Iterable[int] = ()) -> tuple[int, ...]:
    """The other ranks of the first suspect's cohort, the most typical first; those that are suspected too come last.

    Whether one of those is healthy beside the first is the policy's to say (`policy.engine.HEALTHY_GAIN_FRACTION`).
    Where there is no window yet, they are of ``ranks``, in order.
    """
    if not verdict.suspects:
        return ()
    suspected = {rank for suspect in verdict.suspects for rank in suspect.ranks}
    if window is None:
        return tuple(sorted(set(ranks) - suspected))
    # What each rank takes by itself in a step, in the median; NaN for one that has no step.
    local = [at for at, stage in enumerate(window.schema.stages) if stage not in window.schema.sync]
    total_NR = window.durations_NRS[:, :, local].sum(axis=2)
    if window.ready_NR is not None:
        total_NR = total_NR + np.nan_to_num(window.ready_NR, nan=0.0)
    local_R = known_medians(total_NR.T)
    roles = window.cohorts or ("",) * len(local_R)
    wanted = {roles[rank] for rank in verdict.suspects[0].ranks if rank < len(roles)}
    able = [
        rank
        for rank, local_s in enumerate(local_R)
        if rank not in verdict.suspects[0].ranks and roles[rank] in wanted and not np.isnan(local_s)
    ]
    if not able:
        return ()
    healthy = [rank for rank in able if rank not in suspected] or able
    apart = np.abs(local_R[able] - np.median(local_R[healthy]))
    order = sorted(range(len(able)), key=lambda at: (able[at] in suspected, apart[at]))
    return tuple(able[at] for at in order)
