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
    it is the same one as without a stage, and without a stage the same one as with any. A rank of a known slow host is
    that host: which of its ranks stands out changes too.
    """
    own = key_of_ranks(*suspect.identity)
    if own in known:
        return own
    if suspect.scope == "rank":
        host = next((one for one in known if one.startswith("host ") and same(one, own)), None)
        if host is not None:
            return host
    who = own.removesuffix(own.rpartition(" ")[2])
    if own.endswith(f" {WHOLE}"):
        return min((one for one in known if one.startswith(who)), default=own)
    return who + WHOLE if who + WHOLE in known else own


def key_of_ranks(scope: str, ranks: Sequence[int], stage: str | None) -> str:
    """The same."""
    named = ",".join(_spans(sorted(set(ranks))))
    if len(named) > _LONGEST:
        named = hashlib.sha256(named.encode()).hexdigest()
    return f"{scope} {named} {stage or WHOLE}"


def same(one: str, other: str) -> bool:
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
    """The first and the last rank of each span; none of a digest."""
    for span in ranks.split(",") if len(ranks) <= _LONGEST else ():
        first, _, last = span.partition("-")
        yield first, last


def _spans(ranks: Iterable[int]) -> Iterator[str]:
    """Ranks that follow on one another as one: ``0-7``."""
    for _, numbered in groupby(enumerate(ranks), lambda one: one[1] - one[0]):
        span = [rank for _, rank in numbered]
        yield f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}"
