"""Verdicts on windows, their numbers, and the state from one window to the next (see `test_truth`)."""

import math
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from sftriage.controller.controller import settings_of
from sftriage.model.verdicts import Settings
from sftriage.model.windows import StageSchema
from sftriage.policy.schema import Detection
from sftriage.verdict.accounting import anchored
from sftriage.verdict.evidence import Past
from sftriage.verdict.judging import judge
from sftriage.verdict.sequential import MAX_PERIOD_STEPS
from sftriage.verdict.whatif import Baseline, Samples, Typical
from tests.scenario import (
    OUTSIDE,
    Fault,
    Job,
    at,
    classify,
    every,
    exactly,
    from_step,
    gaussian,
    judged,
    judged_windows,
    past_of,
)
from tests.unit.verdict.test_truth import FOUR_NODES, NODE_1, PIPELINE, ROLES

SETTINGS = Settings()


def without(window, steps, ranks):
    window.durations_NRS[steps, ranks] = np.nan
    return window


@pytest.mark.parametrize(
    ("situation", "steps", "ranks"),
    [
        ("half of the ranks are missing", slice(None), slice(2)),
        ("one step of ten is missing", slice(None, None, 10), slice(None)),
        ("everything is missing", slice(None), slice(None)),
    ],
)
def test_missing_vectors_are_held(situation, steps, ranks):
    # GIVEN a window with a slow rank, in which vectors are missing
    window = without(Job().run(Fault("data", 1, 0.030)), steps, ranks)
    # WHEN judged, THEN no rank is suspected, however clear the rest, and nothing is learned
    verdict, past = judge(window, None, SETTINGS)
    assert (verdict.label, verdict.reasons, verdict.suspects) == ("needs_evidence", ("low_coverage",), ())
    assert past.baseline.n_windows == 0


@pytest.mark.parametrize(
    ("slow", "missing", "named"), [(1, 3, (1,)), (1, 0, (1,)), (3, 0, (3,)), (1, 1, ()), (None, 2, ())]
)
def test_a_rank_that_does_not_record_hides_no_other_but_the_rest_is_never_healthy(slow, missing, named):
    # GIVEN a window from which one of four ranks is missing, be it the slow one
    window = without(Job().run(*([] if slow is None else [Fault("data", slow, 0.030)])), slice(None), missing)
    # WHEN classified, THEN another slow rank is named by its number in the job, and the job is not healthy
    verdict = classify(window)
    assert tuple(one.rank for one in verdict.suspects[:1]) == named
    assert verdict.label == ("suspect" if named else "needs_evidence")
    assert verdict.reasons == (() if named else ("low_coverage",))
    assert verdict.numbers["coverage"] == 0.75


def test_one_missing_vector_of_two_hundred_decides_nothing():
    # GIVEN a window with a slow rank, in which one vector is missing
    window = without(Job().run(Fault("data", 1, 0.030)), 7, 2)
    # WHEN classified, THEN it is decided, from the steps that are whole
    verdict = classify(window)
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == ("suspect", 1, "data")
    assert verdict.numbers["complete_steps"] == 49
    assert verdict.numbers["coverage"] == pytest.approx(0.995)


@pytest.mark.parametrize(("n_steps", "label"), [(1, "needs_evidence"), (5, "needs_evidence"), (14, "suspect")])
def test_a_dozen_steps_are_enough_where_they_are_clear_and_a_few_are_chance(n_steps, label):
    # GIVEN a window of hardly any steps, WHEN a rank is late in all of them
    verdict = classify(Job(n_steps=n_steps).run(Fault("forward", 1, 0.030)))
    # THEN it comes first, and is named once it is no chance
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == (label, 1, "forward")


def test_an_idle_window_is_healthy():
    # GIVEN steps that take no time at all, WHEN classified, THEN there is nothing to say
    verdict = classify(exactly(np.zeros((5, 3, 2)), ("forward", "backward"), ("backward",)))
    assert (verdict.label, verdict.exposed_s) == ("healthy", 0.0)
    assert set(verdict.leaders.values()) == {None}


