"""Judges a demo run from its directory, for `sftriage demo` and benchmarks: did sftriage find the injected fault?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from sftriage.controller.controller import settings_of, shape_of
from sftriage.controller.replay import verdicts_and_pauses
from sftriage.demo.faults import Fault
from sftriage.demo.hanging import HANG_KINDS
from sftriage.model.captures import CaptureResult
from sftriage.model.events import CauseFound, WindowJudged
from sftriage.model.hangs import Hang
from sftriage.model.verdicts import Verdict
from sftriage.policy.schema import Detection
from sftriage.runs.decisions import decisions_of
from sftriage.runs.directory import RunDirectory
from sftriage.runs.hangs import read_hang
from sftriage.runs.journal import read_journal
from sftriage.runs.recordings import RecordedRun, load_recording
from sftriage.traces.manifest import CauseInfo
from sftriage.traces.store import LocalStore
from sftriage.windows.gather import Shape

Found = Literal["right", "wrong", "not named"]


class DemoOutcome:
    """A demo run, read from its directory; ``step_time_s`` has medians, or None without such steps."""

    def __init__(
        self,
        directory: RunDirectory,
        detection: Detection,
        steps: int,
        faults: Sequence[Fault],
        fault_step: int,
        captures: Sequence[CaptureResult],
    ) -> None:
        recording, store = load_recording(directory.path), LocalStore(directory.path)
        self.directory, self.faults = directory, tuple(faults)
        judged = verdicts_and_pauses(recording.windows(shape_of(detection)), settings_of(detection))
        self.verdicts = tuple(verdict for verdict, _ in judged)
        self.decisions = tuple(decisions_of(directory))
        self.hangs = any(fault.cause.hangs for fault in faults)
        self.stall, self.hang_cause = _stall_and_cause(directory)
        # Read again, because a capture's cost is known only after it.
        self.manifests = tuple(store.manifest(result.capture_id) for result in captures if result.state == "stored")
        self.hang = next((read_hang(store, each).hang for each in self.manifests if each.of_hang), None)
        self.failures = tuple(result for result in captures if result.state != "stored")
        fault_step = fault_step if faults else steps
        self.step_time_s = _step_times(recording, steps, detection.warmup_steps, fault_step)

    def values(self) -> dict[str, Any]:
        """The outcome as one JSON object."""
        return {
            "run_dir": str(self.directory.path),
            "faults": [str(fault) for fault in self.faults],
            "found": self.found,
            "windows": list(self.verdicts),
            "decisions": list(self.decisions),
            "captures": [manifest.model_dump(mode="json") for manifest in self.manifests],
            "step_time_s": self.step_time_s,
            "hang": self.hang,
        }

    @property
    def found(self) -> Found | None:
        """See `found` and `found_hang`."""
        return found_hang(self.faults, self.hang) if self.hangs else found(self.faults, self.causes())

    def causes(self) -> tuple[tuple[int, CauseInfo], ...]:
        """The causes found for captured suspects, each with its rank, in order of time."""
        suspects = (each for each in self.manifests if each.capture.role == "suspect")
        findings = ((each.capture.rank, each.findings) for each in suspects)
        return tuple((rank, reduced.cause) for rank, reduced in findings if reduced and reduced.cause)

    def verdict_shown(self) -> Verdict | None:
        """The verdict that led to the first capture; without one, the last that was not healthy, or the last."""
        first_steps = {manifest.trigger.window.first_step for manifest in self.manifests[:1]}
        led = [verdict for verdict in self.verdicts if verdict.first_step in first_steps]
        unhealthy = [verdict for verdict in self.verdicts if verdict.label != "healthy"]
        return next(iter(led or unhealthy[-1:] or self.verdicts[-1:]), None)


def found(faults: Sequence[Fault], causes: Sequence[tuple[int, CauseInfo]]) -> Found | None:
    """Whether the first cause found, and its rank, match an injected fault; None if there is neither.

    In a healthy job, any cause is wrong.
    """
    rank, first = next(((rank, cause) for rank, cause in causes if cause.code != "unknown"), (None, None))
    if first is None:
        return "not named" if faults else None
    # (Python 3.10 does not report the class of a function)
    function = "" if first.place is None else first.place.function.rpartition(".")[2]
    injected = (fault.cause for fault in faults if fault.rank == rank)
    right = any(first.code in cause.codes and cause.function in ("", function) for cause in injected)
    return "right" if right else "wrong"


def found_hang(faults: Sequence[Fault], hang: Hang | None) -> Found:
    """Whether a hang, its rank and one of its lines match an injected fault."""
    if hang is None or hang.kind == "unknown":
        return "not named"
    calls = [hang.call.frames[0]] if hang.call is not None and hang.call.frames else []
    places = (place for blocked in hang.blocked for place in (blocked.place, blocked.worker_at))
    # (newer versions of Python report the class of a function)
    functions = {place.function.rpartition(".")[2] for place in (*calls, *places) if place is not None}
    injected = (fault.cause for fault in faults if hang.ranks == (fault.rank,))
    right = any(hang.kind in cause.codes and cause.function in functions for cause in injected)
    return "right" if right else "wrong"


def _stall_and_cause(directory: RunDirectory) -> tuple[Verdict | None, CauseFound | None]:
    """The first stall of a run, and the first cause of one."""
    events = list(read_journal(directory.decisions))
    judged = (event.verdict for event in events if isinstance(event, WindowJudged))
    causes = (event for event in events if isinstance(event, CauseFound) and event.code in HANG_KINDS)
    return next((verdict for verdict in judged if verdict.label == "stalled"), None), next(causes, None)


def _step_times(recording: RecordedRun, steps: int, warmup_steps: int, fault_step: int) -> dict[str, float | None]:
    """Median seconds from one step to the next: before the fault, in it, while a profiler ran, and after that."""
    whole = next(recording.windows(Shape(steps, steps, 0)), None)
    if whole is None:
        return dict.fromkeys(("before_fault", "in_fault", "in_capture", "after_capture"))
    between_NR = np.zeros(()) if whole.between_NR is None else whole.between_NR
    # Ranks keep step with each other: any of them shows the job's pace, the median rank best.
    time_N = np.nanmedian(whole.durations_NRS.sum(axis=2) + between_NR, axis=1)
    step_N = np.arange(steps) + whole.first_step
    capturing_N = np.zeros(steps, dtype=bool) if whole.capturing_N is None else whole.capturing_N
    captured = step_N[capturing_N]
    first, last = (captured[0], captured[-1]) if len(captured) else (steps, steps)
    parts = {
        "before_fault": (step_N >= warmup_steps) & (step_N < fault_step) & ~capturing_N,
        "in_fault": (step_N >= fault_step) & (step_N < first),
        "in_capture": capturing_N,
        "after_capture": step_N > last,
    }
    return {name: float(np.median(time_N[part])) if part.any() else None for name, part in parts.items()}
