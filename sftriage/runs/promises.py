"""What mending was promised to win, and what it won: the last verdicts before a mend, and the step times around it.

A mend shows in that a suspect is no longer named: within an attempt, after a restart, or in the job's next run. Its
promise is what the last verdict that names it says that fixing it would save. What a kept remedy saves is measured by
its own trial (`sftriage.mitigate.loop`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Literal

from sftriage.model.events import JobPaused, RemedyChanged
from sftriage.model.verdicts import is_informative
from sftriage.policy.state import same_trouble
from sftriage.runs.decisions import Note, WindowRow

Mended = Literal["by_itself", "restart", "run", "remedy"]
Judgement = Literal["kept", "less", "more", "not_comparable"]

WITHIN = 0.15
"""A promise is kept if the measured gain differs by at most this fraction of it, or by the error of the measurement."""
MIN_WINDOWS, MAX_WINDOWS = 2, 16
"""Windows without a common step that show that a suspect is gone, and those that are compared on either side."""
MIN_PERIODS = 3
"""Periods that a recurring suspect must be away."""
STEADY = 0.9
"""A suspect that slows this fraction of the steps shows in the typical one; any other only in their mean."""
SAME_WORK = 0.05
JOB = "job"
"""The key of a job that is slower than its own best."""


@dataclass(frozen=True, slots=True)
class AttemptRows:
    """The windows of one attempt of a job of ``ranks`` ranks (0: unknown); ``run``: of this earlier run.

    ``mean_step_s`` returns the mean duration of the steps between two, if both are on record.
    """

    rows: Sequence[WindowRow]
    ranks: int = 0
    run: str = ""
    mean_step_s: Callable[[int, int], float | None] = lambda first_step, last_step: None


@dataclass(frozen=True, slots=True)
class OtherChange:
    """What else has changed. ``slow``: another suspect (``now``), which was not named before."""

    what: Literal["ranks", "stages", "clock", "work", "slow"]
    before: str = ""
    now: str = ""


@dataclass(frozen=True, slots=True)
class Mend:
    """Suspects that are gone: what was promised and what was measured, in seconds a step.

    Attributes:
        who: the suspects, each with its stage; empty for a job that was slower than its own best.
        run: the earlier run in which they were named; "" for this one.
        promised_s: what their verdicts promised. Work that a rank did alone may have been shared out among all ranks
            instead of being removed: that wins ``least_s``.
        measured_s, error_s: by how much steps are shorter, and half the range of that; None if not comparable.
    """

    who: tuple[str, ...]
    by: Mended
    since_step: int
    promised_s: float
    least_s: float
    measured_s: float | None = None
    error_s: float | None = None
    judgement: Judgement = "not_comparable"
    run: str = ""
    difference: OtherChange | None = None


def mends_of(attempts: Sequence[AttemptRows], notes: Sequence[Note] = ()) -> list[Mend]:
    """The mends that last until now, in order, by the windows of the job and the notes of its run.

    Those within an earlier run are left out.
    """
    attempts = [
        replace(each, rows=[row for row in each.rows if is_informative(row.label, row.reasons)]) for each in attempts
    ]
    found: dict[tuple[int, int], list[_Promise]] = {}
    for promise in _standing(attempts):
        if (at := promise.mended_at(attempts)) is not None and not attempts[at[0]].run:
            found.setdefault(at, []).append(promise)
    mends = (_mend(promises, attempts, at, notes) for at, promises in sorted(found.items()))
    tried = {note.switch: note for note in notes if isinstance(note, RemedyChanged) and note.state != "advised"}
    kept = (tried[switch] for switch in tried if tried[switch].state == "kept")
    kept = (remedy for remedy in kept if remedy.numbers.keys() >= {"expected_s", "saves_s", "error_s"})
    return [mend for mend in mends if mend is not None] + [_of_remedy(remedy) for remedy in kept]


def judgement_of(measured_s: float, error_s: float, least_s: float, most_s: float) -> Judgement:
    """Whether what was measured keeps a promise of ``least_s`` to ``most_s``."""
    if measured_s < least_s - max(WITHIN * least_s, error_s):
        return "less"
    return "more" if measured_s > most_s + max(WITHIN * most_s, error_s) else "kept"


def _of_remedy(kept: RemedyChanged) -> Mend:
    who = (f"{kept.who} in {kept.where}",)
    promised_s, measured_s, error_s = (kept.numbers[name] for name in ("expected_s", "saves_s", "error_s"))
    judgement = judgement_of(measured_s, error_s, promised_s, promised_s)
    return Mend(who, "remedy", kept.step, promised_s, promised_s, measured_s, error_s, judgement)


def _key(row: WindowRow) -> str:
    """The key of what a window promises about: a suspect that lasts, or the job's own best; "" for nothing."""
    if row.label == "suspect":
        return row.trouble if row.suspects and row.suspects[0].pattern != "one-off" else ""
    return JOB if "regressed" in row.reasons and row.regression is not None and not row.regression.kind else ""