@pytest.mark.parametrize(
    ("n_ranks", "sync", "exchange_s", "known"),
    [
        (2, (), 0.0, False),
        (8, (), 0.0, False),
        (3, ("exchange",), 0.0, False),  # it was declared, and never came
        (3, ("backward",), 0.0, False),
        (1, (), 0.0, True),
        (3, ("exchange",), 0.001, True),
    ],
)
def test_without_a_known_exchange_ranks_are_never_healthy_and_none_is_suspected(n_ranks, sync, exchange_s, known):
    # GIVEN a job in which rank 0 works or waits: it is unknown which
    durations_NRS = np.full((50, n_ranks, 3), 0.010)
    durations_NRS[:, 0, 0] = 0.080
    durations_NRS[:, :, 1] = exchange_s
    verdict, past = judge(exactly(durations_NRS, ("data", *(sync or ("backward",)), "other"), sync), None, SETTINGS)
    # WHEN judged
    assert (verdict.reasons == ("no_sync",)) == (not known)
    assert known or (verdict.label, verdict.suspects, past.ranks.next_step) == ("needs_evidence", (), 0)


def local_sgd(*faults, n_steps=96, every_steps=8, first=0):
    """Three ranks that exchange now and then: each waits then for all that the others were slower by in between."""
    rng = np.random.default_rng(1)
    local_NRS = np.full((n_steps, 3, 3), (0.004, 0.010, 0.006)) * (1.0 + 0.03 * rng.standard_normal((n_steps, 3, 3)))
    for step, rank, seconds in faults:
        local_NRS[step:, rank, 0] += seconds
    times_NRS = np.concatenate([local_NRS[:, :, :2], np.zeros((n_steps, 3, 1)), local_NRS[:, :, 2:]], axis=2)
    clock_R = np.zeros(3)
    for step in range(n_steps):
        clock_R += local_NRS[step].sum(axis=1)
        if step >= first and step % every_steps == every_steps - 1:
            times_NRS[step, :, 2] = clock_R.max() - clock_R + 0.002
            clock_R[:] = clock_R.max() + 0.002
    return exactly(times_NRS, ("data", "forward", "exchange", "other"), ("exchange",)), float(clock_R.max())


@pytest.mark.parametrize("every_steps", [1, 3, 8, 32])
def test_a_slow_rank_between_exchanges_is_named_and_waiting_ranks_are_not(every_steps):
    # GIVEN an exchange in every n-th step, and a rank that is slow in data from the first step, or from step 40 on
    for first in (0, 40):
        window, took_s = local_sgd((first, 1, 0.065), every_steps=every_steps)
        verdict = classify(window)
        # THEN it is named, with what it costs, and the steps are as long as they were
        suspect = verdict.suspects[0]
        assert (verdict.label, suspect.rank, suspect.stage) == ("suspect", 1, "data")
        assert suspect.gain_s == pytest.approx(0.065, rel=0.1)
        assert verdict.exposed_s * 96 == pytest.approx(took_s, rel=0.05)


def test_a_known_exchange_stays_known_in_windows_without_one():
    # GIVEN windows of which only the first and the last have an exchange, of a job without a fault
    window, _ = local_sgd(every_steps=48, n_steps=144)
    found = [verdict.reasons for verdict, _ in judged(window, 24, 24)]
    # THEN before the first one nothing is known, and what comes after it is judged
    assert found[0] == ("no_sync",)
    assert not any("no_sync" in reasons for reasons in found[1:])


def test_the_gain_is_what_was_injected():
    # GIVEN 20 ms on one rank, hardly any noise
    verdict = classify(Job(noise=gaussian(0.001)).run(Fault("data", 2, 0.020)))
    # WHEN classified, THEN mending it is worth 20 ms a step, a sixth of the step, in every step
    suspect = verdict.suspects[0]
    assert suspect.gain_s == pytest.approx(0.020, rel=0.02)
    # AND so is mending a node of four (less a little: the last of four jitters more than the last of one)
    node = classify(FOUR_NODES.run(Fault("data", NODE_1, 0.020))).suspects[0]
    assert node.gain_s == pytest.approx(0.020, rel=0.1)
    assert suspect.share == pytest.approx(1 / 6, rel=0.02)
    assert suspect.persistence == 1.0


