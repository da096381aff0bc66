"""The messages on a job's first steps, with real processes: when they are recorded, and why not yet."""

import os
import subprocess
import sys

import pytest

from sftriage.runtime.first_step import AGAIN_S, FirstStep, Processes
from sftriage.trainer.monitor import Monitor
from sftriage.windows.gather import Shape
from tests.integration.processes import ended

pytest.importorskip("torch")
TRAINER = "import torch; print('up', flush=True); input()"
# what starts a trainer, and what the trainer does not see because of that
STARTED = {
    "-I": (("-I",), {}, {"-I"}),
    "-E with others": (("-uE",), {}, {"-E"}),
    "a wrapper": ((), {"PYTHONPATH": "/elsewhere"}, {"PYTHONPATH"}),
    "a wrapper that adds": ((), {"PYTHONPATH": "/elsewhere:/ours"}, set()),
}


def trainer(tmp_path, flags=(), **environment):
    given = {"SFTRIAGE_RINGS": str(tmp_path), "PYTHONPATH": "/ours"}
    words = ["sh", "-c", '"$@"; :', "sh", sys.executable, *flags, "-c", TRAINER]
    own = {**os.environ, **given, **environment}
    return given, subprocess.Popen(words, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", STARTED)
def test_what_keeps_seams_from_a_trainer_is_found_in_its_process(tmp_path, how):
    flags, environment, hidden = STARTED[how]
    given, process = trainer(tmp_path, flags, **environment)
    with ended(process):
        assert process.stdout.readline() == "up\n"
        processes = Processes(given)
        processes.check(process.pid)
        assert (len(processes.torch), processes.hidden) == (1, hidden)


def test_a_job_has_a_message_each_minute_from_torch_to_its_first_step(tmp_path):
    messages, noted = [], []
    given, process = trainer(tmp_path)
    with ended(process):
        first = FirstStep(tmp_path, given, Shape(50, 10, 20), messages.append, noted.append, auto=False)
        # GIVEN a process that is yet to import torch THEN there is no message, however long that takes
        for minute in range(3):
            first.check(2**22, AGAIN_S * minute)
        assert messages == []
        # WHEN it has, and takes no step THEN there is a message each minute, and one note
        assert process.stdout.readline() == "up\n"
        processes = Processes(given)
        processes.check(process.pid)
        assert (len(processes.torch), processes.hidden) == (1, set())
        for second in range(0, 130, 5):
            first.check(process.pid, 1000.0 + second)
        why = "the script creates no sftriage.Monitor, and --no-auto detects no stages"
        assert messages == [
            f"no step is recorded yet, 1 minute after torch was imported: {why}",
            f"no step is recorded yet, 2 minutes after torch was imported: {why}",
        ]
        assert noted == [why]
        # WHEN a step is recorded THEN there is one message more
        with Monitor(("data",), (), rank=0, world_size=1, rings=tmp_path) as monitor:
            for _ in range(2):
                with monitor.step(), monitor.stage("data"):
                    pass
            first.check(process.pid, 1200.0)
        first.check(process.pid, 2000.0)
        first.end(0, None)
    assert messages[2:] == ["Recording 1 rank: data. First verdict about step 71."]
    assert noted == [why, ""]
