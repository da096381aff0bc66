"""What the demo does to its own job: delays of one stage on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from sftriage.errors import UsageError

FAULT_STAGES = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True)
class Fault:
    """A delay of ``delay_s`` seconds in one stage of every step on one rank."""

    stage: str
    rank: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.stage}:{self.rank}:{self.delay_s * 1e3:g}"


def parse_fault(text: str) -> Fault:
    """A fault from ``STAGE:RANK:MS``.

    Raises:
        UsageError: it is not of that form.
    """
    parts = text.split(":")
    try:
        stage, rank, delay_ms = parts[0], int(parts[1]), float(parts[2])
        well_formed = len(parts) == 3 and rank >= 0 and 0 < delay_ms <= 60_000
    except (IndexError, ValueError):
        well_formed = False
    if not well_formed or stage not in FAULT_STAGES:
        raise UsageError(
            f"fault {text!r} is not STAGE:RANK:MS with a stage of {', '.join(FAULT_STAGES)}, "
            "a rank from 0 and 0 to 60000 ms; for example data:2:40"
        )
    return Fault(stage, rank, delay_ms / 1e3)
