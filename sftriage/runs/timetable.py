"""Where the time of a run went: rows of seconds that add up to its wall clock, each second in one row.

A long step's extra time goes to the first that claims it: work that its ranks note, what recurs on all ranks, a pause,
a stall, a capture, a suspect, the warm-up, what recurs on one rank, and else ``unaccounted``. Of the other steps,
suspects and captures take what the journal says they cost. The rest of the steps' time is ``useful``. Pure.

Axes: E long steps.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sftriage.model.events import CostMeasured, JobPaused
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import plain
from sftriage.policy.state import AddedLoss, Losses
from sftriage.runs.step_times import ALL_RANKS, AttemptTimes
from sftriage.verdict.regression import LEAST_PAUSE_S, PAUSE_STEPS

_OfSteps = Literal["useful", "suspect", "alone", "shared", "pause", "stall", "capture", "warm_up", "unaccounted"]
RowCode = _OfSteps | Literal["start", "restart", "end"]
"""``alone``: one rank's work, for which the others wait; ``shared``: what all ranks do in some steps."""

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

MIN_TIMES, MIN_REGULAR = 3, 0.6
"""Times that something must occur to recur, and the fraction of its due times at which it must."""
MIN_LEFT = 0.1
"""The fraction of a suspect's loss, or of a step's extra time, that other rows must leave for it to count."""
MAX_ROWS_OF_CODE = 6
"""Rows with one code; smaller ones are added up as ``others``."""
OTHERS = "others"
AMOUNT = re.compile(r"\d+(\.\d+)?")
"""The amount in a price such as ``2.50 USD`` or ``$2.50``."""


@dataclass(frozen=True, slots=True)
class TimeRow:
    """Seconds of a run's wall clock that went to one thing, in ``steps`` steps, or that many times.

    ``subject`` and ``stage`` say which: a suspect, a rank, or "" for all ranks, and where. ``kind`` is what the ranks
    note of the work. It comes every ``period_steps`` steps, if that is regular. All ranks spend the time.
    """

    code: RowCode
    seconds: float
    steps: int = 0
    subject: str = ""
    stage: str = ""
    kind: str = ""
    period_steps: int | None = None
    rank_hours: float = 0.0

    def plus(self, other: TimeRow) -> TimeRow:
        """The row with the numbers of another one added."""
        numbers = ("seconds", "steps", "rank_hours")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in numbers})


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Rows that sum to ``wall_s``: useful steps first, then by their seconds. ``price``: of a rank-hour, or ""."""

    wall_s: float
    rows: tuple[TimeRow, ...]
    price: str = ""

    @property
    def by_code(self) -> dict[str, float]:
        """The seconds of all rows with a code."""
        codes = dict.fromkeys(row.code for row in self.rows)
        return {code: sum(row.seconds for row in self.rows if row.code == code) for code in codes}

    def share(self, row: TimeRow) -> float:
        """The row's fraction of the wall clock."""
        return row.seconds / self.wall_s if self.wall_s else 0.0

    def cost(self, rank_hours: float) -> float | None:
        """What some rank-hours cost, in the currency of the price; None without a price."""
        amount = AMOUNT.search(self.price)
        return None if amount is None else float(amount[0]) * rank_hours

    def money(self, rank_hours: float) -> str:
        """The same as it is shown, like the price; "" without a price."""
        cost = self.cost(rank_hours)
        return "" if cost is None else AMOUNT.sub(f"{cost:,.2f}", self.price, count=1)

    def values(self) -> dict[str, Any]:
        """The table as JSON values."""
        rows = [plain(row) | ({"cost": self.cost(row.rank_hours)} if self.price else {}) for row in self.rows]
        return {"wall_s": self.wall_s, "price": self.price or None, "rows": rows}


