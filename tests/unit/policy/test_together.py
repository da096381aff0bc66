"""Captures that are asked for at once are made in the same steps."""

import pytest

from sftriage.decisions import CaptureRequest
from sftriage.policy.requests import in_the_same_steps


def request(rank: int, profiler: str = "torch", warmup_steps: int = 1, **more) -> CaptureRequest:
    return CaptureRequest(f"c-{rank}-{profiler}", rank, profiler, 5, warmup_steps, 60.0, 2**20, **more)


@pytest.mark.parametrize(
    ("requests", "step_s", "first"),
    [
        ([request(0)], 0.05, [0]),
        ([request(0), request(1)], 0.05, [115, 115]),
        ([request(0, warmup_steps=3), request(1)], 0.05, [117, 117]),
        ([request(0), request(1)], 0.0, [605, 605]),
        ([request(0), request(1)], 2.0, [106, 106]),
        ([request(0, "nsys"), request(1, "nsys")], 0.05, [185, 185]),
        ([request(0, "stacks"), request(1, "stacks")], 0.05, [0, 0]),
        ([request(0), request(1), request(0, "stacks")], 0.05, [115, 115, 0]),
    ],
)
def test_several_begin_at_the_same_step_which_all_can_reach(requests, step_s, first):
    found = in_the_same_steps(requests, 100, step_s)
    assert [one.first_step for one in found] == first
    assert [one.capture_id for one in found] == [one.capture_id for one in requests]


def test_what_comes_back_is_caught_at_the_same_time_by_all():
    # GIVEN a fault every seventh step, and two ranks that see their requests in different steps
    both = in_the_same_steps([request(rank, period_steps=7, phase=3) for rank in (0, 1)], 100, 0.05)
    # THEN both begin at the same step, with the fault among those recorded
    begins = {one.begins_at(step) for one in both for step in (101, 103, 104)}
    assert len(begins) == 1
    assert any((begins.copy().pop() + more) % 7 == 3 for more in range(5))