def test_a_rank_is_present_in_a_step_once_however_many_syncs_it_is_late_at():
    # GIVEN a rank that is late in two segments of every second step
    job = Job(sync=("forward", "backward"))
    window = job.run(Fault("data", 1, 0.060, every(2)), Fault("outside-1", 1, 0.060, every(2)))
    # WHEN classified, THEN it is there in half of the steps and not in all of them
    verdict = classify(window)
    assert (verdict.label, verdict.suspects[0].pattern, verdict.suspects[0].period_steps) == ("suspect", "recurring", 2)
    assert max(suspect.persistence for suspect in verdict.suspects) == pytest.approx(0.5, abs=0.05)


def test_ranks_that_take_turns_by_chance_are_not_suspected():
    # GIVEN two hundred windows of two ranks, in each step of which one of them, at random, is late by 40 ms
    suspected = 0
    for seed in range(200):
        late_N = np.random.default_rng(seed).random(20) < 0.5
        faults = (
            Fault("data", 0, 0.04, lambda n, late=late_N: late),
            Fault("data", 1, 0.04, lambda n, late=late_N: ~late),
        )
        # WHEN classified
        suspected += classify(Job(n_ranks=2, n_steps=20).run(*faults, seed=seed)).label == "suspect"
    # THEN one of them is taken for the cause as often as a coin is two deviations out: a few times in a hundred
    assert suspected <= 0.05 * 200


def test_a_large_window_is_classified_in_a_fraction_of_a_second():
    # GIVEN 50 steps of 1,024 ranks and 8 stages
    rng = np.random.default_rng(0)
    durations_NRS = rng.gamma(400.0, 0.0001, (50, 1024, 8))
    names = ("data", "h2d", "tokenize", "forward", "backward", "optimizer", "log", "other")
    window = exactly(durations_NRS, names, ("backward",))
    classify(window)
    # WHEN classified, THEN it takes some 20 ms; the bound is for a busy machine
    start = perf_counter()
    assert classify(window).label == "healthy"
    assert perf_counter() - start < 0.5


def test_a_group_never_saves_more_than_was_spent():
    # GIVEN a job whose local time was nothing, and now is there in two of three steps
    stages = ("data", "backward")
    window = exactly([[[0.0, 0.0]], [[0.01, 0.0]], [[0.01, 0.0]]], stages, ("backward",))
    idle = exactly(np.zeros((3, 1, 2)), stages, ("backward",))
    assert anchored(idle).exposed_s == 0.0
    nothing = Typical(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(2), 0.0)
    # WHEN classified: the median step spends more than the mean one does
    verdict = classify(window, Past(Baseline({("", None): Samples((nothing,), 1)})))
    # THEN what would be saved is no more than the mean
    assert 0.0 < verdict.suspects[0].gain_s <= verdict.exposed_s


@pytest.mark.parametrize(
    ("cohort", "scope", "ranks"), [(1, "cohort", NODE_1), (None, "all", tuple(range(8)))], ids=["cohort", "all"]
)
def test_a_cohort_that_becomes_slow_is_found_against_its_own_past(cohort, scope, ranks):
    # GIVEN a pipeline of two stages that is known
    past = past_of(PIPELINE.run(*ROLES, seed=seed, first_step=50 * (seed - 10)) for seed in range(10))
    # WHEN all ranks of the longer one, or of both, become slower in one stage
    fault = Fault("forward", None if cohort is None else NODE_1, 0.040)
    verdict = classify(PIPELINE.run(*ROLES, fault, seed=99), past)
    # THEN the cohort is named, or all
    first = verdict.suspects[0]
    assert (verdict.label, first.scope, first.ranks, first.stage) == ("suspect", scope, ranks, "forward")
    assert first.cohort == ("pp1" if scope == "cohort" else None)


