"""Explaining a verdict: its numbers against their thresholds, and what would have changed the label.

Everything that decided is in the verdict, so that a recorded one is explained without its window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sftriage.decisions import Suspect, Verdict

Unit = Literal["s", "fraction", "log odds"]


@dataclass(frozen=True, slots=True)
class Check:
    """One number against its threshold. ``met``: the number reaches it."""

    name: str
    what: str
    value: float
    threshold: float
    unit: Unit

    @property
    def met(self) -> bool:
        """Whether the number reaches its threshold."""
        return self.value >= self.threshold


@dataclass(frozen=True, slots=True)
class Explanation:
    """The checks that were made, the runner-up, and what would have changed the label."""

    checks: tuple[Check, ...]
    runner_up: Suspect | None
    changes: tuple[str, ...]


EXCESS: tuple[tuple[str, str, str, Unit], ...] = (
    ("coverage", "steps of all ranks that came in", "min_coverage", "fraction"),
    ("single_gain_s", "what one rank or host alone adds to a step", "min_gain_s", "s"),
    ("late_excess_s", "how much later than usual the last rank comes", "min_lateness_s", "s"),
    ("shared_excess_s", "how much longer than usual the step is for all ranks alike", "min_group_s", "s"),
)
AGAINST_ITSELF: tuple[tuple[str, str, str, Unit], ...] = (
    ("over_best_fraction", "how much slower than its own best the job is now", "min_over_best_fraction", "fraction"),
    ("slower_evidence", "evidence that the job has become slower, in log odds", "min_slower_evidence", "log odds"),
)
CLOCK: tuple[tuple[str, str, str, Unit], ...] = (
    ("device_coverage", "steps whose device times are known", "min_device_coverage", "fraction"),
    ("clock_agreement", "how far the two clocks agree on the length of a step", "min_clock_agreement", "fraction"),
    ("longer_s", "how much longer than a healthy step it is, by the hosts' clock", "min_longer_s", "s"),
)
"""Of ranks that run on devices: what has to be met to judge by the devices' clock, or else to believe the hosts'."""
FIRST: tuple[tuple[str, str, str, Unit], ...] = (
    ("first_log_odds", "evidence that the likeliest is not last by chance, in log odds", "min_log_odds", "log odds"),
    (
        "first_own_fraction",
        "steps that the likeliest alone held up, of those that it or the next one did",
        "min_own_fraction",
        "fraction",
    ),
    ("first_persistence", "steps that the likeliest was there in", "min_persistence", "fraction"),
    ("first_share", "what the likeliest adds to a step, as a share of it", "min_share", "fraction"),
    ("first_explained_s", "how much of the delay the likeliest explains", "wanted_s", "s"),
)


def explain(verdict: Verdict) -> Explanation:
    """The verdict's numbers against their thresholds, the runner-up, and what would have changed the label."""
    numbers = verdict.numbers
    tables = CLOCK + EXCESS + (FIRST if "first_share" in numbers else ()) + AGAINST_ITSELF
    checks = tuple(
        Check(name, what, numbers[name], numbers[threshold], unit)
        for name, what, threshold, unit in tables
        if name in numbers and threshold in numbers
    )
    first = verdict.suspects[0] if verdict.suspects else None
    rivals = [one for one in verdict.suspects[1:] if first is not None and not set(one.ranks) & set(first.ranks)]
    return Explanation(checks, rivals[0] if rivals else None, _changes(verdict, checks))


def _changes(verdict: Verdict, checks: tuple[Check, ...]) -> tuple[str, ...]:
    """What would have changed the label, in words."""
    of_clock = [check for check in checks if check.name in {name for name, *_ in CLOCK}]
    of_excess = [check for check in checks if check.name in {name for name, *_ in EXCESS}]
    of_first = [check for check in checks if check.name.startswith("first_")]
    if verdict.label == "suspect":
        # The check that was passed by the least is the one that would fail first.
        passed = (check for check in of_first if check.threshold > 0.0)
        close = min(passed, key=lambda check: check.value / check.threshold, default=None)
        return (f"held if this fell below its threshold: {close.what}",) if close is not None else ()
    if "low_coverage" in verdict.reasons:
        return ("looked into once enough of its steps have come in from all ranks",)
    if "clock_limited" in verdict.reasons:
        missed = [check.what for check in of_clock if not check.met and check.unit == "fraction"]
        return _once_all("judged by the devices' clock", missed)
    if "self_inflicted" in verdict.reasons:
        return ("looked into if no capture had run in it",)
    if verdict.reasons == ("regressed",):
        return ("healthy once its steps are as good as the job's best again",)
    missed = [check.what for check in of_first if not check.met]
    if verdict.label == "healthy":
        found = [check.what for check in of_excess[1:] if not check.met]
        several = "any of these reached its threshold" if len(found) > 1 else "this reached its threshold"
        return (f"unhealthy if {several}: {'; '.join(found)}",) if found else ()
    if not of_first:
        return ("a suspect if mending one alone would save a good part of the delay",)
    return _once_all("a suspect", missed)


def _once_all(what: str, missed: list[str]) -> tuple[str, ...]:
    """What a window would be once nothing that it misses is missed any more: one of several is not enough."""
    if len(missed) == 1:
        return (f"{what} if this reached its threshold: {missed[0]}",)
    return (f"{what} if all of these reached their thresholds: {'; '.join(missed)}",) if missed else ()
