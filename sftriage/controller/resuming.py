"""What an earlier controller of a run has left, as its records have it: the next one goes on, and repeats nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sftriage.decisions import ENDED, CaptureRequest, Trigger
from sftriage.events import (
    CaptureChanged,
    Event,
    FollowUpDecided,
    JournalCompacted,
    ManualRequestDecided,
    RemedyChanged,
    WindowJudged,
)
from sftriage.policy.losses import Losses


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What was done, and what was begun.

    Attributes:
        decided: for each attempt, the last step of the last window that was decided.
        judged: and the first and the last step of that window.
        losses: what stragglers have cost by then.
        remedies: what was done about them.
        unended: captures that were asked for and have not ended, with why they exist, by id.
        attempts: of which attempt's ranks these, and others, were asked.
        request_ids: the manual requests that were decided.
        n_windows, n_stored: how many windows were judged, and captures stored.
    """

    decided: Mapping[int, int] = field(default_factory=dict)
    unended: Mapping[str, tuple[CaptureRequest, Trigger]] = field(default_factory=dict)
    request_ids: frozenset[str] = frozenset()
    attempts: Mapping[str, int] = field(default_factory=dict)
    judged: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    remedies: tuple[RemedyChanged, ...] = ()
    n_windows: int = 0
    n_stored: int = 0


def resume_state(events: Iterable[Event]) -> ResumeState:
    """What a run's records, in order, say is left to be done."""
    decided: dict[int, int] = {}
    judged: dict[int, tuple[int, int]] = {}
    unended: dict[str, tuple[CaptureRequest, Trigger]] = {}
    request_ids: set[str] = set()
    attempts: dict[str, int] = {}
    losses = Losses()
    remedies: list[RemedyChanged] = []
    n_windows, stored = 0, set[str]()
    for event in events:
        if isinstance(event, CaptureChanged):
            if event.result.state in ENDED:
                unended.pop(event.result.capture_id, None)
            if event.result.state == "stored":
                stored.add(event.result.capture_id)
        elif isinstance(event, RemedyChanged):
            remedies.append(event)
        elif isinstance(event, JournalCompacted):
            losses, n_windows = Losses.of_values(event.losses), event.dropped
        elif isinstance(event, WindowJudged | ManualRequestDecided | FollowUpDecided):
            unended |= {
                one.capture_id: (one, event.triggers[one.capture_id])
                for one in event.decision.requests
                if one.capture_id in event.triggers
            }
            attempts |= {one.capture_id: event.decision.attempt for one in event.decision.requests}
        if isinstance(event, WindowJudged) and event.verdict.label != "stalled":
            n_windows += 1
            attempt, last_step = event.verdict.attempt, event.verdict.last_step
            decided[attempt] = max(last_step, decided.get(attempt, last_step))
            judged[attempt] = max((event.verdict.first_step, last_step), judged.get(attempt, (-1, -1)))
            losses = losses.after(event.verdict)
        elif isinstance(event, ManualRequestDecided):
            request_ids.add(event.request.request_id)
    counts = n_windows, len(stored)
    return ResumeState(decided, unended, frozenset(request_ids), attempts, judged, losses, tuple(remedies), *counts)
