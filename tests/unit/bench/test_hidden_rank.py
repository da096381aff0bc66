"""The pure parts of the hidden-rank matrix: what is drawn, what the rules say, and what counts as right."""

import numpy as np
import pytest

from bench.drawing import draw
from bench.hidden_rank import (
    HELD,
    PART,
    QUIET,
    RIGHT,
    WRONG,
    Recorded,
    Scored,
    counts,
    document,
    show,
    suspect_is,
    verdict_did,
)
from bench.rivals import RULES, columns_of, says
from bench.rows import STAGES, SYNC, Delay, Outcome, Row, Truth
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import StageSchema, Window
from tests.scenario import Fault, Job, gaussian

SCHEMA = StageSchema((*STAGES, "other"), SYNC)
HEALTHY_MS = {"data": 20.0, "h2d": 5.0, "forward": 30.0, "backward": 40.0, "optimizer": 8.0, "other": 1.0}
JOB = Job(
    stages=tuple((stage, HEALTHY_MS[stage] / 1e3) for stage in SCHEMA.stages),
    exchange_s=0.002,
    outside_s=0.0,
    noise=gaussian(0.01),
)
N_RANKS, SLOW = 4, 2


def window(delay_ms=0.0, stage="data", *, split=False):
    """A window of a job in which one rank takes longer in one stage, and the others wait for it."""
    return JOB.run(Fault(stage, SLOW, delay_ms / 1e3), seed=7, split=split)


def row(sort="local", truth=None, **values):
    truth = truth or Truth("suspect", "rank", (SLOW,), "data", 0)
    return Row(0, sort, "name", N_RANKS, 180, 1, "wait", False, truth, **values)


def suspect(scope="rank", ranks=(SLOW,), stage="data"):
    return Suspect(scope, ranks, stage, gain_s=0.01, share=0.1, persistence=1.0)


