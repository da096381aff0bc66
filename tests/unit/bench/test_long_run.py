"""What the long-run bench counts, plans and tells, and how it makes jobs: waiting, faults and resampling."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bench.estimates import quantile
from bench.judging import (
    OURS,
    RIVALS,
    Healthy,
    Judged,
    Task,
    as_recorded,
    detected,
    episodes,
    healthy_count,
    per_million,
    poisson_interval,
    result_of,
    rule_of,
    windows_of,
)
from bench.long_run import rules_of
from bench.long_run_report import document, text
from bench.recordings import Recording, cells
from bench.resampled import COURSES, Blocks, Fault, block, own_times, side_by_side, slowed, stretches
from bench.rows import STAGE_OF, STAGES, SYNC, WINDOW_STEPS
from sftriage.model.windows import StageSchema
from tests import scenario

SCHEMA = StageSchema((*STAGES, "other"), SYNC)
TWO_SYNCS = StageSchema(("data", "gather", "forward", "backward", "optimizer", "other"), ("gather", "backward"))
OWN_MS = {"data": 20.0, "h2d": 5.0, "gather": 5.0, "forward": 30.0, "backward": 25.0, "optimizer": 8.0, "other": 1.0}
LAST, FIRST_OTHER = 2, 1


def recorded(n_steps=200, n_ranks=4, *, schema=SCHEMA, split=True, kinds=None, seed=7):
    """A window of a job in which rank 2 is the last one in every step."""
    job = scenario.Job(
        n_ranks,
        n_steps,
        tuple((stage, OWN_MS[stage] / 1e3) for stage in schema.stages),
        schema.sync,
        exchange_s=0.01,
        outside_s=5e-5,
        between_s=5e-5,
        noise=lambda rng, n: 1.0 + 0.02 * rng.uniform(-1.0, 1.0, n),
        kinds=kinds,
    )
    return job.run(scenario.Fault("data", LAST, 0.01), seed=seed, split=split)


def own(n_steps=200, n_ranks=4, **values):
    return own_times(recorded(n_steps, n_ranks, **values))


def said(*names, stage="data", captured=()):
    """One window every ten steps; a number names that rank."""
    every = ((50 + 10 * at, name) for at, name in enumerate(names))
    return [
        Judged(last, None, stage) if name is None else Judged(last, ("rank", (name,)), stage, "", captured)
        for last, name in every
    ]


class TestCounting:
    @pytest.mark.parametrize(
        ("judged", "count"),
        [
            ([], 0),
            (said(None, None), 0),
            (said(1, 1, 1), 1),
            (said(1, None, 1), 2),
            (said(1, 2, 2, None, 2), 3),
            ([Judged(50, ("rank", (0,))), Judged(60, ("host", (0,))), Judged(70, ("host", (0, 1)))], 3),
        ],
    )
    def test_a_new_name_or_scope_counts_once(self, judged, count):
        assert len(episodes(judged)) == count

    def test_counts_add_up(self):
        both = Healthy(100, 1.0, 2, 1, 1, 1, 0) + Healthy(50, 0.5, 1, 1, 0, 1, 1)
        assert (both.steps, both.windows, both.names, both.descheduled, both.captures) == (150, 3, 2, 1, 1)

    def test_who_waited_for_a_cpu_is_counted_apart(self):
        # GIVEN two names, of the second of which the verdict says that it waited for a CPU
        waited = replace(said(2)[0], last_step=90, descheduled=True)
        # WHEN counted, THEN it is one of two
        count = healthy_count([*said(1, 1, None), waited, waited], 250, 5.0)
        assert (count.names, count.descheduled) == (2, 1)

    FAULT = Fault(0.1, "constant", "rank", "data", (1,), 65)
    SLOW_HOST = Fault(0.1, "constant", "host", "data", (0, 1), 65)

    @pytest.mark.parametrize(
        ("fault", "judged", "expected"),
        [
            # from the onset in step 65 to the end of the first window that is right: windows end at 50, 60, 70, ...
            (
                *(FAULT, said(None, None, None, 1, 1, captured=(1,))),
                {"named_after": 15, "captured_after": 15, "stage_right": True},
            ),
            (FAULT, said(1, 1, None, None), {"named_after": None, "early_names": 1}),
            (
                *(FAULT, said(None, None, 3, 3, 1, captured=(3,))),
                {"named_after": 25, "captured_after": None, "stage_right": True, "wrong_names": 1, "wrong_captures": 3},
            ),
            (FAULT, said(None, None, 1, stage="h2d"), {"named_after": 5, "stage_right": False}),
            # a rank of a slow host is a part of it, and all of it to a rule that knows no hosts
            (SLOW_HOST, said(None, None, 1), {"named_after": None, "in_part": 1}),
            (SLOW_HOST, said(None, None, 1), {"named_after": 5, "knows_hosts": False}),
            (SLOW_HOST, [Judged(70, ("host", (0, 1)), "data")], {"named_after": 5}),
        ],
        ids=["right", "early", "another rank first", "another stage", "a part", "without hosts", "a host"],
    )
    def test_the_delay_of_a_name_and_wrong_names_are_counted(self, fault, judged, expected):
        expected = {"wrong_names": 0, "wrong_captures": 0, "early_names": 0, "knows_hosts": True, **expected}
        found = detected(judged, fault, knows_hosts=expected.pop("knows_hosts"))
        assert {name: getattr(found, name) for name in expected} == expected

    @pytest.mark.parametrize(("really", "by_load"), [((), 0), ((3,), 1), ((2, 3), 2)])
    def test_a_wrong_name_that_is_true_without_the_fault_stays_one_and_is_told_apart(self, really, by_load):
        # GIVEN two wrong names, of which the recording shows some to have been held up
        names = said(None, None, 3, 3, 2, 1)
        # WHEN counted, THEN both are wrong names, and those are said to be by the load
        by = {"held_up_by_load": lambda one: one.name is not None and one.name[1][0] in really}
        found = detected(names, self.FAULT, knows_hosts=True, **by)
        assert (found.wrong_names, found.held_up_by_load) == (2, by_load)

    @pytest.mark.parametrize(
        ("queued_ms", "ranks", "led", "waited"),
        [
            (0.0, (LAST,), True, 0.0),  # late by 10 ms, and did not wait
            (8.0, (LAST,), True, 0.8),  # most of that was waiting
            (8.0, (LAST, FIRST_OTHER), True, 0.8),  # with a rank that was not late, half of each
            (8.0, (FIRST_OTHER,), False, 0.0),  # who was not late did not lead
            (math.nan, (LAST,), True, 0.0),  # nobody counted
        ],
    )
    def test_what_the_recording_says_of_ranks_is_their_lead_and_what_they_waited(self, queued_ms, ranks, led, waited):
        # GIVEN a job in which one rank is 10 ms late in each step of some 100, and waited for a CPU for some of them
        job = own()
        queued_NR = np.zeros_like(job.queued_NR)
        queued_NR[:, LAST] = queued_ms / 1e3
        # WHEN asked, THEN the lead is that of the last of the ranks, and the wait a part of their lateness
        led_fraction, waited_fraction = replace(job, queued_NR=queued_NR).led_and_waited(ranks)
        assert (led_fraction > 0.04) is led
        assert waited_fraction == pytest.approx(waited, abs=0.1)
        # AND what is made of them can be written as JSON, as numpy's own truth values cannot
        json.dumps([led_fraction >= 0.04, waited_fraction >= 0.5])

    @pytest.mark.parametrize(
        ("count", "low", "high"),
        [(0, 0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.39), (100, 81.36, 121.63), (20_000, 19_723.76, 20_279.14)],
    )
    def test_the_interval_of_a_count_is_that_of_the_tables(self, count, low, high):
        assert poisson_interval(count) == (pytest.approx(low, rel=1e-3), pytest.approx(high, rel=1e-3))

    def test_rates_are_per_million_steps(self):
        assert per_million(2, 4_000_000)[0] == 0.5
        assert per_million(0, 0) is None

    def test_quantiles(self):
        assert [quantile(range(1, 101), part) for part in (0.5, 0.95)] == [50, 95]
        assert quantile([], 0.5) is None


class TestWhole:
    def test_a_calm_job_is_judged_by_every_rule_and_a_slow_rank_found(self):
        # GIVEN a recording of a calm job, and a rank that is slow from step 150 on
        cell = cells(quick=True)[0]
        calm = recorded(300)
        calm.durations_NRS[:, LAST, 0] -= 0.01
        calm.durations_NRS[:, LAST, SCHEMA.stages.index("backward")] += 0.01
        recording = Recording(cell, {}, own_times(calm))
        fault = Fault(0.5, "constant", "rank", "forward", (1,), 150, seed=3)
        every = rules_of(rivals=True)
        # WHEN both jobs are judged
        tasks = [Task(0, cell, 4, 400, 0, every), Task(1, cell, 4, 400, 0, every, fault)]
        results = [result_of(task, [recording]) for task in tasks]
        # THEN nobody is named who is calm, and ours names the slow one soon after its onset, with its stage
        assert {name: found.names for name, found in results[0].healthy.items()} == dict.fromkeys(every, 0)
        assert results[0].healthy[OURS].steps == 400
        found = results[1].detected[OURS]
        assert (found.stage_right, found.wrong_names, found.early_names) == (True, 0, 0)
        assert 0 < found.named_after <= 60
        assert found.captured_after >= found.named_after
        # AND it can be reported
        told = document(results, {"seed": 0}, [{"ours": as_recorded(recording)}])
        assert "ours" in text(told)

    @pytest.mark.parametrize("name", RIVALS)
    def test_rivals_get_windows_in_order(self, name):
        slow = slowed(own(), "forward", np.full((200, 4), 0.2) * (np.arange(4) == 1))
        names = [one.name for one in rule_of(name)(windows_of([slow], 50))]
        assert names == [("rank", (1,))] * 4


def totals_NR(window):
    """What each rank's steps took, the time before them included."""
    return window.durations_NRS.sum(axis=2) + window.between_NR


