"""`sftriage run` before jobs of any kind, with no option: what it records of each, and what its user reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.runs.recordings import load_recording

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
# a job: options, its command, what is printed about it, and the steps that are recorded
JOBS = {
    "a script": ((), "python train.py", SEAMS, 6),
    "a pipeline of a shell": ((), "cat train.py | python - | cat", SEAMS, 6),
    "python -c": ((), 'python -c "$(cat train.py)"', SEAMS, 6),
    "one run after another": ((), "python train.py && python train.py", SEAMS, 6),
    "a Monitor": ((), "python monitor.py", "Recording 1 rank: work.", 8),
    "a Monitor, --no-auto": (("--no-auto",), "python monitor.py", "Recording 1 rank: work.", 8),
    "no PyTorch": ((), "echo 1 && python -c 'import json'", f"{NOTHING}no process of the job on this host imported", 0),
    "a loop without an optimizer": ((), "python own.py", f"{NOTHING}no torch.optim.Optimizer has made{ADVICE}", 0),
    "another PYTHONPATH": ((), "PYTHONPATH=src python train.py", f"{NOTHING}the job overwrites PYTHONPATH", 0),
    "--no-auto": (
        ("--no-auto",),
        "python train.py; echo ${PYTHONPATH-none}",
        f"{NOTHING}the script creates no sftriage.Monitor, and --no-auto detects no stages",
        0,
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_each_kind_of_job_runs_as_alone_and_its_user_reads_what_was_recorded_or_what_to_do(
    start, environment, tmp_path, job
):
    options, command, expected, steps = JOBS[job]
    (tmp_path / "train.py").write_text(TRAIN.format(step="optimizer.step()"))
    (tmp_path / "own.py").write_text(TRAIN.format(step=OWN_UPDATE))
    (tmp_path / "monitor.py").write_text(MONITOR)
    path = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"} | {"PATH": path}
    alone = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    watched = start("run", "--out", "run", *options, "--", "bash", "-c", command, cwd=tmp_path, env=environment)
    output, log = watched.communicate(timeout=240)
    # THEN the job's own output is what it is alone, and the log has one line on what was recorded
    assert (watched.returncode, output) == (0, alone.stdout), log
    lines = [line.removeprefix("sftriage: ") for line in log.splitlines() if line not in alone.stderr.splitlines()]
    assert [line for line in lines if line.startswith((NOTHING, "Recording"))] == [
        line for line in lines if line.startswith(expected)
    ], log
    assert len([line for line in lines if line.startswith(expected)]) == 1, log
    recorded = load_recording(tmp_path / "run").ranks
    assert max((len(records) for ranks in recorded.values() for records in steps_of(ranks)), default=0) == steps
    assert not (tmp_path / "run" / "auto").exists()


def steps_of(ranks):
    return [[record for steps in rank.steps(4096) for record in steps.records()] for rank in ranks.values()]
