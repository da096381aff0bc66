"""Several policies in force at once: all rules, in the order of the files, under the strictest of each limit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from apscheduler.triggers.cron import CronTrigger

from sftriage.model.verdicts import Suspect
from sftriage.policy.document import PolicyError, Problem, path_text
from sftriage.policy.fields import Location, next_open_s
from sftriage.policy.loading import LoadedPolicy, find, load
from sftriage.policy.quantities import AT_ONCE, CONTENTION, Lasting
from sftriage.policy.schema import Detection, Limits, Mitigate, Rule, Spec

_MOST_TURNS = 100
"""Windows of several policies that have not met after so many turns are taken never to."""

_ELSEWHERE = ""
"""Stands for every stage that no rule names: no stage is called so."""

About = tuple[tuple[Rule, ...], Rule]
"""The rules about one kind of suspect, whatever its gain, and of all rules the one that comes closest."""


@dataclass(frozen=True)
class PolicySet:
    """One or more policies that are in force together.

    All judge the same windows, so the first says how (``detection``), and none may say otherwise. A rule that samples
    more ranks than another policy's limits allow samples as many as they do.

    Raises:
        ValueError: there is none.
        PolicyError: they cannot be in force together; with every reason.
    """

    loaded: tuple[LoadedPolicy, ...]
    _about: dict[tuple[str, str, str | None, str], About] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.loaded:
            raise ValueError("no policy")
        problems = list(_between(self.loaded))
        if problems:
            raise PolicyError(self.loaded[0].source, problems)

    @property
    def detection(self) -> Detection:
        """How windows are cut and judged."""
        return self.loaded[0].policy.spec.detection

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, in the order in which they are tried."""
        return tuple(rule for spec in self._specs for rule in spec.rules)

    @cached_property
    def lasting(self) -> Mapping[str, Lasting]:
        """For each rule that waits for its suspects to last, how long; all policies judge the same windows.

        And for how long `CONTENTION` is waited for, whatever the rule.
        """
        every = {rule.name: rule.lasts(self.detection) for rule in self.rules}
        waiting = {name: wanted for name, wanted in every.items() if wanted != AT_ONCE}
        return {**waiting, CONTENTION: self.detection.contended_for}

    @cached_property
    def limits(self) -> Limits:
        """Of each limit the strictest."""
        every = [spec.limits for spec in self._specs]
        return Limits(
            captures_per_hour=min(one.captures_per_hour for one in every),
            captures_per_day=min(one.day_limit for one in every),
            captures_per_run=min((one.captures_per_run for one in every if one.captures_per_run), default=None),
            concurrent_ranks=min(one.concurrent_ranks for one in every),
            overhead_budget=min(every, key=lambda one: one.overhead_fraction).overhead_budget,
        )

    @cached_property
    def mitigate(self) -> Mitigate | None:
        """What may be done about a straggler: what all allow that say something of it, under the strictest bounds."""
        every = [spec.mitigate for spec in self._specs if spec.mitigate is not None]
        if not every:
            return None
        return Mitigate(
            remedies=tuple(one for one in every[0].remedies if all(one in other.remedies for other in every)),
            min_saving=max(every, key=lambda one: one.min_saving_fraction).min_saving,
            steps=max(one.steps for one in every),
            cooldown=max(every, key=lambda one: one.cooldown_s).cooldown,
        )

    @property
    def retention_s(self) -> float | None:
        """How long traces are kept: the shortest that a policy asks for, if one does."""
        kept = [spec.retention.age_s for spec in self._specs if spec.retention is not None]
        return min((age_s for age_s in kept if age_s is not None), default=None)

    @property
    def retention_bytes(self) -> int | None:
        """How much is kept: the least that a policy asks for, if one does."""
        kept = [spec.retention.size_bytes for spec in self._specs if spec.retention is not None]
        return min((size for size in kept if size is not None), default=None)

    @property
    def gathers(self) -> frozenset[str]:
        """What is gathered where a window cannot be decided: what any policy asks for."""
        return frozenset(what for spec in self._specs for what in spec.on_needs_evidence.gather)

    def owner(self, rule: str) -> LoadedPolicy:
        """The policy that a rule is of.

        Raises:
            ValueError: no policy has such a rule.
        """
        for one in self.loaded:
            if any(mine.name == rule for mine in one.policy.spec.rules):
                return one
        names = ", ".join(one.policy.metadata.name for one in self.loaded)
        raise ValueError(f"policy {names} has no rule {rule!r}")

    def about(self, label: str, suspect: Suspect) -> About:
        """The rules about this kind of suspect, looked up once: of a thousand rules most are about another one."""
        # What comes in from outside must not make this grow without bound.
        stage = suspect.stage if suspect.stage is None or suspect.stage in self._stages else _ELSEWHERE
        key = label, suspect.scope, stage, suspect.pattern
        if key not in self._about:
            misses = {rule.name: rule.misses(label, suspect) for rule in self.rules}
            nearest = min(self.rules, key=lambda rule: (*misses[rule.name], rule.min_share, rule.min_gain_s))
            self._about[key] = tuple(rule for rule in self.rules if not any(misses[rule.name])), nearest
        return self._about[key]

    def opens_s(self, now_s: float) -> float | None:
        """When captures are allowed, from ``now_s`` on: that itself if they are now, None if they never will be."""
        time_s = now_s
        for _ in range(_MOST_TURNS):
            before_s = time_s
            for window in self._windows:
                opens_s = next_open_s(window, time_s)
                if opens_s is None:
                    return None
                time_s = opens_s
            if time_s == before_s:
                return time_s
        return None

    @property
    def _specs(self) -> list[Spec]:
        return [one.policy.spec for one in self.loaded]

    @cached_property
    def _windows(self) -> tuple[CronTrigger, ...]:
        return tuple(spec.active.trigger for spec in self._specs if spec.active.trigger is not None)

    @cached_property
    def _stages(self) -> frozenset[str]:
        return frozenset(stage for rule in self.rules for stage in rule.match.stage)


def load_set(names: Iterable[str | os.PathLike[str]]) -> PolicySet:
    """The policies of several files, or of names that ship with sftriage, in force together.

    Raises:
        ValueError: none is named.
        UsageError: one is neither a file nor a name.
        PolicyError: with every problem in all of them.
    """
    loaded, problems = [], []
    for path in [find(name) for name in names]:
        try:
            loaded.append(load(path))
        except PolicyError as error:
            problems += [replace(problem, source=error.source) for problem in error.problems]
    if problems:
        raise PolicyError(problems[0].source, problems)
    return PolicySet(tuple(loaded))


def _between(loaded: tuple[LoadedPolicy, ...]) -> Iterator[Problem]:
    first = loaded[0]
    seen: dict[str, tuple[LoadedPolicy, Location]] = {}
    for one in loaded:
        yield from _other_detection(first, one)
        for index, rule in enumerate(one.policy.spec.rules):
            where: Location = ("spec", "rules", index)
            known, at = seen.setdefault(rule.name, (one, where))
            if known is not one:
                message = f"a second rule named {rule.name!r}; the first is {path_text(at)} of {known.source}"
                yield one.problem((*where, "name"), message)


def _other_detection(first: LoadedPolicy, one: LoadedPolicy) -> Iterator[Problem]:
    mine, theirs = one.policy.spec.detection, first.policy.spec.detection
    # What a policy does not say, it does not ask for.
    for name in sorted(mine.model_fields_set):
        value, other = getattr(mine, name), getattr(theirs, name)
        if value != other:
            message = f"{value}, but {other} in {first.source}; all policies of a job judge the same windows"
            yield one.problem(("spec", "detection", name), message)