@dataclass(frozen=True, slots=True)
class Charges:
    """What the journal says of a run's time.

    Attributes:
        losses: what suspects have cost; ``added`` in which steps, as far as that is on record.
        pauses, costs: the pauses of the job, and the measured costs of captures.
        stalls: by attempt and step, how long it stalled.
        judged_from: by attempt, the first judged step; of an attempt without one, all steps are warm-up.
    """

    losses: Losses = field(default_factory=Losses)
    added: Sequence[AddedLoss] = ()
    pauses: Sequence[JobPaused] = ()
    costs: Sequence[CostMeasured] = ()
    stalls: Mapping[tuple[int, int], float] = field(default_factory=dict)
    judged_from: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of_judged(cls, judged: Iterable[tuple[Verdict, Sequence[JobPaused]]]) -> Charges:
        """The charges of verdicts in order, each with the pauses that its window was the first to show."""
        losses, added, pauses, judged_from = Losses(), list[AddedLoss](), list[JobPaused](), dict[int, int]()
        for verdict, found in judged:
            pauses += found
            judged_from.setdefault(verdict.attempt, verdict.first_step)
            if (new := losses.added_by(verdict)) is not None:
                losses = losses.plus(new)
                added.append(new)
        return cls(losses, added, pauses, judged_from=judged_from)


def time_table(
    begin_s: float, end_s: float | None, attempts: Sequence[AttemptTimes], charges: Charges, *, price: str = ""
) -> TimeTable | None:
    """The table of a run from its begin to its end, in seconds since the epoch; None without a recorded step.

    The end is None of a run that has not ended, or was killed: the table then reaches as far as the record.
    """
    if not attempts:
        return None
    at_s = begin_s = min(begin_s, attempts[0].begin_s)
    rows = _Rows()
    for number, times in enumerate(attempts):
        first_s, removed = max(at_s, times.begin_s), 0 if number else times.removed_steps
        removed_s = min(first_s - at_s, removed * times.steps_s / times.n_steps)
        rows.beside("restart" if number else "start", first_s - at_s - removed_s, times.ranks)
        at_s = max(first_s, times.end_s)
        steps = TimeRow("useful", removed_s + at_s - first_s, removed + times.last_step + 1 - times.first_step)
        rows.useful = rows.useful.plus(_of_ranks(steps, times.ranks))
        _Claims(rows, times, charges).make(at_s - first_s)
        until_s = next((later.begin_s for later in attempts[number + 1 :]), math.inf if end_s is None else end_s)
        stalls = (s for (of, step), s in charges.stalls.items() if of == times.attempt and step > times.last_step)
        stall_s = max(0.0, min(max(stalls, default=0.0), until_s - at_s))
        rows.beside("stall", stall_s, times.ranks)
        at_s += stall_s
    end_s = at_s if end_s is None else max(end_s, at_s)
    rows.beside("end", end_s - at_s, attempts[-1].ranks)
    for key, loss in charges.losses.by_suspect.items():
        # (the rest of what was claimed as work that it notes is that row's, and not another fault)
        if loss.lost_s and (seconds := loss.lost_s - rows.claimed[key]) >= MIN_LEFT * loss.lost_s:
            rows.claim(TimeRow("suspect", seconds, loss.steps, loss.who, loss.where), loss.rank_s / loss.lost_s)
    return TimeTable(end_s - begin_s, tuple(rows.ordered()), price)


class _Rows:
    """Adds up rows. What is claimed of the steps' time leaves the rest of it to the ``useful`` row.

    ``claimed`` is what other rows take of a suspect's loss, by its key.
    """

    def __init__(self) -> None:
        self.useful, self.claimed = TimeRow("useful", 0.0), defaultdict[str, float](float)
        self._claims: dict[TimeRow, TimeRow] = {}
        self._beside: dict[TimeRow, TimeRow] = {}

    def claim(self, row: TimeRow, ranks: float) -> None:
        """Add a row to those of the same steps' time; its key is all but its numbers."""
        _add(self._claims, row, ranks)

    def beside(self, code: RowCode, seconds: float, ranks: int) -> None:
        _add(self._beside, TimeRow(code, seconds, 1), ranks)

    def ordered(self) -> Iterator[TimeRow]:
        claimed_s = sum(row.seconds for row in self._claims.values())
        # The journal's costs are estimates: together they may exceed the time that there was.
        part = min(1.0, self.useful.seconds / claimed_s) if claimed_s else 1.0
        rows = [replace(of, seconds=of.seconds * part, rank_hours=of.rank_hours * part) for of in self._claims.values()]
        rank_hours = max(0.0, self.useful.rank_hours - sum(row.rank_hours for row in rows))
        yield replace(self.useful, seconds=max(0.0, self.useful.seconds - claimed_s), rank_hours=rank_hours)
        by_code: defaultdict[RowCode, list[TimeRow]] = defaultdict(list)
        for row in sorted((*rows, *self._beside.values()), key=lambda row: -row.seconds):
            by_code[row.code].append(row)
        for code, of_code in by_code.items():
            yield from of_code[:MAX_ROWS_OF_CODE]
            if more := of_code[MAX_ROWS_OF_CODE:]:
                yield reduce(TimeRow.plus, more, TimeRow(code, 0.0, subject=OTHERS))


