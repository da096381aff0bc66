"""What is wanted of agents, and when a control is called off: none of its suspects has a trace."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.controller.desired import EXPIRES_S, DesiredCaptures
from sftriage.decisions import CaptureRequest, CaptureResult, Trigger

WHY = Trigger(0, 49, "suspect", "rank", (1,), "data", 0.02, 0.3, 0.9, "default", "ab" * 32, "slow")


def request(capture_id: str, rank: int, role: str = "suspect") -> CaptureRequest:
    return CaptureRequest(capture_id, rank, "torch", 5, 1, 60.0, 2**29, role=role)


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
    made = wants(request("s1", 1), request("s2", 2), *(request(f"c{n}", 4 + n, "control") for n in (1, 2)))
    for end in ends:
        made.ended(result(*end))
    assert ids(made) == wanted


def test_its_end_says_why_and_another_end_is_left_as_it_is():
    made = wants(request("s1", 2), request("c1", 4, "control"))
    refused = result("s1", "refused", detail="a profiler is already running in this process")
    assert made.ended(refused)[1] == refused
    wanted, told = made.ended(result("c1", "failed", 4, "cancelled"))
    assert told.detail == "cancelled: nothing to compare it with, the capture of rank 2 was refused"
    # AND what was wanted is known still, with why it exists and of which generation it was to be
    assert (wanted.request.capture_id, wanted.trigger, wanted.generation) == ("c1", WHY, 3)


def test_one_whose_trace_was_there_already_is_kept_as_it_is():
    made = wants(request("s1", 2), request("c1", 4, "control"))
    made.ended(result("s1", "failed"))
    stored = result("c1", "stored", 4)
    assert made.ended(stored)[1] == stored


def test_when_it_is_to_have_begun_is_told_as_an_age():
    made = wants(request("s1", 2))
    assert [made.wanted(now_s)[0].expires_s for now_s in (1000.0, 1059.0, 1061.0)] == [EXPIRES_S, 1.0, -1.0]


def test_what_an_earlier_process_asked_for_is_wanted_as_such():
    made = DesiredCaptures()
    made.resume(request("s1", 2), WHY, 1)
    (one,) = made.wanted(5000.0)
    assert (one.request, one.resumed, one.expires_s) == (request("s1", 2), True, None)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["s1", "s2", "c1", "c2"]), st.sampled_from(["stored", "failed", "refused"]))))
def test_nothing_that_has_ended_is_wanted_and_what_is_wanted_was_asked_for(ends):
    made = wants(request("s1", 1), request("s2", 2), request("c1", 4, "control"), request("c2", 5, "control"))
    for capture_id, state in ends:
        made.ended(result(capture_id, state))
        assert capture_id not in ids(made)
    assert set(ids(made)) <= {"s1", "s2", "c1", "c2"}
