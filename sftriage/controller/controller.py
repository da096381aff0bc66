"""One job's controller: judges windows, asks the policy, remembers and records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sftriage.controller.journal import Journal
from sftriage.errors import InputError
from sftriage.frontier import Baseline, Settings, judge
from sftriage.policy import LoadedPolicy, State, decide, finished, trigger
from sftriage.policy.schema import Detection
from sftriage.records import CaptureResult, Decision, Trigger, Verdict, Window
from sftriage.traces.rundir import write_atomically


@dataclass(frozen=True, slots=True)
class Judged:
    """One window's verdict, and what is to be done about it."""

    verdict: Verdict
    decision: Decision


def settings_of(detection: Detection) -> Settings:
    """The thresholds of a policy's ``detection``; the others are as they are."""
    return Settings(
        min_gain_fraction=detection.min_gain_fraction,
        min_persistence_fraction=detection.min_persistence,
        min_coverage_fraction=detection.min_coverage,
    )


class Controller:
    """Turns windows into decisions, under one policy.

    What it must not forget (cooldowns, captures made and running) is in ``state_file`` before a decision is handed out,
    so that a controller that starts again goes on where it stopped.

    Args:
        loaded: the policy.
        journal: where everything goes on record.
        state_file: where the engine's state is kept.

    Raises:
        InputError: the state file is there and is not one.
    """

    def __init__(self, loaded: LoadedPolicy, journal: Journal, state_file: Path) -> None:
        self._loaded = loaded
        self._journal = journal
        self._state_file = state_file
        self._settings = settings_of(loaded.policy.spec.detection)
        self._baselines: dict[int, Baseline | None] = {}
        self._triggers: dict[str, Trigger] = {}
        try:
            self._state = State.from_json(state_file.read_text(encoding="utf-8")) if state_file.exists() else State()
        except OSError as error:
            raise InputError(f"{state_file}: {error.strerror}") from error

    def take(self, window: Window, now_s: float) -> Judged:
        """Judge a window, decide, and put both on record. ``now_s``: seconds since the epoch."""
        # A job that starts again may run elsewhere, or with other data: each attempt has its own past.
        known = self._baselines.get(window.attempt)
        verdict, self._baselines[window.attempt] = judge(window, known, self._settings)
        decision, self._state = decide(verdict, self._loaded.policy, self._state, now_s)
        if decision.requests:
            self._remember()
            for request in decision.requests:
                self._triggers[request.capture_id] = trigger(verdict, self._loaded, decision.rule or "")
        self._journal.window(verdict, decision)
        return Judged(verdict, decision)

    def trigger_of(self, capture_id: str) -> Trigger:
        """Why a capture exists."""
        return self._triggers[capture_id]

    def ended(self, result: CaptureResult) -> None:
        """Put on record what became of a capture; its ranks may be captured again."""
        self._state = finished(self._state, result.capture_id)
        self._remember()
        self._journal.capture(result)

    def _remember(self) -> None:
        write_atomically(self._state_file, self._state.to_json())
