"""Experiment trackers, and the numbers and texts that they receive for a run's events, each at a step.

`VerdictLog` calls them in a thread of sftriage; they may raise. This module imports no tracker.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from sftriage.errors import UsageError
from sftriage.model.events import CaptureChanged, CauseFound, Event, RemedyChanged, WindowJudged
from sftriage.model.verdicts import Verdict
from sftriage.sinks.terminal import LineSink

NO_SUSPECT = -1.0
"""The rank to log if no rank is suspected."""


class Tracker(ABC):
    """A target for numbers and texts. ``settle`` is called regularly, to log delayed values.

    ``close`` is the last call; the tracker itself belongs to the script, and stays open.
    """

    @abstractmethod
    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def text(self, step: int, name: str, text: str) -> None: ...

    def settle(self) -> None:  # noqa: B027  # most trackers log at once
        pass

    def close(self) -> None:  # noqa: B027
        pass


class TensorBoard(Tracker):
    """The script's own `SummaryWriter`: TensorBoard follows only the last of several files of a run."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._closed = False

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._check_closed()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._check_closed()
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        # A writer that the script closed before the last verdicts is closed again.
        if self._closed:
            self._writer.close()
        else:
            self._writer.flush()

    def _check_closed(self) -> None:
        # A closed writer that is written to opens another file.
        self._closed = self._closed or getattr(self._writer, "all_writers", self) is None


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases.

    Its own step may only grow, and a late row is dropped: our rows are merged into those that the script logs, one
    into each, and have the training step as a separate axis.
    """

    STEP = "sftriage/step"

    def __init__(self, run: Any) -> None:
        self._run = run
        self._defined: set[str] = set()
        self._waiting: deque[dict[str, Any]] = deque()
        self._last: int | None = None
        self._open: dict[str, Any] = {}

    def text(self, step: int, name: str, text: str) -> None:
        self.numbers(step, {name: text})

    def settle(self) -> None:
        # One of our rows is merged into the next row of the script.
        if self._waiting and self._run.step != self._last:
            self._last, self._open = self._run.step, self._waiting.popleft()
            self._run.log(self._open, commit=False)

    def close(self) -> None:
        if self._run.step == self._last:
            # The last row was not merged yet: the next call of `log` would merge into it.
            self._waiting.appendleft(self._open)
        while self._waiting:
            self._run.log(self._waiting.popleft())

    def numbers(self, step: int, values: Mapping[str, Any]) -> None:
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=self.STEP)
            self._defined.add(name)
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last[self.STEP] == step:
            for name, value in values.items():
                last[name] = f"{last[name]}\n{value}" if name in last and isinstance(value, str) else value
        else:
            self._waiting.append({self.STEP: step, **values})


class MLflow(Tracker):
    """A run of MLflow, by an `MlflowClient`. Texts become tags, of which only the last value remains."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._run_id, name.replace("/", "."), f"step {step}: {text}")


def tracker_of(target: Any) -> Tracker:
    """The tracker for a target of `log_verdicts`; raises UsageError if the target is of no known kind."""
    if isinstance(target, MLflow):
        return target
    if hasattr(target, "add_scalar") and hasattr(target, "add_text"):
        return TensorBoard(target)
    module = type(target).__module__.partition(".")[0]
    if module == "wandb" and hasattr(target, "define_metric"):
        return WeightsAndBiases(target)
    if module == "mlflow" and hasattr(target, "info"):
        return MLflow(sys.modules["mlflow"].MlflowClient(), target.info.run_id)
    raise UsageError(
        f"log_verdicts({type(target).__name__}): expected a SummaryWriter of TensorBoard, a run of Weights & Biases"
        " (wandb.run) or of MLflow (mlflow.active_run())"
    )


class EntrySink(LineSink):
    """Makes the lines of the terminal, and the numbers, for trackers."""

    name = "trackers"

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._step = 0

    def entry(self, event: Event) -> tuple[int, Mapping[str, float], str, str]:
        """An event's log entry: the step, numbers by name, and a text with its name, or ""."""
        numbers: Mapping[str, float] = {}
        name = "sftriage/run"
        match event:
            case WindowJudged(verdict=verdict):
                self._step, name = max(self._step, verdict.last_step), "sftriage/verdict"
                numbers = {} if verdict.label == "stalled" else _numbers_of(verdict)
            case CaptureChanged(result=result):
                name = "sftriage/capture"
                if result.state == "stored" and result.last_step is not None:
                    self._step = max(self._step, result.last_step)
                    numbers = {"sftriage/captured_rank": float(result.rank)}
            case RemedyChanged():
                self._step, name = max(self._step, event.step), "sftriage/remedy"
            case CauseFound():
                name = "sftriage/cause"
        self._lines.clear()
        self.take(event)
        return self._step, numbers, name, "\n".join(self._lines)

    def say(self, text: str) -> None:
        self._lines.append(text)


def _numbers_of(verdict: Verdict) -> dict[str, float]:
    """Step time, and the exposed time of each stage that adds up to it; the suspected rank, and its gain."""
    named = verdict.named
    suspect = None if named is None or not named.ranks else named
    return {
        "sftriage/step_time_s": verdict.step_s,
        **{f"sftriage/exposed_s/{stage}": advance_s for stage, advance_s in verdict.advances_s.items()},
        "sftriage/suspect_rank": NO_SUSPECT if suspect is None else float(suspect.ranks[0]),
        "sftriage/suspect_gain_s": 0.0 if suspect is None else suspect.gain_s,
    }
