"""Several policies in force at once: all rules, in the order of the files, under the strictest of each limit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from sftriage.policy.document import path_text
from sftriage.policy.fields import Location
from sftriage.policy.loading import LoadedPolicy, find, load
from sftriage.policy.plan import Plan
from sftriage.policy.problems import PolicyError, Problem
from sftriage.policy.schema import Detection


@dataclass(frozen=True, slots=True)
class PolicySet:
    """One or more policies that are in force together.

    All judge the same windows, so the first says how (``detection``), and none may say otherwise. A rule that samples
    more ranks than another policy's limits allow samples as many as they do.

    Raises:
        ValueError: there is none.
        PolicyError: they cannot be in force together; with every reason.
    """

    loaded: tuple[LoadedPolicy, ...]
    plan: Plan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse policies that contradict each other, and make ready those that do not."""
        if not self.loaded:
            raise ValueError("no policy")
        problems = list(_between(self.loaded))
        if problems:
            raise PolicyError(self.loaded[0].source, problems)
        specs = [one.policy.spec for one in self.loaded]
        plan = Plan(
            (rule for spec in specs for rule in spec.rules),
            [spec.limits for spec in specs],
            [spec.active for spec in specs],
        )
        object.__setattr__(self, "plan", plan)

    @property
    def detection(self) -> Detection:
        """How windows are cut and judged."""
        return self.loaded[0].policy.spec.detection

    @property
    def retention_s(self) -> float | None:
        """How long traces are kept: the shortest that a policy asks for, if one does."""
        kept = [one.policy.spec.retention for one in self.loaded]
        return min((one.age_s for one in kept if one is not None and one.age_s is not None), default=None)

    @property
    def retention_bytes(self) -> int | None:
        """How much is kept: the least that a policy asks for, if one does."""
        kept = [one.policy.spec.retention for one in self.loaded]
        return min((one.size_bytes for one in kept if one is not None and one.size_bytes is not None), default=None)

    @property
    def gathers(self) -> frozenset[str]:
        """What is gathered where a window cannot be decided: what any policy asks for."""
        return frozenset(what for one in self.loaded for what in one.policy.spec.on_needs_evidence.gather)

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
        if one is not first:
            yield from _other_detection(first, one)
        for index, rule in enumerate(one.policy.spec.rules):
            where: Location = ("spec", "rules", index)
            known, at = seen.setdefault(rule.name, (one, where))
            if known is not one:
                message = f"a second rule named {rule.name!r}; the first is {path_text(at)} of {known.source}"
                yield _problem(one, (*where, "name"), message)


def _other_detection(first: LoadedPolicy, one: LoadedPolicy) -> Iterator[Problem]:
    mine, theirs = one.policy.spec.detection, first.policy.spec.detection
    # What a policy does not say, it does not ask for.
    for name in sorted(mine.model_fields_set):
        value, other = getattr(mine, name), getattr(theirs, name)
        if value != other:
            message = f"{value}, but {other} in {first.source}; all policies of a job judge the same windows"
            yield _problem(one, ("spec", "detection", name), message)


def _problem(loaded: LoadedPolicy, location: Location, message: str) -> Problem:
    line, column = loaded.places.get(location, (0, 0))
    return Problem(line, column, path_text(location), message, loaded.source)