def _of_ranks(row: TimeRow, ranks: float) -> TimeRow:
    return replace(row, rank_hours=row.seconds * ranks / 3600.0)


def _add(rows: dict[TimeRow, TimeRow], row: TimeRow, ranks: float) -> None:
    if row.seconds > 0.0:
        key, new = replace(row, seconds=0.0, steps=0, period_steps=None), _of_ranks(row, ranks)
        rows[key] = rows[key].plus(new) if key in rows else new


class _Claims:
    """Divides the extra time of an attempt's long steps; ``left_E`` is what nothing has claimed yet."""

    def __init__(self, rows: _Rows, times: AttemptTimes, charges: Charges) -> None:
        self._rows, self._times, self._charges = rows, times, charges
        self._step_E, self._rank_E = times.long_E["step"], times.long_E["rank"]
        self._left_E: FloatArray = times.long_E["over_s"].copy()
        self._lost_E, self._suspect_E = _lost_in(times, charges)

    def make(self, span_s: float) -> None:
        """Make all claims in order. The steps took ``span_s``, with those that are no longer on record."""
        times, charges, long_E = self._times, self._charges, self._times.long_E
        if gone := times.last_step + 1 - times.first_step - times.n_steps:
            expected_s = gone * times.steps_s / times.n_steps
            self._rows.claim(TimeRow("unaccounted", span_s - times.steps_s - expected_s, gone), times.ranks)
        for kind, rank in _distinct(long_E[["kind", "rank"]][long_E["kind"] != ""]):
            here_E = (long_E["kind"] == kind) & (self._rank_E == rank)
            found = recurring(self._step_E[here_E])
            row = _shared_or_alone(rank, kind=kind)
            self._take(here_E, replace(row, period_steps=None if found is None else found[0]))
        self._take_recurring(self._rank_E == ALL_RANKS)
        for pause in charges.pauses:
            row = TimeRow("pause", pause.lasted_s, pause.last_step + 1 - pause.first_step, stage=pause.stage)
            self._take_noted(pause, row)
        usual_s = (times.steps_s - float(long_E["over_s"].sum())) / times.n_steps
        paused_E = long_E["over_s"] >= max(LEAST_PAUSE_S, (PAUSE_STEPS - 1.0) * usual_s)
        # (in which all ranks were stopped, each in another stage)
        self._take(paused_E & (self._rank_E == ALL_RANKS) & (long_E["stage"] == ""), TimeRow("pause", 0.0))
        for attempt, step in charges.stalls:
            if attempt == times.attempt:
                self._take(self._step_E == step, TimeRow("stall", 0.0))
        for cost in charges.costs:
            row = TimeRow("capture", cost.cost_s or 0.0, cost.last_step + 1 - cost.first_step)
            self._take_noted(cost, row, at_most_s=cost.cost_s)
        self._left_E -= np.minimum(self._left_E, self._lost_E)
        judged_from = charges.judged_from.get(times.attempt, times.last_step + 1)
        self._take(self._step_E < judged_from, TimeRow("warm_up", 0.0), of_suspects=False)
        self._take_recurring(self._rank_E >= 0)
        for rank in np.unique(self._rank_E[paused_E & (self._rank_E >= 0)]).tolist():
            row = TimeRow("pause", 0.0, subject=f"rank {rank}")
            self._take(paused_E & (self._rank_E == rank), row, of_suspects=False)
        self._take(np.ones(len(long_E), dtype=np.bool_), TimeRow("unaccounted", 0.0), of_suspects=False)

    def _take(self, here_E: BoolArray, row: TimeRow, *, at_most_s: float = math.inf, of_suspects: bool = True) -> None:
        """Claim what is left of some steps for a row, at most some seconds of it."""
        here_E = here_E & (self._left_E > 0.0)
        left_s = float(self._left_E[here_E].sum())
        part = min(1.0, max(0.0, at_most_s) / left_s) if left_s else 0.0
        taken_E = np.where(here_E, self._left_E * part, 0.0)
        self._left_E -= taken_E
        steps = int((taken_E > MIN_LEFT * self._times.long_E["over_s"]).sum())
        self._rows.claim(replace(row, seconds=left_s * part, steps=row.steps or steps), self._times.ranks)
        if of_suspects:
            for key in np.unique(self._suspect_E[here_E]).tolist():
                self._rows.claimed[key] += float(np.minimum(taken_E, self._lost_E)[self._suspect_E == key].sum())

    def _take_noted(self, note: JobPaused | CostMeasured, row: TimeRow, at_most_s: float | None = None) -> None:
        """Claim an event's long steps for its row, or the row's seconds if none of its steps is."""
        if note.attempt != self._times.attempt:
            return
        here_E = (self._step_E >= note.first_step) & (self._step_E <= note.last_step)
        long_s = float(self._times.long_E["over_s"][here_E].sum())
        self._take(here_E, row, at_most_s=math.inf if at_most_s is None else at_most_s)
        # (what a capture costs lies in ordinary steps as well, and a pause may be in steps that are no longer kept)
        if row.seconds > long_s and (at_most_s is not None or not long_s):
            left = replace(row, seconds=row.seconds - long_s, steps=0 if long_s else row.steps)
            self._rows.claim(left, self._times.ranks)

    def _take_recurring(self, here_E: BoolArray) -> None:
        here_E = here_E & (self._left_E > 0.0)
        for stage, rank in _distinct(self._times.long_E[["stage", "rank"]][here_E]):
            of_E = here_E & (self._times.long_E["stage"] == stage) & (self._rank_E == rank)
            if (found := recurring(self._step_E[of_E])) is not None:
                of_E[of_E] = found[1]
                self._take(of_E, replace(_shared_or_alone(rank, stage=stage), period_steps=found[0]))