class TestWaiting:
    @pytest.mark.parametrize("schema", [SCHEMA, TWO_SYNCS])
    @pytest.mark.parametrize("split", [True, False])
    def test_taken_out_and_put_in_again_it_is_what_was_recorded(self, schema, split):
        # GIVEN a recorded window
        window = recorded(schema=schema, split=split)
        # WHEN its waiting is taken out and put in again
        again = own_times(window).window()
        # THEN nothing has changed
        assert np.allclose(again.durations_NRS, window.durations_NRS, rtol=0, atol=1e-12)
        assert np.allclose(again.outside_NRG, window.outside_NRG)
        assert (again.ready_NR is None) == (not split)
        if split:
            assert np.allclose(again.ready_NR, window.ready_NR)

    def test_ranks_that_do_not_leave_together_stay_as_they_were(self):
        # GIVEN ranks that leave the sync a little sooner or later than the others
        window = recorded()
        sync = SCHEMA.stages.index("backward")
        window.durations_NRS[:, :, sync] += np.random.default_rng(1).uniform(-1e-3, 1e-3, (200, 4))
        # THEN that is kept
        assert np.allclose(own_times(window).window().durations_NRS, window.durations_NRS, rtol=0, atol=1e-12)

    def test_a_window_that_lacks_a_step_is_refused(self):
        window = recorded()
        window.durations_NRS[3, 1] = np.nan
        with pytest.raises(ValueError, match="lacks no step"):
            own_times(window)

    def test_ranks_recorded_apart_wait_for_each_other(self):
        # GIVEN two recordings, put side by side
        parts = [own(seed=1), own(seed=2)]
        both = side_by_side(parts)
        window = both.window()
        # THEN the job is as slow as the slower of the two in every step, on two hosts
        slower_N = np.max([part.exposed_N() for part in parts], axis=0)
        assert np.allclose(both.exposed_N()[1:], slower_N[1:], atol=1e-3)
        assert (both.exposed_N() >= slower_N - 1e-12).all()
        assert window.hosts == ("host-0",) * 4 + ("host-1",) * 4
        # AND all ranks are together at the end of each sync: from one to the next all take as long
        assert_together(both)