def test_checkpoints_and_their_aftermath_are_no_fault():
    # GIVEN a job that says which of its steps are checkpoints, in which rank 0 writes for three steps' time
    kinds = tuple("checkpoint" if n % 10 == 9 else "" for n in range(50))
    job = Job(kinds=kinds)
    writes = Fault("other", 0, 0.300, every(10, 9))
    # WHEN judged, THEN that is no fault
    verdict = classify(job.run(writes))
    assert (verdict.label, verdict.numbers["used_steps"]) == ("healthy", 41)
    # AND a rank that is slow in the ordinary steps is named from these
    verdict = classify(job.run(writes, Fault("data", 2, 0.020)))
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == ("suspect", 2, "data")
    # BUT without its note, it is a rank that delays all others every tenth step
    windows = (replace(job.run(writes, first_step=first_step), kinds=None) for first_step in range(0, 200, 50))
    *_, (verdict, _) = judged_windows(windows)
    first = verdict.suspects[0]
    assert (verdict.label, first.rank, first.stage) == ("suspect", 0, "other")
    assert (first.pattern, first.period_steps) == ("recurring", 10)


def test_a_partly_known_split_is_used_where_known_and_a_rare_one_never():
    # GIVEN a rank that is slow inside backward, and a split that was learned in the first five steps
    window = Job().run(Fault("backward", 1, 0.030), split=True)
    window.ready_NR[:5] = np.nan
    verdict = classify(window)
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == ("suspect", 1, "backward")
    # AND where only a few steps have it, they are judged without
    window.ready_NR[5:45] = np.nan
    assert classify(window).numbers["complete_steps"] == 50


def test_backward_is_split_even_with_a_sync_stage_before_it():
    # GIVEN a rank that is slow inside backward, in a job whose ranks exchange something before forward
    window = Job().run(Fault("backward", 1, 0.030), split=True)
    stages = ("data", "exchange", *window.schema.stages[1:])
    outside_NRG = window.outside_NRG
    window = replace(
        window,
        schema=StageSchema(stages, ("exchange", "backward")),
        durations_NRS=np.insert(window.durations_NRS, 1, 0.001, axis=2),
        outside_NRG=None if outside_NRG is None else np.insert(outside_NRG, 0, 0.0, axis=2),
    )
    # THEN it is named
    verdict = classify(window)
    assert (verdict.label, verdict.suspects[0].rank, verdict.suspects[0].stage) == ("suspect", 1, "backward")


def test_a_named_suspect_stays_named_while_its_gain_lies_at_the_threshold():
    # GIVEN a rank that was named, whose delay falls to just under what would get it named
    job, delays_s = Job(noise=gaussian(0.01)), [0.020, 0.0040, 0.0040, 0.0]
    windows = (job.run(Fault("data", 1, late_s), seed=n, first_step=50 * n) for n, late_s in enumerate(delays_s))
    # THEN it stays named until it is mended
    assert [one.label for one, _ in judged_windows(windows)] == ["suspect", "suspect", "suspect", "healthy"]
    # AND without that past the same window names no rank
    assert classify(job.run(Fault("data", 1, 0.0040), seed=1), Past(), SETTINGS).label == "healthy"


def test_ranks_that_do_nothing_are_in_no_role():
    # GIVEN a window of zeros but for one rank
    durations_NRS = np.zeros((10, 3, 2))
    durations_NRS[:, 1] = 0.1
    # THEN it is that rank, and no roles
    verdict = classify(exactly(durations_NRS, ("data", "forward", "backward")[:2]))
    assert verdict.reasons != ("mixed_roles",)


WINDOW, STRIDE, N_STEPS = 50, 10, 300


