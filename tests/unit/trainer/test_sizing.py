"""The number of steps a capture may have, from given measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.captures import CaptureRequest
from sftriage.trainer.session import MAX_STALL_S, PROBED_STEPS, StepSizes, TraceCost

MANY_BYTES = 1 << 40


def request(steps: int, max_bytes: int = MANY_BYTES, **options: bool) -> CaptureRequest:
    return CaptureRequest("c-1", 3, "torch", steps, 1, 30.0, max_bytes, options)


def known(measured: TraceCost, **options: bool) -> StepSizes:
    sizes = StepSizes()
    sizes.note(options, measured)
    return sizes


HELD_UP = "more would hold the rank up for over 2 s"


@pytest.mark.parametrize(
    ("measured", "requested", "max_bytes", "limit"),
    [
        # A hundred milliseconds a step: twenty, were larger traces not dearer by half.
        (TraceCost(1, 1000, 0.1), 600, MANY_BYTES, (13, HELD_UP)),
        (TraceCost(1, 1000, 0.1), 13, MANY_BYTES, (13, "")),
        # What an empty trace takes is no step's, and comes once.
        (TraceCost(1, 1000, 0.6, 0.5), 600, MANY_BYTES, (10, HELD_UP)),
        (TraceCost(1, 1000, 0.5, 0.5), 600, MANY_BYTES, (600, "")),
        (TraceCost(1, 1000, 0.4, 0.5), 600, MANY_BYTES, (600, "")),
        (TraceCost(1, 1000, 0.0), 600, MANY_BYTES, (600, "")),
        # The measured steps need no estimate.
        (TraceCost(20, 20_000, 2.0), 600, MANY_BYTES, (20, HELD_UP)),
        (TraceCost(18, 18_000, 1.8), 600, MANY_BYTES, (18, HELD_UP)),
        (TraceCost(40, 40_000, 4.0), 30, MANY_BYTES, (20, HELD_UP)),
        # At least one, however long it takes.
        (TraceCost(1, 1000, 5.0), 600, MANY_BYTES, (1, HELD_UP)),
        (TraceCost(1, 1000, 3.1, 3.0), 600, MANY_BYTES, (1, HELD_UP)),
        (TraceCost(1, 1000, 5.0), 1, MANY_BYTES, (1, "")),
        # The narrower bound is the one that is named.
        (TraceCost(1, 1000, 0.1), 600, 10_000, (9, "more would not fit into 10000 bytes")),
        (TraceCost(1, 1000, 0.1), 600, 20_000, (13, HELD_UP)),
    ],
)
def test_a_capture_has_the_steps_that_fit_and_do_not_hold_up_the_rank(measured, requested, max_bytes, limit):
    assert known(measured).limit(request(requested, max_bytes)) == limit


def test_without_a_measurement_all_steps_are_recorded():
    assert StepSizes().limit(request(600)) == (600, "")
    # (with other options a step is another)
    assert known(TraceCost(1, 1000, 5.0)).limit(request(600, with_stack=True)) == (600, "")


@pytest.mark.parametrize(
    ("steps", "options", "wanted"),
    [
        (PROBED_STEPS, {}, False),
        (PROBED_STEPS + 1, {}, True),
        (PROBED_STEPS, {"with_stack": False, "record_shapes": False}, False),
        (2, {"with_stack": True}, True),
        (2, {"record_shapes": True}, True),
        (2, {"profile_memory": True}, True),
        # A single step is no larger than a probe.
        (1, {"with_stack": True}, False),
    ],
)
def test_a_step_is_recorded_beforehand_where_a_trace_may_be_large(steps, options, wanted):
    requested = request(steps, **options)
    assert StepSizes().wants_probe(requested) is wanted
    assert not known(TraceCost(1, 1000, 0.1), **options).wants_probe(requested)


@given(
    st.builds(TraceCost, st.integers(1, 1000), st.integers(1_000, 1 << 33), st.floats(0, 100), st.floats(0, 3)),
    st.integers(1, 1000),
)
def test_a_planned_capture_never_holds_up_the_rank_unless_of_a_single_step(measured, requested):
    steps, why = known(measured).limit(request(requested))
    assert 1 <= steps <= requested
    assert bool(why) == (steps < requested)
    step_s = (measured.stall_s - measured.fixed_s) / measured.steps
    assert steps == 1 or measured.fixed_s + steps * step_s <= max(MAX_STALL_S * (1 + 1e-9), measured.fixed_s)
