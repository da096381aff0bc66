"""Whether a link between hosts is slow: the rates of all links against each other. Pure; `judging` calls it.

A slow link makes no rank late: all ranks wait for the exchange. It shows in the sockets that send over it. Only time
in which there was something to send and the receiver read counts: a host that lacks CPU time sends seldom, not slowly.

That time also has waits for acknowledgements, on a busy host for a CPU. So a link is slow only if the kernel's estimate
of what the path takes is low as well. Acknowledgements also wait in the queue of a slow link: in a ring the link of one
host lengthens what it sends and what it receives, and the host at which both meet is the one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high
from typing import Literal, TypeAlias

from sftriage.model.verdicts import Against, Direction, Settings, SlowLink
from sftriage.model.windows import LinkUse

LEAST_READINGS = 3
"""Readings of a link, at least: its rate differs from one to the next."""
BULK_FRACTION = 0.1
"""The rule ignores a link that carries less than this part of what the busiest one does: it carries small messages."""
SLOW_FRACTION = 0.5
"""A link with less than this part of its peers' rate is slow."""
SLOW_ALONE_FRACTION = 0.25
"""The same where less shows it: of two hosts, its own past; of more, only one link of a host. Rates on a shared machine
differ by this much."""
APART_FRACTION = 0.8
"""A direction with less than this part of the other one's rate is the slow one."""
INTERFACE_FRACTION = 0.1
"""The same of the interface's speed, which one socket seldom reaches."""

Pair: TypeAlias = "tuple[str, str]"
"""A host, and the one that it sends to; "" for an RDMA port."""
Rates: TypeAlias = "Mapping[Pair, float]"
"""Bits per second."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one host sent to another in some seconds; the median reading gives its rate."""

    pair: Pair
    readings: tuple[LinkUse, ...]

    @property
    def bits_per_s(self) -> float:
        return median(use.bits_per_s for use in self.readings)

    @property
    def sent_bytes(self) -> int:
        return sum(use.sent_bytes for use in self.readings)

    @property
    def busy_fraction(self) -> float:
        """The part of the time in which it was sending."""
        return sum(use.busy_s for use in self.readings) * 1e9 / sum(use.end_ns - use.begin_ns for use in self.readings)

    @property
    def sent_bits_per_s(self) -> float:
        return median(use.sent_bits_per_s for use in self.readings)

    def is_under(self, bits_per_s: float, settings: Settings) -> bool:
        """Whether it is slower than a rate in most readings that show what its path takes."""
        under = [use.bits_per_s < bits_per_s for use in self.readings if not use.at_rest or use.bits_per_s < bits_per_s]
        return len(under) >= LEAST_READINGS and sum(under) >= settings.min_persistence_fraction * len(under)


@dataclass(frozen=True, slots=True)
class HostSide:
    """All links from a host, or to it. What they carry at once shares its interface."""

    host: str
    direction: Literal["send", "receive"]
    links: tuple[Link, ...]

    @property
    def peer(self) -> str:
        """The host at the other end of the first link; "" of an RDMA port."""
        return self.links[0].pair[1]

    @property
    def fastest(self) -> Link:
        return max(self.links, key=lambda link: link.bits_per_s)

    @property
    def busy_fraction(self) -> float:
        return max(link.busy_fraction for link in self.links)

    @property
    def bits_per_s(self) -> float:
        return sum(link.sent_bits_per_s * link.busy_fraction for link in self.links) / self.busy_fraction


_Found: TypeAlias = "tuple[SlowLink, HostSide]"
"""A slow link before its cost is known, and its slower side."""


def bulk_links(uses: Iterable[LinkUse]) -> list[Link]:
    """The links that carry the exchange."""
    by_pair = defaultdict[tuple[str, str, str], list[LinkUse]](list)
    for use in uses:
        if use.end_ns > use.begin_ns and use.busy_s > 0.0:
            by_pair[use.host, use.peer, "" if use.peer else use.address].append(use)
    links = [Link(key[:2], tuple(found)) for key, found in by_pair.items() if len(found) >= LEAST_READINGS]
    most = max((link.sent_bytes for link in links), default=0)
    return [link for link in links if link.sent_bytes >= BULK_FRACTION * most]


def best_rates(uses: Iterable[LinkUse], before: Rates) -> Rates:
    """The highest rates of the job, with those of a window."""
    now = {link.pair: link.bits_per_s for link in bulk_links(uses)}
    return {**before, **{pair: max(rate, before.get(pair, 0.0)) for pair, rate in now.items()}} if now else before


