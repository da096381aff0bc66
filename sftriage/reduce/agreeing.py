"""Does the heavy trace say what the coarse signal said of the same steps?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Agrees = Literal["yes", "partly", "no"]

STAGE_FRACTION = 0.10
STEP_FRACTION = 0.02
"""A stage agrees within a tenth of itself or a fiftieth of the step, whichever is more: marking a stage for the
profiler takes some microseconds, and a stage that was told by its names begins and ends a little elsewhere."""


@dataclass(frozen=True, slots=True)
class StageAgreement:
    """One stage in the trace and in the signal, seconds a step."""

    stage: str
    trace_s: float
    signal_s: float
    difference_s: float
    allowed_s: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Trace against signal, over the steps of one rank that both have.

    ``agrees`` is ``yes`` if all stages do, ``no`` if the stage in question does not, and else ``partly``.
    """

    agrees: Agrees
    rank: int
    steps: int
    first_step: int
    last_step: int
    stage: str
    stages: tuple[StageAgreement, ...]


def compare(
    trace_s: Mapping[str, float],
    signal_s: Mapping[str, float],
    *,
    stage: str | None,
    rank: int,
    numbers: tuple[int, ...],
) -> Agreement:
    """Compare what a stage took in the mean of some steps.

    Args:
        trace_s: by the trace; a stage it does not have took no time.
        signal_s: by the signal, likewise.
        stage: the stage in question; None for the one that the signal shows as the longest.
        rank: whose steps they are.
        numbers: the steps that were compared.
    """
    step_s = sum(signal_s.values())
    stages = []
    for name in dict.fromkeys((*signal_s, *trace_s)):
        heavy_s, coarse_s = trace_s.get(name, 0.0), signal_s.get(name, 0.0)
        allowed_s = max(STAGE_FRACTION * coarse_s, STEP_FRACTION * step_s)
        difference_s = heavy_s - coarse_s
        stages.append(StageAgreement(name, heavy_s, coarse_s, difference_s, allowed_s, abs(difference_s) <= allowed_s))
    asked = stage if stage is not None and stage in signal_s else max(signal_s, key=lambda name: signal_s[name])
    agrees: Agrees = "yes"
    if not all(one.agrees for one in stages):
        agrees = "partly" if next(one for one in stages if one.stage == asked).agrees else "no"
    return Agreement(agrees, rank, len(numbers), min(numbers), max(numbers), asked, tuple(stages))


def overall(agreements: tuple[Agreement, ...], *, verdicts_agree: bool | None = None) -> Agrees:
    """Of several ranks: ``yes`` if all of them agree, and the verdicts do where there are two; ``no`` if none does."""
    said = {one.agrees for one in agreements}
    if said == {"yes"} and verdicts_agree is not False:
        return "yes"
    return "no" if said == {"no"} else "partly"
