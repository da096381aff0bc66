"""Which profiler runs: a truth table of what is asked for against what there is to see."""

import pytest

from sftriage.policy.choosing import Means, Situation, choose, computes, options_of
from sftriage.policy.schema import Capture

DEVICE_UNDER_NSYS = {"clock": "device", "nsys": True}
NATIVE = {"stacks": {"native": True}}


@pytest.mark.parametrize(
    ("asked", "case", "expected"),
    [
        # Where the host does the work, stacks alone; also on devices, and under nsys
        ({}, {"stage": "data"}, Means("stacks", "host_stage")),
        ({}, {"stage": "other"}, Means("stacks", "host_stage")),
        ({}, {"stage": "callbacks"}, Means("stacks", "host_stage")),
        ({}, {"stage": "data", **DEVICE_UNDER_NSYS}, Means("stacks", "host_stage")),
        # What computes is told by operators: nsys's where the job runs under it and the device's clock says so
        ({}, {"stage": "forward"}, Means("torch", "compute_stage")),
        ({}, {"stage": "reduce", "sync": ("reduce",)}, Means("torch", "compute_stage")),
        ({}, {"stage": "forward", "clock": "device"}, Means("torch", "compute_stage")),
        ({}, {"stage": "forward", "nsys": True}, Means("torch", "compute_stage")),
        ({}, {"stage": "forward", **DEVICE_UNDER_NSYS}, Means("nsys", "device_clock")),
        # Both where it is not known
        ({}, {"stage": None}, Means("torch", "whole_rank")),
        ({}, {"stage": None, **DEVICE_UNDER_NSYS}, Means("nsys", "device_clock")),
        # Who takes no steps is looked at from outside
        ({}, {"stage": None, "stands_still": True}, Means("stacks", "stands_still", once=True)),
        ({}, {"stage": "forward", "stands_still": True, "left_open": "stacks"}, Means("stacks", "stands_still", True)),
        # What was left open is asked of the other means, if there is one
        ({}, {"stage": "data", "left_open": "operators"}, Means("torch", "left_open")),
        ({}, {"stage": "data", "left_open": "operators", **DEVICE_UNDER_NSYS}, Means("nsys", "left_open")),
        ({}, {"stage": "forward", "left_open": "stacks"}, Means("stacks", "left_open")),
        ({}, {"stage": None, "left_open": "system"}, None),
        ({}, {"stage": None, "left_open": "system", "nsys": True}, Means("nsys", "left_open")),
        # A profiler that is named is that one, whatever there is to see
        ({"profiler": "torch"}, {"stage": "data"}, Means("torch")),
        ({"profiler": "torch"}, {"stage": "data", "stands_still": True}, Means("torch")),
        ({"profiler": "nsys"}, {"stage": "data"}, Means("nsys")),
        ({"profiler": "stacks"}, {"stage": "forward", "left_open": "operators"}, Means("stacks")),
        ({"profiler": "stacks"}, {"stage": None, "stands_still": True}, Means("stacks", once=True)),
        # Native frames only a look from outside has
        ({"profiler": "stacks", **NATIVE}, {"stage": "forward"}, Means("stacks", once=True)),
        ({"profiler": "stacks", "stacks": {"flight_recorder": True}}, {"stage": "data"}, Means("stacks", once=True)),
        (NATIVE, {"stage": "data"}, Means("stacks", "host_stage")),
    ],
)
def test_what_runs(asked, case, expected):
    assert choose(Capture.model_validate(asked), Situation(**case)) == expected


@pytest.mark.parametrize("stage", ["forward", "h2d", "backward", "optimizer", "model.forward", "fwd_2", "Loss"])
def test_a_stage_computes_by_its_name(stage):
    assert computes(stage)


@pytest.mark.parametrize("stage", ["data", "other", "callback", "forwarding", "lossy"])
def test_any_other_is_the_hosts_work_unless_ranks_wait_in_it(stage):
    assert not computes(stage)
    assert computes(stage, (stage,))


@pytest.mark.parametrize(
    ("asked", "means", "options"),
    [
        ({}, Means("stacks"), {"sample_stacks": True, "samples_per_second": 200}),
        (NATIVE, Means("stacks", once=True), {"native": True, "flight_recorder": False}),
        # What the ranks were launched with, where nobody says otherwise
        ({}, Means("nsys"), {"sample": "none", "sqlite": True}),
        ({"nsys": {"trace": ["nvtx"]}}, Means("nsys"), {"trace": ["nvtx"], "sample": "none", "sqlite": True}),
        ({"profiler": "nsys"}, Means("nsys"), {"sample": "none", "sqlite": True}),
    ],
)
def test_what_runs_has_its_own_options(asked, means, options):
    assert options_of(Capture.model_validate(asked), means) == options


def test_stacks_alone_need_no_warm_up_and_a_look_from_outside_no_steps():
    assert (Means("torch").steps(5), Means("torch").warmup_steps(2)) == (5, 2)
    assert (Means("stacks").steps(5), Means("stacks").warmup_steps(2)) == (5, 0)
    assert (Means("stacks", once=True).steps(5), Means("stacks", once=True).warmup_steps(2)) == (1, 0)
