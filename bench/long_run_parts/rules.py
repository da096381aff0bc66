"""All that the bench knows of who judges: a rule gets a job's windows in order, and says of each whom it names.

Ours is `judge`, with the past carried from window to window; as shipped it is asked through the replay of the default
policy, which judges the same way and says too what would have been captured. To try another way to judge, give `named`
or `decided` something else; to try other settings, add a line to `variants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from bench.hidden_rank_matrix.rivals import ALARM_FRACTION, RULES, Columns, Named, Rule, Said, columns_of
from sftriage.controller.controller import settings_of
from sftriage.controller.replay import replay
from sftriage.decisions import Verdict
from sftriage.policy.loading import find, load
from sftriage.policy.policy_set import PolicySet
from sftriage.records import Window
from sftriage.verdicts import Past, Settings, judge

Name = tuple[str, tuple[int, ...]]
"""Who is named: a scope and its ranks."""

OURS = "ours"
START_S = 946684800.0
"""When a job begins, for its policy: at midnight, on a Saturday."""
MAD_TO_SIGMA, MAD_SIGMAS = 1.4826, 3.5


@dataclass(frozen=True, slots=True)
class Judged:
    """What a rule says of one window.

    Attributes:
        last_step: of the window.
        name: whom it names.
        stage: for which stage.
        label: of ours, its label and its reasons.
        captured: of ours as shipped, the ranks that would have been captured for it.
        descheduled: of ours, that the verdict says that whom it names mostly waited for a CPU.
        since: of ours, the step since which the verdict says so.
    """

    last_step: int
    name: Name | None = None
    stage: str | None = None
    label: str = ""
    captured: tuple[int, ...] = ()
    descheduled: bool = False
    since: int | None = None


Namer = Callable[[Iterable[Window]], Iterator[Judged]]


def variants() -> dict[str, Settings]:
    """Ours at other sensitivities than the shipped one: the points of the trade-off."""
    shipped = shipped_settings()
    return {f"gain from {percent:g} %": replace(shipped, min_gain_fraction=percent / 100) for percent in (2.5, 10.0)}


@cache
def shipped_policies() -> PolicySet:
    """The default policy alone."""
    return PolicySet((load(find("default")),))


def shipped_settings() -> Settings:
    """What windows are judged by under it."""
    return settings_of(shipped_policies().detection)


def judged(verdict: Verdict, captured: tuple[int, ...] = ()) -> Judged:
    """A verdict as the bench counts it."""
    label = " ".join((verdict.label, *verdict.reasons))
    if verdict.label != "suspect":
        return Judged(verdict.last_step, label=label, captured=captured)
    first = verdict.suspects[0]
    name = (first.scope, first.ranks)
    return Judged(verdict.last_step, name, first.stage, label, captured, first.by_system is not None, first.onset_step)


def named(settings: Settings) -> Namer:
    """Our verdicts, without a policy."""

    def say(windows: Iterable[Window]) -> Iterator[Judged]:
        past: Past | None = None
        for window in windows:
            verdict, past = judge(window, past, settings)
            yield judged(verdict)

    return say


def decided(policies: PolicySet) -> Namer:
    """Our verdicts, and the captures that policies start for them."""

    def say(windows: Iterable[Window]) -> Iterator[Judged]:
        for one in replay(windows, policies, START_S):
            requests = one.decision.requests
            yield judged(one.verdict, tuple(request.rank for request in requests if request.role == "suspect"))

    return say


def median_absolute_deviation(seen: Columns, earlier: Sequence[Columns] = ()) -> Said:
    """The ranks' mean times in each local stage against their median, by their median absolute deviation.

    Ingero Fleet's rule, on the stages instead of a health score. An outlier is past 3.5 deviations (Iglewicz and
    Hoaglin 1993); one that is past the median by less than 5 % of the step raises no alarm.
    """
    means_RK = seen.values_NRK.mean(axis=0)
    past_RK = means_RK - np.median(means_RK, axis=0)
    sigma_K = MAD_TO_SIGMA * np.median(np.abs(past_RK), axis=0)
    named = [
        Named(seen.rank_R[rank], name, float(past_RK[rank, k]))
        for k, name in enumerate(seen.names)
        for rank in [int(past_RK[:, k].argmax())]
        if seen.local_K[k] and past_RK[rank, k] > MAD_SIGMAS * sigma_K[k]
    ]
    ranked = tuple(sorted(named, key=lambda one: -one.score))
    return Said(ranked, bool(ranked) and ranked[0].score >= ALARM_FRACTION * seen.step_s)


RIVALS: dict[str, Rule] = {
    name: RULES[name] for name in ("plain frontier", "per-stage maximum", "minimum backward", "own speed 0.75")
} | {"median deviation": median_absolute_deviation}


def rival(rule: Rule) -> Namer:
    """A rule of one window as a rule of windows in order: whom it raises an alarm for."""

    def say(windows: Iterable[Window]) -> Iterator[Judged]:
        best: list[Columns] = []
        for window in windows:
            seen = columns_of(window)
            said = Said() if seen.empty else rule(seen, best)
            best = _best_of([*best, seen])
            if said.alarm and said.ranked:
                first = said.ranked[0]
                yield Judged(window.last_step, ("rank", (first.rank,)), first.stage)
            else:
                yield Judged(window.last_step)

    return say


def _best_of(windows: Sequence[Columns]) -> list[Columns]:
    """One step that has the least median of any window: all that a rule which remembers better days asks of them."""
    last = windows[-1]
    alike = [one for one in windows if (one.names, one.rank_R) == (last.names, last.rank_R) and not one.empty]
    if not alike:
        return []
    least_RK = np.min([np.median(one.values_NRK, axis=0) for one in alike], axis=0)
    return [Columns(last.names, last.local_K, least_RK[None], last.rank_R, last.sync)]


def rule_of(name: str) -> Namer:
    """A rule by its name: ours as shipped, one of our variants, or a rival."""
    if name == OURS:
        return decided(shipped_policies())
    return rival(RIVALS[name]) if name in RIVALS else named(variants()[name])