def assert_together(owned, schema=SCHEMA):
    """From the end of one step's last sync to that of the next, every rank takes as long: the exposed time."""
    window = owned.window()
    after = schema.stages.index(schema.sync_in_order[-1]) + 1
    tail_NR = window.durations_NRS[:, :, after:].sum(axis=2) - window.outside_NRG.sum(axis=2)
    head_NR = totals_NR(window) - tail_NR
    assert np.allclose(head_NR[1:] + tail_NR[:-1], owned.exposed_N()[1:, None], rtol=0, atol=1e-12)


class TestSlowing:
    DELAY_S = 0.015

    def delays(self, rank, steps=slice(50, 60)):
        delay_NR = np.zeros((200, 4))
        delay_NR[steps, rank] = self.DELAY_S
        return delay_NR

    @pytest.mark.parametrize("place", STAGE_OF)
    def test_where_the_rank_was_last_already_the_job_takes_longer_by_just_the_delay(self, place):
        # GIVEN a job in which a rank is last in every step
        healthy = own()
        # WHEN it is delayed in some steps
        slow = slowed(healthy, place, self.delays(LAST))
        # THEN those steps take longer by just that: after the sync, the steps after them
        at = slice(51, 61) if place in ("optimizer", "after") else slice(50, 60)
        longer_N = np.zeros(200)
        longer_N[at] = self.DELAY_S
        assert np.allclose(slow.exposed_N() - healthy.exposed_N(), longer_N, rtol=0, atol=1e-12)
        # AND the others wait for it: it is in their backward, and in the rank's own stage
        grown_NRS = slow.window().durations_NRS - healthy.window().durations_NRS
        sync = SCHEMA.stages.index("backward")
        assert np.allclose(grown_NRS[at, FIRST_OTHER, sync], self.DELAY_S)
        if place not in ("between", "backward"):
            stage = SCHEMA.stages.index(STAGE_OF[place])
            assert np.allclose(grown_NRS[50:60, LAST, stage], self.DELAY_S)
            assert np.allclose(grown_NRS[:, LAST, sync], 0.0)
        assert_together(slow)

    @pytest.mark.parametrize("place", STAGE_OF)
    def test_what_is_hidden_by_another_rank_costs_nothing_and_shortens_the_wait(self, place):
        # GIVEN a rank that waits for the last one in every step
        healthy = own()
        # WHEN it is delayed by less than it waits
        slow = slowed(healthy, place, self.delays(FIRST_OTHER) * 0.1)
        # THEN no step takes longer, and it waits less
        assert np.allclose(slow.exposed_N(), healthy.exposed_N(), rtol=0, atol=1e-12)
        assert_together(slow)

    @pytest.mark.parametrize("place", STAGE_OF)
    @pytest.mark.parametrize("rank", [FIRST_OTHER, LAST])
    def test_nothing_is_ever_negative(self, place, rank):
        window = slowed(own(), place, self.delays(rank, slice(None))).window()
        assert (window.durations_NRS >= 0.0).all()
        assert (window.ready_NR <= window.durations_NRS[:, :, SCHEMA.stages.index("backward")] + 1e-12).all()

    def test_with_two_syncs_the_first_is_waited_for_and_the_second_is_not(self):
        # GIVEN a job with two sync stages, one rank of which is delayed before the first
        healthy = own(schema=TWO_SYNCS)
        window = slowed(healthy, "data", self.delays(LAST)).window()
        grown_NRS = window.durations_NRS - healthy.window().durations_NRS
        # THEN the others wait in the first
        assert np.allclose(grown_NRS[50:60, FIRST_OTHER, TWO_SYNCS.stages.index("gather")], self.DELAY_S)
        assert np.allclose(grown_NRS[:, :, TWO_SYNCS.stages.index("backward")], 0.0)

    def test_inside_a_sync_without_the_split_there_is_nothing_to_slow(self):
        with pytest.raises(ValueError, match="no part of its own"):
            slowed(own(split=False), "backward", self.delays(LAST))

    def test_what_is_over_at_the_end_of_a_stretch_delays_the_next(self):
        # GIVEN a job that is cut in two
        healthy = own()
        whole = healthy.window()
        first, second = healthy.steps(slice(0, 100)), healthy.steps(slice(100, 200))
        # WHEN the second part is told what came before it
        after = second.window(100, first.tail_NR[-1])
        # THEN it is as if it had not been cut
        assert np.allclose(after.durations_NRS, whole.durations_NRS[100:])
        assert after.first_step == 100


