"""What filled a stage, from sampled stacks and recorded steps alone; and what that leaves open."""

from dataclasses import replace

import pytest

from sftriage.errors import InputError
from sftriage.reduce.causes import cause_of
from sftriage.reduce.inside import SampledRank, find_sampled, slowest
from sftriage.reduce.samples import Frame
from sftriage.reduce.spots import in_torch, left_open
from tests.unit.reduce.test_causes import GET, LOOP, samples, within

STEP = {"data": 0.040, "forward": 0.010, "other": 0.0}
QUICK = {"data": 0.004, "forward": 0.010, "other": 0.0}
SLEEPS = samples(((LOOP, GET), 8))
CALLS = Frame("mix", "/job/data.py", 8, "x = torch.mm(x, x)")


def rank(number=1, steps=None, taken=SLEEPS):
    return SampledRank(f"r{number}.json", number, {1: STEP, 2: STEP} if steps is None else steps, taken)


def test_a_stage_is_as_long_as_it_was_recorded_and_filled_by_the_places_that_were_met():
    found = find_sampled(rank(), "data")
    assert (found.suspect.stage_s, found.suspect.step_s, found.suspect.steps) == (0.040, 0.050, 2)
    assert (found.suspect.waiting_s, found.suspect.working_s) == (0.040, 0.0)
    (share,) = found.shares
    assert (share.name, share.kind, share.waits, share.self_s) == (
        "Images.__getitem__ (data.py:57)",
        "python",
        True,
        0.040,
    )
    assert found.summary.endswith("What stands out is Images.__getitem__ (data.py:57).")
    # AND the cause is told as of a trace
    cause = cause_of(found, SLEEPS, None, over_s=0.036)
    assert (cause.code, cause.place and cause.place.line, cause.took_s) == ("sleep", 57, 0.040)


def test_beside_a_control_the_same_steps_are_compared_and_the_stage_is_the_one_that_is_longer():
    control = rank(3, {2: QUICK, 3: QUICK}, samples(((LOOP, GET), 2), step=2))
    assert slowest(rank(), control) == "data"
    found = find_sampled(rank(taken=samples(((LOOP, GET), 8), step=2)), "data", control)
    assert found.control is not None
    assert (found.suspect.first_step, found.suspect.last_step, found.control.steps) == (2, 2, 1)
    assert (found.control.rank, found.shares[0].control_self_s, found.beside) == (3, 0.004, "rank")
    assert "36.0 ms more than rank 3" in found.summary


@pytest.mark.parametrize(("others", "beside"), [(QUICK, "steps"), (STEP, "rank")])
def test_steps_without_the_fault_are_what_is_compared_with_where_they_are_quicker(others, beside):
    found = find_sampled(rank(steps={1: STEP, 2: others}), "data", None, (1,))
    assert (found.beside == "steps", found.control is not None, found.of_steps) == (True, beside == "steps", 2)


def test_what_is_not_on_record_is_said():
    with pytest.raises(InputError, match="nothing was recorded"):
        find_sampled(rank(steps={}), "data")
    with pytest.raises(InputError, match="no stage 'loss' in it; there are: data, forward, other"):
        find_sampled(rank(), "loss")


def test_a_stage_without_a_sample_was_not_seen():
    found = find_sampled(rank(), "forward")
    assert (found.shares, found.suspect.unseen_s) == ((), 0.010)
    assert found.summary.startswith("forward took 10.0 of the 50.0 ms of a step, by its stacks: 10.0 ms of which")


@pytest.mark.parametrize(
    ("code", "has", "missing"),
    [
        # (what was recorded) -> what another means would show
        ("unknown", {"operators": False, "stacks": True}, "operators"),
        ("blocked", {"operators": False, "stacks": True}, "operators"),
        ("unknown", {"operators": True, "stacks": False}, "stacks"),
        ("blocked", {"operators": True, "stacks": True}, "system"),
        ("unknown", {"operators": True, "stacks": True}, "system"),
        # A call of torch is for operators to say, where there are none
        ("python", {"operators": False, "stacks": True, "torch_call": True}, "operators"),
        ("python", {"operators": True, "stacks": True, "torch_call": True}, ""),
        ("python", {"operators": False, "stacks": True}, ""),
        # What is known is known
        ("sleep", {"operators": False, "stacks": True, "torch_call": True}, ""),
        ("operator", {"operators": True, "stacks": False}, ""),
        ("descheduled", {"operators": False, "stacks": True}, ""),
    ],
)
def test_what_is_left_open(code, has, missing):
    assert left_open(code, **has) == missing


@pytest.mark.parametrize(
    ("stack", "calls"),
    [
        ((LOOP, GET), False),
        ((LOOP, CALLS), True),
        ((LOOP, GET, within("linear", "torch/nn/functional.py")), True),
        ((LOOP, replace(GET, source="self.torch_calls += 1")), False),
    ],
)
def test_a_call_of_torch_is_told_by_its_files_or_by_the_line(stack, calls):
    assert in_torch(samples((stack, 8)), "data") == calls
    assert not in_torch(samples((stack, 8)), "forward")
