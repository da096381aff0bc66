"""What `sftriage run` says on stderr while a job goes on."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sftriage.decisions import CaptureRequest, CaptureResult, Decision, Pattern, Suspect, Verdict
from sftriage.events import CaptureChanged, WindowJudged
from sftriage.sinks.terminal import MOST, MOST_TIMES, WITHIN_S, Progress, RecentLines, Reporter
from sftriage.words.captures import capturing_sentence


@pytest.fixture
def console():
    return Console(stderr=True, highlight=False)


def judged(first: int, pattern: Pattern, *requests: CaptureRequest) -> WindowJudged:
    suspect = Suspect("rank", (1,), "data", 0.02, 0.2, 0.9, rank=1, pattern=pattern, onset_step=57)
    verdict = Verdict(first, first + 39, "suspect", (), (suspect,), 0.1, {"data": 0.1}, {"data": 1}, {})
    outcome, reason = ("capture", "rule_matched") if requests else ("hold", "one_off")
    return WindowJudged(
        verdict, Decision(float(first), first, first + 39, "suspect", outcome, reason, requests=requests)
    )


def test_a_fault_that_is_there_to_stay_after_all_is_said_before_it_is_captured(console, capsys):
    # GIVEN a suspect that seems to have passed, in two windows
    reporter = Reporter(console)
    reporter.take(judged(40, "one-off"))
    reporter.take(judged(50, "one-off"))
    # WHEN it is chronic in the next one, which leads to a capture
    reporter.take(judged(60, "chronic", CaptureRequest("c-1", 1, "torch", 4, 1, 60.0, 2**29)))
    # THEN that window is said too, and the one like the one before it is not
    first, why_not, second, third = capsys.readouterr().err.splitlines()
    assert "steps 40 to 79; one-off from step 57, and has passed." in first
    assert "steps 60 to 99; chronic since step 57." in second
    assert why_not == "sftriage: No capture now: one-off, and has passed."
    assert third.endswith("Capturing 4 steps of rank 1 with PyTorch Profiler.")


def ended(capture_id: str, state: str, **also) -> CaptureChanged:
    return CaptureChanged(1.0, CaptureResult(capture_id, 1, state, **also), stored_bytes=2048)


def test_how_a_capture_has_ended_is_said_once(console, capsys):
    reporter = Reporter(console)
    for state in ("accepted", "armed", "running"):
        reporter.take(ended("c-1", state))
    reporter.take(ended("c-1", "stored", first_step=60, last_step=63))
    reporter.take(ended("c-2", "refused", detail="torch is not imported"))
    assert capsys.readouterr().err.splitlines() == [
        "sftriage: Captured steps 60 to 63 of rank 1 (2.0 KiB): sftriage traces show c-1",
        "sftriage: No trace of rank 1: the capture was refused: torch is not imported.",
    ]
    assert reporter.captures == 1


def test_a_demo_says_what_changes_and_keeps_how_captures_ended(console, capsys):
    progress = Progress(console, 300)
    with progress.live("starting the job"):
        for first in (40, 50):
            progress.take(judged(first, "chronic"))
        progress.take(judged(60, "chronic", CaptureRequest("c-1", 1, "torch", 4, 1, 60.0, 2**29)))
        progress.take(ended("c-1", "running"))
        progress.take(ended("c-1", "stored", first_step=60, last_step=63))
        progress.take(ended("c-2", "failed", detail="the job ended"))
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("Rank 1 is slow in data")
    assert others == [
        "No capture now: one-off, and has passed.",
        "Capturing 4 steps of rank 1 with PyTorch Profiler.",
        "Captured steps 60 to 63 of rank 1 (2.0 KiB): sftriage traces show c-1",
        "No trace of rank 1: the capture failed: the job ended.",
    ]
    assert [one.state for one in progress.ended] == ["stored", "failed"]


def windows_said(*windows: tuple[float, str]) -> list[tuple[float, str]]:
    """Which of some windows are said; one written in capitals leads to a capture."""
    said, told = RecentLines(), []
    for time_s, found in windows:
        said, news = said.after(found.lower(), time_s, at_once=found.isupper())
        told += [(time_s, found)] if news else []
    return told


@pytest.mark.parametrize(
    ("windows", "silent"),
    [
        # What stays as it is is said once
        ([(0, "a"), (1, "a"), (500, "a")], [(1, "a"), (500, "a")]),
        # A change is said at once, and so is that it has passed
        ([(0, "a"), (1, "b"), (2, "c")], []),
        ([(0, "a"), (5, "b"), (10, "a")], []),
        # What flickers is said twice a minute
        ([(0, "a"), (5, "b"), (10, "a"), (15, "b"), (20, "a"), (25, "b"), (59, "a"), (60, "a"), (65, "b"), (66, "a")],
         [(20, "a"), (25, "b"), (59, "a"), (66, "a")]),
        # What has come back stays, and is said when the minute is over
        ([(0, "a"), (5, "b"), (10, "a"), (15, "b"), (20, "a"), (59, "a"), (60, "a")], [(20, "a"), (59, "a")]),
        # What went and came back before that was told of is no news
        ([(0, "a"), (5, "b"), (6, "a"), (7, "b"), (8, "a"), (9, "b"), (70, "b")], [(8, "a"), (9, "b"), (70, "b")]),
        # A capture is not begun without saying why, and not said why twice
        ([(0, "a"), (5, "b"), (10, "a"), (15, "b"), (20, "A"), (21, "A")], [(21, "A")]),
        # A clock that was set back keeps nobody silent
        ([(900, "a"), (905, "b"), (910, "a"), (915, "b"), (5, "a"), (10, "b")], []),
        # Of many different things, six a minute
        ([(0, "a"), (1, "b"), (2, "c"), (3, "d"), (4, "e"), (5, "f"), (6, "g"), (7, "h"), (60, "h"), (61, "i")],
         [(6, "g"), (7, "h")]),
    ],
)  # fmt: skip
def test_what_is_said_of_windows_that_follow_one_another(windows, silent):
    assert windows_said(*windows) == [one for one in windows if one not in silent]


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abcdefghij")), max_size=200))
def test_a_terminal_is_not_flooded_and_does_not_go_stale(moves):
    # GIVEN windows that find anything, any time apart
    times_s = itertools.accumulate(seconds for seconds, _ in moves)
    windows = list(zip(times_s, (found for _, found in moves), strict=True))
    told = windows_said(*windows)
    for time_s, found in told:
        # THEN nothing is said more than twice within a minute, nor more than six things in all
        within = [one for at_s, one in told if time_s - WITHIN_S < at_s <= time_s]
        assert within.count(found) <= MOST_TIMES
        assert len(within) <= MOST
    # AND whoever has found the same for a minute has said so
    for n, (time_s, found) in enumerate(windows):
        since = next((m for m in range(n, -1, -1) if windows[m][1] != found), -1) + 1
        if time_s - windows[since][0] >= WITHIN_S:
            assert [one for at_s, one in told if at_s <= time_s][-1] == found


def held(first: int, *reasons: str, label: str = "needs_evidence") -> WindowJudged:
    verdict = Verdict(first, first + 39, label, reasons, (), 0.1, {"data": 0.1}, {"data": 1}, {})
    return WindowJudged(verdict, Decision(float(first), first, first + 39, label, "hold", "undecided"))


def test_the_terminal_says_what_is_so_now(console, capsys):
    # GIVEN a job that is held for one reason, then for another, is captured meanwhile, and is healthy in the end
    reporter = Reporter(console)
    for first, *reasons in ((0, "roaming"), (10, "roaming"), (20, "co_critical"), (30, "self_inflicted")):
        reporter.take(held(first, *reasons))
    reporter.take(held(40, "co_critical"))
    reporter.take(held(50, label="healthy"))
    # THEN each is said, but for the window that the capture disturbed, and what is as it was before that
    begin = [line.split(" in steps")[0] for line in capsys.readouterr().err.splitlines()]
    assert begin == ["sftriage: Held: roaming", "sftriage: Held: co_critical", "sftriage: Healthy: nothing stands out"]


def test_what_waited_to_be_said_is_said_in_the_end(console, capsys):
    reporter = Reporter(console)
    for first, *reasons in ((0, "roaming"), (1, "co_critical"), (2, "roaming"), (3, "co_critical"), (4, "roaming")):
        reporter.take(held(first, *reasons))
    assert len(capsys.readouterr().err.splitlines()) == 4
    reporter.finish()
    assert capsys.readouterr().err.startswith("sftriage: Held: roaming in steps 4 to 43")


def test_what_comes_after_a_stall_is_said_though_it_was_just_before(console, capsys):
    reporter = Reporter(console)
    for event in (held(0, label="healthy"), held(10, "in_sync", label="stalled"), held(20, label="healthy")):
        reporter.take(event)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["Healthy:", "Stalled:", "Healthy:"]


def requested(rank: int, role: str = "suspect", profiler: str = "torch", steps: int = 3) -> CaptureRequest:
    return CaptureRequest(f"c-{rank}", rank, profiler, steps, 1, 60.0, 2**29, role=role)


@pytest.mark.parametrize(
    ("requests", "line"),
    [
        ([requested(2)], "Capturing 3 steps of rank 2 with PyTorch Profiler."),
        (
            [requested(2), requested(1, "control")],
            "Capturing 3 steps of rank 2 with PyTorch Profiler; rank 1 too, to compare with.",
        ),
        (
            [requested(2, steps=1), requested(5, steps=1), requested(1, "control"), requested(3, "control")],
            "Capturing 1 step of ranks 2 and 5 with PyTorch Profiler; ranks 1 and 3 too, to compare with.",
        ),
        ([requested(2, profiler="nsys")], "Capturing 3 steps of rank 2 with Nsight Systems."),
        ([requested(2, profiler="stacks")], "Capturing the stacks of rank 2."),
        ([requested(1, "control")], "Capturing 3 steps of rank 1 with PyTorch Profiler."),
    ],
)
def test_who_is_captured_and_who_is_the_control(requests, line):
    assert capturing_sentence(requests) == line
