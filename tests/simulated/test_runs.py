"""Runs of many windows: who is named, from when on, and for what."""

from dataclasses import replace

import numpy as np
import pytest

from sftriage.model.verdicts import Settings
from sftriage.windows.npz import counted_of
from sftriage.words.verdicts import explain
from tests.scenario import Fault, Job, at, every, from_step, gaussian, heavy_tailed, judged, verdicts

SETTINGS = Settings()
SHORT = Job(
    stages=(("data", 0.002), ("forward", 0.002), ("backward", 0.014), ("optimizer", 0.0015), ("other", 0.0001)),
    exchange_s=0.001,
    outside_s=0.0,
    n_steps=900,
)
"""A step of 20 ms, as of a small model."""


def names(found):
    return {(v.suspects[0].ranks, v.suspects[0].stage) for v in found if v.label == "suspect"}


def first_named(found):
    return next(v.last_step for v in found if v.label == "suspect")


def evaluating(window, seed, period, part):
    """The run, with an evaluation every ``period`` steps: 2.4 ms and some more, in a part of the ranks twice that."""
    random = np.random.default_rng(seed)
    shape = window.durations_NRS.shape[:2]
    takes_NR = 0.0024 + random.exponential(0.0015, shape)
    longer_NR = random.random(shape) < 0.4
    takes_NR = takes_NR * (1 + longer_NR) if part == "all" else 2 * takes_NR * longer_NR
    durations_NRS = window.durations_NRS.copy()
    durations_NRS[:, :, -1] += takes_NR * (np.arange(shape[0]) % period == 7)[:, None]
    # (the others wait at the next sync for time after the last one)
    durations_NRS[1:, :, 2] += (takes_NR.max(axis=1)[:, None] - takes_NR)[:-1] * (
        np.arange(shape[0] - 1) % period == 7
    )[:, None]
    return replace(window, durations_NRS=durations_NRS)


@pytest.mark.parametrize("part", ["all", "some ranks"])
@pytest.mark.parametrize("period", [10, 20, 50])
@pytest.mark.parametrize("seed", range(3))
def test_an_evaluation_without_a_kind_names_no_rank_and_hides_none(seed, period, part):
    # GIVEN a job that evaluates periodically, and from step 600 on a rank that is slow
    fault = Fault("data", 3, 0.015, from_step(600))
    found = verdicts(evaluating(SHORT.run(fault, seed=seed), seed, period, part))
    # THEN that rank is named soon, and never another
    assert names(found) == {((3,), "data")}
    assert first_named(found) < 640


@pytest.mark.parametrize("noise", [gaussian(0.05), gaussian(0.3), heavy_tailed(0.05), heavy_tailed(0.3)])
@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_ranks_that_jitter_alike_are_not_named(n_ranks, noise):
    # GIVEN jobs of pure, equal jitter
    for seed in range(3):
        # WHEN they run for long THEN no rank is named
        assert names(verdicts(replace(SHORT, n_ranks=n_ranks, noise=noise).run(seed=seed), 50, 50)) == set()


@pytest.mark.parametrize("period", [3, 7, 12, 20, 30])
def test_a_recurring_fault_began_at_one_of_its_own_steps(period):
    # GIVEN a fault that comes back, after another one of the same rank just before
    comes_back = Fault("forward", 2, 0.040, lambda n: (np.arange(n) >= 150) & ((np.arange(n) - 150) % period == 0))
    found = verdicts(Job(n_steps=600).run(Fault("forward", 2, 0.060, at(149)), comes_back, seed=period))
    named = [v.suspects[0] for v in found if v.label == "suspect"]
    # THEN once it is known to recur, its onset is one of its steps
    assert {(one.ranks, one.stage) for one in named} == {((2,), "forward")}
    back = [one for one in named if one.pattern == "recurring"]
    assert len(back) > len(named) / 2
    assert {one.period_steps for one in back} == {period}
    assert {(one.onset_step - 150) % period for one in back} == {0}


@pytest.mark.parametrize("seed", range(3))
def test_a_fault_that_continues_has_not_passed(seed):
    # GIVEN bursts of 20 steps in every 60, from step 200 on
    bursts = Fault("forward", 1, 0.060, lambda n: (np.arange(n) >= 200) & ((np.arange(n) - 200) % 60 < 20))
    found = verdicts(Job(n_steps=800).run(bursts, seed=seed))
    # THEN the rank is named from the first one on, since when it says
    assert names(found) == {((1,), "forward")}
    assert first_named(found) < 240
    assert {v.suspects[0].onset_step for v in found if v.label == "suspect"} <= set(range(198, 203))
    # AND once it has come again, it has not passed
    later = [v for v in found if v.first_step > 260]
    assert {v.label for v in later} == {"suspect"}
    assert "one-off" not in {v.suspects[0].pattern for v in later}


