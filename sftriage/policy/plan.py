"""The rules of one or several policies, made ready to be asked thousands of times: who is about what is looked up once.

Of a thousand rules, most are about another label, scope, stage or pattern. Which ones are left for a suspect does not
depend on its gain, so it is kept; per window only the gains are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apscheduler.triggers.cron import CronTrigger

from sftriage.policy import cron
from sftriage.records import Label, Suspect, Verdict

if TYPE_CHECKING:
    from sftriage.policy.capture import Capture
    from sftriage.policy.schema import Active, Limits, Rule

_MOST_TURNS = 100
"""Windows of several policies that have not met after so many turns are taken never to."""

_ELSEWHERE = ""
"""Stands for every stage that no rule names: no stage is called so."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of each limit the strictest, over all policies."""

    captures_per_hour: int
    captures_per_run: int
    concurrent_ranks: int
    overhead_fraction: float

    @classmethod
    def of(cls, limits: Iterable[Limits]) -> Bounds:
        """The strictest of several policies' limits."""
        every = tuple(limits)
        return cls(
            min(one.captures_per_hour for one in every),
            min(one.captures_per_run for one in every),
            min(one.concurrent_ranks for one in every),
            min(one.overhead_fraction for one in every),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRule:
    """A rule with its quantities read. An empty set of scopes, stages or patterns means any.

    Rules of one ``wish`` capture the same of a suspect's ranks.
    """

    name: str
    label: Label
    scopes: frozenset[str]
    stages: frozenset[str | None]
    patterns: frozenset[str]
    min_share: float
    min_gain_s: float
    windows: int
    cooldown_s: float
    capture: Capture | None
    wish: int
    notifies: bool
    rule: Rule

    @classmethod
    def of(cls, rule: Rule, wishes: dict[object, int]) -> PlannedRule:
        """A rule of the schema. ``wishes`` numbers what rules ask for, and grows."""
        match, gain, capture = rule.match, rule.match.gain_condition, rule.capture
        return cls(
            name=rule.name,
            label=match.label,
            scopes=frozenset(match.scope),
            stages=frozenset(match.stage),
            patterns=frozenset(match.pattern),
            min_share=gain.min_share,
            min_gain_s=gain.min_gain_s,
            windows=rule.windows,
            cooldown_s=rule.cooldown_s,
            capture=capture,
            wish=wishes.setdefault(capture and (capture.ranks, capture.sample, capture.control_ranks), len(wishes)),
            notifies=bool(rule.notify),
            rule=rule,
        )

    def misses(self, label: str, suspect: Suspect) -> tuple[bool, bool, bool, bool]:
        """Whether label, scope, stage and pattern are what the rule is not about."""
        return (
            self.label != label,
            bool(self.scopes) and suspect.scope not in self.scopes,
            bool(self.stages) and suspect.stage not in self.stages,
            bool(self.patterns) and suspect.pattern not in self.patterns,
        )

    def reached(self, share: float, gain_s: float) -> bool:
        """Whether a gain is what the rule asks for. Not a number reaches nothing."""
        return share >= self.min_share and gain_s >= self.min_gain_s

    def matches(self, label: str, suspect: Suspect) -> bool:
        """Whether the rule is about this suspect."""
        return not any(self.misses(label, suspect)) and self.reached(suspect.share, suspect.gain_s)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The rules about one kind of suspect, whatever its gain, and of all rules the one that comes closest."""

    rules: tuple[PlannedRule, ...]
    nearest: PlannedRule
    lasting: bool
    notifying: bool

    def reached(self, suspect: Suspect) -> list[PlannedRule]:
        """Those of the rules that the suspect's gain is enough for, in order."""
        share, gain_s = suspect.share, suspect.gain_s
        return [rule for rule in self.rules if share >= rule.min_share and gain_s >= rule.min_gain_s]


class Plan:
    """What a policy, or several together, come to.

    Args:
        rules: all rules, in the order in which they are tried.
        limits: of each policy, its limits.
        active: of each policy, when it allows captures.
    """

    def __init__(self, rules: Iterable[Rule], limits: Iterable[Limits], active: Iterable[Active]) -> None:
        wishes: dict[object, int] = {}
        self.rules = tuple(PlannedRule.of(rule, wishes) for rule in rules)
        self.bounds = Bounds.of(limits)
        self._windows = tuple(one.trigger for one in active if one.trigger is not None)
        self._stages = frozenset(stage for rule in self.rules for stage in rule.stages)
        self._groups: dict[tuple[str, str, str | None, str], Group] = {}

    def group(self, verdict: Verdict, suspect: Suspect) -> Group:
        """The rules about this kind of suspect."""
        # What comes in from outside must not make this grow without bound.
        stage = suspect.stage if suspect.stage is None or suspect.stage in self._stages else _ELSEWHERE
        key = verdict.label, suspect.scope, stage, suspect.pattern
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self._grouped(verdict.label, suspect)
        return found

    def on(self, label: str) -> Iterator[PlannedRule]:
        """The rules about a label, in order."""
        return (rule for rule in self.rules if rule.label == label)

    def opens_s(self, now_s: float) -> float | None:
        """When captures are allowed, from ``now_s`` on: that itself if they are now, None if they never will be."""
        return _all_open_s(self._windows, now_s) if self._windows else now_s

    def _grouped(self, label: str, suspect: Suspect) -> Group:
        def distance(rule: PlannedRule) -> tuple[bool, bool, bool, bool, float, float]:
            return *rule.misses(label, suspect), rule.min_share, rule.min_gain_s

        about = tuple(rule for rule in self.rules if not any(rule.misses(label, suspect)))
        return Group(
            rules=about,
            nearest=min(self.rules, key=distance),
            lasting=any(rule.windows > 1 for rule in about),
            notifying=any(rule.notifies for rule in about),
        )


def _all_open_s(windows: Sequence[CronTrigger], now_s: float) -> float | None:
    """When all windows are open at once."""
    time_s = now_s
    for _ in range(_MOST_TURNS):
        before_s = time_s
        for window in windows:
            opens = cron.opens_s(window, time_s)
            if opens is None:
                return None
            time_s = opens
        if time_s == before_s:
            return time_s
    return None
