"""What a journal has left for the next controller."""

from dataclasses import replace

from sftriage.controller.controller import Controller
from sftriage.controller.desired import resume_state
from sftriage.decisions import CaptureResult, ManualRequest, Reproduced
from sftriage.events import CauseFound
from sftriage.policy.loading import parse
from sftriage.records import RankStatus
from sftriage.runs.journal import Journal, read_journal
from sftriage.windows.statuses import status_of
from tests.unit.controller.test_controller import window

POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: test}
spec:
  detection: {window_steps: 20, stride_steps: 20}
  rules: [{name: slow, match: {gain: ">= 5%"}, capture: {steps: 3}, cooldown: 0s}]
"""


def controller(directory, left=None) -> Controller:
    journal = Journal(directory / "decisions.jsonl")
    return Controller(parse(POLICY, "test.yaml"), journal, directory / "state.json", left=left)


def test_a_controller_that_takes_over_knows_what_was_decided_and_what_is_under_way(tmp_path):
    # GIVEN a controller that has asked for a capture because of a window, and one for a person, and was killed
    first = controller(tmp_path)
    slow = window(0, late_s=0.02)
    (request,) = first.take(slow, 100.0).decision.requests
    ranks = tuple(RankStatus(rank, "h", None, 1, 30, 1, 30, closed=False, alive=True) for rank in range(4))
    ask = ManualRequest("a-1", (1,), "me", "why not")
    (wanted,) = first.ask(ask, status_of(slow.schema, 4, ranks), 101.0).requests
    # WHEN the journal is read
    left = resume_state(read_journal(tmp_path / "decisions.jsonl"))
    assert (left.n_windows, left.n_stored) == (1, 0)
    # THEN both captures are known with their requests and why they exist
    assert {one: known[0] for one, known in left.unended.items()} == {
        request.capture_id: request,
        wanted.capture_id: wanted,
    }
    assert left.unended[request.capture_id][1] == first.trigger_of(request.capture_id)
    assert (left.decided, left.request_ids) == ({0: slow.last_step}, {"a-1"})
    # AND the next controller decides neither again, knows why a capture exists, and lets it end
    second = controller(tmp_path, left)
    assert second.decided(slow)
    assert not second.decided(window(20))
    assert second.answered(ask)
    assert second.trigger_of(request.capture_id).rule == "slow"
    second.changed(CaptureResult(request.capture_id, 2, "running"), 105.0)
    assert request.capture_id in resume_state(read_journal(tmp_path / "decisions.jsonl")).unended
    second.changed(CaptureResult(request.capture_id, 2, "stored", first_step=30, last_step=32), 110.0)
    left = resume_state(read_journal(tmp_path / "decisions.jsonl"))
    assert (set(left.unended), left.n_windows, left.n_stored) == ({wanted.capture_id}, 1, 1)


def test_what_a_capture_left_open_is_asked_for_by_the_next_controller_once(tmp_path):
    # GIVEN a capture that has told what it leaves open, and whose controller was killed before it counted as ended
    first = controller(tmp_path)
    (request,) = first.take(window(0, late_s=0.02), 100.0).decision.requests
    assert (request.profiler, first.trigger_of(request.capture_id).chosen) == ("stacks", "host_stage")
    found = CauseFound(101.0, request.capture_id, 2, "blocked", False, "It waits.", left_open="operators")
    first.explained(found)
    journal = tmp_path / "decisions.jsonl"
    second = controller(tmp_path, resume_state(read_journal(journal)))
    # WHEN the next one hears of it again
    stored = CaptureResult(request.capture_id, 2, "stored", first_step=30, last_step=32)
    second.explained(found)
    second.changed(stored, 102.0, Reproduced("yes", 3, 3, 0.02, 0.02))
    # THEN it is followed up by the next window of the suspect
    (follow_up,) = (decision := second.take(window(40, late_s=0.02), 103.0).decision).requests
    assert (decision.reason, follow_up.profiler) == ("follow_up", "torch")
    assert second.trigger_of(follow_up.capture_id).follows == request.capture_id
    # AND neither by this one again, nor by the one after it
    third = controller(tmp_path, resume_state(read_journal(journal)))
    assert second.take(window(60, late_s=0.02), 104.0).decision.outcome == "throttle"
    third.changed(replace(stored, capture_id=follow_up.capture_id), 105.0, Reproduced("yes", 3, 3, 0.02, 0.02))
    assert third.take(window(60, late_s=0.02), 106.0).decision.reason == "already_captured"


def test_what_stragglers_have_cost_goes_on_with_the_next_controller(tmp_path):
    # GIVEN one controller that judges all windows of a slow rank, and others that take over after each
    (tmp_path / "whole").mkdir()
    (tmp_path / "taken").mkdir()
    whole, journal = controller(tmp_path / "whole"), tmp_path / "taken" / "decisions.jsonl"
    for number in range(6):
        slow = window(20 * number, late_s=0.02)
        whole.take(slow, 100.0)
        taken = controller(tmp_path / "taken", resume_state(read_journal(journal)))
        for before in range(number):
            taken.learn(window(20 * before, late_s=0.02))
        taken.take(slow, 100.0)
    # THEN the sums are the same, and so is that of whoever reads the journal
    assert whole.losses.rank_s > 0.0
    assert taken.losses == whole.losses == resume_state(read_journal(journal)).losses


def test_what_is_learnt_goes_on_no_record_and_makes_the_next_verdict_what_it_would_have_been(tmp_path):
    # GIVEN one controller that saw a healthy job become slow on every rank, and one that took over between the two
    healthy = [window(20 * number) for number in range(4)]
    slower = replace(window(80), durations_NRS=window(80).durations_NRS * (3.0, 1.0, 1.0))
    (tmp_path / "whole").mkdir()
    (tmp_path / "taken").mkdir()
    whole, before = controller(tmp_path / "whole"), controller(tmp_path / "taken")
    for one in healthy:
        whole.take(one, 100.0)
        before.take(one, 100.0)
    journal = tmp_path / "taken" / "decisions.jsonl"
    written = journal.read_bytes()
    after = controller(tmp_path / "taken", resume_state(read_journal(journal)))
    # WHEN it learns from what was decided, some of it twice
    for one in (*healthy, *healthy[2:]):
        after.learn(one)
    # THEN nothing goes on record by that
    assert journal.read_bytes() == written
    # AND it judges what comes next as the other one does
    verdict = after.take(slower, 101.0).verdict
    assert verdict == whole.take(slower, 101.0).verdict
    # (which needs the past: it is every rank that is slow)
    assert (verdict.label, verdict.suspects[0].scope) == ("suspect", "all")
