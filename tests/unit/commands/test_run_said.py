"""What `sftriage run` prints on stderr while a job runs: which windows, and how often."""

import io
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sftriage.model.captures import CaptureRequest, Decision
from sftriage.model.verdicts import Regression, Suspect, Verdict
from sftriage.sinks.terminal import Progress, Reporter
from sftriage.words.news import MOST, MOST_TIMES, WITHIN_S, News, RecentLines, urgency_of
from tests.golden.said import ended, judged


def test_a_demo_prints_changes_and_keeps_the_outcomes_of_captures(capsys):
    progress = Progress(Console(stderr=True, highlight=False), 300)
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
        "No capture now: one-off that has passed.",
        "Capturing 4 steps of rank 1 with PyTorch Profiler.",
        "Captured steps 60 to 63 of rank 1 (2.0 KiB): sftriage traces show c-1",
        "No trace of rank 1: the capture failed: the job ended.",
    ]
    assert [result.state for result in progress.ended] == ["stored", "failed"]


def printed(*windows: tuple[float, str], urgency: str = "now") -> list[tuple[float, str]]:
    """The windows that are printed, of 50 steps each and one a second; a capital letter leads to a capture."""
    lines = RecentLines()

    def news(time_s: float, found: str) -> News:
        how = {"h": "calm", "n": "never"}.get(found, "at_once" if found.isupper() else urgency)
        return News(how, found.lower(), time_s, int(time_s), int(time_s) + 49)

    return [window for window in windows if lines.after(news(*window))]


@pytest.mark.parametrize(
    ("windows", "silent"),
    [
        # A lasting state is printed once
        ([(0, "a"), (1, "a"), (500, "a")], [(1, "a"), (500, "a")]),
        # A change is printed at once
        ([(0, "a"), (1, "b"), (2, "c")], []),
        ([(0, "a"), (5, "b"), (10, "a")], []),
        # A flickering state is printed twice a minute
        ([(0, "a"), (5, "b"), (10, "a"), (15, "b"), (20, "a"), (25, "b"), (59, "a"), (60, "a"), (65, "b"), (66, "a")],
         [(20, "a"), (25, "b"), (59, "a"), (66, "a")]),
        # A state that returns and stays is printed when the minute is over
        ([(0, "a"), (5, "b"), (10, "a"), (15, "b"), (20, "a"), (59, "a"), (60, "a")], [(20, "a"), (59, "a")]),
        # A change that is undone before it was printed is no news
        ([(0, "a"), (5, "b"), (6, "a"), (7, "b"), (8, "a"), (9, "b"), (70, "b")], [(8, "a"), (9, "b"), (70, "b")]),
        # A capture's reason is always printed, but only once
        ([(0, "a"), (5, "b"), (10, "a"), (15, "b"), (20, "A"), (21, "A")], [(21, "A")]),
        # A clock that was set back silences nothing
        ([(900, "a"), (905, "b"), (910, "a"), (915, "b"), (5, "a"), (10, "b")], []),
        # Six different lines a minute
        ([(0, "a"), (1, "b"), (2, "c"), (3, "d"), (4, "e"), (5, "f"), (6, "g"), (7, "i"), (60, "i"), (61, "j")],
         [(6, "g"), (7, "i")]),
        # The first healthy window is printed; a recovery only after a quiet minute
        ([(0, "h"), (10, "h"), (90, "h")], [(10, "h"), (90, "h")]),
        ([(0, "h"), (5, "a"), (6, "h"), (64, "h"), (65, "h")], [(6, "h"), (64, "h")]),
        ([(0, "a"), (5, "h"), (10, "a"), (15, "h"), (20, "a")], [(5, "h"), (10, "a"), (15, "h"), (20, "a")]),
        # Windows that only `decisions` lists change nothing
        ([(0, "n"), (5, "h"), (10, "n"), (15, "h")], [(0, "n"), (10, "n"), (15, "h")]),
    ],
)  # fmt: skip
def test_which_windows_in_a_row_are_printed(windows, silent):
    assert printed(*windows) == [window for window in windows if window not in silent]


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        # A minute later, with no step in common with the first one
        ([(0, "a"), (30, "a"), (59, "a"), (60, "a"), (61, "a"), (200, "a")], [(60, "a")]),
        # A healthy window in between restarts the minute
        ([(0, "a"), (30, "h"), (40, "a"), (99, "a"), (100, "a")], [(30, "h"), (100, "a")]),
        # Contention and a delay without a suspect: one of them lasts all the time
        ([(0, "a"), (30, "b"), (60, "a"), (61, "b")], [(60, "a"), (61, "b")]),
        # Windows that only `decisions` lists neither end nor prolong it
        ([(0, "a"), (30, "n"), (60, "n"), (61, "a")], [(61, "a")]),
    ],
)
def test_a_state_that_may_pass_is_printed_once_it_has_lasted(windows, expected):
    assert printed(*windows, urgency="lasting") == expected


