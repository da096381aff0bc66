"""Records under a training framework, and logs its run's verdicts to trackers; never raises into the training loop."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftriage.base.loops import start_thread
from sftriage.log import warn
from sftriage.trainer.monitor import RUN_ENV

if TYPE_CHECKING:
    from sftriage.integrations.trackers import EntrySink, Tracker
    from sftriage.trainer.seams.patches import Seams

POLL_S = 0.5
"""Seconds between two reads of the journal."""

QUIET_S, LINGER_S = 1.5, 4.0
"""Seconds to wait at the end, after the last new verdict and at most."""


def log_verdicts(*targets: Any) -> VerdictLog:
    """Log step time, exposed time by stage, suspects and captures, beside the script's own metrics.

    Logs in a thread of its own; each value at the last step of its window. Call it where the loss is logged: on one
    rank, on the host of ``sftriage run``. Without ``sftriage run`` it does nothing.

    Each target is a `SummaryWriter` of TensorBoard, a run of Weights & Biases (``wandb.run``) or of MLflow
    (``mlflow.active_run()``), or None; raises UsageError for any other. The log's ``close`` waits for verdicts on the
    last steps; otherwise the end of the process does.
    """
    from sftriage.integrations.trackers import tracker_of

    trackers = [tracker_of(target) for target in targets if target is not None]
    run = os.environ.get(RUN_ENV) if trackers else None
    return VerdictLog(trackers, Path(run)) if run else VerdictLog()


def active_runs() -> list[Any]:
    """The active runs of Weights & Biases and MLflow in this process; imports nothing."""
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    runs = [getattr(wandb, "run", None), mlflow.active_run() if hasattr(mlflow, "active_run") and mlflow else None]
    return [run for run in runs if run is not None]


class VerdictLog:
    """Logs the verdicts of a run to trackers until it is closed. Without trackers it does nothing."""

    def __init__(self, trackers: Sequence[Tracker] = (), run: Path = Path()) -> None:
        self._trackers = list(trackers)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        if trackers:
            from sftriage.integrations.trackers import EntrySink
            from sftriage.runs.journal import Appended

            sink, journal = EntrySink(), run / "decisions.jsonl"
            # (existing lines belong to another training in this run, or to an earlier attempt)
            appended = Appended(journal, lambda line: self._log(sink, line), lambda: None, skip=True)
            self._thread = start_thread("verdicts", self._run, appended.follow, journal)
            atexit.register(self.close)

    def close(self) -> None:
        """Wait briefly for verdicts on the last steps, and log them. A second call does nothing."""
        thread, self._thread = self._thread, None
        # (in a forked child there is no such thread)
        if thread is not None and thread.is_alive():
            atexit.unregister(self.close)
            self._ending.set()
            thread.join(2 * LINGER_S)

    def _run(self, follow: Callable[[], bool], journal: Path) -> None:
        try:
            while not self._ending.wait(POLL_S):
                follow()
                self._each(lambda tracker: tracker.settle())
            ended_s = latest_s = time.monotonic()
            while (now_s := time.monotonic()) < min(latest_s + QUIET_S, ended_s + LINGER_S):
                if follow():
                    latest_s = now_s
                time.sleep(POLL_S / 10)
            if not journal.exists():
                warn("no verdicts to log: %s is not on this host", journal)
        except Exception as error:
            warn("stopped logging verdicts: %r", error)
        self._each(lambda tracker: tracker.close())

    def _log(self, sink: EntrySink, line: bytes) -> None:
        from sftriage.model.events import decode

        try:
            event = decode(line)
        except (ValueError, RecursionError):
            return
        if event is not None:
            step, numbers, name, text = sink.entry(event)
            if numbers:
                self._each(lambda tracker: tracker.numbers(step, numbers))
            if text:
                self._each(lambda tracker: tracker.text(step, name, text))

    def _each(self, action: Callable[[Tracker], object]) -> None:
        """Call ``action`` with each tracker; drop a tracker that raises."""
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                warn("stopped logging verdicts to %s: %r", type(tracker).__name__, error)


class Lead:
    """Records the loop of a framework that reports the ends and kinds of its steps; stages come from torch's seams.

    Never raises. Records no stages if the job is not recorded, or the script creates a `Monitor` itself.
    """

    def __init__(self) -> None:
        self._seams: Seams | None = None
        self.log = VerdictLog()

    def begin(self, targets: Sequence[Any] = (), *, optimizers: bool = False, first_step: int = 0) -> None:
        """Training begins.

        Args:
            targets: where to log verdicts (`log_verdicts`).
            optimizers: steps end when the optimizers step, not when the framework calls `ended`.
            first_step: the number of the loop's first step, with ``optimizers``.
        """
        try:
            if "torch" in sys.modules:
                from sftriage.trainer.seams import patches

                self._seams = patches.lead()
        except Exception as error:
            warn("cannot record stages: %r", error)
        if self._seams is not None:
            self._seams.steps.led, self._seams.steps.first = not optimizers, first_step
        try:
            self.log = log_verdicts(*targets)
        except Exception as error:
            warn("cannot log verdicts: %r", error)

    def ended(self, next_number: int) -> None:
        """A step has ended; ``next_number`` is that of the next step."""
        self._call(lambda seams: seams.steps.ended(next_number))

    def note(self, kind: str) -> None:
        """This step is of a special kind (`sftriage.trainer.seams.steps`)."""
        self._call(lambda seams: seams.steps.note(kind))

    def stop(self) -> None:
        """Training is over. Waits briefly for verdicts on the last steps. A second call does nothing."""
        self._call(lambda seams: seams.stop())
        self._seams = None
        self.log.close()

    def _call(self, action: Callable[[Seams], object]) -> None:
        try:
            if self._seams is not None:
                action(self._seams)
        except Exception as error:
            self._seams = None
            warn("stopped recording stages: %r", error)
