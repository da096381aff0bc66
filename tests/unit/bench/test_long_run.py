"""What the long-run bench counts, plans and tells."""

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
from bench.long_run import Amount, hosts_of, rules_of, sources, tasks_of
from bench.long_run_report import document, text
from bench.recordings import Recording, cells, row_of
from bench.resampled import Fault, own_times, slowed
from tests.unit.bench.synchronous_job import FIRST_OTHER, LAST, SCHEMA, own, recorded


def said(*names, stage="data", captured=()):
    """One window every ten steps; a number names that rank."""
    return [
        Judged(
            50 + 10 * at, None if name is None else ("rank", (name,)), stage, "", captured if name is not None else ()
        )
        for at, name in enumerate(names)
    ]


class TestCounting:
    @pytest.mark.parametrize(
        ("names", "count"),
        [
            ([], 0),
            ([None, None], 0),
            ([1, 1, 1], 1),
            ([1, None, 1], 2),
            ([1, 2, 2, None, 2], 3),
        ],
    )
    def test_who_is_named_anew_counts_once(self, names, count):
        assert len(episodes(said(*names))) == count

    def test_another_scope_is_another_name(self):
        one = [Judged(50, ("rank", (0,))), Judged(60, ("host", (0,))), Judged(70, ("host", (0, 1)))]
        assert len(episodes(one)) == 3

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

    def test_the_delay_is_from_the_onset_to_the_end_of_the_first_window_that_is_right(self):
        # GIVEN windows that end at 50, 60, 70, ..., and a fault from step 65 on
        found = detected(said(None, None, None, 1, 1, captured=(1,)), self.FAULT, knows_hosts=True)
        assert (found.named_after, found.captured_after, found.stage_right) == (15, 15, True)
        assert (found.wrong_names, found.wrong_captures, found.early_names) == (0, 0, 0)

    def test_who_is_named_before_the_onset_was_not_found(self):
        found = detected(said(1, 1, None, None), self.FAULT, knows_hosts=True)
        assert (found.named_after, found.early_names, found.wrong_names) == (None, 1, 0)

    def test_somebody_else_is_a_wrong_name_and_a_wrong_capture(self):
        found = detected(said(None, None, 3, 3, 1, captured=(3,)), self.FAULT, knows_hosts=True)
        assert (found.named_after, found.wrong_names, found.wrong_captures) == (25, 1, 3)
        assert found.captured_after is None

    @pytest.mark.parametrize(("really", "by_load"), [((), 0), ((3,), 1), ((2, 3), 2)])
    def test_a_wrong_name_that_is_true_without_the_fault_stays_one_and_is_told_apart(self, really, by_load):
        # GIVEN two wrong names, of which the recording shows some to have been held up
        names = said(None, None, 3, 3, 2, 1)
        # WHEN counted, THEN both are wrong names, and those are said to be by the load
        found = detected(
            names,
            self.FAULT,
            knows_hosts=True,
            held_up_by_load=lambda one: one.name is not None and one.name[1][0] in really,
        )
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

    def test_the_right_rank_for_the_wrong_stage_is_found_and_told_apart(self):
        found = detected(said(None, None, 1, stage="h2d"), self.FAULT, knows_hosts=True)
        assert (found.named_after, found.stage_right, found.wrong_names) == (5, False, 0)

    def test_a_rank_of_a_slow_host_is_a_part_of_it_and_all_of_it_to_who_knows_no_hosts(self):
        ours = detected(said(None, None, 1), self.SLOW_HOST, knows_hosts=True)
        rival = detected(said(None, None, 1), self.SLOW_HOST, knows_hosts=False)
        assert (ours.named_after, ours.in_part, ours.wrong_names) == (None, 1, 0)
        assert rival.named_after == 5
        whole = [Judged(70, ("host", (0, 1)), "data")]
        assert detected(whole, self.SLOW_HOST, knows_hosts=True).named_after == 5

    @pytest.mark.parametrize(
        ("count", "low", "high"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.390), (100, 81.36, 121.63)]
    )
    def test_the_interval_of_a_count_is_that_of_the_tables(self, count, low, high):
        assert poisson_interval(count) == (pytest.approx(low, rel=1e-3), pytest.approx(high, rel=1e-3))

    def test_a_large_count_has_an_interval_too(self):
        low, high = poisson_interval(20_000)
        assert (20_000 - low, high - 20_000) == (pytest.approx(1.96 * math.sqrt(20_000), rel=0.03),) * 2

    def test_rates_are_per_million_steps(self):
        assert per_million(2, 4_000_000)[0] == 0.5
        assert per_million(0, 0) is None

    def test_quantiles(self):
        assert [quantile(range(1, 101), part) for part in (0.5, 0.95)] == [50, 95]
        assert quantile([], 0.5) is None


class TestPlan:
    def test_every_recorded_job_is_healthy_and_has_a_load_and_some_have_every_size(self):
        planned = cells(quick=False)
        assert {cell.n_ranks for cell in planned} == {2, 4, 8}
        assert len(set(planned)) == len(planned)
        for number, cell in enumerate(planned):
            row = row_of(cell, number, 10.0, seed=1)
            assert (row.truth.label, row.delays, row.n_ranks) == ("healthy", (), cell.n_ranks)
            assert all(cell.period_steps % every == 0 for every in (row.evaluate_every, row.checkpoint_every) if every)
            # AND who writes checkpoints says so: untold, it would be guilty of them
            assert row.says_kinds or not row.checkpoint_every

    def test_a_plan_has_the_steps_that_are_asked_for_of_every_load_and_size(self):
        tasks = tasks_of(Amount(1_000_000, 2), cells(quick=False))
        healthy = [task for task in tasks if task.fault is None]
        assert sum(task.n_steps for task in healthy) == pytest.approx(1_000_000, rel=0.25)
        assert {(task.n_ranks, task.cell.load) for task in healthy} == {
            (n_ranks, cell.load) for n_ranks in (2, 4, 8, 64, 1024) for cell in sources(cells(quick=False), n_ranks)
        }
        # AND ours judges all, the others some of each load
        assert all(task.rules[0] == OURS for task in tasks)
        assert {task.cell.load for task in healthy if set(RIVALS) <= set(task.rules)} == {
            task.cell.load for task in healthy
        }

    def test_faults_are_of_ranks_there_are_and_hosts_are_not_the_whole_job(self):
        for task in tasks_of(Amount(10_000, 3), cells(quick=False)):
            if task.fault is not None:
                hosts = hosts_of(task.cell, task.n_ranks)
                assert set(task.fault.ranks) <= set(range(task.n_ranks))
                assert task.fault.scope == "rank" or len(task.fault.ranks) == hosts.count(hosts[0]) < task.n_ranks
                assert task.n_steps % task.cell.period_steps == 0

    def test_ranks_are_made_of_whole_recordings(self):
        assert {cell.n_ranks for cell in sources(cells(quick=False), 4)} == {2, 4}
        assert {cell.n_ranks for cell in sources(cells(quick=False), 1024)} == {8}


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
