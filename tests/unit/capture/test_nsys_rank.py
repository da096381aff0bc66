"""What a rank is started with under nsys; that it is started at all is for the integration tests."""

import os
import subprocess
import sys

import pytest

from sftriage.capture import nsys_rank
from sftriage.capture.nsys_rank import (
    bare_environment,
    nsys_command,
    session_name,
    trainer_command,
    trainer_environment,
)

OURS = {
    "SFTRIAGE_NSYS": "/usr/bin/nsys",
    "SFTRIAGE_NSYS_SESSION": "sft-run",
    "SFTRIAGE_NSYS_TRACE": "cuda,nvtx",
    "SFTRIAGE_NSYS_TMP": "/run/tmp",
    "SFTRIAGE_NSYS_RANK": "/run/tmp/rank",
    "PYTHON_EXEC": "/run/tmp/rank",
}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "sft-run-0.0"),
        ({"RANK": "7"}, "sft-run-7.0"),
        ({"RANK": "7", "TORCHELASTIC_RESTART_COUNT": "2"}, "sft-run-7.2"),
    ],
)
def test_every_rank_and_every_attempt_has_a_session_of_its_own(environment, name):
    assert session_name({**OURS, **environment}) == name
    command = nsys_command({**OURS, **environment})
    assert command == ["/usr/bin/nsys", "launch", f"--session-new={name}", "--trace=cuda,nvtx"]


def test_armed_it_knows_the_range_to_wait_for():
    command = nsys_command({**OURS, "SFTRIAGE_NSYS_ARMED": "/spool/nsys", "RANK": "3"})
    assert command == [
        *("/usr/bin/nsys", "launch", "--session-new=sft-run-3.0", "--trace=cuda,nvtx", "--nvtx-capture=SFT_CAPTURE@*")
    ]


def test_nsys_sees_no_secret():
    real = {**OURS, "PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "CUDA_VISIBLE_DEVICES": "1", "API_KEY": "x", "RANK": "3"}
    bare = bare_environment({**real, "TMPDIR": "/tmp"})
    assert set(bare) == {
        "PATH",
        "LD_LIBRARY_PATH",
        "CUDA_VISIBLE_DEVICES",
        "TMPDIR",
        "NSYS_NVTX_PROFILER_REGISTER_ONLY",
    }
    assert bare["TMPDIR"] == "/run/tmp"


@pytest.mark.parametrize(
    ("real", "injected", "expected"),
    [
        # What the trainer had, it has; what is ours, it has not.
        ({**OURS, "API_KEY": "x", "TMPDIR": "/tmp"}, {}, {"API_KEY": "x", "TMPDIR": "/tmp"}),
        # What nsys has added, it has too; what nsys was given and left, it has as before.
        ({**OURS, "A": "1"}, {"LD_PRELOAD": "x.so", "TMPDIR": "/run/tmp"}, {"A": "1", "LD_PRELOAD": "x.so"}),
        ({**OURS, "LD_PRELOAD": "jemalloc.so"}, {"LD_PRELOAD": "jemalloc.so:x.so"}, {"LD_PRELOAD": "jemalloc.so:x.so"}),
        # A Python of the job's own for torchrun is there again for torchruns that it starts itself.
        ({**OURS, "SFTRIAGE_NSYS_PYTHON": "/own"}, {}, {"PYTHON_EXEC": "/own"}),
        # Set by Python, not by nsys.
        (OURS, {"LC_CTYPE": "C.UTF-8"}, {}),
    ],
)
def test_the_trainer_has_its_environment_and_what_nsys_adds(real, injected, expected):
    found = trainer_environment(real, bare_environment(real), injected)
    assert found == {**expected, "NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


@pytest.mark.parametrize(
    ("arguments", "environment", "command"),
    [
        (["--", "python3", "train.py"], {}, ["python3", "train.py"]),
        (["--", "prog", "--", "x"], {}, ["prog", "--", "x"]),
        (["-u", "train.py"], {"SFTRIAGE_NSYS_PYTHON": "/own/python"}, ["/own/python", "-u", "train.py"]),
    ],
)
def test_the_command_of_a_rank(arguments, environment, command):
    assert trainer_command(arguments, environment) == command


def test_in_the_place_of_torchruns_python_it_finds_that_python():
    # GIVEN a launcher that runs in a virtual environment, where Python is a link
    code = (
        f"import subprocess; subprocess.run([{sys.executable!r}, '-I', '-S', '-c', 'import os, runpy; "
        f'print(runpy.run_path("{nsys_rank.__file__}", run_name="x")["_python_of"](os.getppid()))\'])'
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    # THEN it is the link that is found, not what it leads to
    assert found.stdout.strip() == sys.executable


def test_an_inner_half_that_nobody_wants_does_not_become_the_trainer():
    read, write = nsys_rank._pair()
    command = [sys.executable, "-I", "-S", nsys_rank.__file__, nsys_rank.INNER, str(write)]
    process = subprocess.Popen(command, pass_fds=[write])
    os.close(write)
    assert int(os.read(read, 100)) == process.pid
    os.close(read)
    assert process.wait(60) == nsys_rank.UNKNOWN_STATUS


@pytest.mark.parametrize(("owner", "kept"), [("nobody", True), ("alive", True), ("dead", False)])
def test_a_session_registry_is_removed_only_if_a_dead_process_holds_its_lock(tmp_path, owner, kept):
    # GIVEN nsys's registry of this host, and who holds its lock
    ended = subprocess.Popen(["true"])
    ended.wait()
    registry = tmp_path / "NSys-2022.4.2.1"
    pid = {"nobody": 0, "alive": os.getpid(), "dead": ended.pid}[owner]
    registry.write_bytes((1).to_bytes(8, "little") + pid.to_bytes(8, "little") + bytes(100))
    # WHEN nsys hung or failed THEN a dead owner's is gone, and a new one can be made
    nsys_rank.release_registry(tmp_path)
    assert registry.exists() == kept