class TestDrawing:
    @pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 8])
    @pytest.mark.parametrize("seed", range(5))
    def test_every_row_can_be_run_and_its_truth_is_about_its_faults(self, n_ranks, seed):
        for drawn in draw(40, n_ranks, seed):
            # THEN faults are on ranks there are, in steps there are
            assert all(set(delay.ranks) <= set(range(n_ranks)) for delay in drawn.delays)
            assert all(0 <= delay.first < delay.last <= drawn.n_steps for delay in drawn.delays)
            if drawn.truth.label == "suspect":
                assert any(delay.fraction_at(step) > 0 for delay in drawn.delays for step in range(drawn.n_steps))
                assert all(delay.fraction_at(drawn.truth.onset - 1) == 0 for delay in drawn.delays)
            # AND a slow host has several ranks, and at most half of all
            if drawn.sort == "host":
                slow = {rank for rank, host in enumerate(drawn.hosts) if host == drawn.hosts[drawn.truth.ranks[0]]}
                assert slow == set(drawn.truth.ranks)
                assert 2 <= len(slow) <= max(2, n_ranks // 2)


class TestDelay:
    @pytest.mark.parametrize(
        ("delay", "fractions"),
        [
            (Delay("data", (0,), 0.1, 0, 4), [0.1, 0.1, 0.1, 0.1, 0.0]),
            (Delay("data", (0,), 0.1, 1, 5, every=2), [0.0, 0.1, 0.0, 0.1, 0.0]),
            (Delay("data", (0,), 0.1, 1, 5, full_at=3), [0.0, 0.0, 0.05, 0.1, 0.15]),
        ],
    )
    def test_its_size_follows_its_course(self, delay, fractions):
        assert [delay.fraction_at(step) for step in range(5)] == pytest.approx(fractions)

    def test_one_that_roams_is_on_one_rank_at_a_time_and_on_all_of_them_in_time(self):
        delay = Delay("data", (0, 1, 2), 0.1, 0, 100, roams=True)
        seen = [delay.ranks_at(step) for step in range(100)]
        assert all(len(ranks) == 1 for ranks in seen)
        assert {rank for (rank,) in seen} == {0, 1, 2}


class TestRivals:
    @pytest.mark.parametrize("name", RULES)
    @pytest.mark.parametrize(
        ("faults", "first", "rules", "alarmed"),
        [
            # a plain straggler, of 60 ms in a step of 100
            ([(60.0, "data")], "data", set(RULES), set(RULES)),
            ([(60.0, "forward")], "forward", set(RULES), set(RULES)),
            # after the sync, so that the others wait in the next step's backward: who compares stages by themselves
            # finds it, and the plain frontier sees two ranks that took as long
            ([(60.0, "optimizer")], "optimizer", set(RULES) - {"plain frontier"}, set(RULES) - {"plain frontier"}),
            # between steps is other
            ([(60.0, "between")], "other", set(RULES), None),
            # inside backward without the split, and nowhere
            ([(60.0, "backward")], "", set(), set()),
            ([(0.0, "data")] * 2, "", set(), set()),
        ],
    )
    def test_which_rule_finds_a_straggler_where(self, name, faults, first, rules, alarmed):
        # GIVEN windows of a fault THEN the rule has the rank and the stage first, and raises an alarm, or not
        found = says(RULES[name], [window(*fault) for fault in faults])
        if name in rules:
            assert (found.ranked[0].rank, found.ranked[0].stage) == (SLOW, first)
        assert alarmed is None or found.alarm == (name in alarmed)

    @pytest.mark.parametrize("name", ["plain frontier", "per-stage maximum", "per-stage average", "own speed 0.75"])
    def test_with_the_split_a_straggler_inside_backward_is_found(self, name):
        found = says(RULES[name], [window(60.0, "backward", split=True)])
        assert (found.ranked[0].rank, found.ranked[0].stage) == (SLOW, "backward")

    def test_own_speed_remembers_better_days(self):
        # GIVEN all ranks slower in a stage than they were a window ago
        before = window()
        slower = np.array(before.durations_NRS)
        slower[:, :, 0] *= 2.0
        # THEN the window alone shows nothing, and the one before it gives them away
        assert not says(RULES["own speed 0.75"], [Window(SCHEMA, 50, slower)]).alarm
        healthy = Window(SCHEMA, 0, before.durations_NRS)
        assert says(RULES["own speed 0.75"], [healthy, Window(SCHEMA, 50, slower)]).alarm

    @pytest.mark.parametrize("name", RULES)
    def test_a_rank_of_which_nothing_came_is_left_out(self, name):
        # GIVEN a straggler, and another rank that recorded nothing
        found = window(60.0, "data")
        durations_NRS = np.array(found.durations_NRS)
        durations_NRS[:, 0] = np.nan
        # THEN the straggler keeps its number
        assert says(RULES[name], [Window(SCHEMA, 0, durations_NRS)]).ranked[0].rank == SLOW

    @pytest.mark.parametrize("name", RULES)
    def test_nothing_is_said_of_a_window_without_a_complete_step(self, name):
        assert says(RULES[name], [Window(SCHEMA, 0, np.full((5, 2, len(SCHEMA.stages)), np.nan))]).ranked == ()

    def test_the_split_moves_no_time(self):
        split, whole = columns_of(window(30.0, split=True)), columns_of(window(30.0))
        assert split.step_s == pytest.approx(whole.step_s)


class TestScoring:
    SLOW_HOST = row("host", Truth("suspect", "host", (0, 1), "data"), hosts=("a", "a", "b", "b"))

    @pytest.mark.parametrize(
        ("found", "of", "did"),
        [
            # a single fault is one rank and one stage
            (suspect(), row(), RIGHT),
            (suspect(stage=None), row(), PART),
            (suspect(stage="forward"), row(), WRONG),
            (suspect(ranks=(1,)), row(), WRONG),
            (suspect("all", (0, 1, 2, 3)), row(), WRONG),
            # a slow host is all its ranks
            (suspect("host", (0, 1)), SLOW_HOST, RIGHT),
            (suspect("host", (0, 1), None), SLOW_HOST, PART),
            (suspect("rank", (1,)), SLOW_HOST, PART),
            (suspect("host", (2, 3)), SLOW_HOST, WRONG),
        ],
    )
    def test_a_suspect_is_right_if_it_is_the_fault_as_it_was_made(self, found, of, did):
        assert suspect_is(found, of) == did

    @pytest.mark.parametrize(
        ("label", "suspects", "filled", "did"),
        [
            ("healthy", (), 0.1, QUIET),
            ("needs_evidence", (suspect(),), 0.1, HELD),
            ("suspect", (suspect(),), 0.1, RIGHT),
            ("suspect", (suspect(),), 0.0, WRONG),  # the fault has not begun
        ],
    )
    def test_a_verdict_is_held_against_its_own_window(self, label, suspects, filled, did):
        verdict = Verdict(0, 49, label, (), suspects, 0.1, {}, {}, {})
        assert verdict_did(verdict, row(), filled) == did

    @pytest.mark.parametrize(
        ("delay", "first_step"),
        [
            (Delay("data", (SLOW,), 0.1, 0, 180), 130),  # there to the end: the last window
            (Delay("data", (SLOW,), 0.1, 60, 120), 70),  # the last one that lies inside it
            (Delay("data", (SLOW,), 0.1, 65, 90), 60),  # the last one that holds most of it
        ],
    )
    def test_the_window_that_counts_is_the_last_one_that_is_full_of_the_fault(self, delay, first_step):
        windows = tuple(Window(SCHEMA, first, np.zeros((50, 4, 6))) for first in range(20, 131, 10))
        recorded = Recorded(None, row(delays=(delay,)), Outcome(), windows)
        assert recorded.windows[recorded.judged].first_step == first_step


class TestReport:
    def test_a_row_that_failed_is_reported_and_counts_for_nothing(self):
        # GIVEN a row whose job did not run
        failed = Scored(Recorded("row-000", row(), Outcome(failed="rank 1 ended"), ()), {})
        # THEN it is reported, as not what was expected, and no rule has a row
        assert any("FAILED: rank 1 ended" in line for line in show(document([failed])))
        assert not failed.as_expected
        assert all(found["rows"] == 0 for found in counts([failed]).values())
