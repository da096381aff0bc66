"""How the long-run bench makes jobs: taking the waiting out and putting it in, faults, and resampling."""

import numpy as np
import pytest

from bench.judging import windows_of
from bench.resampled import COURSES, Blocks, Dealer, Fault, block, own_times, side_by_side, slowed, stretches
from bench.rows import STAGE_OF, WINDOW_STEPS
from tests.unit.bench.synchronous_job import FIRST_OTHER, LAST, SCHEMA, TWO_SYNCS, own, recorded


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
    def fault(self, course, **values):
        return Fault(0.1, course, "rank", "data", (1,), 100, **values)

    def test_nothing_is_slow_before_the_onset_and_the_onset_is(self):
        for course in COURSES:
            fraction_N = self.fault(course, period_steps=7).fractions_N(900)
            assert not fraction_N[:100].any()
            assert fraction_N[100] > 0.0
            assert fraction_N.max() == pytest.approx(0.1)

    def test_each_course_is_there_when_it_should_be(self):
        constant, recurring, growing, bursts = (
            self.fault(course, period_steps=7).fractions_N(900)[100:] for course in COURSES
        )
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

    def test_the_same_seed_deals_the_same_faults_and_a_host_is_slow_as_a_whole(self):
        hosts_R = np.array(["host-0", "host-0", "host-1", "host-1"])
        deal = [[Dealer(seed).deal(0.1, "recurring", "host", hosts_R, split=False) for _ in "1"] for seed in (1, 1, 2)]
        assert deal[0] == deal[1] != deal[2]
        assert all(set(fault.ranks) in ({0, 1}, {2, 3}) for (fault,) in deal)

    def test_every_place_is_dealt_and_backward_only_where_it_can_be_seen(self):
        dealer, hosts_R = Dealer(3), np.array(["host-0"] * 4)
        places = [
            {dealer.deal(0.1, "constant", "rank", hosts_R, split=split).place for _ in STAGE_OF} for split in (0, 1)
        ]
        assert places == [set(STAGE_OF) - {"backward"}, set(STAGE_OF)]


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

    def test_the_same_seed_makes_the_same_job(self):
        one, same, other = (
            next(stretches([own()], 1, 8, 200, Blocks(), np.random.default_rng(seed))).between_NR for seed in (1, 1, 2)
        )
        assert (one == same).all()
        assert (one != other).any()

    def test_what_cannot_be_made_is_refused(self):
        with pytest.raises(ValueError, match="6 ranks of 4"):
            next(stretches([own()], 1, 6, 100, Blocks(), np.random.default_rng(0)))

    def test_windows_hold_every_step_once_and_none_lies_across_a_border(self):
        parts = list(stretches([own(500)], 1, 4, 700, Blocks(stretch=300), np.random.default_rng(0)))
        windows = list(windows_of(parts, WINDOW_STEPS))
        assert [window.first_step for window in windows] == list(range(0, 700, 50))
        assert all(len(window.durations_NRS) == 50 for window in windows)
