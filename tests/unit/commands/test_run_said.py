"""What `sftriage run` says on stderr while a job goes on."""

import pytest
from rich.console import Console

from sftriage.events import CaptureChanged, WindowJudged
from sftriage.records import CaptureRequest, CaptureResult, Decision, Pattern, Suspect, Verdict
from sftriage.sinks.terminal import Progress, Reporter


@pytest.fixture
def console():
    return Console(stderr=True, highlight=False)


def judged(first: int, pattern: Pattern, *requests: CaptureRequest) -> WindowJudged:
    suspect = Suspect("rank", (1,), "data", 0.02, 0.2, 0.9, rank=1, pattern=pattern, onset_step=57)
    verdict = Verdict(first, first + 39, "suspect", (), (suspect,), 0.1, {"data": 0.1}, {"data": 1}, {})
    outcome = "capture" if requests else "ignore"
    return WindowJudged(
        verdict, Decision(1.0, first, first + 39, "suspect", outcome, "rule_matched", requests=requests)
    )


def test_a_fault_that_is_there_to_stay_after_all_is_said_before_it_is_captured(console, capsys):
    # GIVEN a suspect that seems to have passed, in two windows
    reporter = Reporter(console)
    reporter.take(judged(40, "one-off"))
    reporter.take(judged(50, "one-off"))
    # WHEN it is chronic in the next one, which leads to a capture
    reporter.take(judged(60, "chronic", CaptureRequest("c-1", 1, "torch", 4, 1, 60.0, 2**29)))
    # THEN that window is said too, and the one like the one before it is not
    first, second, third = capsys.readouterr().err.splitlines()
    assert "steps 40 to 79; one-off from step 57, and has passed." in first
    assert "steps 60 to 99; chronic since step 57." in second
    assert third.endswith("Capturing 4 steps of rank 1.")


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
        "sftriage: No trace of rank 1: refused, torch is not imported.",
    ]
    assert reporter.captures == 1


def test_a_demo_says_what_changes_and_keeps_how_captures_ended(console, capsys):
    progress = Progress(console, 300)
    with progress.live("starting the job"):
        for first in (40, 50):
            progress.take(judged(first, "chronic"))
        progress.take(judged(60, "chronic", CaptureRequest("c-1", 1, "torch", 4, 1, 60.0, 2**29)))
        for state in ("running", "stored"):
            progress.take(ended("c-1", state))
        progress.take(ended("c-2", "failed", detail="the job ended"))
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("Rank 1 is slow in data")
    assert others == [
        "Starting torch.profiler on rank 1 alone.",
        "Capture of rank 1: stored.",
        "Capture of rank 1: failed (the job ended).",
    ]
    assert [one.state for one in progress.captures] == ["stored", "failed"]