def test_long_steps_overlap_for_longer_than_a_minute():
    # GIVEN windows of 50 steps, ten steps and ten minutes apart
    lines = RecentLines()
    windows = [News("lasting", ("held",), 600.0 * n, 10 * n, 10 * n + 49) for n in range(8)]
    # THEN the first that is printed shares no step with the first that was held
    assert [window.first_step for window in windows if lines.after(window)] == [50]


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abcdefgij")), max_size=200))
def test_a_terminal_is_not_flooded_and_does_not_go_stale(moves):
    # GIVEN windows with any findings, any time apart
    times_s = itertools.accumulate(seconds for seconds, _ in moves)
    windows = list(zip(times_s, (found for _, found in moves), strict=True))
    lines = printed(*windows)
    for time_s, found in lines:
        # THEN no line is printed more than twice within a minute, nor more than six lines in all
        within = [line for at_s, line in lines if time_s - WITHIN_S < at_s <= time_s]
        assert within.count(found) <= MOST_TIMES
        assert len(within) <= MOST
    # AND a finding that lasts for a minute is the last one printed
    for n, (time_s, found) in enumerate(windows):
        since = next((m for m in range(n, -1, -1) if windows[m][1] != found), -1) + 1
        if time_s - windows[since][0] >= WITHIN_S:
            assert [line for at_s, line in lines if at_s <= time_s][-1] == found


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from("hn")), max_size=200))
def test_a_healthy_job_is_printed_once_whatever_flickers_below_the_thresholds(moves):
    times_s = itertools.accumulate(seconds for seconds, _ in moves)
    windows = list(zip(times_s, (found for _, found in moves), strict=True))
    assert [found for _, found in printed(*windows)] == ["h"] * any(found == "h" for _, found in moves)


SLIGHT = {"late_excess_s": 0.009, "min_lateness_s": 0.01, "shared_excess_s": 0.0, "min_group_s": 0.015}
LATE, SHARED = {**SLIGHT, "late_excess_s": 0.01}, {**SLIGHT, "shared_excess_s": 0.02}
SLOWER = Regression(40, 38, 45, 0.21, "all", ("backward",), 0.05)


@pytest.mark.parametrize(
    ("label", "about", "decided", "when"),
    [
        ("healthy", {}, ("ignore", "healthy"), "calm"),
        ("stalled", {"reasons": ("in_sync",)}, ("hold", "standstill"), "at_once"),
        # The suspect of a capture is printed at once; so is a slower job that leads to one
        ("suspect", {"pattern": "chronic"}, ("capture", "rule_matched"), "at_once"),
        ("suspect", {"pattern": "one-off"}, ("capture", "rule_matched"), "at_once"),
        ("needs_evidence", {"reasons": ("regressed",)}, ("capture", "rule_matched"), "at_once"),
        # A suspect is news, unless it may pass or has passed
        ("suspect", {"pattern": "chronic"}, ("hold", "pending"), "now"),
        ("suspect", {"pattern": "recurring"}, ("throttle", "cooldown"), "now"),
        ("suspect", {"pattern": "chronic"}, ("hold", "cgroup_throttled"), "now"),
        ("suspect", {"pattern": "chronic"}, ("hold", "contended"), "lasting"),
        ("suspect", {"pattern": "chronic"}, ("hold", "descheduled"), "lasting"),
        ("suspect", {"pattern": "one-off", "gain_s": 0.02}, ("hold", "one_off"), "never"),
        ("suspect", {"pattern": "one-off", "gain_s": 1.0}, ("hold", "one_off"), "now"),
        # A delay without a suspect is news once it has lasted, but not below the thresholds
        *(("needs_evidence", {"reasons": (reason,), "numbers": numbers}, ("hold", "undecided"), when)
          for reason in ("roaming", "intermittent", "co_critical", "sync_ambiguous", "no_baseline")
          for numbers, when in ((SLIGHT, "never"), (LATE, "lasting"), (SHARED, "lasting"), ({}, "lasting"))),
        # Missing evidence is never jitter
        *(("needs_evidence", {"reasons": (reason,), "numbers": SLIGHT}, ("hold", "undecided"), "lasting")
          for reason in ("no_sync", "low_coverage", "mixed_roles", "clock_limited")),
        # A window that a capture disturbed says nothing about the job
        ("needs_evidence", {"reasons": ("self_inflicted",)}, ("hold", "undecided"), "never"),
        # A job slower than its best is news if all ranks are alike, unless they wait for CPUs
        *(("needs_evidence", {"reasons": ("regressed",), "numbers": SLIGHT, "regression": slower},
           ("hold", "undecided"), when)
          for slower, when in ((SLOWER, "now"), (replace(SLOWER, descheduled_fraction=0.6), "lasting"),
                               (replace(SLOWER, scope="some"), "lasting"))),
        ("needs_evidence", {"reasons": ("roaming",), "numbers": SLIGHT, "regression": replace(SLOWER, until_step=90)},
         ("hold", "undecided"), "never"),
    ],
)  # fmt: skip
def test_when_a_window_is_printed(label, about, decided, when):
    suspect = Suspect(
        "rank", (1,), "data", about.get("gain_s", 0.02), 0.2, 0.9, rank=1, pattern=about.get("pattern", "chronic")
    )
    reasons, numbers, regression = about.get("reasons", ()), about.get("numbers", {}), about.get("regression")
    verdict = Verdict(40, 79, label, reasons, (suspect,), 0.1, {}, {}, numbers, regression=regression)
    assert urgency_of(verdict, Decision(1.0, 40, 79, label, *decided)) == when


def test_a_line_does_not_mix_with_the_jobs_progress_bar(tmp_path):
    # GIVEN a progress bar without a newline, on a terminal and in a file
    terminal = io.StringIO()
    terminal.write("  3%|#")
    Reporter(Console(file=terminal, force_terminal=True, highlight=False)).say("one")
    with (tmp_path / "log").open("w") as log:
        log.write("  3%|#")
        log.flush()
        reporter = Reporter(Console(file=log))
        reporter.say("one")
        reporter.say("two")
    # THEN our line replaces it on the terminal, and begins a new line in the file
    assert terminal.getvalue() == "  3%|#\r\x1b[Ksftriage: one\n"
    assert (tmp_path / "log").read_text() == "  3%|#\nsftriage: one\nsftriage: two\n"
