"""What is wanted of agents, and when a control is called off: none of its suspects has a trace."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.controller.agents import EXPIRES_S, DesiredCaptures, resume_state
from sftriage.controller.controller import Controller
from sftriage.model.captures import CaptureRequest, CaptureResult, ManualRequest, Reproduced, Trigger
from sftriage.model.events import CauseFound
from sftriage.model.windows import RankStatus
from sftriage.runs.journal import Journal, read_journal
from sftriage.windows.rings import status_of
from tests.scenario import request_of
from tests.unit.controller.test_controller import window
from tests.unit.policy.making import make_policy

WHY = Trigger(0, 49, "suspect", "rank", (1,), "data", 0.02, 0.3, 0.9, "default", "ab" * 32, "slow")


def result(capture_id: str, state: str, rank: int = 2, detail: str = "") -> CaptureResult:
    return CaptureResult(capture_id, rank, state, detail)


def wants(*requests: CaptureRequest) -> DesiredCaptures:
    made = DesiredCaptures()
    made.add(requests, {one.capture_id: WHY for one in requests}, 3, 1000.0)
    return made


def ids(of: DesiredCaptures) -> list[str]:
    return [one.request.capture_id for one in of.wanted(1000.0)]


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ([("s1", "refused")], ["s2", "c1", "c2"]),
        ([("s1", "refused"), ("s2", "refused")], []),
        ([("s1", "failed"), ("s2", "expired")], []),
        # One that was captured is enough, whichever ends first.
        ([("s1", "stored"), ("s2", "refused")], ["c1", "c2"]),
        ([("s1", "refused"), ("s2", "stored")], ["c1", "c2"]),
        # A control that has ended is left alone; what becomes of one says nothing of the others.
        ([("c1", "stored"), ("s1", "refused"), ("s2", "refused")], []),
        ([("c1", "refused"), ("s1", "stored")], ["s2", "c2"]),
        # Another decision's captures.
        ([("x", "refused")], ["s1", "s2", "c1", "c2"]),
    ],
)
def test_a_control_is_wanted_until_none_of_its_suspects_can_have_a_trace(ends, wanted):
    made = wants(request_of("s1", 1), request_of("s2", 2), *(request_of(f"c{n}", 4 + n, "control") for n in (1, 2)))
    for end in ends:
        made.ended(result(*end))
    assert ids(made) == wanted


def test_its_end_says_why_and_another_end_is_left_as_it_is():
    made = wants(request_of("s1", 2), request_of("c1", 4, "control"))
    refused = result("s1", "refused", detail="a profiler is already running in this process")
    assert made.ended(refused)[1] == refused
    wanted, told = made.ended(result("c1", "failed", 4, "cancelled"))
    assert told.detail == "cancelled: nothing to compare it with, the capture of rank 2 was refused"
    # AND what was wanted is known still, with why it exists and of which generation it was to be
    assert (wanted.request.capture_id, wanted.trigger, wanted.generation) == ("c1", WHY, 3)


def test_one_whose_trace_was_there_already_is_kept_as_it_is():
    made = wants(request_of("s1", 2), request_of("c1", 4, "control"))
    made.ended(result("s1", "failed"))
    stored = result("c1", "stored", 4)
    assert made.ended(stored)[1] == stored


def test_when_it_is_to_have_begun_is_told_as_an_age():
    made = wants(request_of("s1", 2))
    assert [made.wanted(now_s)[0].expires_s for now_s in (1000.0, 1059.0, 1061.0)] == [EXPIRES_S, 1.0, -1.0]


def test_what_an_earlier_process_asked_for_is_wanted_as_such():
    made = DesiredCaptures()
    made.resume(request_of("s1", 2), WHY, 1)
    (one,) = made.wanted(5000.0)
    assert (one.request, one.resumed, one.expires_s) == (request_of("s1", 2), True, None)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["s1", "s2", "c1", "c2"]), st.sampled_from(["stored", "failed", "refused"]))))
def test_nothing_that_has_ended_is_wanted_and_what_is_wanted_was_asked_for(ends):
    made = wants(
        request_of("s1", 1), request_of("s2", 2), request_of("c1", 4, "control"), request_of("c2", 5, "control")
    )
    for capture_id, state in ends:
        made.ended(result(capture_id, state))
        assert capture_id not in ids(made)
    assert set(ids(made)) <= {"s1", "s2", "c1", "c2"}


POLICY = make_policy(
    {"name": "slow", "match": {"gain": ">= 5%"}, "capture": {"steps": 3}, "cooldown": "0s"},
    detection={"window_steps": 20, "stride_steps": 20},
)


def controller(directory, left=None) -> Controller:
    directory.mkdir(exist_ok=True)
    return Controller(POLICY, Journal(directory / "decisions.jsonl"), directory / "state.json", left=left)


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
    slower = replace(window(80), durations_NRS=window(80).durations_NRS * (3.0, 1.0, 1.0, 1.0))
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
