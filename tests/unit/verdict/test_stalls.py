"""When a step in progress is a stall, for which ranks the others wait, and what is not a stall."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.hangs import HangEvidence
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import RankStatus, StageSchema
from sftriage.verdict import stalls
from sftriage.verdict.proof import PauseSnapshot, before_timeout_s
from sftriage.verdict.stalls import Pace, StepPause, Watch
from sftriage.windows.rings import status_of

S = 1_000_000_000
NOW = 100_000 * S
GIVEN_S = 60.0
SCHEMA = StageSchema(("data", "forward", "backward", "optimizer", "save", "other"), ("backward",))
TWO_SYNCS = StageSchema(("data", "forward", "backward", "optimizer", "other"), ("forward", "backward"))
STEADY = Pace(periods_s=(0.1,) * 5)


def stalled(status, pace=STEADY, given_s=None, capturing=(), snapshot=None):
    wait_state = stalls.wait_state_of(status, pace, NOW)
    found = stalls.stall_verdict(wait_state, status, pace, given_s, NOW, 0, capturing, snapshot)
    return found if isinstance(found, Verdict) else None


def snapshot_with(timeout_s=None, pending_s=0.0, *, age_s=0.0, again_s=0.0, proved=False):
    """A snapshot that is ``age_s`` old, of a call that is pending since ``pending_s``."""
    report_ns = NOW + int((before_timeout_s(timeout_s or 0.0) - pending_s) * S)
    timeout = None if timeout_s is None else (timeout_s, report_ns)
    return PauseSnapshot(NOW - int(age_s * S), NOW + int(again_s * S), 10.0, None, proved, {}, timeout)


def rank(number, what, still_s, host="h"):
    """From "STAGE@STEP", with "-" between steps, and perhaps "died", "unknown", "closed" or "special" after."""
    place, _, fate = what.partition(" ")
    stage, _, step = place.partition("@")
    return RankStatus(
        rank=number,
        host=host,
        stage=None if stage == "-" else stage,
        stage_age_ns=int(still_s * S),
        step=int(step),
        step_age_ns=int((still_s + 1) * S),
        published=int(step) + (stage == "-"),
        closed=fate == "closed",
        alive={"died": False, "unknown": None}.get(fate, True),
        special=fate == "special",
    )


def job(ranks, still_s=61.0, hosts=None, schema=SCHEMA, world_size=None):
    each = enumerate(ranks.split(", ") if ranks else ())
    found = tuple(rank(number, what, still_s, (hosts or "h" * 99)[number]) for number, what in each)
    return stalls.on_clock(status_of(schema, world_size or len(found), found), None, NOW)


def named(verdict):
    return [(s.scope, s.host if s.scope == "host" else s.ranks, s.stage) for s in verdict.suspects]


@pytest.mark.parametrize(
    ("ranks", "floor_s", "reasons", "suspects"),
    [
        # Ranks in a local stage, while the others wait in the sync stage, are the suspects.
        ("backward@50, backward@50, forward@50", 10, ("not_arrived",), [("rank", (2,), "forward")]),
        ("data@50, backward@50, forward@50", 10, ("not_arrived",), [("rank", (0,), "data"), ("rank", (2,), "forward")]),
        ("backward@50, optimizer@49, backward@50", 10, ("not_arrived",), [("rank", (1,), "optimizer")]),
        # A rank that is dead does not come, wherever it died.
        ("backward@50, backward@50, forward@50 died", 10, ("died",), [("rank", (2,), "forward")]),
        ("backward@50, -@49 died, backward@50", 10, ("died",), [("rank", (1,), "other")]),
        (
            "data@50, backward@50, forward@50 died",
            10,
            ("died", "not_arrived"),
            [("rank", (2,), "forward"), ("rank", (0,), "data")],
        ),
        # A rank that may or may not exist counts where it is: it has not died, ...
        ("backward@50, backward@50, forward@50 unknown", 10, ("not_arrived",), [("rank", (2,), "forward")]),
        # ... it waits like the others, ...
        ("backward@50 unknown, backward@50 unknown, data@50", 10, ("not_arrived",), [("rank", (2,), "data")]),
        ("backward@50 unknown, backward@50 unknown", 10, ("in_sync",), []),
        # ... and one that is known to be dead comes before it.
        (
            "data@50 unknown, backward@50, forward@50 died",
            10,
            ("died", "not_arrived"),
            [("rank", (2,), "forward"), ("rank", (0,), "data")],
        ),
        # With all of them inside the sync stage there is no suspect, and it says so.
        ("backward@50, backward@50, backward@50", 10, ("in_sync",), []),
        # Of ranks in the sync stages of different steps, those behind are the suspects.
        ("backward@50, backward@49, backward@50", 10, ("not_arrived",), [("rank", (1,), "backward")]),
        # One has taken fewer steps than the others, and will take no more.
        ("backward@50, backward@50, -@49 closed", 10, ("left_early",), [("rank", (2,), "other")]),
        # The first rank of a host may evaluate, or save a checkpoint, between stages or steps; others go on with it.
        ("-@49, backward@50, backward@50", 300, ("not_arrived",), [("rank", (0,), "other")]),
        ("other@50, backward@50, backward@50", 300, ("not_arrived",), [("rank", (0,), "other")]),
        ("backward@50, backward@50, -@49", 10, ("not_arrived",), [("rank", (2,), "other")]),
        ("backward@50, backward@50, other@50", 10, ("not_arrived",), [("rank", (2,), "other")]),
        ("-@49, backward@50, -@49", 300, ("not_arrived",), [("rank", (0,), "other"), ("rank", (2,), "other")]),
        # Any rank may be in a stage that is not entered in every step.
        ("backward@50, backward@50, save@49 special", 300, ("not_arrived",), [("rank", (2,), "save")]),
        # A step that was given a kind is no ordinary one, from its first time on.
        ("backward@50, backward@50, forward@50 special", 300, ("not_arrived",), [("rank", (2,), "forward")]),
        # All ranks alike in an ordinary stage wait for the same file; elsewhere they may evaluate.
        ("forward@50, forward@50, forward@50", 10, ("no_rank_waits",), [("all", (0, 1, 2), "forward")]),
        ("other@50, other@50", 300, ("no_rank_waits",), [("all", (0, 1), "other")]),
        ("save@50 special, save@50 special", 300, ("no_rank_waits",), [("all", (0, 1), "save")]),
        # On a device that runs ahead no rank waits in the sync stage itself, and still one is behind.
        ("optimizer@50, data@50, optimizer@50", 10, ("no_rank_waits",), [("rank", (1,), "data")]),
        # The first step compiles and loads; a dead rank does not, nor does one that has arrived.
        ("forward@0, forward@0, forward@0", 1800, ("no_rank_waits",), [("all", (0, 1, 2), "forward")]),
        ("backward@0, backward@0, forward@0", 300, ("not_arrived",), [("rank", (2,), "forward")]),
        ("backward@0, backward@0", 300, ("in_sync",), []),
        ("backward@0, backward@0, forward@0 died", 10, ("died",), [("rank", (2,), "forward")]),
        # Before any pace is known
        ("backward@3, backward@3, forward@3", 60, ("not_arrived",), [("rank", (2,), "forward")]),
        ("forward@3, forward@3", 60, ("no_rank_waits",), [("all", (0, 1), "forward")]),
        ("backward@3, backward@3, forward@3 died", 10, ("died",), [("rank", (2,), "forward")]),
        ("forward@1, forward@1", 1800, ("no_rank_waits",), [("all", (0, 1), "forward")]),
        # No rank is in a step.
        ("-@50, -@50, -@50", 3600, ("outside_steps",), []),
        ("data@51, -@50, -@50", 3600, ("no_rank_waits",), [("rank", (1,), "other"), ("rank", (2,), "other")]),
    ],
)
@pytest.mark.parametrize("given_s", [None, 3.0, 15.0, 7200.0])
def test_from_the_floor_or_the_given_time_on_it_is_a_stall_and_not_before(ranks, floor_s, reasons, suspects, given_s):
    pace = STEADY if "@50" in ranks else Pace()
    threshold_s = given_s or floor_s
    verdict = stalled(job(ranks, still_s=threshold_s), pace, given_s)
    assert (verdict.label, verdict.reasons, named(verdict)) == ("stalled", reasons, suspects)
    assert verdict.numbers["threshold_s"] == threshold_s
    assert (verdict.numbers["policy_s"], verdict.numbers["floor_s"]) == ((given_s, 0) if given_s else (0, floor_s))
    assert stalled(job(ranks, still_s=threshold_s - 0.1), pace, given_s) is None


@pytest.mark.parametrize(
    "ranks",
    [
        "-@99 closed, -@99 closed",
        "backward@50 died, forward@50 died",
        "-@99 closed, -@99",  # the last rank still saves the model
        "-@99 died, -@99",
        "-@99 closed, -@99 unknown",
        "",
    ],
)
def test_a_job_that_has_ended_or_is_about_to_is_not_a_stall(ranks):
    assert stalled(job(ranks, still_s=90_000.0)) is None


BEHIND, ALIKE, FIRST = "backward@50, backward@50, forward@50", "data@50, data@50", "-@49, backward@50"
STEP, LOCAL, OUTSIDE, START, IDLE = (
    StepPause(wait, 50.0, NOW - 60 * S) for wait in ("step", "local", "outside", "start", "idle")
)


@pytest.mark.parametrize(
    ("ranks", "pace", "threshold_s", "longest_s"),
    [
        # Ten times the typical step; a checkpoint among the steps is not the typical one.
        (BEHIND, Pace(periods_s=(0.1, 0.1, 900.0)), 10, 0),
        (BEHIND, Pace(periods_s=(20.0,) * 3), 200, 0),
        # Ten times the longest pause in ordinary stages
        (BEHIND, replace(STEADY, pauses=(replace(STEP, seconds=1.5),)), 15, 1.5),
        (BEHIND, replace(STEADY, pauses=(STEP, replace(STEP, seconds=1.5))), 500, 50),
        (ALIKE, replace(STEADY, pauses=(LOCAL,)), 500, 50),
        # Too long ago
        (BEHIND, replace(STEADY, pauses=(replace(STEP, ended_ns=NOW - 7300 * S),)), 10, 0),
        # One that was reported: its own length, but for those of over a minute
        (BEHIND, replace(STEADY, pauses=(replace(STEP, reported=True),)), 50, 50),
        (BEHIND, replace(STEADY, pauses=(replace(STEP, seconds=3600.0, reported=True),)), 60, 3600),
        # Other pauses say nothing here.
        (BEHIND, replace(STEADY, pauses=(LOCAL, OUTSIDE, START, IDLE)), 10, 0),
        (ALIKE, replace(STEADY, pauses=(STEP, OUTSIDE, IDLE)), 10, 0),
        # A compilation in the first step may come again.
        (ALIKE, replace(STEADY, pauses=(START,)), 150, 50),
        # An evaluation, or a checkpoint: three times the longest
        (FIRST, replace(STEADY, pauses=(replace(OUTSIDE, seconds=120.0), STEP)), 360, 120),
        (FIRST, replace(STEADY, pauses=(OUTSIDE,)), 300, 50),
        ("-@49, -@49", replace(STEADY, pauses=(replace(IDLE, seconds=1500.0),)), 4500, 1500),
        # Where others wait, NCCL's timeout would end the job after 600 s, ...
        (BEHIND, replace(STEADY, pauses=(replace(STEP, seconds=90.0),)), 540, 90),
        (FIRST, replace(STEADY, pauses=(replace(OUTSIDE, seconds=400.0),)), 540, 400),
        # ... but that is not its timeout if it has outlived that.
        (FIRST, replace(STEADY, pauses=(replace(OUTSIDE, seconds=700.0),)), 2100, 700),
    ],
)
def test_the_threshold_follows_the_pauses_of_the_job(ranks, pace, threshold_s, longest_s):
    verdict = stalled(job(ranks, still_s=threshold_s), pace)
    assert verdict.numbers["threshold_s"] == pytest.approx(threshold_s)
    assert (verdict.numbers["longest_still_s"], verdict.numbers["typical_step_s"]) == (longest_s, pace.typical_s)
    assert (verdict.numbers["watchdog_s"] == 600) == (threshold_s == 540)
    assert stalled(job(ranks, still_s=threshold_s - 0.1), pace) is None


SLOW = replace(STEADY, periods_s=(400.0,) * 3)


@pytest.mark.parametrize(
    ("ranks", "given_s", "timeout_s", "pace", "threshold_s"),
    [
        # With a tenth of it to spare, and at least 15 s, and half of it at most
        (BEHIND, None, 1800.0, SLOW, 1620),
        (BEHIND, None, 600.0, SLOW, 540),
        (BEHIND, None, 100.0, replace(STEADY, pauses=(replace(STEP, seconds=20.0),)), 85),
        (FIRST, None, 60.0, STEADY, 45),
        (FIRST, None, 24.0, STEADY, 12),
        # A short wait is over long before.
        (BEHIND, None, 1800.0, STEADY, 10),
        # It is a longer time than the given one, or a shorter one; an unknown one shortens none.
        (BEHIND, 900.0, 1800.0, STEADY, 900),
        (BEHIND, 900.0, 600.0, STEADY, 540),
        (BEHIND, 900.0, None, STEADY, 900),
        # A known one is not the default one.
        (FIRST, None, 1800.0, replace(STEADY, pauses=(replace(OUTSIDE, seconds=400.0),)), 1200),
        # A call is pending, though no rank is in a sync stage, or even in a step.
        (ALIKE, 900.0, 600.0, STEADY, 540),
        ("-@50, -@50", None, 600.0, STEADY, 540),
        ("-@50, -@50", None, None, STEADY, 3600),
        # A step in which ranks wait that long is ordinary.
        (BEHIND, None, 400.0, SLOW, 4000),
    ],
)
def test_a_stall_is_reported_before_a_timeout_ends_the_job(ranks, given_s, timeout_s, pace, threshold_s):
    for still_s in (threshold_s, threshold_s - 0.1):
        snapshot = snapshot_with(timeout_s, pending_s=still_s)
        verdict = stalled(job(ranks, still_s=still_s), pace, given_s, snapshot=snapshot)
        assert (verdict is not None) == (still_s == threshold_s)
        if verdict is not None:
            assert verdict.numbers["threshold_s"] == pytest.approx(threshold_s)
            assert (verdict.numbers["watchdog_s"] > 0) == (threshold_s in (1620, 540, 85, 45, 12))


def test_a_timeout_counts_from_the_begin_of_a_call_that_is_still_pending():
    # GIVEN an evaluation on all ranks, with a call that may be pending for 45 s of a timeout of 60 s
    pause = job("-@50, -@50", still_s=200.0)
    assert stalled(pause, snapshot=snapshot_with(60.0, pending_s=44.0)) is None
    # WHEN that is known from before THEN evidence is gathered first
    for age_s, action in ((0.0, Verdict), (1.0, str)):
        snapshot = snapshot_with(60.0, pending_s=45.5, age_s=age_s)
        wait_state = stalls.wait_state_of(pause, STEADY, NOW)
        found = stalls.stall_verdict(wait_state, pause, STEADY, None, NOW, 0, (), snapshot)
        assert isinstance(found, action)
    assert found == "gather"


def test_an_unknown_timeout_counts_from_when_the_first_rank_waits():
    # GIVEN two ranks that wait, one since 400 s longer than the other
    moved_ns = NOW - 139 * S
    found = job(FIRST + ", backward@50", still_s=139.0)
    found = replace(found, since_ns_R=np.array([moved_ns, moved_ns - 400 * S, moved_ns]))
    # THEN 540 s after the first one, no rank need be still any longer
    assert stalled(found) is None
    later = replace(found, since_ns_R=found.since_ns_R - S)
    assert stalled(later).numbers["threshold_s"] == pytest.approx(140)


@pytest.mark.parametrize(
    ("still_s", "threshold_s", "soonest_s", "snapshot", "action"),
    [
        (9.9, 300, 10, None, "wait"),
        # From the soonest time on, with nothing known, or once it is time again
        (10, 300, 10, None, "gather"),
        (49.9, 300, 50, None, "wait"),
        (20, 300, 10, snapshot_with(again_s=1.0), "wait"),
        (20, 300, 10, snapshot_with(again_s=0.0), "gather"),
        # What is a stall by its time needs no evidence.
        (10, 10, 10, None, "report"),
        (4, 4, 10, None, "report"),
        (300, 300, 10, snapshot_with(again_s=1.0), "report"),
    ],
)
def test_what_to_do_follows_from_the_time_and_the_last_evidence(still_s, threshold_s, soonest_s, snapshot, action):
    assert stalls.next_action(still_s, threshold_s, soonest_s, snapshot, NOW) == action


@pytest.mark.parametrize(
    ("ranks", "pace", "given_s", "threshold_s"),
    [
        # Wherever it hangs, for as long as an ordinary pause may take, and no longer pause counts
        (FIRST, STEADY, None, 10),
        ("-@50, -@50", STEADY, None, 10),
        ("forward@0, forward@0", Pace(), None, 10),
        (FIRST, replace(STEADY, pauses=(replace(OUTSIDE, seconds=120.0),)), None, 10),
        (FIRST, Pace(periods_s=(20.0,) * 3), None, 200),
        (FIRST, replace(STEADY, pauses=(replace(STEP, seconds=1.5),)), None, 15),
        (ALIKE, replace(STEADY, pauses=(replace(STEP, seconds=1.5),)), None, 15),
        # The policy's time is exact.
        (FIRST, STEADY, 100.0, 100),
    ],
)
def test_a_proved_hang_has_the_lowest_floor(ranks, pace, given_s, threshold_s):
    for still_s in (threshold_s, threshold_s - 0.1):
        verdict = stalled(job(ranks, still_s=still_s), pace, given_s, snapshot=snapshot_with(proved=True))
        assert (verdict is not None) == (still_s == threshold_s)


@pytest.mark.parametrize(
    ("late_s", "hosts", "floor_s"), [(0.5, "aab", 300), (0.5, "aaa", 10), (2.0, "aaa", 300), (0.5, "abc", 10)]
)
def test_a_rank_between_steps_may_evaluate_as_the_first_of_its_host_or_like_all_ranks(late_s, hosts, floor_s):
    # GIVEN that the others began to wait ``late_s`` after the last step of the missing rank
    for still_s in (floor_s, floor_s - 0.1):
        found = job("backward@50, backward@50, -@49", still_s=still_s, hosts=hosts)
        earlier = replace(found, since_ns_R=found.since_ns_R - np.array([0, 0, int(late_s * S)]))
        assert (stalled(earlier) is not None) == (still_s == floor_s)


@given(
    st.sampled_from([BEHIND, ALIKE, FIRST, "-@49, -@49", "backward@50, backward@50"]),
    st.builds(
        Pace,
        periods_s=st.lists(st.floats(0.01, 500.0), max_size=3).map(tuple),
        pauses=st.lists(
            st.builds(
                StepPause,
                st.sampled_from(["step", "local", "outside", "start", "idle"]),
                st.floats(0, 5000),
                st.just(NOW - S),
                st.booleans(),
            ),
            max_size=4,
        ).map(tuple),
    ),
    st.none() | st.floats(1.0, 86400.0),
    st.none() | st.floats(1.0, 7200.0),
    st.booleans(),
    st.floats(1.0, 50_000.0),
    st.floats(0.0, 40_000.0),
)
def test_a_stall_stays_one_and_a_given_time_is_the_threshold(ranks, pace, given_s, timeout_s, proved, still_s, more_s):
    def judged(still_s):
        snapshot = snapshot_with(timeout_s, pending_s=still_s, proved=proved)
        return stalled(job(ranks, still_s=still_s), pace, given_s, snapshot=snapshot)

    verdict, later = judged(still_s), judged(still_s + more_s)
    # THEN one that lasts longer is still reported, by the same threshold
    assert verdict is None or later.numbers["threshold_s"] == pytest.approx(verdict.numbers["threshold_s"])
    # AND without a watchdog it is exactly as long as given, and without that at least ten seconds
    known = judged(99_000.0).numbers
    if timeout_s is None:
        assert known["threshold_s"] == (given_s or max(10.0, known["threshold_s"]))
    if abs(still_s - known["threshold_s"]) > 1e-6:
        assert (verdict is not None) == (still_s > known["threshold_s"])


@pytest.mark.parametrize(
    ("hosts", "ranks", "suspects"),
    [
        # All ranks of one host, and only they
        ("aabb", "backward@50, backward@50, data@50, data@50", [("host", "b", "data")]),
        ("aabb", "backward@50, backward@50, data@50, forward@50", [("host", "b", None)]),
        # Not all of its ranks
        ("aabb", "backward@50, backward@50, backward@50, data@50", [("rank", (3,), "data")]),
        ("aaab", "backward@50, backward@50, backward@50, data@50", [("rank", (3,), "data")]),
        # A host, and a rank of another one
        ("aabb", "backward@50, optimizer@49, data@50, data@50", [("rank", (1,), "optimizer"), ("host", "b", "data")]),
    ],
)
def test_the_ranks_of_one_host_are_one_suspect(hosts, ranks, suspects):
    verdict = stalled(job(ranks, hosts=hosts))
    assert sorted(named(verdict), key=str) == sorted(suspects, key=str)
    # AND a rank alone has its host beside it
    for one in verdict.suspects:
        assert one.on_host == (hosts[one.rank] if one.scope == "rank" else None)


@pytest.mark.parametrize(
    ("stage", "stage_s", "step_s", "typical_s", "still"),
    [
        ("forward", 4.9, 4.9, 0.1, False),
        ("forward", 5.1, 5.1, 0.1, True),
        # A stage that has just begun, of a step that has not
        ("forward", 0.1, 5.1, 0.1, True),
        # A step may take ten times what it usually does
        ("forward", 19.0, 19.0, 2.0, False),
        ("forward", 21.0, 21.0, 2.0, True),
        # Between steps, since the last one ended
        (None, 4.0, 60.0, 0.1, False),
        (None, 6.0, 60.0, 0.1, True),
        ("forward", 6.0, 6.0, 0.0, True),
    ],
)
def test_the_ranks_that_take_no_steps_now(stage, stage_s, step_s, typical_s, still):
    ages = int(stage_s * 1e9), 7, int(step_s * 1e9)
    one = RankStatus(3, "h", stage, *ages, 7, closed=False, alive=True)
    assert stalls.still_ranks(status_of(SCHEMA, 4, (one,)), typical_s) == ({3} if still else set())


def test_of_two_sync_stages_the_later_one_is_where_the_others_wait():
    verdict = stalled(job("backward@50, forward@50, backward@50", schema=TWO_SYNCS))
    assert named(verdict) == [("rank", (1,), "forward")]
    # A rank that waits for another one further back is not what the others wait for in the end
    verdict = stalled(job("backward@50, forward@50, data@50", schema=TWO_SYNCS))
    assert named(verdict) == [("rank", (2,), "data")]


def test_the_verdict_is_about_the_step_in_progress_and_holds_its_numbers():
    verdict = stalled(job("backward@51, optimizer@50, backward@51", still_s=75.0))
    assert (verdict.first_step, verdict.last_step, verdict.exposed_s) == (50, 50, pytest.approx(76.0))
    (suspect,) = verdict.suspects
    assert (suspect.gain_s, suspect.share, suspect.onset_step) == (pytest.approx(75.0), pytest.approx(75 / 76), 50)
    assert verdict.numbers == {
        "still_s": pytest.approx(75.0),
        "threshold_s": 10.0,
        "policy_s": 0.0,
        "floor_s": 10.0,
        "typical_step_s": 0.1,
        "longest_still_s": 0.0,
        "watchdog_s": 0.0,
        "waiting_ranks": 2.0,
        "missing_ranks": 1.0,
        "unseen_ranks": 0.0,
    }


def test_unseen_ranks_are_a_reason_if_no_other_rank_is_missing():
    verdict = stalled(job("backward@50, backward@50", world_size=4))
    assert (verdict.reasons, verdict.suspects) == (("in_sync", "unseen_ranks"), ())
    assert verdict.numbers["unseen_ranks"] == 2.0


def test_of_many_missing_ranks_the_first_are_named_and_all_are_counted():
    verdict = stalled(job("backward@50" + ", data@50" * 40))
    assert (len(verdict.suspects), verdict.numbers["missing_ranks"]) == (stalls.MAX_NAMED, 40.0)


def test_a_capture_may_delay_its_rank_while_it_runs():
    held_up = job("backward@50, backward@50, data@50")
    assert stalled(held_up, capturing={2}) is None
    # AND a rank without a capture is a suspect in any case
    assert stalled(held_up, capturing={1}) is not None


def test_a_time_in_the_future_is_ignored():
    found = job("backward@50, forward@50, data@50")
    damaged = replace(found, since_ns_R=np.array([*found.since_ns_R[:2], 1 << 61]))
    verdict = stalled(damaged)
    assert named(verdict) == [("rank", (1,), "forward")]


class Job:
    """A job of three ranks that the test moves."""

    def __init__(self, given_s=None):
        self.now_ns, self.watch, self.verdicts, self.given_s = NOW, Watch(), [], given_s
        # (the ages are moments, here)
        self.ranks = [RankStatus(r, "h", None, NOW, 0, 0, 0, False, True) for r in range(3)]

    def wait(self, seconds, every_s=0.5):
        for _ in range(round(seconds / every_s)):
            self.now_ns += int(every_s * S)
            self.look()

    def status(self, attempt=0):
        now_ns = self.now_ns
        ranks = [
            replace(one, stage_age_ns=now_ns - one.stage_age_ns, step_age_ns=now_ns - one.step_age_ns)
            for one in self.ranks
        ]
        return stalls.on_clock(status_of(SCHEMA, len(ranks), ranks, attempt), None, now_ns)

    def look(self):
        verdict, self.watch = stalls.observe(self.status(), self.watch, self.given_s, self.now_ns)
        self.verdicts += [verdict] if verdict else []

    def enter(self, stage, ranks=None):
        for number in range(3) if ranks is None else ranks:
            one = self.ranks[number]
            if stage is None:
                one = replace(one, published=one.published + 1)
            elif one.stage is None:
                one = replace(one, step=one.published, step_age_ns=self.now_ns)
            self.ranks[number] = replace(one, stage=stage, stage_age_ns=self.now_ns)

    def steps(self, count):
        for stage in ("data", "forward", "backward", None) * count:
            self.enter(stage)
            self.wait(0.05, 0.05)

    def hang(self, seconds):
        self.enter("data")
        self.enter("backward", [0, 2])
        self.enter("forward", [1])
        self.wait(seconds)

    def evaluate(self, seconds):
        """Rank 0 is between two steps, and the others go on."""
        self.enter("data", [1, 2])
        self.enter("backward", [1, 2])
        self.wait(seconds)
        self.enter("data", [0])
        self.go_on(0)
        self.steps(10)

    def go_on(self, number=1):
        self.enter("backward", [number])
        self.enter(None)


def test_a_stall_is_reported_once_and_the_next_one_anew():
    job = Job()
    job.steps(10)
    # WHEN a rank hangs, is released, and hangs again after some steps
    job.hang(100)
    assert [named(verdict) for verdict in job.verdicts] == [[("rank", (1,), "forward")]]
    job.go_on()
    job.steps(10)
    job.hang(100)
    # THEN there are two stalls, of the steps they are in; the first has not made the second normal
    assert [verdict.first_step for verdict in job.verdicts] == [10, 21]


def test_a_stall_is_reported_again_when_another_rank_is_missing():
    job = Job()
    job.steps(10)
    job.hang(100)
    # WHEN the rank is killed, and the others go on waiting
    job.ranks[1] = replace(job.ranks[1], alive=False)
    job.wait(100)
    assert [verdict.reasons for verdict in job.verdicts] == [("not_arrived",), ("died",)]


def test_a_hanging_job_that_is_ended_does_not_stall_anew():
    job = Job()
    job.steps(10)
    job.hang(20)
    # WHEN its ranks close and end, one after the other, a few seconds apart
    for number in (1, 0, 2):
        job.ranks[number] = replace(job.ranks[number], closed=True)
        job.wait(6)
        job.ranks[number] = replace(job.ranks[number], alive=False)
        job.wait(6)
    assert [verdict.reasons for verdict in job.verdicts] == [("not_arrived",)]


def test_compiling_evaluating_and_checkpoints_are_no_stalls():
    job = Job()
    # WHEN the first step compiles for ten minutes, one rank longer than the others
    job.enter("data")
    job.enter("forward")
    job.wait(400, every_s=2)
    job.enter("backward", [0, 2])
    job.wait(500, every_s=2)
    job.go_on()
    job.steps(10)
    # AND all ranks evaluate for half an hour between steps
    job.wait(1800, every_s=5)
    job.steps(10)
    # AND rank 0 saves a checkpoint, while the others wait in the next step
    job.enter("data", [1, 2])
    job.enter("backward", [1, 2])
    job.wait(250)
    job.enter("data", [0])
    job.go_on(0)
    job.steps(10)
    # AND it ends, and rank 0 takes an hour to write the model
    job.ranks[1:] = [replace(one, closed=True) for one in job.ranks[1:]]
    job.wait(4000, every_s=10)
    # THEN nothing of this was a stall
    assert job.verdicts == []


@pytest.mark.parametrize(
    ("first", "seconds"),
    [
        # Rank 0 evaluates for the first time, ...
        (None, 120),
        # ... or saves a checkpoint, which takes a little longer than the one before.
        (55, 60),
    ],
)
def test_healthy_pauses_of_rank_0_are_no_stalls(first, seconds):
    job = Job()
    # GIVEN a job that compiles for 90 s in its first step
    job.enter("data")
    job.enter("forward")
    job.wait(90)
    job.go_on(0)
    job.steps(10)
    for pause_s in (first, seconds) if first else (seconds,):
        # WHEN rank 0 is between two steps, and the others wait in the next one
        job.evaluate(pause_s)
    # THEN nothing of this was a stall, and a hang in a stage is one after ten seconds
    assert job.verdicts == []
    job.hang(11)
    assert len(job.verdicts) == 1
    # AND all ranks compile again, in the time that it took at first
    job = Job()
    job.enter("data")
    job.wait(90)
    job.steps(10)
    job.enter("data")
    job.wait(250)
    assert job.verdicts == []
    job.wait(25)
    assert [verdict.reasons for verdict in job.verdicts] == [("no_rank_waits",)]


def test_a_pause_that_recurs_in_a_stage_is_ordinary_once_it_was_no_stall():
    job = Job()
    job.steps(10)
    for seconds, n_reported in ((8, 0), (12, 0), (125, 1)):
        # WHEN rank 1 is in forward for a while, and the others wait
        job.hang(seconds)
        job.go_on()
        job.steps(10)
        assert len(job.verdicts) == n_reported
    # AND one that was reported does not make ten times as much ordinary, but the same again, which then is
    job = Job()
    job.steps(10)
    for seconds, n_reported in ((13, 1), (20, 2), (19, 2), (150, 2)):
        job.hang(seconds)
        job.go_on()
        job.steps(10)
        assert len(job.verdicts) == n_reported


def test_an_evaluation_reported_as_a_stall_is_known_the_next_time():
    job = Job()
    job.steps(10)
    for _ in range(3):
        # WHEN rank 0 is between steps for 400 s, again and again
        job.evaluate(400)
    # THEN only the first time is a stall
    assert len(job.verdicts) == 1
    # AND a hang inside a stage is found as soon as ever
    job.hang(11)
    assert len(job.verdicts) == 2


def test_neither_the_first_step_nor_a_stall_counts_for_the_jobs_pace():
    job = Job()
    # GIVEN a job whose first step takes five minutes, and whose third one stalls for two
    job.hang(290)
    job.go_on()
    job.wait(0.5)
    job.steps(2)
    job.hang(120)
    job.go_on()
    job.wait(0.5)
    job.steps(2)
    assert len(job.verdicts) == 1
    # THEN its pace is that of its other steps
    assert job.watch.pace.periods_s
    assert max(job.watch.pace.periods_s) < 2.0


def test_unwatched_time_does_not_count():
    job = Job(GIVEN_S)
    job.steps(10)
    job.hang(30)
    # WHEN job and triage are stopped for ten minutes, and go on
    job.now_ns += 600 * S
    job.wait(30)
    assert job.verdicts == []
    job.wait(31)
    assert len(job.verdicts) == 1


def test_evidence_is_due_while_a_pause_may_be_a_hang_and_counts_in_that_pause_alone():
    job = Job()
    job.steps(10)
    # GIVEN rank 0 between two steps, and the others in the next
    job.enter("data", [1, 2])
    job.enter("backward", [1, 2])
    job.wait(9.5)
    assert not job.watch.evidence_due
    job.wait(1)
    assert job.watch.evidence_due
    # WHEN there is evidence THEN none is due for a while
    nothing = HangEvidence(0.0, 0, 10, 3, ())
    job.watch = job.watch.with_evidence(nothing, job.now_ns, job.now_ns)
    job.wait(9)
    assert (job.watch.evidence_due, job.watch.snapshot is not None) == (False, True)
    job.wait(2)
    assert job.watch.evidence_due
    # AND in another pause it is worth nothing, nor is what is gathered meanwhile
    job.enter("data", [0])
    job.wait(1)
    assert (job.watch.evidence_due, job.watch.snapshot) == (False, None)
    assert job.watch.with_evidence(nothing, job.now_ns, job.now_ns).snapshot is None
    # AND a stall that is reported needs none
    job.wait(60)
    assert (len(job.verdicts), job.watch.evidence_due) == (1, False)


def test_another_attempt_has_a_pace_of_its_own():
    job = Job()
    job.steps(10)
    _, watch = stalls.observe(job.status(attempt=1), job.watch, None, job.now_ns)
    assert watch.pace == Pace()


stages = st.sampled_from([None, *SCHEMA.stages])
statuses = st.builds(
    RankStatus,
    rank=st.integers(0, 9),
    host=st.sampled_from(["", "a", "b"]),
    stage=stages,
    stage_age_ns=st.integers(0, 9000 * S) | st.integers(-(2**64), 2**64),
    step=st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1),
    step_age_ns=st.integers(-(2**64), 2**64),
    published=st.integers(0, 5),
    closed=st.booleans(),
    alive=st.sampled_from([True, True, None, False]),
)
jobs = st.lists(statuses, max_size=10, unique_by=lambda one: one.rank).map(
    lambda ranks: stalls.on_clock(status_of(SCHEMA, 10, ranks), None, NOW)
)


@given(jobs, st.sampled_from([STEADY, Pace()]))
def test_with_any_headers_it_never_raises_and_names_only_ranks_that_are_behind(status, pace):
    verdict = stalled(status, pace)
    if verdict is None:
        return
    by_rank = {one.rank: one for one in status.status.ranks}
    live = [one for one in by_rank.values() if one.alive is not False and not one.closed and one.stage_age_ns >= 0]
    waiting = [one for one in live if one.stage == "backward"]
    furthest = max((one.step for one in waiting), default=None)
    blamed = [by_rank[number] for suspect in verdict.suspects for number in suspect.ranks]
    # THEN no rank is named twice, and no waiting rank if none is further
    assert len({one.rank for one in blamed}) == len(blamed)
    assert not [one for one in blamed if one in waiting and one.step == furthest]
    # AND times are such that a journal takes them
    assert 0 < verdict.suspects[0].share <= 1 if verdict.suspects else verdict.exposed_s > 0


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 1.0)), max_size=30), st.sampled_from([None, 5.0, 60.0]))
def test_a_job_that_moves_in_time_never_stalls(moves, given_s):
    # GIVEN a steady job in which some rank moves in time, whichever and whenever
    job = Job(given_s)
    job.steps(3)
    for number, share in moves:
        seconds = share * ((given_s or stalls.FLOOR_S) - 1.0)
        following = {None: "data", "data": "forward", "forward": "backward", "backward": None}
        job.enter(following[job.ranks[number].stage], [number])
        job.wait(seconds, every_s=max(seconds / 8, 0.001))
    assert job.verdicts == []


@given(jobs, jobs)
def test_any_two_observations_in_a_row_are_accepted(first, second):
    _, watch = stalls.observe(first, Watch(), None, NOW)
    verdict, _ = stalls.observe(second, watch, None, NOW + 60 * S)
    assert verdict is None or verdict.label == "stalled"
