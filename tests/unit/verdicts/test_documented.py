"""docs/verdicts.md says the numbers that decide."""

import math
from pathlib import Path

import pytest

from sftriage.policy.schema import Detection
from sftriage.verdicts import Settings
from sftriage.verdicts.sequential import MAX_PERIOD_STEPS

PAGE = " ".join((Path(__file__).parents[3] / "docs" / "verdicts.md").read_text(encoding="utf-8").split())
ONE = Settings()


def percent(fraction):
    return f"{100 * fraction:g} %"


def in_a_row(n_ranks):
    chance = max(1 / n_ranks, ONE.min_chance)
    return math.ceil(ONE.naming_log_odds / math.log(ONE.guilty_fractions[0] / chance))


def odds(n_ranks, guilty):
    chance = max(1 / n_ranks, ONE.min_chance)
    return f"{math.log(guilty / chance):+.2f}, {math.log((1 - guilty) / (1 - chance)):.2f}"


@pytest.mark.parametrize(
    "said",
    [
        f"over {100 * ONE.min_event_fraction:g}, "
        f"{', '.join(f'{100 * size:g}' for size in ONE.event_fractions[:-1])} and {percent(ONE.event_fractions[-1])}",
        f"{percent(ONE.guilty_fractions[0])}, or {percent(ONE.guilty_fractions[1])} amid the hiccups",
        f"| {odds(4, ONE.guilty_fractions[0])} | {odds(8, ONE.guilty_fractions[0])} |",
        f"| {odds(4, ONE.guilty_fractions[1])} | {odds(8, ONE.guilty_fractions[1])} |",
        f"reaches {ONE.naming_log_odds:.1f}, the logarithm of ten million",
        f"{in_a_row(4)} clear events in a row of 4 ranks, {in_a_row(8)} of 8",
        f"down to half of that, and loses it after {MAX_PERIOD_STEPS} steps",
        f"Fewer than {percent(ONE.min_coverage_fraction)} of the (step, rank) vectors",
        f"`share` is at least {percent(ONE.min_gain_fraction)} of the step",
        f"slower in the same way than its baseline, by {percent(ONE.min_group_fraction)}",
        f"adds {percent(ONE.min_gain_fraction)} to the step and is not named; or the last rank is late by "
        f"{percent(ONE.min_lateness_fraction)} beyond jitter; or what all have in common is "
        f"{percent(ONE.min_group_fraction)} over the baseline",
        f"if it has {percent(ONE.larger_part_fraction)} of the host's gain",
        f"it has been away for {ONE.min_away_steps} steps",
        f"takes {percent(ONE.slower_fraction)} of a step longer than at its best",
        f"most are ({percent(ONE.guilty_fractions[0])})",
        f"is {percent(ONE.min_over_best_fraction)} over the best",
    ],
)
def test_the_page_and_the_code_say_the_same_numbers(said):
    assert said in PAGE


def test_a_policy_that_says_nothing_asks_for_the_same():
    asked = Detection()
    assert asked.min_gain_fraction == ONE.min_gain_fraction
    assert asked.false_names_per_million_steps == ONE.false_names_per_million_steps
    assert (asked.min_persistence, asked.min_coverage) == (ONE.min_persistence_fraction, ONE.min_coverage_fraction)
