"""A real pipeline of four stages over Gloo with a delayed link, whose stages run as far ahead as is planned."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules

from sftriage.errors import UsageError
from sftriage.mitigate.adapted import _RECEIVES, _SENDS, HostTransfers, adapted_schedule, attach, is_known
from sftriage.mitigate.advice import absorbing, one_f_one_b, order_of, planned
from sftriage.model.events import Pipeline
from tests.integration.forked import forked_output
from tests.integration.processes import JOBS, LAUNCH

JOB = JOBS / "delayed_pipeline.py"
FORWARD_S, BACKWARD_S, DELAY_S, MICROBATCHES = 0.004, 0.008, 0.01, 8


DELAYS = (0.0, DELAY_S, 0.0)
PIPELINE = Pipeline((FORWARD_S,) * 4, (BACKWARD_S,) * 4, DELAYS, MICROBATCHES)
SPEC = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "delay_S": DELAYS, "microbatches": MICROBATCHES}


def trained(environment, **spec):
    return json.loads(forked_output(LAUNCH, 4, JOB, json.dumps(SPEC | spec), env=environment))


def orders(ahead_S):
    return [[f"{step.kind}{step.microbatch}" for step in order_of(ahead, MICROBATCHES)] for ahead in ahead_S]


def test_stages_run_as_far_ahead_as_planned_from_one_step_to_the_next(environment):
    # GIVEN the plans for the pipeline
    assert planned(PIPELINE) != one_f_one_b(PIPELINE)
    plans = [one_f_one_b(PIPELINE), planned(PIPELINE), absorbing(PIPELINE), one_f_one_b(PIPELINE)]
    # WHEN it is trained by torch's own 1F1B, and then by one plan after the other
    own, *steps, refused = trained(environment, rounds=["1F1B", *plans])
    # THEN every stage computes in the planned order, gradients being the same (the job checks that)
    assert [told["orders"] for told in steps] == [orders(ahead_S) for ahead_S in plans]
    # AND our 1F1B is torch's
    assert own["orders"] == steps[0]["orders"]
    # AND deadlocking plans are refused before they run
    assert "4 stages ahead by [1, 1, 1, 2]" in refused["refused"]


@pytest.mark.parametrize(("transfers", "thread"), [("held", "MainThread"), ("host", "sftriage-transfers")])
def test_transfers_from_the_host_do_not_delay_computation(environment, transfers, thread):
    # GIVEN a link that blocks its senders WHEN stages run ahead, with and without transfers from the host
    ahead = planned(PIPELINE)
    own, *steps, _ = trained(environment, rounds=["1F1B", ahead, ahead], transfers=transfers)
    # THEN results are the same (the job compares with torch's own schedule), in the planned order
    assert [told["orders"] for told in steps] == [orders(ahead)] * 2
    # AND a stage sends from its computing thread, or from another
    assert [told["sent_from"] for told in steps] == [[[thread]] * 4] * 2
    assert own["sent_from"] == [["MainThread"]] * 4


CALLS = {one: lambda number: [] for one in (*_SENDS, *_RECEIVES)}


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("get_fwd_send_ops", "sends activations in an unknown way"),
        ("get_bwd_recv_ops", "sends activations in an unknown way"),
        (None, "a stage on cuda:0"),
    ],
)
def test_a_stage_on_a_device_or_of_an_unknown_torch_is_refused(lacks, message):
    calls = {name: call for name, call in CALLS.items() if name != lacks}
    with pytest.raises(UsageError, match=message):
        HostTransfers(SimpleNamespace(**calls, device=torch.device("cuda:0")))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (schedules, "_PipelineScheduleRuntime"),
        (schedules, "_Action"),
        (schedules, "_ComputationType"),
        (schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms"),
    ],
)
def test_an_unknown_torch_runtime_is_left_alone(monkeypatch, owner, name):
    # GIVEN a torch without a private part that we need
    assert is_known()
    monkeypatch.delattr(owner, name)
    # THEN the schedule is unchanged, and a request for one is refused in words
    assert not is_known()
    if name != "_ComputationType":
        with pytest.raises(UsageError, match="runs pipelines in an unknown way"):
            adapted_schedule(None, 4, lambda *_: None, (1,))


class Foreign:
    """Some other schedule."""


def test_another_schedule_is_left_alone_with_a_warning(monkeypatch, tmp_path, caplog):
    # GIVEN a watched job WHEN its schedule is not 1F1B THEN it continues with a warning
    monkeypatch.setenv("SFTRIAGE_RINGS", str(tmp_path))
    schedule = Foreign()
    assert attach(schedule, most=4) is schedule
    assert "stages run as before" in caplog.text
    assert list(tmp_path.iterdir()) == []