@pytest.mark.parametrize("noise", [gaussian(0.03), heavy_tailed(0.1)])
def test_the_onset_is_right_or_its_range_has_it(noise):
    right, n_runs = 0, 20
    for seed in range(n_runs):
        # GIVEN a fault from step 150 on
        run = Job(n_steps=300, noise=noise).run(Fault("data", 1, 0.02, from_step(150)), seed=seed)
        # WHEN it is named
        suspect = next(v.suspects[0] for v, _ in judged(run, stride=10, first=20) if v.label == "suspect")
        earliest, latest = suspect.onset_range
        # THEN the onset is about then, or its range has it
        assert earliest <= suspect.onset_step <= latest
        assert abs(suspect.onset_step - 150) <= max(3, latest - earliest)
        right += earliest <= 150 <= latest
    # AND mostly within the range
    assert right >= 0.8 * n_runs


def test_a_fixed_fault_is_forgotten_and_the_next_one_is_another():
    # GIVEN a rank that is slow for a while, and again much later
    faults = Fault("data", 1, 0.03, from_step(100, 200)), Fault("data", 1, 0.03, from_step(400))
    found = verdicts(Job(n_steps=600).run(*faults))
    # THEN in between nothing is wrong
    assert {v.label for v in found if v.first_step >= 200 and v.last_step < 400} == {"healthy"}
    # AND each has its own beginning
    onsets = {v.last_step >= 400: v.suspects[0].onset_step for v in found if v.label == "suspect"}
    assert onsets == {False: pytest.approx(100, abs=2), True: pytest.approx(400, abs=2)}


def test_a_capture_hides_its_own_steps_and_no_others():
    # GIVEN a fault that begins while a profiler runs in five steps
    window = Job(n_steps=200).run(Fault("data", 1, 0.03, from_step(100)))
    capturing_N = np.isin(np.arange(200), range(100, 105))
    found = verdicts(replace(window, capturing_N=capturing_N))
    # WHEN windows have these steps in them THEN no rank is named
    held = [v for v in found if v.first_step <= 104 and v.last_step >= 100]
    assert {v.reasons for v in held} == {("self_inflicted",)}
    # AND the first window without them names the rank that the steps after the capture show
    assert next(v for v in found if v.first_step > 104).label == "suspect"


@pytest.mark.parametrize(("seconds", "named"), [(0.002, False), (0.005, True), (0.010, True), (0.020, True)])
def test_a_fault_of_five_percent_is_found_and_one_of_two_is_not_worth_it(seconds, named):
    for seed in range(5):
        # GIVEN a fault of some percent of the step, WHEN it has been there for a hundred steps
        found = verdicts(Job(n_steps=250).run(Fault("forward", 2, seconds, from_step(100)), seed=seed))
        # THEN it is named from five percent on
        assert names(found) == ({((2,), "forward")} if named else set())
        assert not named or first_named(found) <= 200
        # AND worth a capture under the policy
        assert all(v.suspects[0].share >= SETTINGS.min_gain_fraction for v in found[-1:] if v.label == "suspect")


def test_of_two_ranks_that_always_differed_the_one_that_becomes_slower_still_is_named():
    # GIVEN a rank that has been a little later than the other from the first step on, and from step 150 on is by much
    faults = Fault("data", 1, 0.008), Fault("forward", 1, 0.060, from_step(150))
    found = verdicts(Job(n_ranks=2, n_steps=300).run(*faults))
    # THEN as long as it only differs, no rank is named
    assert {v.label for v in found if v.last_step < 150} == {"needs_evidence"}
    # AND then it is
    assert {ranks for ranks, _ in names(found)} == {(1,)}
    assert next(reversed([v for v in found if v.label == "suspect"])).suspects[0].stage == "forward"
    assert first_named(found) < 190


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_always_late_is_named_however_late_others_are_in_other_steps(seed):
    # GIVEN 16 ranks that each collect garbage for 150 ms in one step of 60, by chance: 40 % of the job's time
    def collects(rank):
        return Fault("data", rank, 0.150, lambda n: np.random.default_rng([seed, rank]).random(n) < 1 / 60)

    job, garbage = Job(n_ranks=16, n_steps=500), [collects(rank) for rank in range(16)]
    # THEN no rank is named
    assert names(verdicts(job.run(*garbage, seed=seed))) == set()
    # BUT who takes 20 ms more in every step from 200 on is, though most of all lateness is not its own
    found = verdicts(job.run(*garbage, Fault("forward", 5, 0.020, from_step(200)), seed=seed))
    assert names(found) == {((5,), "forward")}
    assert first_named(found) < 250


