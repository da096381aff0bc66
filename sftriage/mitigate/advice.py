"""What would help a job that has a straggler, and by how much: models, not measurements. Pure.

Each remedy says from where on it pays, and what it takes for granted (`sftriage.words.advice`). An all-reduce with a
late rank costs by the α-β model (arXiv 2505.23523, section 4): a message of b bytes takes α + bβ; each rank sends one
and receives one at a time, to and from any other. Seconds count from when the straggler is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sftriage.mitigate.pipelines import Pipeline, blocked, one_f_one_b, planned, slow_link, step_s
from sftriage.mitigate.schedule import fewest_rounds, schedule_of
from sftriage.model.events import RemedyChanged
from sftriage.verdicts.judging import UNDECIDED

MOST_SCHEDULED = 64
"""For more ranks, rounds are the fewest that there can be; schedules are within three of them for up to 128."""


@dataclass(frozen=True, slots=True)
class Link:
    """α in seconds a message, β in seconds a byte."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class UnderStraggler:
    """StragglAR's cost among n ranks, one of them late.

    ``early_s`` is what the others take to share out their sums while they wait, ``after_s`` the rounds once the
    straggler is there, ``ring_s`` an all-reduce in a ring, all of it once the straggler is there.
    """

    early_s: float
    after_s: float
    ring_s: float

    def exposed_s(self, delay_s: float) -> float:
        """What is left to do when the straggler comes ``delay_s`` after the others."""
        return max(0.0, self.early_s - delay_s) + self.after_s

    @property
    def break_even_s(self) -> float | None:
        """How late the straggler must be for a ring to take longer; None where it never does."""
        return max(0.0, self.early_s + self.after_s - self.ring_s) if self.after_s < self.ring_s else None


def under_straggler(n: int, size_bytes: float, link: Link) -> UnderStraggler:
    """The cost of one all-reduce of ``size_bytes`` among n ranks."""
    chunk_s = link.latency_s + size_bytes / (n - 1) * link.s_per_byte
    rounds = len(schedule_of(n).rounds) if n <= MOST_SCHEDULED else fewest_rounds(n)
    return UnderStraggler((n - 2) * chunk_s, rounds * chunk_s, ring_s(n, size_bytes, link))


def ring_s(n: int, size_bytes: float, link: Link) -> float:
    """What a ring of n ranks takes: 2(n - 1) messages of one n-th each."""
    return 2 * (n - 1) * (link.latency_s + size_bytes / n * link.s_per_byte)


def as_measured(n: int, ring_s: float) -> UnderStraggler:
    """The cost where a ring takes so long, and bytes are all that takes time."""
    of_one = under_straggler(n, 1.0, Link(0.0, 1.0))
    scale = ring_s / of_one.ring_s
    return UnderStraggler(of_one.early_s * scale, of_one.after_s * scale, ring_s)


RemedyCode = Literal["take_out", "rebalance", "stragglar", "pipeline", "host_transfers"]

MIN_SHARE = 0.01
"""What saves less of a step than this is not worth the trouble."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Who holds a job up, and by how much a step: ``late_s``, of ``ranks`` of the job's ``n_ranks``."""

    who: str
    where: str
    ranks: tuple[int, ...]
    n_ranks: int
    late_s: float
    step_s: float


RECENT_WINDOWS = 10
MIN_WINDOWS = 4
"""Of the recent windows at least so many, and half of them, name who is there to stay."""


class Chronic(NamedTuple):
    """Whom a window names as slow for long, what that costs in a step, and what a step takes."""

    who: str
    where: str
    ranks: tuple[int, ...]
    gain_s: float
    step_s: float


def tells(label: str, reasons: Iterable[str]) -> bool:
    """Whether a verdict says anything of who is slow: none does where ranks are missing, are captured, or all wait."""
    return label != "stalled" and UNDECIDED.isdisjoint(reasons)


def straggler_in(recent: Sequence[Chronic | None], n_ranks: int) -> Straggler | None:
    """The rank that has been slow for long, and is still, by the last `RECENT_WINDOWS` windows that `tells`; or None.

    ``recent`` has the first suspect of each if that is a chronic one. Half of them name it, or the last `MIN_WINDOWS`
    do.
    """
    last = list(recent)[-MIN_WINDOWS:]
    if None not in last and len({one.ranks for one in last if one is not None}) == 1:
        recent = last
    most = Counter(one.ranks for one in recent if one is not None).most_common(1)
    if not most or most[0][1] < max(MIN_WINDOWS, len(recent) / 2):
        return None
    last_named = next(one for one in reversed(recent) if one is not None and one.ranks == most[0][0])
    who, where, ranks, late_s, step_s = last_named
    return Straggler(who, where, ranks, max(n_ranks, 1 + max(ranks)), min(late_s, step_s), step_s)


def is_settled(recent: Sequence[Chronic | None]) -> bool:
    """Whether the windows of `straggler_in` decide: not while they are few, nor where the last begin to name a rank."""
    last = list(recent)[-MIN_WINDOWS:]
    begins = None in last and last[-1] is not None
    return len(recent) == RECENT_WINDOWS and (straggler_in(recent, 0) is not None or not begins)


