"""What an all-reduce costs where one rank comes late, in the α-β model (arXiv 2505.23523, section 4).

A message of b bytes takes α + bβ: latency and seconds a byte. Each rank sends one and receives one at a time, to and
from any other. Seconds count from when the straggler is there; what the others did before that is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from sftriage.mitigate.schedule import fewest_rounds, schedule_of

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

    Attributes:
        early_s: what the others take to share out their sums, which they can while they wait.
        after_s: the rounds once the straggler is there.
        ring_s: what an all-reduce in a ring takes, all of it once the straggler is there.
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