@pytest.mark.parametrize("noise", [gaussian(0.05), heavy_tailed(0.03)])
@pytest.mark.parametrize("n_ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_work_that_every_rank_repeats_at_its_own_time_names_none(seed, n_ranks, noise):
    # GIVEN ranks that collect their garbage equally often, not in the same steps, and take more or less for it
    random = np.random.default_rng([seed, n_ranks])
    period, takes_s = int(random.integers(15, 90)), random.uniform(0.1, 0.3) * 0.02
    firsts = period * np.arange(n_ranks) // n_ranks + random.integers(period)
    garbage = [
        Fault("forward", rank, takes_s * random.uniform(0.8, 1.2), every(period, first))
        for rank, first in enumerate(firsts)
    ]
    found = verdicts(replace(SHORT, n_ranks=n_ranks, noise=noise).run(*garbage, seed=seed))
    # THEN no rank recurs. (One whose events are over a size, and the others' are not, may be named for that.)
    named = [one for one in found if one.label == "suspect"]
    assert "recurring" not in {one.suspects[0].pattern for one in named}
    assert len(named) <= 0.05 * len(found)


@pytest.mark.parametrize("n_ranks", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_of_two_equally_late_ranks_neither_is_ever_named(seed, n_ranks):
    # GIVEN two ranks that are as late as each other for 800 steps, in stages that jitter: each is the last in half of
    # the steps, by chance, and more often than anybody else
    late = [Fault("data", 1, 0.030, from_step(200)), Fault("forward", 2, 0.030, from_step(200))]
    found = verdicts(Job(n_ranks=n_ranks, n_steps=1000, noise=gaussian(0.2)).run(*late, seed=seed))
    # THEN neither is named
    assert names(found) == set()
    # AND of the windows in which it is there, none is healthy
    assert {v.label for v in found if v.first_step >= 200} == {"needs_evidence"}


def test_a_suspect_that_stays_named_is_explained_by_the_lower_thresholds():
    # GIVEN two ranks that hiccup, one of which is slow in bursts: what names it comes and goes
    bursts = Fault("data", 1, 0.030, lambda n: (np.arange(n) // 30) % 3 == 1)
    found = verdicts(Job(n_ranks=2, n_steps=150, noise=heavy_tailed(0.08)).run(bursts, seed=1))
    named = [one for one in found if one.label == "suspect"]
    # WHEN it keeps its name with less than it takes to get it
    assert any(one.numbers["first_log_odds"] < SETTINGS.naming_log_odds for one in named)
    # THEN it meets all requirements
    for one in named:
        assert all(check.met for check in explain(one).checks if check.name.startswith("first_"))


@pytest.mark.parametrize("first", [0, 300])
@pytest.mark.parametrize("seed", range(3))
def test_pulses_on_one_of_two_ranks_are_no_other_work(first, seed):
    # GIVEN two ranks on a machine that is busy at first, and one that is stopped once a step from then on, in any stage
    stages, where_N = ("data", "forward", "backward", "optimizer"), np.random.default_rng(seed).integers(4, size=700)
    stopped = tuple(
        Fault(stage, 1, 0.020, lambda n, s=s: (where_N[:n] == s) & (np.arange(n) >= first))
        for s, stage in enumerate(stages)
    )
    busy = tuple(Fault(stage, None, factor=1.5, steps=from_step(0, 150)) for stage in stages)
    job = Job(n_ranks=2, n_steps=700, noise=heavy_tailed(0.15))
    # WHEN it runs
    found = verdicts(job.run(*stopped, *busy, seed=seed, split=True))
    # THEN the other one is never named, and the roles are never called different
    assert {ranks for ranks, _ in names(found)} <= {(1,)}
    assert not any("mixed_roles" in v.reasons for v in found)
    # AND the stopped one is named where its own past is known
    assert names(found) or first == 0


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_rank_that_makes_a_step_many_times_as_long_is_named_at_once(n_ranks):
    # GIVEN steps of a millisecond, in which from the 60th on one rank sleeps for 100, and all wake up a little late
    stages = (("data", 2e-5), ("forward", 1e-4), ("backward", 7e-4), ("optimizer", 5e-5), ("other", 1e-4))
    job = replace(SHORT, stages=stages, exchange_s=1e-4, n_ranks=n_ranks, n_steps=200)
    found = verdicts(job.run(Fault("data", 1, 0.1, from_step(60)), Fault("other", None, 3e-4, from_step(60))))
    # THEN its steps are no other work, and it is named for all of them
    assert names(found) == {((1,), "data")}
    assert first_named(found) < 110
    assert {v.suspects[0].onset_step for v in found if v.label == "suspect"} == {60}


def test_a_stage_is_named_though_a_few_hiccups_lie_in_others():
    # GIVEN a rank that is slow in one stage, and now and then is held up for as long as a step in another
    held = 60 + np.cumsum(np.random.default_rng(4).integers(9, 17, size=30))
    slow = Fault("forward", 2, 0.012, from_step(60, 400))
    hiccups = Fault("optimizer", 2, 0.100, lambda n: np.isin(np.arange(n), held))
    # THEN it is named in that stage
    assert names(verdicts(Job(n_steps=400).run(slow, hiccups))) == {((2,), "forward")}


def test_a_stage_is_named_though_in_most_steps_something_is_late_in_another():
    # GIVEN a rank that is slow in one stage, in two of five steps a little late in another, and in two in a third one
    slow, late = Fault("optimizer", 2, 0.009, from_step(60)), [("data", 0), ("data", 1), ("forward", 2), ("forward", 3)]
    others = [Fault(stage, 2, 0.007, at(*range(60 + first, 400, 5))) for stage, first in late]
    # THEN it is named in that stage
    assert names(verdicts(Job(n_steps=400).run(slow, *others))) == {((2,), "optimizer")}


@pytest.mark.parametrize(("comes_back", "stage"), [(("data",), "data"), (("data", "forward", "optimizer"), None)])
def test_the_stage_of_a_recurring_fault_is_the_one_that_it_adds_to(comes_back, stage):
    # GIVEN a rank that is a little slow in two stages, and every 15th step is late in one stage, or in three alike
    little = [Fault(one, 2, 0.0006) for one in ("forward", "optimizer")]
    late = [Fault(one, 2, 0.025 / len(comes_back), every(15)) for one in comes_back]
    # THEN it is named in that stage, or as a whole
    assert names(verdicts(Job(n_steps=400).run(*little, *late))) == {((2,), stage)}


def test_one_of_two_ranks_is_named_though_the_other_has_always_had_more_to_do():
    # GIVEN two ranks of which one reads more in every step, so that no window was ever healthy
    reads, slow = Fault("data", 0, 0.022), Fault("forward", 1, 0.060, from_step(100, 300))
    # WHEN the other one becomes slow, by far more than that
    found = verdicts(Job(n_ranks=2, n_steps=300).run(reads, slow))
    assert not any(one.label == "healthy" for one in found)
    # THEN it is named, and its role is not called another
    assert {ranks for ranks, _ in names(found)} == {(1,)}
    assert not any("mixed_roles" in one.reasons for one in found if one.first_step >= 100)


def test_of_two_ranks_that_always_differed_neither_is_named():
    # GIVEN two ranks, one of which has more to do from the first step on: an embedding, or a slow disk
    found = verdicts(Job(n_ranks=2, n_steps=400).run(Fault("forward", 0, 0.015)))
    # THEN it is not known which of them is as it should be, however long it lasts
    assert {(v.label, v.reasons) for v in found} == {("needs_evidence", ("no_baseline",))}


@pytest.mark.parametrize(("last", "named"), [(226, False), (300, True)])
def test_a_rank_that_is_slow_in_all_stages_is_named_if_that_lasts(last, named):
    # GIVEN a rank whose core another process has, for half a window or for two of them
    stages = ("data", "forward", "backward", "optimizer", "other")
    slow = tuple(Fault(stage, 1, factor=1.6, steps=from_step(200, last)) for stage in stages)
    found = verdicts(Job(n_steps=450).run(*slow, split=True))
    # THEN it is named if it lasts, and no other rank is
    assert names(found) == ({((1,), None)} if named else set())


@pytest.mark.parametrize(
    ("counted", "named"),
    [({"stopped_s": 0.06, "queued_s": 0.0}, True), ({"queued_s": 0.06}, False), ({}, False)],
    ids=["stopped", "waiting", "no counters"],
)
def test_a_rank_with_rare_delays_is_named_if_counters_rule_waiting_out(counted, named):
    # GIVEN a rank that is held up in all it does, in a good fifth of the steps: by pulses of a period of their own
    held_N = np.diff(np.floor(0.22 * np.arange(401))) > 0
    stages = ("data", "forward", "backward", "optimizer", "other")
    slow = tuple(Fault(stage, 1, 0.012, lambda n: held_N[:n]) for stage in stages)
    window = Job(n_ranks=4, n_steps=400).run(*slow, split=True)
    # AND what the system counted meanwhile
    known_NR = held_N[:, None] * (np.arange(4) == 1)
    if counted:
        window = replace(window, counted_NRC=counted_of({name: known_NR * each_s for name, each_s in counted.items()}))
    # WHEN it is judged
    found = verdicts(window)
    # THEN it is named where it did not wait for a CPU: neighbours come and go
    assert names(found) == ({((1,), None)} if named else set())