def watched(*faults, of_run=lambda run: run, **job):
    """The verdicts on a job, and the pauses that were found in it."""
    found = list(judged(of_run(Job(n_steps=N_STEPS, **job).run(*faults)), WINDOW, STRIDE))
    return [verdict for verdict, _ in found], [pause for _, past in found for pause in past.paused]


KINDS = tuple("checkpoint" if n == 240 else "" for n in range(N_STEPS))


@pytest.mark.parametrize(
    ("situation", "faults", "job", "found"),
    [
        ("inside the sync stage", [Fault("backward", None, 55.0, at(240))], {}, [(240, 240, "backward")]),
        ("at their own work", [Fault("data", None, 55.0, at(240))], {}, [(240, 240, "data")]),
        ("outside the stages", [Fault(OUTSIDE, None, 55.0, at(240))], {}, [(240, 240, "other")]),
        ("in steps on end", [Fault("data", None, 9.0, at(241, 242, 243))], {}, [(241, 243, "data")]),
        ("twice", [Fault("data", None, 9.0, at(100, 240))], {}, [(100, 100, "data"), (240, 240, "data")]),
        ("two ranks", [Fault("backward", None, 55.0, at(240))], {"n_ranks": 2}, [(240, 240, "backward")]),
        # What one rank causes is a suspect's, and what some cause is no pause of the job.
        ("one rank", [Fault("data", 2, 55.0, at(240))], {}, []),
        ("one of two ranks", [Fault("data", 1, 55.0, at(240))], {"n_ranks": 2}, []),
        ("half of the ranks", [Fault("data", (2, 3), 55.0, at(240))], {}, []),
        ("a step with a kind", [Fault("other", None, 55.0, at(240))], {"kinds": KINDS}, []),
        ("a hiccup", [Fault("data", None, 0.5, at(240))], {}, []),
        ("nothing", [], {}, []),
    ],
)
def test_a_pause_concerns_all_ranks_and_is_reported_once(situation, faults, job, found):
    # GIVEN a job that goes on after that, WHEN it is judged window by window
    verdicts, pauses = watched(*faults, **job)
    # THEN the pause is found, once, with what it took
    assert [(one.first_step, one.last_step, one.stage) for one in pauses] == found
    lasted_s = sum(fault.seconds * fault.steps(N_STEPS).sum() for fault in faults)
    assert sum(one.lasted_s for one in pauses) == pytest.approx(lasted_s if found else 0.0, abs=0.2)
    # AND a step takes as long as before, and no rank is blamed
    assert all(one.step_s == pytest.approx(0.1, abs=0.01) for one in verdicts)
    if found:
        assert {one.label for one in verdicts} == {"healthy"}


def test_thresholds_are_not_scaled_by_a_pause():
    # GIVEN a rank that is late by 15 ms, and a pause of 55 s of all ranks
    verdicts, _ = watched(Fault("data", 1, 0.015, from_step(150)), Fault("backward", None, 55.0, at(240)))
    # THEN it is named in the windows with the pause as in those without
    after = [one for one in verdicts if one.first_step >= 150]
    assert {(one.label, one.suspects[0].rank) for one in after} == {("suspect", 1)}
    assert all(one.numbers["slow_step_s"] == pytest.approx(0.115, abs=0.01) for one in after)
    assert all(one.numbers["min_gain_s"] == pytest.approx(0.0046, abs=0.0005) for one in after)
    # AND the accounting is exact nevertheless
    assert any(one.exposed_s > 1.0 for one in after)
    assert all(sum(one.advances_s.values()) == pytest.approx(one.exposed_s) for one in verdicts)


def test_a_profiler_that_delays_all_ranks_is_no_pause():
    def captured(run):
        return replace(run, capturing_N=np.arange(N_STEPS) == 240)

    _, pauses = watched(Fault("data", None, 9.0, at(240)), of_run=captured)
    assert pauses == []


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
    "sentence",
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
def test_the_page_has_the_numbers_of_the_code(sentence):
    assert sentence in PAGE


def test_an_empty_policy_has_the_same_thresholds():
    assert settings_of(Detection()) == ONE
