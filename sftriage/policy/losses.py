"""Suspects by key, and what each has cost a job since it began: the sum of what verdicts say, and nothing else. Pure.

A verdict's `Lost` has what its suspect cost in each step that no window before has counted. Summed over a
run's verdicts, in order, that is the same while the job runs, once another controller has taken it over, and after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from typing import Any

import msgspec

from sftriage.model.verdicts import Suspect, Verdict
from sftriage.words.verdicts import where, who

WHOLE = "*"
"""All local stages: no stage is called so."""

_LONGEST = 60
"""Characters. A cohort of a large job may be thousands of ranks in no order; a digest stands for these."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a rule would capture: the ``suspect``'s key, and what it costs the job in this ``attempt`` of it.

    ``gain_s`` is seconds a step; of a stall, in which no step ends, it is without bound.
    """

    suspect: str
    gain_s: float = 0.0
    attempt: int = 0


NOBODY = Target("")
"""Whom a capture is about that no rule asks for."""


def suspect_key(suspect: Suspect, known: Collection[str] = ()) -> str:
    """Who and where, as a short text: scope, ranks and stage, such as ``rank 3 data``.

    Whether one stage has nearly all of it may change from window to window. So of those that are ``known`` by such keys
    it is the same one as without a stage, and without a stage the same one as with any. A rank of a known slow host is
    that host: which of its ranks stands out changes too.
    """
    own = key_of_ranks(*suspect.identity)
    if own in known:
        return own
    if suspect.scope == "rank":
        host = next((one for one in known if one.startswith("host ") and same_trouble(one, own)), None)
        if host is not None:
            return host
    who = own.removesuffix(own.rpartition(" ")[2])
    if own.endswith(f" {WHOLE}"):
        return min((one for one in known if one.startswith(who)), default=own)
    return who + WHOLE if who + WHOLE in known else own


def key_of_ranks(scope: str, ranks: Sequence[int], stage: str | None) -> str:
    """The key of ranks in a stage, or in all local stages."""
    named = ",".join(_spans(sorted(set(ranks))))
    if len(named) > _LONGEST:
        named = hashlib.sha256(named.encode()).hexdigest()
    return f"{scope} {named} {stage or WHOLE}"


def same_trouble(one: str, other: str) -> bool:
    """Whether two keys are of one trouble: one rank in one stage and as a whole, or a host and one of its ranks."""
    (scope, ranks, stage), (scope_, ranks_, stage_) = _parts(one), _parts(other)
    if ranks == ranks_ and scope == scope_:
        return stage == stage_ or WHOLE in (stage, stage_) or scope == "host"
    if {scope, scope_} != {"host", "rank"}:
        return False
    host, rank = (ranks, ranks_) if scope == "host" else (ranks_, ranks)
    return any(int(first) <= int(rank) <= int(last or first) for first, last in _bounds(host))


def _parts(key: str) -> tuple[str, str, str]:
    scope, _, rest = key.partition(" ")
    ranks, _, stage = rest.partition(" ")
    return scope, ranks, stage


def _bounds(ranks: str) -> Iterator[tuple[str, str]]:
    for span in ranks.split(",") if len(ranks) <= _LONGEST else ():
        first, _, last = span.partition("-")
        yield first, last


def _spans(ranks: Iterable[int]) -> Iterator[str]:
    """Ranks that follow on one another as one: ``0-7``."""
    for _, numbered in groupby(enumerate(ranks), lambda one: one[1] - one[0]):
        span = [rank for _, rank in numbered]
        yield f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}"


MOST_SUSPECTS = 1000
"""Further suspects are counted together, under `OTHERS`."""
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class SuspectLoss:
    """What one suspect has cost the job: exposed seconds in so many ``steps``, the last of them ``last_step``.

    ``rank_s`` is the same of every rank's time: all wait for one. ``who`` and ``where`` say whom it is about.
    """

    who: str
    where: str
    lost_s: float = 0.0
    rank_s: float = 0.0
    steps: int = 0
    last_step: int = 0

    @property
    def rank_hours(self) -> float:
        """Hours of the job's ranks: GPU-hours, where each rank has a GPU."""
        return self.rank_s / 3600.0


@dataclass(frozen=True, slots=True)
class Losses:
    """What stragglers have cost a job, by suspect (`suspect_key`), and up to which step of each attempt."""

    by_suspect: Mapping[str, SuspectLoss] = field(default_factory=dict)
    counted: Mapping[int, int] = field(default_factory=dict)

    @property
    def lost_s(self) -> float:
        """What all of them have cost the job, in exposed seconds."""
        return sum(one.lost_s for one in self.by_suspect.values())

    @property
    def rank_s(self) -> float:
        """The same of every rank's time."""
        return sum(one.rank_s for one in self.by_suspect.values())

    @property
    def largest(self) -> list[SuspectLoss]:
        """The suspects, the costliest first."""
        return sorted(self.by_suspect.values(), key=lambda one: -one.rank_s)

    @property
    def by_name(self) -> Mapping[tuple[str, str], float]:
        """The same by who and where."""
        return {(one.who, one.where): one.rank_s for one in self.by_suspect.values()}

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Losses:
        """The losses of what `values` returned; raises ValueError for anything else."""
        return msgspec.convert(values, cls, strict=False)

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return values

    def of(self, suspect: Suspect) -> SuspectLoss | None:
        """What a suspect has cost; None for nothing."""
        return self.by_suspect.get(suspect_key(suspect, self.by_suspect))

    def after(self, verdict: Verdict) -> Losses:
        """The losses with those of one more verdict."""
        lost = verdict.lost
        suspect = verdict.named if lost is None or lost.of is None else lost.of
        if lost is None or suspect is None:
            return self
        # A controller that takes over may not know what the one before it has counted.
        known, last_step = self.counted.get(verdict.attempt, -1), lost.first_step + len(lost.step_s) - 1
        new_s = lost.step_s[max(0, known + 1 - lost.first_step) :]
        if not new_s:
            return self
        key = suspect_key(suspect, self.by_suspect)
        if key not in self.by_suspect and len(self.by_suspect) >= MOST_SUSPECTS:
            key, before = OTHERS, self.by_suspect.get(OTHERS, SuspectLoss(OTHERS, ""))
        else:
            named = SuspectLoss(who(suspect), where(replace(suspect, stage=suspect.identity[2])))
            before = self.by_suspect.get(key, named)
        found = replace(
            before,
            lost_s=before.lost_s + sum(new_s),
            rank_s=before.rank_s + sum(new_s) * lost.ranks,
            steps=before.steps + sum(one_s > 0.0 for one_s in new_s),
            last_step=last_step,
        )
        return Losses({**self.by_suspect, key: found}, {**self.counted, verdict.attempt: last_step})


def losses_of(verdicts: Iterable[Verdict]) -> Losses:
    """What stragglers have cost, by a run's verdicts in order."""
    return reduce(Losses.after, verdicts, Losses())