def _is_of(key: str, row: WindowRow) -> bool:
    own = _key(row)
    return own == key or (own != "" and JOB not in (own, key) and same_trouble(own, key))


@dataclass(frozen=True, slots=True)
class _Promise:
    """The last promise about a suspect, made in an attempt: by the windows since its onset that name it."""

    key: str
    at: int
    rows: Sequence[WindowRow]

    @property
    def last(self) -> WindowRow:
        return self.rows[-1]

    @property
    def gain_s(self) -> float:
        """What fixing it would save in a slow step."""
        slower = self.last.regression if self.key == JOB else None
        return self.last.suspects[0].gain_s if slower is None else slower.fraction * slower.best_step_s

    @property
    def has_peers(self) -> bool:
        """Whether ranks in the same step show it. Otherwise it may only be unknown after a restart."""
        return self.key.startswith(("rank ", "host "))

    @property
    def is_steady(self) -> bool:
        return self.key == JOB or (self.last.suspects[0].persistence >= STEADY and not self.last.period_steps)

    @property
    def promised_s(self) -> float:
        """What fixing it would save in a step; if only some steps are slow, in the mean step."""
        if self.is_steady or self.last.period_steps:
            return self.gain_s / (self.last.period_steps or 1)
        first = max(self.rows[0].first_step, self.last.onset_step or 0)
        # (a rank that notes its work is charged for what it did before it was named)
        first = min([first, *(row.lost_from_step for row in self.rows if row.lost_from_step is not None)])
        return sum(row.lost_s for row in self.rows) / (self.last.last_step + 1 - first)

    def mended_at(self, attempts: Sequence[AttemptRows]) -> tuple[int, int] | None:
        """The attempt in which it is gone and the first step without it; None if it is not, or not for long enough."""
        for at in range(self.at, len(attempts)):
            after = [row for row in attempts[at].rows if at > self.at or row.first_step > self.last.last_step]
            if len(_apart(after)) >= MIN_WINDOWS and _steps(after) >= MIN_PERIODS * (self.last.period_steps or 0):
                return None if any(map(self._is_listed, after)) else (at, after[0].first_step)
        return None

    def _is_listed(self, row: WindowRow) -> bool:
        """Whether it costs half as much as before or more, though it is not certain enough to be named."""
        who = "" if self.key == JOB else self.last.suspects[0].who
        return any(each.who == who and each.gain_s >= self.gain_s / 2 for each in (*row.candidates, *row.suspects[1:]))


def _standing(attempts: Sequence[AttemptRows]) -> Iterator[_Promise]:
    """The last promise about each suspect that cost the job something."""
    last: dict[str, tuple[int, int]] = {}
    for at, attempt in enumerate(attempts):
        for n, row in enumerate(attempt.rows):
            if key := _key(row):
                last[next((known for known in last if _is_of(known, row)), key)] = at, n
    for key, (at, n) in last.items():
        newest = attempts[at].rows[n]
        onset = newest.regression.since_step if key == JOB and newest.regression is not None else newest.onset_step
        own = [row for row in attempts[at].rows[: n + 1] if row.last_step >= (onset or 0) and _is_of(key, row)]
        if key == JOB or any(row.lost_s for row in own):
            yield _Promise(key, at, own)


def _apart(rows: Iterable[WindowRow]) -> list[WindowRow]:
    """The first few of the windows, in either order, that have no step in common."""
    taken: list[WindowRow] = []
    for row in rows:
        if not taken or row.first_step > taken[-1].last_step or row.last_step < taken[-1].first_step:
            taken.append(row)
    return taken[:MAX_WINDOWS]


