"""Which clock a window is judged on, and what the host's clock can tell of ranks that run on devices.

The host runs ahead of its device: it sees launches, and waits for the device in whatever stage it next has to. Stage
boundaries in the device's own stream do not have this problem. The device reaches one when it has finished what was
launched before, and not before the host has launched it. So a late host shows there too, in its own stage, as far as
the device had to wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.model.verdicts import Clock, Verdict
from sftriage.model.windows import Window
from sftriage.verdict.accounting import BoolArray, complete_steps
from sftriage.verdict.settings import Settings

HOST_STAGES = frozenset({"data"})
"""Stages of the host's own work. In all others, the host's time is launches or waiting for the device."""

UNDECIDED = frozenset({"low_coverage", "self_inflicted", "mixed_roles", "no_sync"})
"""Reasons that hold on any clock, and for which a window shows nothing, not even of the job's own speed."""


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """A window with the times of the clock that it is judged on.

    Attributes:
        window: with that clock's times as durations.
        limited: whether it is the host's though the device's would be needed.
        agree: whether the clocks do not contradict each other.
    """

    window: Window
    clock: Clock = "host"
    limited: bool = False
    agree: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict)


def timed(window: Window, settings: Settings) -> Timed:
    """The window on the clock that it is judged on: the device's if it is known in enough steps, else the host's."""
    if window.device_NRS is None:
        if not window.on_device:
            return Timed(window)
        return Timed(window, limited=True, numbers=_coverage(0.0, settings))
    device = _on_device(window)
    host_N, both_N = complete_steps(window), complete_steps(device)
    both_N &= host_N
    numbers = _coverage(float(both_N.sum()) / max(1.0, float(host_N.sum())), settings)
    if not both_N.any() or numbers["device_coverage"] < settings.most_fraction:
        return Timed(window, limited=True, numbers=numbers)
    steps_s = {"host_step_s": _step_s(window, both_N), "device_step_s": _step_s(device, both_N)}
    shorter_s, longer_s = sorted(steps_s.values())
    agreement = shorter_s / longer_s if longer_s > 0.0 else 1.0
    numbers |= steps_s | {"clock_agreement": agreement, "min_clock_agreement": settings.most_fraction}
    if agreement < settings.most_fraction:
        return Timed(window, limited=True, agree=False, numbers=numbers)
    return Timed(device, clock="device", numbers=numbers)


def on_its_clock(verdict: Verdict, seen: Timed, longer_s: float | None, settings: Settings) -> Verdict:
    """The verdict with its clock: held if that is the host's and cannot show it.

    On the host's clock, ``healthy`` stands, and so does a rank or host that is late in a stage of the host's own work.
    What all ranks share does not: it may be waiting for the devices. Devices that have enough to do can also hide the
    delay of one host; if a healthy step is known, the step is then no longer than that (``longer_s``).
    """
    if seen.clock == "host" and not seen.limited:
        return verdict
    verdict = replace(verdict, clock=seen.clock, numbers={**verdict.numbers, **seen.numbers})
    if not seen.limited or (verdict.reasons and set(verdict.reasons) <= UNDECIDED):
        return verdict
    if seen.agree and verdict.label == "healthy":
        return verdict
    first = next(iter(verdict.suspects), None)
    of_the_host = first is not None and first.scope in ("rank", "host") and first.stage in HOST_STAGES
    if seen.agree and verdict.label == "suspect" and first is not None and of_the_host:
        wanted_s = settings.most_fraction * first.gain_s * first.persistence
        if longer_s is None or longer_s >= wanted_s:
            return verdict
        numbers = {**verdict.numbers, "longer_s": longer_s, "min_longer_s": wanted_s}
        verdict = replace(verdict, numbers=numbers)
    return replace(verdict, label="needs_evidence", reasons=("clock_limited",))


def _on_device(window: Window) -> Window:
    """The window with the devices' times as durations.

    The host's ready moments are those of the last gradient's launch, and are not used. The time before a step is
    unknown if the step before is, and a step without it is not complete: no row of the accounting is half there.
    """
    assert window.device_NRS is not None
    between_NR = window.device_between_NR
    if between_NR is not None:
        after_gap_NR = np.zeros(between_NR.shape, dtype=np.bool_)
        after_gap_NR[1:] = ~np.isfinite(window.device_NRS[:-1]).all(axis=2)
        if after_gap_NR.any():
            between_NR = np.where(after_gap_NR, np.nan, between_NR)
    return replace(
        window,
        durations_NRS=window.device_NRS,
        outside_NRG=window.device_outside_NRG,
        between_NR=between_NR,
        ready_NR=window.device_ready_NR,
    )


def _step_s(window: Window, steps_N: BoolArray) -> float:
    """The mean length of some steps over the ranks, with the time between steps."""
    total_NR = window.durations_NRS[steps_N].sum(axis=2)
    return float((total_NR if window.between_NR is None else total_NR + window.between_NR[steps_N]).mean())


def _coverage(fraction: float, settings: Settings) -> dict[str, float]:
    return {"device_coverage": fraction, "min_device_coverage": settings.most_fraction}
