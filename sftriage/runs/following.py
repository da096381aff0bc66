"""Following a run's journal: what was appended since the last look, each line once.

The journal lies on a disk that others can write to: a line that is too long, or is no entry, is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sftriage.errors import RingError
from sftriage.events import MAX_EVENT_BYTES, CaptureChanged, FollowUpDecided, ManualRequestDecided, WindowJudged
from sftriage.recorder import files
from sftriage.records import (
    ENDED,
    CaptureResult,
    CaptureState,
    Clock,
    Decision,
    Label,
    Outcome,
    Parameter,
    Pattern,
    ReasonCode,
    Suspect,
    Verdict,
)
from sftriage.runs.journal import event_of
from sftriage.runs.notes import (
    MAX_NAMED,
    MAX_S,
    MAX_TEXT,
    RequestedCapture,
    RequestRow,
    Row,
    asked_in,
    bounded,
    note_of,
    request_row,
)
from sftriage.words import reason_sentence, resolution, verdict_sentence, when, where, who

__all__ = ["JournalTail", "NamedSuspect", "RequestRow", "RequestedCapture", "WindowRow", "row_of"]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NamedSuspect:
    """A suspect in words, and its numbers (see `records.Suspect`)."""

    who: str
    where: str
    when: str
    ranks: tuple[int, ...]
    stage: str | None
    gain_s: float
    share: float
    persistence: float
    pattern: Pattern


@dataclass(frozen=True, slots=True)
class WindowRow:
    """What is kept of one window: its verdict and the decision on it.

    ``stages`` and ``advances_s`` go together, and the latter sum to ``exposed_s``. ``named`` is the first suspect in a
    few words, "" where there is none, and ``onset_step`` where that one began. ``suspects`` are the first few, each
    with the first few of its ranks, ``coverage`` the fraction of the window's vectors that were there, and ``clock``
    the one that its times are on. ``words`` say ``reason`` with its ``parameters``.
    """

    first_step: int
    last_step: int
    attempt: int
    time_s: float
    label: Label
    reasons: tuple[str, ...]
    exposed_s: float
    stages: tuple[str, ...]
    advances_s: tuple[float, ...]
    sentence: str
    named: str
    onset_step: int | None
    outcome: Outcome
    reason: ReasonCode
    parameters: Mapping[str, Parameter]
    words: str
    resolves: str
    rule: str
    asked: tuple[RequestedCapture, ...] = ()
    suspects: tuple[NamedSuspect, ...] = ()
    coverage: float | None = None
    clock: Clock = "host"


@dataclass(slots=True)
class JournalTail:
    """What a journal says so far.

    Attributes:
        path: the journal.
        rows: its windows in order.
        results: what became of captures that have ended, by id.
        states: how far each is.
        asks: what was asked for beside them, in order.
        notes: what else is on record, in order: policies, costs, evidence, take-overs.
        skipped: lines that were no entries of a known type.
    """

    path: Path
    rows: list[WindowRow] = field(default_factory=list)
    results: dict[str, CaptureResult] = field(default_factory=dict)
    states: dict[str, CaptureState] = field(default_factory=dict)
    asks: list[RequestRow] = field(default_factory=list)
    notes: list[Row] = field(default_factory=list)
    skipped: int = 0
    _at: int = 0
    _inode: int = 0
    _rest: bytes = b""
    _passing_over: bool = False
    _stages: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def follow(self) -> bool:
        """Read what has been appended; whether there was anything. A journal that shrank is read anew."""
        try:
            descriptor = files.open_regular(self.path, os.O_RDONLY)
        except RingError:
            return False
        try:
            about = os.fstat(descriptor)
            if about.st_ino != self._inode or about.st_size < self._at:
                self._begin(about.st_ino)
            before = self._at
            while data := os.pread(descriptor, _CHUNK_BYTES, self._at):
                self._at += len(data)
                self._take(data)
        except OSError:
            # Read on from there at the next look.
            return False
        finally:
            os.close(descriptor)
        return self._at != before

    def _begin(self, inode: int) -> None:
        self._inode, self._at, self._rest, self._passing_over, self.skipped = inode, 0, b"", False, 0
        self.rows.clear()
        self.results.clear()
        self.states.clear()
        self.asks.clear()
        self.notes.clear()

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._passing_over:
                self._entry(line)
            self._passing_over = False
        # The end of a line that is too long is not the beginning of another.
        self._passing_over = self._passing_over or len(rest) > MAX_EVENT_BYTES
        self._rest = b"" if self._passing_over else rest

    def _entry(self, line: bytes) -> None:
        try:
            event = event_of(line)
            match event:
                case None:
                    pass
                case WindowJudged():
                    row = row_of(event.verdict, event.decision)
                    # Thousands of windows name the same stages.
                    shared = self._stages.setdefault(row.stages, row.stages)
                    self.rows.append(row if shared is row.stages else replace(row, stages=shared))
                case CaptureChanged():
                    capture_id, state = event.result.capture_id, event.result.state
                    self.states[capture_id] = state
                    if state in ENDED:
                        self.results[capture_id] = event.result
                case ManualRequestDecided() | FollowUpDecided():
                    self.asks.append(request_row(event))
                case _:
                    if (note := note_of(event)) is not None:
                        self.notes.append(note)
        except (ValueError, IndexError, RecursionError):
            self.skipped += bool(line.strip())


def row_of(verdict: Verdict, decision: Decision) -> WindowRow:
    """What the page keeps of a window.

    Raises:
        ValueError: numbers that no window has.
    """
    times_s = (verdict.exposed_s, decision.time_s, *verdict.advances_s.values())
    if not all(0.0 <= seconds < MAX_S for seconds in times_s) or not verdict.first_step <= verdict.last_step:
        raise ValueError("a time or a step that cannot be")
    first = verdict.suspects[0] if verdict.suspects else None
    return WindowRow(
        first_step=verdict.first_step,
        last_step=verdict.last_step,
        attempt=verdict.attempt,
        time_s=decision.time_s,
        label=verdict.label,
        reasons=verdict.reasons,
        exposed_s=verdict.exposed_s,
        stages=tuple(verdict.advances_s),
        advances_s=tuple(verdict.advances_s.values()),
        sentence=verdict_sentence(verdict)[:MAX_TEXT],
        named=f"{who(first)} in {where(first)}"[:MAX_TEXT] if first is not None and first.ranks else "",
        onset_step=None if first is None else first.onset_step,
        outcome=decision.outcome,
        reason=decision.reason,
        parameters=bounded(decision.parameters),
        words=reason_sentence(decision)[:MAX_TEXT],
        resolves=resolution(decision)[:MAX_TEXT],
        rule=(decision.rule or "")[:MAX_TEXT],
        asked=asked_in(decision),
        suspects=tuple(_named(one) for one in verdict.suspects[:MAX_NAMED] if one.ranks),
        coverage=_fraction(verdict.numbers.get("coverage")),
        clock=verdict.clock,
    )


def _named(suspect: Suspect) -> NamedSuspect:
    if not all(abs(number) < MAX_S for number in (suspect.gain_s, suspect.share, suspect.persistence)):
        raise ValueError("a gain that cannot be")
    return NamedSuspect(
        who=who(suspect)[:MAX_TEXT],
        where=where(suspect)[:MAX_TEXT],
        when=when(suspect)[:MAX_TEXT],
        ranks=suspect.ranks[:MAX_NAMED],
        stage=None if suspect.stage is None else suspect.stage[:MAX_TEXT],
        gain_s=suspect.gain_s,
        share=suspect.share,
        persistence=suspect.persistence,
        pattern=suspect.pattern,
    )


def _fraction(number: float | None) -> float | None:
    return number if number is not None and 0.0 <= number <= 1.0 else None


_SEVERITY: tuple[Label, ...] = ("healthy", "needs_evidence", "suspect", "stalled")


@dataclass(frozen=True, slots=True)
class TimelineColumn:
    """Windows in a row, as one. ``advances_s`` are means, one a stage of the chart, and sum to ``exposed_s``."""

    first_step: int
    last_step: int
    attempt: int
    windows: int
    label: Label
    named: str
    exposed_s: float
    advances_s: tuple[float, ...]


def columns_of(rows: Sequence[WindowRow], stages: Sequence[str], max_columns: int) -> tuple[TimelineColumn, ...]:
    """Windows put together into columns of as many each, the last of the rest."""
    each = -(-len(rows) // max_columns)
    return tuple(_column(rows[start : start + each], stages) for start in range(0, len(rows), each))


def stages_of(rows: Sequence[WindowRow]) -> tuple[str, ...]:
    """Every stage that is named, in the order of the newest window's step."""
    kinds = dict.fromkeys(row.stages for row in reversed(rows))
    return tuple(dict.fromkeys(stage for stages in kinds for stage in stages))


def _column(rows: Sequence[WindowRow], stages: Sequence[str]) -> TimelineColumn:
    # A step that hangs has no frontier yet: it is in the label, not in the stack.
    timed = [row for row in rows if row.stages]
    sums = dict.fromkeys(stages, 0.0)
    for row in timed:
        for stage, advance_s in zip(row.stages, row.advances_s, strict=True):
            sums[stage] += advance_s
    worst = max(rows, key=lambda row: _SEVERITY.index(row.label))
    advances_s = tuple(sums[stage] / max(1, len(timed)) for stage in stages)
    return TimelineColumn(
        first_step=rows[0].first_step,
        last_step=rows[-1].last_step,
        attempt=rows[-1].attempt,
        windows=len(rows),
        label=worst.label,
        named=worst.named,
        exposed_s=sum(advances_s),
        advances_s=advances_s,
    )