class TestFaults:
    def fault(self, course):
        return Fault(0.1, course, "rank", "data", (1,), 100, period_steps=7)

    def test_nothing_is_slow_before_the_onset_and_each_course_is_slow_when_it_should_be(self):
        fractions = {course: self.fault(course).fractions_N(900) for course in COURSES}
        for fraction_N in fractions.values():
            assert not fraction_N[:100].any()
            assert fraction_N[100] > 0.0
            assert fraction_N.max() == pytest.approx(0.1)
        constant, recurring, growing, bursts = (fraction_N[100:] for fraction_N in fractions.values())
        assert (constant == 0.1).all()
        assert np.flatnonzero(recurring).tolist() == list(range(0, 800, 7))
        assert (np.diff(growing) >= 0.0).all()
        assert growing[0] < 0.001
        assert growing[-1] == 0.1
        # bursts come and go, and are there about half of the time
        assert 10 <= np.abs(np.diff(bursts > 0.0)).sum() <= 40
        assert 0.3 <= (bursts > 0.0).mean() <= 0.7

    def test_a_delay_is_on_its_ranks_alone_and_of_its_size_in_the_mean(self):
        delay_NR = self.fault("constant").delay_NR(1100, 4, step_s=0.2)
        assert not delay_NR[:, [0, 2, 3]].any()
        assert delay_NR[100:, 1].mean() == pytest.approx(0.02, rel=0.02)