@dataclass(frozen=True, slots=True)
class Messages:
    """What ranks exchange in a step, in bytes, and the link of each."""

    size_bytes: float
    link: Link


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do.

    It saves ``saves_s`` of a step (None: unknown; negative: it costs), and pays from a lateness or a delay of
    ``pays_from_s`` on (None: never). ``numbers`` are what that was worked out from, by name.
    """

    code: RemedyCode
    saves_s: float | None
    pays_from_s: float | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()


class SlowLink(NamedTuple):
    """A link of a pipeline, by the number of the stage before it, and what it delays a microbatch by."""

    link: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The remedies, the most useful first; ``step_s`` is a step without any.

    ``tried`` is the last outcome, for each group of ranks, of those that a policy allows.
    """

    step_s: float | None
    straggler: Straggler | None
    remedies: tuple[Remedy, ...]
    slow_link: SlowLink | None = None
    tried: tuple[RemedyChanged, ...] = ()

    @property
    def best(self) -> Remedy | None:
        """What helps most; None where nothing is worth the trouble."""
        first = next(iter(self.remedies), None)
        worth = first is not None and self.step_s and (first.saves_s or 0.0) >= MIN_SHARE * self.step_s
        return first if worth else None


def advice_of(
    straggler: Straggler | None,
    messages: Messages | None,
    pipeline: Pipeline | None,
    measured: UnderStraggler | None = None,
) -> Advice:
    """What would help against a straggler, and a pipeline with slow links.

    Without ``messages``, ``measured`` is what an all-reduce takes by the job's own measurement.
    """
    found: list[Remedy] = []
    now_s = None if straggler is None else straggler.step_s
    if straggler is not None and len(straggler.ranks) < straggler.n_ranks:
        found += [_taken_out(straggler), _rebalanced(straggler), *_around(straggler, messages, measured)]
    named = None
    if pipeline is not None and any(pipeline.delay_L):
        found += _of_pipeline(pipeline)
        now_s = now_s or step_s(pipeline, one_f_one_b(pipeline))
        link = slow_link(pipeline)
        named = None if link is None else SlowLink(link, pipeline.delay_L[link])
    return Advice(now_s, straggler, tuple(sorted(found, key=lambda one: -(one.saves_s or 0.0))), named)


def _taken_out(straggler: Straggler) -> Remedy:
    """The others do its work too, and wait for nobody: (step - lateness) n / (n - k)."""
    n, k = straggler.n_ranks, len(straggler.ranks)
    after_s = (straggler.step_s - straggler.late_s) * n / (n - k)
    numbers = {"with_a_spare_s": straggler.late_s, "ranks": k}
    return Remedy("take_out", straggler.step_s - after_s, straggler.step_s * k / n, numbers)


def _rebalanced(straggler: Straggler) -> Remedy:
    """Each does what it can in the same time: n / ((n - k) / w + k / (w + lateness)), w being a step of the others."""
    n, k = straggler.n_ranks, len(straggler.ranks)
    others_s = straggler.step_s - straggler.late_s
    if others_s <= 0.0:
        return Remedy("rebalance", None, 0.0)
    after_s = n / ((n - k) / others_s + k / straggler.step_s)
    return Remedy("rebalance", straggler.step_s - after_s, 0.0, {"its_share": after_s / straggler.step_s})


def _around(straggler: Straggler, messages: Messages | None, measured: UnderStraggler | None) -> Iterator[Remedy]:
    n = straggler.n_ranks
    if len(straggler.ranks) != 1 or n < 3:
        return
    if messages is not None:
        measured = under_straggler(n, messages.size_bytes, messages.link)
    if measured is not None:
        yield around(straggler, measured)
        return
    cost = under_straggler(n, 1.0, Link(0.0, 1.0))
    if cost.break_even_s is not None:
        break_even, most = cost.break_even_s / cost.ring_s, 1.0 - cost.after_s / cost.ring_s
        yield Remedy("stragglar", None, None, {"break_even_of_ring": break_even, "most_of_ring": most})


def around(straggler: Straggler, cost: UnderStraggler) -> Remedy:
    """StragglAR, of what an exchange of gradients costs."""
    numbers = {"ring_s": cost.ring_s, "after_s": cost.exposed_s(straggler.late_s), "early_s": cost.early_s}
    return Remedy("stragglar", cost.ring_s - cost.exposed_s(straggler.late_s), cost.break_even_s, numbers)


def _of_pipeline(pipeline: Pipeline) -> Iterator[Remedy]:
    usual, ahead = one_f_one_b(pipeline), planned(pipeline)
    now_s, ideal_s = step_s(pipeline, usual), step_s(pipeline.undelayed, usual)
    numbers = {"one_f_one_b_s": now_s, "ideal_s": ideal_s}
    adapted_s = step_s(pipeline, ahead)
    yield Remedy("pipeline", now_s - adapted_s, 0.0, {**numbers, "adapted_s": adapted_s}, ahead)
    # Only where transfers hold up what is computed next, which the trace does not show.
    held_s = step_s(blocked(pipeline), ahead)
    yield Remedy("host_transfers", None, 0.0, {"held_up_s": held_s, "not_held_up_s": adapted_s}, ahead)
