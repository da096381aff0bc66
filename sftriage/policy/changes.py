"""What a policy that was written for an earlier version means now, where that is not what it meant then."""

from __future__ import annotations

from collections.abc import Iterator

from sftriage.policy.fields import Location
from sftriage.policy.limits import WORSE_TIMES
from sftriage.policy.loading import LoadedPolicy
from sftriage.policy.problems import Problem
from sftriage.policy.quantities import lasting
from sftriage.policy.schema import Limits, Spec

LIMITS: Location = ("spec", "limits")
RULES: Location = ("spec", "rules")

_COOLDOWNS = (
    "a cooldown is of one suspect now, and keeps nobody else waiting; a suspect whose capture holds its fault is "
    f"captured again once it costs {WORSE_TIMES:g} times as much, in another attempt of the job, or a week later"
)
_AUTO = (
    "the profiler is auto where it is not said, which was torch: Python stacks where the host does the work, torch for "
    "what computes; say which, if it is to be one"
)
_SAMPLED = (
    "stacks of a suspect are sampled by its trainer now, over `steps`, which it is as well to say; for one look from "
    "outside say native: true among the options of stacks"
)
_KEPT = "of an hour's and of a day's places the last is kept for a suspect larger than any before"


def changes(loaded: LoadedPolicy) -> list[Problem]:
    """What has changed for a policy, in the order of the document. None of it is a mistake."""
    spec = loaded.policy.spec
    return sorted(loaded.problem(*said) for said in (*_of_windows(spec), *_of_captures(spec)))


def _of_windows(spec: Spec) -> Iterator[tuple[Location, str]]:
    for index, rule in enumerate(spec.rules):
        windows = lasting(rule.lasting).windows
        steps = rule.lasts(spec.detection).steps
        if windows > 1:
            span = f"so many are in {windows} windows that follow on one another"
            yield (*RULES, index, "for"), f"{rule.lasting} is {steps} steps now: {span}; say {steps} steps, or a time"
        elif windows == 1:
            said = "1 window is 1 step now: whatever a window shows is there for one; say 1 step, or nothing"
            yield (*RULES, index, "for"), said


def _of_captures(spec: Spec) -> Iterator[tuple[Location, str]]:
    """What is other about profilers, limits and cooldowns. A policy that limits a day was written with that in mind."""
    for index, rule in enumerate(spec.rules):
        capture, stalled = rule.capture, rule.match.label == "stalled"
        if capture is None or stalled:
            continue
        if "profiler" not in capture.model_fields_set:
            yield (*RULES, index, "capture"), _AUTO
        elif capture.profiler == "stacks" and not (capture.stacks.from_outside or "steps" in capture.model_fields_set):
            yield (*RULES, index, "capture", "profiler"), _SAMPLED
    if spec.limits.captures_per_day is None and any(rule.capture is not None for rule in spec.rules):
        yield LIMITS, _of_limits(spec.limits)
        yield RULES, _COOLDOWNS


def _of_limits(limits: Limits) -> str:
    day = f"captures_per_day is new, and {limits.day_limit} where it is not said"
    if limits.captures_per_run is None:
        return f"{day}; captures_per_run, which was 3 where it was not said, is off now; {_KEPT}"
    most = f"captures_per_run: {limits.captures_per_run}"
    return f"{day}; {most} still ends all captures of a run, however long it is, and can be left out; {_KEPT}"
