"""When a control is called off: none of the captures that it was to be compared with has a trace."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.records import CaptureRequest, CaptureResult
from sftriage.runtime.controls import Controls


def request(capture_id: str, rank: int, role: str = "suspect") -> CaptureRequest:
    return CaptureRequest(capture_id, rank, "torch", 5, 1, 60.0, 2**29, role=role)


def result(capture_id: str, state: str, rank: int = 2, detail: str = "") -> CaptureResult:
    return CaptureResult(capture_id, rank, state, detail)


@pytest.mark.parametrize(
    ("ends", "called_off"),
    [
        ([("s1", "refused"), ("s2", "refused")], [(), ("c1", "c2")]),
        ([("s1", "failed"), ("s2", "refused")], [(), ("c1", "c2")]),
        # One that was captured is enough, whichever ends first.
        ([("s1", "done"), ("s2", "refused")], [(), ()]),
        ([("s1", "refused"), ("s2", "done")], [(), ()]),
        # A control that has ended is left alone; what becomes of one says nothing of the others.
        ([("c1", "done"), ("s1", "refused"), ("s2", "refused")], [(), (), ("c2",)]),
        ([("c1", "refused"), ("s1", "done")], [(), ()]),
        # Another decision's captures.
        ([("x", "refused")], [()]),
    ],
)
def test_a_control_is_called_off_once_none_of_its_suspects_can_have_a_trace(ends, called_off):
    controls = Controls()
    controls.asked([request("s1", 1), request("s2", 2), *(request(f"c{n}", 4 + n, "control") for n in (1, 2))])
    assert [controls.ended(result(*end)) for end in ends] == called_off
    assert [one for one in ("c1", "c2") if controls.is_off(one)] == list(called_off[-1])


def test_its_end_says_why_and_another_end_is_left_as_it_is():
    controls = Controls()
    controls.asked([request("s1", 2), request("c1", 4, "control")])
    refused = result("s1", "refused", detail="a profiler is already running in this process")
    assert controls.told(refused) == refused
    controls.ended(refused)
    told = controls.told(result("c1", "failed", 4, "cancelled"))
    assert told.detail == "cancelled: nothing to compare it with, the capture of rank 2 was refused"
    # AND it is said once
    assert not controls.is_off("c1")


def test_one_whose_trace_was_there_already_is_kept_as_it_is():
    controls = Controls()
    controls.asked([request("s1", 2), request("c1", 4, "control")])
    controls.ended(result("s1", "failed"))
    done = result("c1", "done", 4)
    assert controls.told(done) == done


def test_what_was_asked_for_without_a_suspect_is_never_called_off():
    controls = Controls()
    controls.asked([request("c1", 4, "control")])
    assert controls.ended(result("x", "refused")) == ()


@settings(deadline=None)
@given(st.permutations(["s1", "s2", "c1", "c2"]), st.lists(st.sampled_from(["done", "refused", "failed"]), min_size=4))
def test_in_whatever_order_they_end_nothing_is_called_off_beside_a_trace_or_twice(order, states):
    controls = Controls()
    controls.asked([request("s1", 1), request("s2", 2), request("c1", 4, "control"), request("c2", 5, "control")])
    ended: dict[str, str] = {}
    off: list[str] = []
    for capture_id, state in zip(order, states, strict=False):
        ended[capture_id] = state
        off += controls.ended(result(capture_id, state))
        controls.told(result(capture_id, state))
        assert not set(off) & {"s1", "s2"}
    assert len(off) == len(set(off))
    assert not off or "done" not in (ended["s1"], ended["s2"])
