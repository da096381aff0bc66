"""What the terminal prints of a job that hangs."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from sftriage.commands.output import JobOutput
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.events import CaptureChanged, CauseFound, WindowJudged
from sftriage.sinks.metering import Metering
from sftriage.sinks.terminal import Reporter
from tests.scenario import decision, verdict

WHOLE = CaptureRequest("c-1", 2, "stacks", 1, 0, 10.0, 2**29, options={"whole_job": True, "detail": [0, 2]})
STALL = replace(verdict(60, "stalled", reasons=("in_sync",)), last_step=60)
HANG = CauseFound(5.0, "c-1", 2, "different_sizes", True, "Rank 2 called all_reduce of 7 floats.", next_step="Compare.")


@pytest.fixture
def printed():
    return StringIO()


@pytest.fixture
def reporter(printed):
    return Reporter(Console(file=printed, width=500, highlight=False))


def stalls(*requests):
    return WindowJudged(STALL, decision(STALL, "capture", "rule_matched", requests=requests))


@pytest.mark.parametrize(
    "hang", [HANG, CauseFound(5.0, "c-1", 2, "unknown", False, "Why the job hangs is not known.", next_step="Compare.")]
)
def test_GIVEN_a_stall_WHEN_its_evidence_is_there_THEN_its_reason_is_printed_known_or_not(reporter, printed, hang):
    reporter.take(stalls(WHOLE))
    reporter.take(hang)
    # (a later one that does not show it takes nothing back)
    reporter.take(CauseFound(6.0, "c-1", 2, "unknown", False, "It is not known."))
    reporter.take(CaptureChanged(6.0, CaptureResult("c-1", 2, "stored", "", 60, 60), stored_bytes=2048))
    assert printed.getvalue().splitlines()[1:] == [
        "sftriage: Capturing where every rank is, and in which collective.",
        f"sftriage: {hang.sentence} Compare.",
        "sftriage: Captured where the ranks are in step 60 (2.0 KiB): sftriage traces show c-1",
    ]


def test_GIVEN_a_stall_WHEN_its_capture_fails_THEN_no_rank_is_named(reporter, printed):
    reporter.take(stalls(WHOLE))
    reporter.take(CaptureChanged(6.0, CaptureResult("c-1", 2, "failed", "no host reported")))
    assert printed.getvalue().endswith("sftriage: No evidence of the ranks: the capture failed: no host reported.\n")


@pytest.mark.parametrize(("after", "last"), [((), "Compare."), ((verdict(61),), "sftriage decisions")])
def test_GIVEN_a_job_that_ends_while_it_hangs_THEN_its_last_line_says_why(tmp_path, capsys, after, last):
    output = JobOutput(Metering(), why="sftriage decisions")
    output._reporter._console = Console(stderr=True, width=500)
    for event in (stalls(WHOLE), HANG, *(WindowJudged(of, decision(of)) for of in after)):
        output._reporter.take(event)
    output.say_summary(None)
    assert capsys.readouterr().err.splitlines()[-1].endswith(last)