def _steps(rows: Sequence[WindowRow]) -> int:
    return sum(row.last_step + 1 - row.first_step for row in _apart(rows))


def _mend(
    promises: Sequence[_Promise], attempts: Sequence[AttemptRows], at: tuple[int, int], notes: Sequence[Note]
) -> Mend | None:
    """The mend of some suspects at once; None if what all ranks shared has not won half of its promise."""
    promises = [each for each in promises if each.has_peers] or promises
    newest = max(promises, key=lambda each: each.last.last_step)
    old, new, steady = attempts[newest.at], attempts[at[0]], all(each.is_steady for each in promises)
    own = [row for row in newest.rows if newest.key == JOB or row.first_step >= (newest.last.onset_step or 0)]
    own = own or [newest.last]
    if not steady:
        own = [row for row in old.rows if own[0].first_step <= row.first_step <= newest.last.first_step]
    before, after = _apart(own[::-1]), _apart(row for row in new.rows if row.first_step >= at[1])
    promised_s = sum(each.promised_s for each in promises)
    # (of work that all ranks share, each still has its part)
    kept_s = sum(each.promised_s * each.last.alone for each in promises) / max(1, new.ranks)
    by: Mended = "by_itself" if newest.at == at[0] else "run" if old.run else "restart"
    who = tuple(each.last.named for each in promises if each.key != JOB)
    mend = Mend(who, by, at[1], promised_s, promised_s - kept_s, run=old.run)
    sides = [_step_of(*side, notes, steady=steady) for side in ((old, before), (new, after))]
    measured_s, error_s = sides[0][0] - sides[1][0], math.hypot(sides[0][1], sides[1][1])
    if any(each.last.period_steps for each in promises):
        # (these steps may hold one recurrence more or less)
        error_s = max(each.gain_s for each in promises) / min(_steps(before), _steps(after))
    if not newest.has_peers and measured_s < promised_s / 2:
        return None
    judgement = judgement_of(measured_s, error_s, mend.least_s, promised_s)
    difference = _difference(old, new, before[0], after[0])
    if difference is None and judgement == "less":
        known = {key for row in old.rows if row.last_step <= newest.last.last_step and (key := _key(row))}
        others = (row for row in after if row.label == "suspect" and _key(row))
        slow = next((row.named for row in others if not any(_is_of(key, row) for key in known)), "")
        difference = OtherChange("slow", now=slow) if slow else None
    if difference is not None:
        return replace(mend, difference=difference)
    return replace(mend, measured_s=measured_s, error_s=error_s, judgement=judgement)


def _step_of(
    attempt: AttemptRows, rows: Sequence[WindowRow], notes: Sequence[Note], *, steady: bool
) -> tuple[float, float]:
    """The typical step of some windows, or the mean one without pauses, and half the range of their middle half."""
    times_s = [row.step_s if steady else row.exposed_s for row in rows]
    low_s, _, high_s = quantiles(times_s, n=4, method="inclusive") if len(times_s) > 1 else (0.0, 0.0, 0.0)
    if steady:
        return median(times_s), (high_s - low_s) / 2
    first, last = min(row.first_step for row in rows), max(row.last_step for row in rows)
    pauses = (note for note in notes if isinstance(note, JobPaused) and note.attempt == rows[0].attempt)
    paused_s = sum(pause.lasted_s for pause in pauses if first <= pause.first_step <= last and not attempt.run)
    mean_s = attempt.mean_step_s(first, last) or fmean(times_s)
    return mean_s - paused_s / (last + 1 - first), (high_s - low_s) / 2


def _difference(old: AttemptRows, new: AttemptRows, before: WindowRow, after: WindowRow) -> OtherChange | None:
    if old.ranks and new.ranks and old.ranks != new.ranks:
        return OtherChange("ranks", f"{old.ranks:,}", f"{new.ranks:,}")
    if [*before.advances_s] != [*after.advances_s]:
        return OtherChange("stages")
    if before.clock != after.clock:
        return OtherChange("clock", before.clock, after.clock)
    if min(before.work, after.work) > 0.0 and abs(after.work - before.work) > SAME_WORK * before.work:
        return OtherChange("work", f"{before.work:,.0f}", f"{after.work:,.0f}")
    return None
