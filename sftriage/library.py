"""The method as functions: `load`, `account`, `judge`, `explain` and `whatif`, which `sftriage` exports.

Notebooks, scripts and tests call them (docs/library.md). They read the recording that they get, and change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sftriage.controller.controller import settings_of, shape_of
from sftriage.controller.replay import verdicts_and_pauses
from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import Window
from sftriage.runs.operations import operations_of
from sftriage.runs.recordings import RecordedRun, detection_of, load_recording
from sftriage.runs.whatif import WhatIf, whatif_of
from sftriage.verdict.accounting import Accounting, anchored, timed
from sftriage.windows.gather import Shape
from sftriage.words.verdicts import verdict_sentence


@dataclass(frozen=True, slots=True)
class RecordedWindows:
    """The windows of a recording in order; iterate as often as you like, steps are read each time.

    ``settings`` are the thresholds of the run's policy, or the defaults.
    """

    _recording: RecordedRun
    _shape: Shape
    settings: Settings

    def __iter__(self) -> Iterator[Window]:
        return self._recording.windows(self._shape)


def load(
    path: str | os.PathLike[str],
    *,
    window_steps: int | None = None,
    stride_steps: int | None = None,
    warmup_steps: int | None = None,
) -> RecordedWindows:
    """Open a recording: a run directory, a directory of step logs or rings, or an ``.npz`` (see `sftriage analyze`).

    Args:
        path: the directory or file.
        window_steps: steps per window; by default the run's, or 50. Without this option and ``stride_steps``, windows
            of long steps are shorter and windows of quick steps longer.
        stride_steps: steps from the start of one window to the next; by default the run's, or 10.
        warmup_steps: steps to skip at the start; by default the run's, or 20, and 0 for an ``.npz``.

    Raises:
        SftriageError: it is none of these, or cannot be read. The windows raise it too, for a damaged file.
    """
    source = Path(path)
    recording, detection = load_recording(source), detection_of(source)
    if warmup_steps is None and not source.is_dir():
        warmup_steps = 0
    cut = {"window_steps": window_steps, "stride_steps": stride_steps, "warmup_steps": warmup_steps}
    shape = shape_of(detection, **{name: steps for name, steps in cut.items() if steps is not None})
    return RecordedWindows(recording, shape, settings_of(detection))


def account(window: Window) -> Accounting:
    """The frontier of a window, anchored at its sync stages: where the exposed time went, stage by stage.

    On the devices' clock if it is known in most steps, as in `judge`. Sums are exact (StageFrontier, arXiv 2606.06751).
    """
    return anchored(timed(window, Settings()).window)


def judge(windows: Iterable[Window], settings: Settings | None = None) -> Iterator[Verdict]:
    """Judge windows in order, each with what the ones before have shown; the windows may come from a running job.

    Args:
        windows: those of one job. Each attempt (`Window.attempt`) is judged apart.
        settings: thresholds; by default those of `load`'s run, or the defaults of `Settings`.
    """
    if settings is None:
        settings = windows.settings if isinstance(windows, RecordedWindows) else Settings()
    return (verdict for verdict, _ in verdicts_and_pauses(windows, settings))


def explain(verdict: Verdict) -> str:
    """A verdict as one sentence, as every view prints it."""
    return verdict_sentence(verdict)


def whatif(window: Window, verdict: Verdict | None = None) -> WhatIf:
    """Replay a window without its stragglers (arXiv 2505.05713).

    Args:
        window: at least two complete, ordinary steps in a row; `Window.joined` joins windows that follow each other.
        verdict: the verdict on these steps, so that the result names the same rank.

    Raises:
        SftriageError: there are too few steps, or they take no time.
    """
    return whatif_of(operations_of(window, verdict))
