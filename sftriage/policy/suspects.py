"""Whom captures are about, so that what is remembered of one suspect never concerns another."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from sftriage.decisions import Suspect

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


def key(suspect: Suspect, known: Collection[str] = ()) -> str:
    """Who and where, as a short text: scope, ranks and stage, such as ``rank 3 data``.

    Whether one stage has nearly all of it may change from window to window. So of those that are ``known`` by such keys
    it is the same one as without a stage, and without a stage the same one as with any.
    """
    own = key_of_ranks(suspect.scope, suspect.ranks, suspect.stage)
    if own in known:
        return own
    who = own.removesuffix(suspect.stage or WHOLE)
    if suspect.stage is None:
        return min((one for one in known if one.startswith(who)), default=own)
    return who + WHOLE if who + WHOLE in known else own


def key_of_ranks(scope: str, ranks: Sequence[int], stage: str | None) -> str:
    """The same."""
    named = ",".join(_spans(sorted(set(ranks))))
    if len(named) > _LONGEST:
        named = hashlib.sha256(named.encode()).hexdigest()
    return f"{scope} {named} {stage or WHOLE}"


def _spans(ranks: Iterable[int]) -> Iterator[str]:
    """Ranks that follow on one another as one: ``0-7``."""
    for _, numbered in groupby(enumerate(ranks), lambda one: one[1] - one[0]):
        span = [rank for _, rank in numbered]
        yield f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}"