def _shared_or_alone(rank: int, stage: str = "", kind: str = "") -> TimeRow:
    code: RowCode = "shared" if rank == ALL_RANKS else "alone"
    return TimeRow(code, 0.0, subject=f"rank {rank}" if rank >= 0 else "", stage=stage, kind=kind)


def _distinct(values_E: NDArray[np.void]) -> list[tuple[str, int]]:
    return list(dict.fromkeys(values_E.tolist()))


def _lost_in(times: AttemptTimes, charges: Charges) -> tuple[FloatArray, NDArray[np.str_]]:
    """What suspects cost in each long step (E), over what they cost in those around it, and the key of the suspect."""
    n_steps = times.last_step + 1 - times.first_step
    lost_N, of_N, keys = np.zeros(n_steps + 2), np.zeros(n_steps + 2, dtype=np.int32), [""]
    for added in charges.added:
        begin = added.first_step - times.first_step + 1
        if added.attempt == times.attempt and 1 <= begin <= n_steps:
            if added.key not in keys:
                keys.append(added.key)
            step_s = np.asarray(added.step_s)[: n_steps + 1 - begin]
            lost_N[begin : begin + len(step_s)] = step_s
            of_N[begin : begin + len(step_s)] = keys.index(added.key)
    at_E = times.long_E["step"] - times.first_step + 1
    steady_E = np.minimum(lost_N[at_E - 1], lost_N[at_E + 1])
    return np.maximum(0.0, lost_N[at_E] - steady_E), np.asarray(keys)[of_N[at_E]]


def recurring(step_E: NDArray[np.int64]) -> tuple[int, BoolArray] | None:
    """The period of steps in order, and which of them are in its phase; None if they are not regular."""
    if len(step_E) < MIN_TIMES:
        return None
    ((period, _),) = Counter(np.diff(step_E).tolist()).most_common(1)
    ((phase, _),) = Counter((step_E % period).tolist()).most_common(1)
    in_phase_E = step_E % period == phase
    due = (step_E[in_phase_E][-1] - step_E[in_phase_E][0]) // period + 1
    regular = period > 1 and in_phase_E.sum() >= max(MIN_TIMES, MIN_REGULAR * due)
    return (period, in_phase_E) if regular else None
