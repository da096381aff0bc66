"""`sftriage run` before jobs of any kind, with no option: what it records of each, and what its user reads."""

import os
import sys
from pathlib import Path

import pytest

from sftriage.runs.recordings import load_recording
from tests.integration.conftest import own_environment
from tests.integration.forked import forked_output

pytest.importorskip("torch")

TRAIN = """
import json, os, subprocess, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(8):
    model(torch.ones(4, 8)).sum().backward()
    {step}
    optimizer.zero_grad()
# (a worker of the job's own: another Python, that has the job's environment)
print(subprocess.run([sys.executable, "-c", "print('worker')"], capture_output=True, text=True).stdout.strip())
print(model.weight.sum().item())
"""
OWN_UPDATE = "[parameter.data.sub_(0.01 * parameter.grad) for parameter in model.parameters()]"
MONITOR = """
import sftriage, torch
monitor = sftriage.Monitor(("work",), ())
for _ in range(8):
    with monitor.step(), monitor.stage("work"):
        torch.ones(2).sum()
print(torch.optim.SGD.__name__, torch.save.__module__, hasattr(torch.save, "__wrapped__"))
"""
SEAMS = "Recording 1 rank: data, forward, backward, optimizer."
NOTHING = "nothing was recorded: "
ADVICE = " a step; if the script trains, `sftriage doctor -- COMMAND` prints the lines that record its loop"
TRAINS, TRAINS_TWICE, MONITORS = ("train",), ("train", "train"), ("monitor",)
# a job: options, its command, the scripts whose output it has, what is printed about it, and the steps recorded
JOBS = {
    "a pipeline of a shell": ((), "cat train.py | python - | cat", TRAINS, SEAMS, 6),
    "a script, and python -c": ((), 'python train.py && python -c "$(cat train.py)"', TRAINS_TWICE, SEAMS, 6),
    "a Monitor": ((), "python monitor.py", MONITORS, "Recording 1 rank: work.", 8),
    "a Monitor, --no-auto": (("--no-auto",), "python monitor.py", MONITORS, "Recording 1 rank: work.", 8),
    "no PyTorch": ((), "python -c 'import json'", (), f"{NOTHING}no process of the job on this host imported", 0),
    "a loop without an optimizer": (
        *((), "python own.py", ("own",), f"{NOTHING}no torch.optim.Optimizer has made{ADVICE}", 0),
    ),
    "another PYTHONPATH": (
        *((), "PYTHONPATH=src python train.py", TRAINS, f"{NOTHING}the job overwrites PYTHONPATH", 0),
    ),
    "--no-auto": (
        ("--no-auto",),
        "python train.py && [ -z ${PYTHONPATH-} ]",
        TRAINS,
        f"{NOTHING}the script creates no sftriage.Monitor, and --no-auto detects no stages",
        0,
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the scripts, and what each prints without us."""
    folder = tmp_path_factory.mktemp("scripts")
    steps = {"train": TRAIN.format(step="optimizer.step()"), "own": TRAIN.format(step=OWN_UPDATE), "monitor": MONITOR}
    for name, script in steps.items():
        (folder / f"{name}.py").write_text(script)
    return folder, {name: forked_output(folder / f"{name}.py", env=own_environment(folder)) for name in steps}


@pytest.mark.parametrize("job", JOBS)
def test_each_kind_of_job_runs_as_alone_and_its_user_reads_what_was_recorded_or_what_to_do(
    start, environment, tmp_path, alone, job
):
    options, command, scripts, expected, steps = JOBS[job]
    folder, printed = alone
    path = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"} | {"PATH": path}
    out = tmp_path / "run"
    watched = start("run", "--out", out, *options, "--", "bash", "-c", command, cwd=folder, env=environment)
    output, log = watched.communicate(timeout=240)
    # THEN the job's own output is what it is alone, and the log has one line on what was recorded
    assert (watched.returncode, output) == (0, "".join(printed[name] for name in scripts)), log
    lines = [line.removeprefix("sftriage: ") for line in log.splitlines()]
    assert [line for line in lines if line.startswith((NOTHING, "Recording"))] == [
        line for line in lines if line.startswith(expected)
    ], log
    assert len([line for line in lines if line.startswith(expected)]) == 1, log
    recorded = [len(records) for ranks in load_recording(out).ranks.values() for records in steps_of(ranks)]
    assert recorded == ([steps] * len(scripts) if steps else [])
    assert not (out / "auto").exists()


def steps_of(ranks):
    return [[record for steps in rank.steps(4096) for record in steps.records()] for rank in ranks.values()]
