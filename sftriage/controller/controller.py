"""One job's controller: judges windows and standstills, asks the policy, remembers and records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sftriage.controller.journal import Journal
from sftriage.errors import InputError
from sftriage.frontier import Past, Settings, judge
from sftriage.frontier.stalls import StallSettings, Watch, look
from sftriage.policy import LoadedPolicy, State, decide, finished, trigger
from sftriage.policy.schema import Detection
from sftriage.records import CaptureResult, Decision, JobStatus, Trigger, Verdict, Window
from sftriage.traces.rundir import write_atomically


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, on a window or on a step that stalls, and what is to be done about it."""

    verdict: Verdict
    decision: Decision


def settings_of(detection: Detection) -> Settings:
    """The thresholds of a policy's ``detection``; the others are as they are."""
    return Settings(
        min_gain_fraction=detection.min_gain_fraction,
        min_persistence_fraction=detection.min_persistence,
        min_coverage_fraction=detection.min_coverage,
    )


def stall_settings_of(detection: Detection) -> StallSettings:
    """What a policy's ``detection`` says about stalls; the other thresholds are as they are."""
    return StallSettings(floor_s=detection.stalled_after_s)


class Controller:
    """Turns windows, and what the ranks are doing now, into decisions, under one policy.

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
        self._stall_settings = stall_settings_of(loaded.policy.spec.detection)
        self._watch = Watch()
        self._pasts: dict[int, Past] = {}
        self._triggers: dict[str, Trigger] = {}
        try:
            self._state = State.from_json(state_file.read_text(encoding="utf-8")) if state_file.exists() else State()
        except OSError as error:
            raise InputError(f"{state_file}: {error.strerror}") from error

    def take(self, window: Window, now_s: float) -> Judged:
        """Judge a window, decide, and put both on record. ``now_s``: seconds since the epoch."""
        # A job that starts again may run elsewhere, or with other data: each attempt has its own past.
        known = self._pasts.get(window.attempt)
        verdict, self._pasts[window.attempt] = judge(window, known, self._settings)
        self._watch = self._watch.with_window(window)
        return self._decided(verdict, now_s)

    def look(self, job: JobStatus, now_ns: int, now_s: float) -> Judged | None:
        """See whether the job stalls. A stall is decided and put on record when it begins, or its suspects change.

        Args:
            job: what every rank is doing.
            now_ns: now, on the host's monotonic clock, read after ``job`` was.
            now_s: seconds since the epoch.
        """
        capturing = {one.rank for one in self._state.running.values() if one.deadline_s > now_s}
        verdict, self._watch = look(job, self._watch, self._stall_settings, now_ns, capturing)
        return None if verdict is None else self._decided(verdict, now_s)

    def _decided(self, verdict: Verdict, now_s: float) -> Judged:
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
