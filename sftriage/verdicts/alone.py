"""What a rank does alone by its own note while the others wait: it compiles, evaluates, saves. Named by that note.

A rank that is last in the steps that it alone marked, and hardly ever in others, is so because of what it marked: that
is strong evidence, also where the steps are few and far apart. Where other ranks do the same at times of their own,
nobody is named: it is the job's work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.arrays import BoolArray, FloatArray
from sftriage.frontier.units import UnitName
from sftriage.model.verdicts import OwnWork
from sftriage.verdicts.sequential import HISTORY_STEPS, MAX_DRIFT, Evidence
from sftriage.verdicts.settings import Settings

MIN_TIMES = 3
"""Times that a rank has held up the others with what it does alone, at least."""

MAX_RECENT = 32
"""Times that are remembered step by step."""

MAX_KNOWN = 256
"""Ranks and kinds that are remembered: those met last."""

MIN_COST_FRACTION = 0.01
"""What it costs of the time since the first time, at least, to be named for it."""

Known: TypeAlias = "Mapping[tuple[int, str], Alone]"


@dataclass(frozen=True, slots=True)
class Alone:
    """What one rank did alone, by one kind, in the run so far.

    Attributes:
        first_step: the first step in which it held up the others.
        times: the steps that it marked.
        late: those of them in which it held up the others.
        lost_s: what that has cost, in seconds.
        recent: the last steps that it marked, each with its cost.
    """

    first_step: int
    times: int = 0
    late: int = 0
    lost_s: float = 0.0
    recent: tuple[tuple[int, float], ...] = ()

    def after(self, step: int, lost_s: float) -> Alone:
        """With one more step that it marked."""
        first_step = step if lost_s and not self.late else self.first_step
        recent = (*self.recent, (step, lost_s))[-MAX_RECENT:]
        return Alone(first_step, self.times + 1, self.late + (lost_s > 0.0), self.lost_s + lost_s, recent)

    @property
    def period_steps(self) -> int | None:
        """The steps from one time to the next; None where they differ."""
        gaps = np.diff([step for step, _ in self.recent])
        usual = int(np.median(gaps)) if len(gaps) else 0
        # (of some times the steps are not known)
        times = np.maximum(np.round(gaps / max(1, usual)), 1)
        return usual if usual and (np.abs(gaps - times * usual) <= MAX_DRIFT * usual).all() else None

    @property
    def is_now_and_then(self) -> bool:
        """Whether most steps are without it: what is in every step is a fault like any other."""
        return len(self.recent) > 1 and float(np.median(np.diff([step for step, _ in self.recent]))) >= 2.0


def known_after(
    known: Known,
    noted_NR: NDArray[Any],
    new_N: BoolArray,
    first_step: int,
    lost_s: Mapping[tuple[UnitName, int], float],
) -> Known:
    """What is known of work alone after a window's new steps; ``lost_s`` is what delays cost, by rank and step."""
    found = dict(known)
    for n, rank in np.argwhere((noted_NR != "") & new_N[:, None]).tolist():
        step, key = first_step + n, (rank, str(noted_NR[n, rank]))
        found[key] = found.pop(key, Alone(step)).after(step, lost_s.get((rank, step), 0.0))
    return dict(list(found.items())[-MAX_KNOWN:])


def log_odds_of(alone: Alone, rank: int, ranks: Evidence, steps_seen: int, settings: Settings) -> float:
    """The log odds that a rank is last because of what it marked, against chance.

    By chance it is last there as often as in its other steps, by as much.
    """
    marked = {step for step, _ in alone.recent}
    usual_s = [one.share for one in ranks.events if one.unit == rank and one.step in marked]
    least = settings.most_fraction * float(np.median(usual_s)) if usual_s else 0.0
    others = sum(one.unit == rank and one.step not in marked and one.share > least for one in ranks.events)
    n_steps = max(1, min(steps_seen, HISTORY_STEPS) - len(marked))
    guilty, chance = settings.guilty_fractions[0], (others + 1.0) / (n_steps + 2.0)
    if chance >= guilty:
        return 0.0
    missed = alone.times - alone.late
    return alone.late * math.log(guilty / chance) + missed * math.log((1.0 - guilty) / (1.0 - chance))


def named_alone(
    known: Known, ranks: Evidence, steps_seen: int, usual_s: float, settings: Settings
) -> dict[int, tuple[str, Alone, float]]:
    """Of each rank that is named by its own notes: the kind, what is known of it, and the log odds."""
    found: dict[int, tuple[str, Alone, float]] = {}
    for (rank, kind), alone in known.items():
        if alone.late < MIN_TIMES or not alone.is_now_and_then:
            continue
        rivals = (one.lost_s for (other, same), one in known.items() if same == kind and other != rank)
        if max(rivals, default=0.0) >= settings.most_fraction * alone.lost_s:
            continue
        since_s = alone.lost_s + (ranks.next_step - alone.first_step) * usual_s
        log_odds = log_odds_of(alone, rank, ranks, steps_seen, settings)
        enough = log_odds >= settings.naming_log_odds and alone.lost_s >= MIN_COST_FRACTION * since_s
        if enough and (rank not in found or alone.lost_s > found[rank][1].lost_s):
            found[rank] = kind, alone, log_odds
    return found


def is_marked(noted_NR: NDArray[Any] | None, rank: int | str, gain_N: FloatArray, settings: Settings) -> bool:
    """Whether a rank marked steps in which most of what it cost was lost."""
    if noted_NR is None or isinstance(rank, str):
        return False
    marked_s = float(gain_N[noted_NR[:, rank] != ""].sum())
    return marked_s > 0.0 and marked_s >= settings.most_fraction * float(gain_N.sum())


def own_work(known: Known, rank: int, filled_N: BoolArray, noted_NR: NDArray[Any] | None) -> OwnWork | None:
    """What a rank alone did in most of the steps that its fault fills; None if it marked fewer."""
    if noted_NR is None or not filled_N.any():
        return None
    kinds: Sequence[str] = noted_NR[filled_N, rank].tolist()
    kind = max(set(kinds) - {""}, key=kinds.count, default="")
    alone = known.get((rank, kind))
    if alone is None or 2 * kinds.count(kind) < len(kinds):
        return None
    return OwnWork(kind, kinds.count(kind) / len(kinds), alone.late, alone.lost_s)
