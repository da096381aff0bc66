"""Recorded windows through a policy, on the clock of the recording."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.controller.replay import replay
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import StageSchema, Window
from tests.unit.policy.making import make_policy

SCHEMA = StageSchema(("data", "backward", "other"), ("backward",))
STEP_S = 0.05
DETECTION = {"window_steps": 20, "stride_steps": 20, "warmup_steps": 0}


def policy(cooldown="0s", steps=3, max_seconds=60):
    capture = {"steps": steps, "warmup_steps": 1, "max_seconds": max_seconds}
    rule = {"name": "any", "match": {"gain": ">= 5%"}, "capture": capture, "cooldown": cooldown}
    return make_policy(rule, detection=DETECTION, captures_per_hour=100, overhead_budget="100%")


def window(first_step, late_s=0.02, attempt=0, n_steps=20):
    """Twenty steps of four ranks, 50 ms each; rank 2 is late in data, and the others wait for it in backward."""
    local_R = np.array([0.01, 0.01, 0.01 + late_s, 0.01])
    durations_NRS = np.zeros((n_steps, 4, 3))
    durations_NRS[:, :, 0] = local_R
    durations_NRS[:, :, 1] = STEP_S - local_R
    return Window(SCHEMA, first_step, durations_NRS, attempt=attempt)


def stall(step, seconds, attempt=0):
    suspect = Suspect("rank", (1,), "data", seconds, 1.0, 1.0, rank=1)
    return Verdict(step, step, "stalled", ("not_arrived",), (suspect,), seconds, {}, {}, {}, attempt=attempt)


def outcomes(replayed):
    return [one.decision.outcome for one in replayed]


def test_the_clock_follows_the_recorded_steps():
    # GIVEN windows of 20 steps of 50 ms that overlap by half
    windows = [window(first, late_s=0.0) for first in (0, 10, 20)]
    times = [one.time_s for one in replay(windows, policy(), start_s=1000.0)]
    assert times == [pytest.approx(1000.0 + seconds) for seconds in (1.0, 1.5, 2.0)]


def test_time_between_steps_counts_and_a_missing_step_takes_as_long_as_the_last():
    # GIVEN 10 ms between steps, a step that one rank lacks, and one that all lack
    recorded = window(0, late_s=0.0)
    recorded.durations_NRS[3, 1] = np.nan
    recorded.durations_NRS[7] = np.nan
    recorded = replace(recorded, between_NR=np.full((20, 4), 0.01))
    (one,) = replay([recorded], policy(), 0.0)
    assert one.time_s == pytest.approx(20 * 0.06)
    # AND steps between two windows count as missing
    *_, last = replay([window(0, late_s=0.0), window(60, late_s=0.0)], policy(), 0.0)
    assert last.time_s == pytest.approx(80 * STEP_S)


def test_a_capture_marks_the_window_of_its_steps_as_self_inflicted():
    replayed = list(replay([window(first) for first in (0, 20, 40)], policy(), 0.0))
    # THEN the capture is of the steps after its window; the stacks of a slow loader need no warm-up
    assert replayed[0].captured_steps == ((20, 22),)
    assert [request.rank for request in replayed[0].decision.requests] == [2]
    # AND the window that holds them is held, and after it there is a trace of the fault
    assert outcomes(replayed) == ["capture", "hold", "throttle"]
    assert replayed[2].decision.reason == "already_captured"
    assert replayed[2].decision.parameters["capture_id"] == replayed[0].decision.requests[0].capture_id
    assert replayed[1].verdict.reasons == ("self_inflicted",)
    assert replayed[1].verdict.numbers["capturing_steps"] == 3.0


def test_a_recorded_profiler_still_counts():
    recorded = replace(window(0), capturing_N=np.arange(20) == 5)
    (one,) = replay([recorded], policy(), 0.0)
    assert (one.decision.outcome, one.verdict.reasons) == ("hold", ("self_inflicted",))


def test_a_cooldown_follows_the_recordings_clock():
    # GIVEN a window each second, a cooldown of two and a half, and a fault that is worse each time
    worse = [window(20 * number, 0.004 * 1.6**number) for number in range(6)]
    replayed = list(replay(worse, policy("2500ms"), 0.0))
    assert outcomes(replayed) == ["capture", "hold", "throttle", "capture", "hold", "throttle"]
    assert replayed[2].decision.reason == "cooldown"


def test_a_capture_with_too_many_steps_ends_with_its_time_box():
    # GIVEN a capture of 100 steps within a second, which is 20 steps
    wanted = policy(steps=100, max_seconds=1)
    # WHEN a second has passed
    replayed = list(replay([window(0), window(20), window(40)], wanted, 0.0))
    # THEN it is over, and what comes after is not its doing
    assert outcomes(replayed) == ["capture", "hold", "throttle"]
    assert replayed[2].verdict.label == "suspect"


def late(rank, first_step, late_s=0.02):
    """A window in which a rank is late."""
    order = [rank if at == 2 else 2 if at == rank else at for at in range(4)]
    return window(first_step, late_s).of_ranks(order)


def test_a_false_capture_of_one_rank_does_not_hide_another():
    # GIVEN rank 0 is late for a moment and is captured, and from then on rank 3, for half a minute
    windows = [late(0, 0), *(late(3, 20 * number) for number in range(1, 30))]
    replayed = list(replay(windows, policy("10m"), 0.0))
    # THEN rank 3 is captured as soon as the first capture has ended, and then has been
    assert [one.decision.requests[0].rank for one in replayed if one.decision.requests] == [0, 3]
    assert outcomes(replayed)[:4] == ["capture", "hold", "capture", "hold"]
    assert {one.decision.reason for one in replayed[4:]} == {"already_captured"}


def test_an_attempt_has_its_own_past_and_captures():
    windows = [window(0), window(0, attempt=1), window(20, attempt=1)]
    replayed = list(replay(windows, policy(), 0.0))
    # THEN the first attempt's capture marks no step of the second
    assert outcomes(replayed) == ["capture", "capture", "hold"]
    assert replayed[1].time_s == pytest.approx(2.0)


def test_a_stall_is_decided_at_its_step_and_detection_time():
    windows = [window(0, late_s=0.0), window(20, late_s=0.0)]
    replayed = list(replay(windows, policy(), 0.0, [stall(25, 90.0), stall(50, 60.0)]))
    assert [(one.verdict.label, one.verdict.first_step) for one in replayed] == [
        ("healthy", 0),
        ("stalled", 25),
        ("healthy", 20),
        ("stalled", 50),
    ]
    assert replayed[1].time_s == pytest.approx(91.0)
    assert replayed[1].decision.outcome == "hold"


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 0.005, 0.02, 0.05]), max_size=12))
def test_every_window_has_one_decision_and_a_second_replay_repeats_it(delays):
    windows = [window(20 * number, late_s) for number, late_s in enumerate(delays)]
    first, second = (list(replay(windows, policy("2s"), 0.0)) for _ in range(2))
    assert first == second
    assert [one.decision.first_step for one in first] == [one.first_step for one in windows]
    assert all((one.decision.outcome == "capture") == bool(one.captured_steps) for one in first)
    assert not any(one.decision.outcome == "capture" for one in first if one.verdict.label != "suspect")


def test_stacks_are_taken_at_once_and_disturb_no_window():
    stacks = {"profiler": "stacks", "control_ranks": 1}
    rule = {"name": "hung", "match": {"label": "stalled"}, "capture": stacks, "cooldown": "0s"}
    wanted = make_policy(rule, detection=DETECTION)
    windows = [window(first, late_s=0.0) for first in (0, 20, 40)]
    replayed = list(replay(windows, wanted, 0.0, [stall(25, 90.0), stall(45, 90.0)]))
    assert outcomes(replayed) == ["ignore", "capture", "ignore", "capture", "ignore"]
    # AND the clock never goes back, though the recorded steps do not show the stall
    assert [one.time_s for one in replayed] == sorted(one.time_s for one in replayed)
    # AND of the missing rank and all others, as the last window has them
    (request,) = replayed[1].decision.requests
    assert (request.rank, request.detail_ranks) == (1, (0, 1, 2, 3))
    assert replayed[1].captured_steps == (None,)


def test_a_stall_in_which_nobody_is_missing_is_captured_once_a_window_shows_the_ranks():
    rule = {"name": "hung", "match": {"label": "stalled"}, "capture": {}, "cooldown": "0s"}
    wanted, windows = make_policy(rule, detection=DETECTION), [window(0, late_s=0.0), window(20, late_s=0.0)]
    stalls = [replace(stall(step, 90.0), reasons=("in_sync",), suspects=()) for step in (10, 25)]
    replayed = [one.decision for one in replay(windows, wanted, 0.0, stalls) if one.verdict.label == "stalled"]
    # THEN the first is held, for before the first window no rank is known
    assert [one.outcome for one in replayed] == ["hold", "capture"]
    (request,) = replayed[1].requests
    assert (request.rank, request.detail_ranks) == (0, (0, 1, 2, 3))