class TestResampling:
    def kinds(self, n_steps, period):
        return tuple("evaluation" if step % period == period - 1 else "" for step in range(n_steps))

    def test_a_block_is_consecutive_steps_of_all_ranks(self):
        # GIVEN a recording of which every step can be told
        whole = own(500)
        whole.work_NR[:] = np.arange(500)[:, None] * 10 + np.arange(4)
        # WHEN blocks are taken
        rng = np.random.default_rng(0)
        for _ in range(20):
            steps_NR = block(whole, 1, Blocks(), rng).work_NR
            # THEN each has 100 to 400 steps that follow one another, of the same ranks
            assert 100 <= len(steps_NR) <= 400
            assert (np.diff(steps_NR, axis=0) == 10).all()
            assert (steps_NR % 10 == np.arange(4)).all()

    def test_what_comes_every_so_many_steps_goes_on_doing_so_on_all_ranks(self):
        # GIVEN a job that evaluates every 20 steps
        whole = own(510, kinds=self.kinds(510, 20))
        # WHEN it is resampled to more ranks and steps
        parts = list(stretches([whole], 20, 8, 3000, Blocks(), np.random.default_rng(0)))
        # THEN it evaluates every 20 steps, across blocks and stretches
        kinds = [kind for part in parts for kind in part.kinds_N.tolist()]
        assert kinds == list(self.kinds(3000, 20))
        assert {part.n_ranks for part in parts} == {8}
        # AND no stretch is longer than what was recorded
        assert [len(part) for part in parts] == [500] * 6

    def test_ranks_stay_who_they_are_within_a_stretch_and_change_places_between_two(self):
        # GIVEN a recording whose ranks can be told
        whole = own(500)
        whole.work_NR[:] = np.arange(4)
        # WHEN many stretches are made of it
        parts = list(stretches([whole], 1, 8, 8 * 300, Blocks(stretch=300), np.random.default_rng(0)))
        # THEN in each the ranks are the same from first to last, and each host has all four
        orders = set()
        for part in parts:
            assert (part.work_NR == part.work_NR[0]).all()
            assert sorted(part.work_NR[0, :4]) == sorted(part.work_NR[0, 4:]) == [0, 1, 2, 3]
            orders.add(tuple(part.work_NR[0].tolist()))
        # AND not in the same places
        assert len(orders) > 4

    def test_windows_hold_every_step_once_and_none_lies_across_a_border(self):
        parts = list(stretches([own(500)], 1, 4, 700, Blocks(stretch=300), np.random.default_rng(0)))
        windows = list(windows_of(parts, WINDOW_STEPS))
        assert [window.first_step for window in windows] == list(range(0, 700, 50))
        assert all(len(window.durations_NRS) == 50 for window in windows)