def slow_link(
    uses: Sequence[LinkUse], step_s: float, exchange_s: float, best: Rates, settings: Settings, *, split: bool = True
) -> SlowLink | None:
    """The slow link that costs most; None if none is worth reporting.

    Args:
        uses: what the hosts sent each other in the window.
        step_s: the duration of a step.
        exchange_s: the part of it in which all ranks are in the sync stages.
        best: the highest rates of the job so far.
        settings: its ``min_gain_fraction`` is the least cost.
        split: that part begins with the last gradient; otherwise the ranks also compute in it.
    """
    links = bulk_links(uses)
    two = len({host for link in links for host in link.pair}) == 2 and all(link.pair[1] for link in links)
    slow = []
    for found, side in _between_two(links, best, settings) if two else _among_peers(links, settings):
        busy_s = min(step_s * side.busy_fraction, exchange_s)
        # (an exchange for most of which the link is idle waits for something else)
        if split and busy_s < settings.most_fraction * exchange_s:
            continue
        cost_s = busy_s * max(0.0, 1.0 - side.bits_per_s / found.usual_bits_per_s)
        if cost_s >= settings.min_gain_fraction * step_s:
            readings = [use for link in side.links for use in link.readings]
            seconds = sum(use.end_ns - use.begin_ns for use in readings) / 1e9 / len(side.links)
            slow.append(replace(found, cost_s=cost_s, again_per_s=sum(use.again for use in readings) / seconds))
    return max(slow, key=lambda link: link.cost_s, default=None)


def _among_peers(links: Sequence[Link], settings: Settings) -> Iterator[_Found]:
    """Hosts whose links are slower than the other hosts' links; two hosts, if only the link between them is."""
    sides: dict[tuple[str, Literal["send", "receive"]], list[Link]] = defaultdict(list)
    for link in links:
        sides[link.pair[0], "send"].append(link)
        if link.pair[1]:
            sides[link.pair[1], "receive"].append(link)
    every = [HostSide(*about, tuple(its)) for about, its in sides.items()]
    slow = defaultdict[str, list[tuple[HostSide, float]]](list)
    alone = list[tuple[HostSide, float]]()
    held_up = Counter[str]()
    for side in every:
        peers = [other for other in every if other.direction == side.direction and other.host != side.host]
        if not peers:
            continue
        takes = median_high(other.fastest.bits_per_s for other in peers)
        usual = median_high(other.bits_per_s for other in peers)
        if side.fastest.is_under(SLOW_FRACTION * takes, settings):
            slow[side.host].append((side, usual))
            if side.fastest.is_under(SLOW_ALONE_FRACTION * takes, settings):
                alone.append((side, usual))
        sends = median_high(other.fastest.sent_bits_per_s for other in peers)
        held_up[side.host] += side.fastest.sent_bits_per_s < SLOW_FRACTION * sends
    whole = {host: its for host, its in slow.items() if held_up[host] > 1}
    whole = whole or {host: its for host, its in slow.items() if len(its[0][0].links) > 1 or not its[0][0].peer}
    for host, its in whole.items():
        (side, usual), *_ = sorted(its, key=lambda one: one[0].fastest.bits_per_s)
        apart = len(its) == 1 or side.fastest.bits_per_s < APART_FRACTION * max(s.fastest.bits_per_s for s, _ in its)
        direction: Direction = side.direction if apart and side.peer else "both"
        yield SlowLink(host, "", direction, side.bits_per_s, usual, "peers"), side
    if not whole:
        for side, usual in alone:
            yield SlowLink(*side.fastest.pair, "send", side.bits_per_s, usual, "peers"), side


def _between_two(links: Sequence[Link], best: Rates, settings: Settings) -> Iterator[_Found]:
    """The slower direction between two hosts, or both: against the other one, its own past, or the interface."""
    slow = []
    for link in links:
        side = HostSide(link.pair[0], "send", (link,))
        reverse = max((other.bits_per_s for other in links if other is not link), default=0.0)
        speed = max(use.speed_bits_per_s for use in link.readings)
        past: tuple[tuple[float, float, Against], ...] = (
            (SLOW_FRACTION, reverse, "reverse"),
            (SLOW_ALONE_FRACTION, best.get(link.pair, 0.0), "before"),
        )
        interface: tuple[float, float, Against] = (INTERFACE_FRACTION, speed, "interface")
        for fraction, usual, code in (*sorted(past, key=lambda one: -one[1]), interface):
            if link.is_under(fraction * usual, settings):
                slow.append((SlowLink(*link.pair, "send", side.bits_per_s, usual, code), side))
                break
    slow.sort(key=lambda one: one[0].bits_per_s)
    for found, side in slow[:1]:
        apart = len(slow) == 1 or found.bits_per_s < APART_FRACTION * slow[1][0].bits_per_s
        yield found if apart else replace(found, direction="both"), side
