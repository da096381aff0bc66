"""The evidence along a run: who causes the clear events, against chance, and what comes back."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.verdicts import Settings
from sftriage.verdict.sequential import HISTORY_STEPS, MAX_PERIOD_STEPS, ClearEvent, Evidence, advanced, recurrence_of

SETTINGS = Settings()
RANK = 1


def events(*steps, rank=RANK, share=0.2):
    return [ClearEvent(int(step), rank, share) for step in steps]


def in_order(*parts):
    """Events of several ranks; of those in one step the largest."""
    largest = {}
    for one in (event for part in parts for event in part):
        if one.step not in largest or one.share > largest[one.step].share:
            largest[one.step] = one
    return [largest[step] for step in sorted(largest)]


def after(found, n_steps, n_units=4, settings=SETTINGS):
    return advanced(Evidence(n_units), found, n_steps, settings)


def by_chance(n_steps, seed, n_units=4, rate=0.5):
    """Events of which each is anybody's."""
    random = np.random.default_rng(seed)
    steps = np.flatnonzero(random.random(n_steps) < rate)
    units, shares = random.integers(n_units, size=len(steps)), random.exponential(0.2, len(steps))
    return [ClearEvent(*one) for one in zip(steps.tolist(), units.tolist(), shares.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("situation", "found", "named"),
    [
        ("nothing happens", [], False),
        ("a dozen steps", events(*range(20, 32)), False),
        ("one more", events(*range(20, 33)), True),
        ("two steps of three, and no unit in the third", events(*(n for n in range(20, 60) if n % 3)), True),
        (
            "two steps of three, another rank in the third",
            in_order(
                events(*(n for n in range(20, 120) if n % 3)),
                events(*range(21, 120, 3), rank=(2,)),
                events(0, rank=(0,)),
            ),
            True,
        ),
        (
            "as often as two other ranks",
            in_order(*(events(*range(20 + rank, 320, 3), rank=(rank,)) for rank in range(3))),
            False,
        ),
        ("now and then, with longer pauses than any period has", events(*range(0, 6600, 66)), False),
        (
            "small ones, amid large ones of all others",
            in_order(
                events(*range(60), share=0.03),
                *(events(*range(3 * n, 60, 9), rank=(rank,), share=0.5) for n, rank in enumerate((0, 2, 3))),
            ),
            True,
        ),
    ],
)
def test_the_unit_with_most_of_the_clear_events_is_named(situation, found, named):
    # GIVEN events, WHEN the evidence is taken up to the last of them
    evidence = after(found, found[-1].step + 1 if found else 100)
    # THEN the unit with most of them is named, and no other
    assert evidence.named(RANK) == named
    assert all(unit == RANK for unit, one in evidence.units.items() if one.named)


def hanging_together(n_steps, seed, n_units, stays):
    """Events in every step, each of the same unit as the one before or of anybody."""
    random = np.random.default_rng(seed)
    anew = np.concatenate([[0], np.cumsum(random.random(n_steps - 1) >= stays)])
    unit_N = random.integers(n_units, size=n_steps)[anew]
    return [ClearEvent(step, unit, 0.2) for step, unit in enumerate(unit_N.tolist())]


def named_windows(found, n_units, stride=10):
    """How often a unit is named, checked at regular steps."""
    evidence, named = Evidence(n_units), 0
    for first in range(0, len(found), stride):
        evidence = advanced(evidence, found[first : first + stride], first + stride, SETTINGS)
        named += any(one.named for one in evidence.units.values())
    return named


@pytest.mark.parametrize(("n_units", "stays"), [(2, 0.6), (4, 0.7), (8, 0.7), (1024, 0.8)])
def test_correlated_delays_hardly_ever_name_a_unit(n_units, stays):
    # GIVEN hiccups of any unit that last for several steps, THEN a unit is named in at most one window of a hundred
    found = hanging_together(10_000, 5, n_units, stays)
    assert named_windows(found, n_units) <= 10
    # AND who causes nine in ten of the events among them still is
    random = np.random.default_rng(6)
    guilty = [replace(one, unit=RANK) if random.random() < 0.9 else one for one in found[:1000]]
    assert named_windows(guilty, n_units) >= 80


def test_one_fault_does_not_hide_the_next():
    # GIVEN a rank that was slow for a long time, WHEN another one is, THEN few events more name that one
    before = after(events(*range(300), rank=0), 300)
    assert not advanced(before, events(*range(300, 312)), 312, SETTINGS).named(RANK)
    assert advanced(before, events(*range(300, 320)), 320, SETTINGS).named(RANK)


def test_a_fault_that_stays_away_has_ended_and_the_next_one_is_another():
    # GIVEN a rank that was named
    evidence = after(events(*range(100, 140)), 140)
    assert evidence.named(RANK)
    # WHEN it does nothing for as long as the longest period, THEN it still is, and after that no more
    assert advanced(evidence, [], 139 + MAX_PERIOD_STEPS, SETTINGS).named(RANK)
    ended = advanced(evidence, [], 140 + MAX_PERIOD_STEPS, SETTINGS)
    assert not ended.named(RANK)
    # AND one event more is one event
    again = advanced(ended, events(300), 301, SETTINGS)
    assert again.units[RANK].onset == 300


def test_others_take_a_name_away():
    # GIVEN a rank that was named, WHEN others cause the events from then on
    evidence = after(events(*range(20)), 20)
    for step in range(20, 60):
        evidence = advanced(evidence, events(step, rank=(step % 3 + 2,)), step + 1, SETTINGS)
    # THEN no unit is named
    assert not any(one.named for one in evidence.units.values())


def test_one_unit_alone_is_never_named():
    assert after(events(*range(50), rank=(0,)), 50, n_units=1).units == {}


def mostly_last(own, others):
    """Regular steps, an evaluation perhaps, in which `RANK` is the last in all but a few."""
    theirs = [1, 3][:others]
    return [ClearEvent(50 * n, (0,) if n in theirs else RANK, 0.5) for n in range(own + others)]


PERIODS = ((5, 9), (7, 8), (20, 7), (40, 7), (60, 7))
TWO_IN_72 = in_order(events(*range(67, 580, 72), share=0.15), events(*range(44, 580, 72), rank=(0,), share=0.15))
AMID = in_order(by_chance(300, 1, rate=1 / 3), events(*range(4, 300, 9), share=0.5))
TENTH = events(*range(100, 300, 10))


@pytest.mark.parametrize(
    ("situation", "found", "n_steps", "n_units", "recurrence"),
    [
        *(
            (f"every {n} steps, often enough", events(*range(100, 100 + times * n, n)), 0, 4, (n, 100 % n, 100))
            for n, times in PERIODS
        ),
        *((f"thrice, every {n} steps", events(100, 100 + n, 100 + 2 * n), 0, 4, None) for n, _ in PERIODS),
        ("every 9 steps, amid hiccups of all", AMID, 300, 4, (9, 4, 4)),
        # Of three ranks one is the last in six of eight evaluations, by chance; of two, in half of them.
        ("6 of 8, three ranks", mostly_last(6, 2), 0, 3, None),
        ("6 of 6, three ranks", mostly_last(6, 0), 0, 3, (50, 0, 0)),
        ("6 of 8, many ranks", mostly_last(6, 2), 0, 16, (50, 0, 0)),
        ("8 of 8, two ranks", mostly_last(8, 0), 0, 2, None),
        ("9 of 9, two ranks", mostly_last(9, 0), 0, 2, (50, 0, 0)),
        ("8 of 9, two ranks", mostly_last(8, 1), 0, 2, None),
        # A longer period than any that is searched for: every other time of half of it, as far as is remembered.
        ("every 72 steps, as another rank does", TWO_IN_72, 580, 4, None),
        ("every 72 steps, alone", events(*range(67, 796, 72), share=0.15), 796, 4, (36, 67 % 36, 355)),
        ("up to now", TENTH, 305, 4, (10, 0, 100)),
        ("no more", TENTH, 330, 4, None),
    ],
)
def test_a_recurring_fault_is_found_with_its_period_and_first_step(situation, found, n_steps, n_units, recurrence):
    evidence = after(found, n_steps or found[-1].step + 1, n_units)
    here = recurrence_of(evidence, RANK, SETTINGS)
    assert (here and (here.period, here.phase, here.onset)) == recurrence
    # AND the sequence alone names it after a dozen events and not before
    assert evidence.named(RANK) == (sum(one.unit == RANK for one in found) > 12)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("period", [10, 20, 50])
def test_the_rhythm_of_all_units_names_none(period, seed):
    # GIVEN an evaluation in which another unit is last each time; or that is late in two of three
    random = np.random.default_rng(seed)
    found = [
        ClearEvent(step, int(random.integers(4)), float(random.exponential(0.2)))
        for step in range(0, 2000, period)
        if random.random() < 2 / 3
    ]
    evidence = Evidence(4)
    for event in found:
        evidence = advanced(evidence, [event], event.step + 1, SETTINGS)
        # THEN no unit recurs at any time, and none is named
        assert all(recurrence_of(evidence, (rank,), SETTINGS) is None for rank in range(4)), event
        assert not any(one.named for one in evidence.units.values())


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ("do nothing", True),
        ("have hiccups", True),
        ("do the same, each in its own time", False),
        ("do the same, each in its own time, among hiccups of all", False),
        ("do the same, each in its own time, and show half of the times", False),
        ("do the same, each in its own time, a third shorter", False),
        ("do the same, each in its own time, for a few steps on end", False),
        ("do it half as often", True),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_work_that_each_rank_does_at_its_own_time_names_none(others, named, seed):
    # GIVEN a rank that is late in every 50th step; the others' garbage is collected as often, give or take two steps
    random = np.random.default_rng(seed)
    parts = [events(*range(10, 500, 50), share=3.0)]
    if "each in its own time" in others:
        starts = {(0,): 7, (2,): 23, (3,): 41}
        parts += [
            events(*(np.arange(at, 500, 50) + random.integers(-2, 3, len(range(at, 500, 50)))), rank=rank, share=2.5)
            for rank, at in starts.items()
        ]
    if "shorter" in others:
        # (one size of event is between them)
        parts = [[replace(one, share=0.4 if one.unit == RANK else 0.27) for one in part] for part in parts]
    if "on end" in others:
        parts += [[replace(one, step=one.step + 1) for one in part if one.step < 499] for part in parts]
    if "half of the times" in others:
        parts[1:] = [[one for one in part if random.random() < 0.5] for part in parts[1:]]
    if others == "do it half as often":
        parts.append(events(*range(30, 500, 100), rank=(0,), share=2.5))
    if "hiccups" in others:
        parts.append(by_chance(500, seed, rate=0.2))
    # WHEN there are enough
    found = recurrence_of(after(in_order(*parts), 500), RANK, SETTINGS)
    # THEN it is that rank's only where no other does the same
    assert (found is not None and found.period == 50) == named


@given(steps=st.lists(st.integers(0, 511), max_size=1200), rate=st.integers(1, 5))
def test_a_repeated_step_counts_once(steps, rate):
    # GIVEN events in any steps, and steps that have two of one rank: in time before its sync, and after it
    found = [event for step in range(0, 512, rate) for event in events(step, step)]
    twice = sorted(found + events(*steps, rank=(2,)), key=lambda one: one.step)
    # WHEN a period is looked for, however many there are, THEN it is that of the steps
    evidence, once = after(twice, 512), after(sorted(set(twice), key=lambda one: one.step), 512)
    for rank in (RANK, (2,)):
        one, other = recurrence_of(evidence, rank, SETTINGS), recurrence_of(once, rank, SETTINGS)
        if one is not None and other is not None:
            assert (one.period, one.phase, one.onset) == (other.period, other.phase, other.onset)


@given(
    steps=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3), st.floats(0.02, 2.0)), min_size=1, max_size=120),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_the_split_of_steps_into_parts_does_not_matter(steps, cuts):
    # GIVEN any events, and any way to cut them into parts
    at = np.cumsum([step for step, _, _ in steps])
    found = [ClearEvent(int(step), rank, share) for step, (_, rank, share) in zip(at, steps, strict=True)]
    whole = after(found, int(at[-1]) + 1)
    parts = Evidence(4)
    borders = sorted({0, len(found), *(min(cut, len(found)) for cut in cuts)})
    for first, last in pairwise(borders):
        parts = advanced(parts, found[first:last], found[last - 1].step + 1, SETTINGS)
    # THEN the evidence is the same
    assert parts == whole
    # AND odds are never below nothing, nor over their cap; and no event is older than what is remembered
    cap = SETTINGS.whole_factor * SETTINGS.naming_log_odds
    assert all(0.0 <= odds <= cap for one in whole.units.values() for odds in one.log_odds)
    assert all(one.step >= whole.next_step - HISTORY_STEPS for one in whole.events)


@given(seed=st.integers(0, 1000), ranks=st.permutations(range(4)))
def test_renumbering_ranks_changes_nothing_else(seed, ranks):
    found = in_order(by_chance(200, seed), events(*range(100, 200, 2), share=1.5))
    renamed = [ClearEvent(one.step, ranks[one.unit], one.share) for one in found]
    one, other = after(found, 200), after(renamed, 200)
    assert {ranks[unit]: standing for unit, standing in one.units.items()} == dict(other.units)
