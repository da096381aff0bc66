"""A row as it was recorded: its truth, its windows, and how much slower the job really was."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.hidden_rank_matrix.rows import Outcome, Row
from sftriage.records import Window
from sftriage.runs.recordings import load_recording
from sftriage.windows.gather import Shape

FULL_FRACTION = 0.85
"""A window with this much of the most that any window has of the fault is as full of it as any."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One row: what it is, how running it went, and its windows in order."""

    path: Path
    row: Row
    outcome: Outcome
    windows: tuple[Window, ...]

    @property
    def judged(self) -> int:
        """The window that counts: the last one that is as full of the fault as any; -1 where there is no window."""
        fills = [self.filled(window) for window in self.windows]
        full = [index for index, filled in enumerate(fills) if filled >= FULL_FRACTION * max(fills)]
        return full[-1] if full else -1

    def filled(self, window: Window) -> float:
        """The mean delay of a window's steps as it was meant, as a fraction of the healthy step."""
        steps = range(window.first_step, window.last_step + 1)
        return sum(self.row.fraction_at(step) for step in steps) / len(steps)

    @property
    def slowdown(self) -> float:
        """How much longer the judged window's steps took than healthy ones, as a fraction; NaN where that is unknown.

        Healthy are the recorded steps before the onset where there are enough, and else those of the calibration.
        """
        if self.judged < 0:
            return math.nan
        window = self.windows[self.judged]
        before = [_walls_s(earlier) for earlier in self.windows if earlier.last_step < self.row.truth.onset]
        walls_s = _walls_s(window)
        healthy_s = float(np.median(np.concatenate(before))) if before else self.outcome.healthy_step_s
        return float(walls_s.mean()) / healthy_s - 1.0 if walls_s.size and healthy_s > 0.0 else math.nan


def _walls_s(window: Window) -> Any:
    """Each complete step's time on the rank that took longest, the time before it included."""
    totals_NR = window.durations_NRS.sum(axis=2)
    if window.between_NR is not None:
        totals_NR = totals_NR + window.between_NR
    there_N = np.isfinite(totals_NR).any(axis=1)
    return np.nanmax(totals_NR[there_N], axis=1) if there_N.any() else np.zeros(0)


def read_row(path: Path, shape: Shape) -> Recorded:
    """The row kept in a directory; one that failed has no windows."""
    document = json.loads((path / "row.json").read_text(encoding="utf-8"))
    outcome = Outcome(**document["outcome"])
    windows: Sequence[Window] = () if outcome.failed else tuple(load_recording(path).windows(shape))
    return Recorded(path, msgspec.convert(document["row"], Row), outcome, tuple(windows))


def kept_rows(directory: Path) -> list[Path]:
    """The rows kept in a directory, or in directories in it."""
    return sorted(path.parent for path in directory.rglob("row.json"))
