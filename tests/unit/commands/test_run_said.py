"""What `sftriage run` says on stderr while a job goes on."""

from sftriage.commands.run import Reporter
from sftriage.controller.controller import Judged
from sftriage.records import CaptureRequest, Decision, Pattern, Suspect, Verdict


def judged(first: int, pattern: Pattern, *requests: CaptureRequest) -> Judged:
    suspect = Suspect("rank", (1,), "data", 0.02, 0.2, 0.9, rank=1, pattern=pattern, onset_step=57)
    verdict = Verdict(first, first + 39, "suspect", (), (suspect,), 0.1, {"data": 0.1}, {"data": 1}, {})
    outcome = "capture" if requests else "ignore"
    return Judged(verdict, Decision(1.0, first, first + 39, "suspect", outcome, "why", requests=requests))


def test_a_fault_that_is_there_to_stay_after_all_is_said_before_it_is_captured(capsys):
    # GIVEN a suspect that seems to have passed, in two windows
    reporter = Reporter()
    reporter.judged(judged(40, "one-off"))
    reporter.judged(judged(50, "one-off"))
    # WHEN it is chronic in the next one, which leads to a capture
    reporter.judged(judged(60, "chronic", CaptureRequest("c-1", 1, "torch", 4, 1, 60.0, 2**29)))
    # THEN that window is said too, and the one like the one before it is not
    first, second, third = capsys.readouterr().err.splitlines()
    assert "steps 40 to 79; one-off from step 57, and has passed." in first
    assert "steps 60 to 99; chronic since step 57." in second
    assert third.endswith("Capturing 4 steps of rank 1.")
