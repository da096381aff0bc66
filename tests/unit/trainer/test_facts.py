"""What a process says it runs with: what its training thread knows, its limits, and an environment without secrets."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sftriage.trainer import facts
from sftriage.trainer.facts import HIDDEN, answer

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")


class Held:
    """An object whose attributes run code."""

    def __init__(self, **held):
        for name, value in held.items():
            setattr(self, name, value)

    def __getattribute__(self, name):
        raise AssertionError(f"the program's code ran: {name}")


def answered(*known):
    """The answer of another thread, as a trainer's is, while this one has a variable of what is ``known``."""
    found = []
    asking = threading.Thread(target=lambda: found.append(answer()))
    asking.start()
    asking.join()
    del known
    return found[0]


def test_loaders_and_optimizers_are_found_from_the_variables_of_the_training_thread():
    # GIVEN a loader that an object holds, in a container, and an optimizer of parameters of two types
    trainer = Held(fit=[Held(loader=data.DataLoader([1, 2], batch_size=2, pin_memory=False))], loop=None)
    parameters = *torch.nn.Linear(2, 2).double().parameters(), *torch.nn.Linear(2, 2).parameters()
    optimizers = {"main": torch.optim.SGD(parameters)}
    found = answered(trainer, optimizers)
    assert (found["num_workers"], found["batch_size"], found["pin_memory"]) == (0, 2, False)
    assert found["parameter_types"] == "float32 and float64"
    # AND loaders that differ count together, of which one may be in use only by its iterator
    found = answered(trainer, [iter(data.DataLoader([1], num_workers=1))], data.DataLoader([1], batch_size=5))
    assert (found["num_workers"], found["batch_size"]) == ("0 and 1", "2 and 5")
    assert not {"num_workers", "batch_size", "parameter_types"} & answered().keys()


def test_what_the_program_holds_is_bounded_and_may_lead_back_to_itself(monkeypatch):
    monkeypatch.setattr(facts, "MAX_OBJECTS", 50)
    loop, chain = {}, [data.DataLoader([1])]
    loop["self"] = loop
    for _ in range(10_000):
        chain = [chain]
    assert "num_workers" not in answered(loop, chain, [[number] for number in range(10_000)])


def test_torch_and_the_process_are_read(monkeypatch):
    monkeypatch.setattr(os, "getpriority", lambda *_: (_ for _ in ()).throw(OSError))
    found = answered()
    assert found["torch_threads"] == torch.get_num_threads()
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert (found["torch"], found["python"]) == (torch.__version__, sys.version.split()[0])
    # AND one that cannot be read is left out
    assert "nice" not in found


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("OMP_NUM_THREADS", "4", "4"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", "/usr/lib/libjemalloc.so.2"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128", ...),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("GLOO_SOCKET_IFNAME", "\x1b[31m\udcff", "?[31m?"),
        # What may be a secret.
        ("TORCH_HUB_TOKEN", "short", HIDDEN),
        ("NCCL_PROXY", "https://ada:lovelace@example.com/x", HIDDEN),
        ("NCCL_X", "ghp_16C7e42F292c6912E7710c838347Ae178B4a", HIDDEN),
        ("NCCL_Y", "a" * 100_000, HIDDEN),
        # What each rank has for itself, and what is none of its business.
        ("CUDA_VISIBLE_DEVICES", "1", None),
        ("AWS_SECRET_ACCESS_KEY", "x", None),
        ("HOME", "/root", None),
        ("RANK", "1", None),
        ("OMP_\udcff", "1", None),
    ],
)
def test_only_variables_that_change_how_a_program_runs_are_read_and_none_that_may_be_secret(
    monkeypatch, name, value, expected
):
    monkeypatch.setenv(name, value)
    assert answer().get(name) == (value if expected is ... else expected)


def test_an_answer_is_bounded_whatever_the_environment(monkeypatch):
    for number in range(5000):
        monkeypatch.setenv(f"NCCL_{number}{'N' * 99}", "v" * 199)
        monkeypatch.setenv(f"NCCL_{number}", "é" * 199)
    assert len(json.dumps(answer())) < 200_000


def test_a_limit_of_a_real_cgroup_is_known():
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    cgroup = (first if first.is_dir() else second) / f"sftriage-facts-{os.getpid()}"
    name, quota = ("cpu.cfs_quota_us", "50000") if first.is_dir() else ("cpu.max", "50000 100000")
    # GIVEN a process in a cgroup inside one that has half a core
    try:
        (cgroup / "inner").mkdir(parents=True)
        (cgroup / name).write_text(quota)
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        join = f"open({str(cgroup / 'inner' / 'cgroup.procs')!r}, 'w').write('0')"
        code = f"import json; {join}; from sftriage.trainer.facts import answer; print(json.dumps(answer()))"
        found = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    finally:
        (cgroup / "inner").rmdir()
        cgroup.rmdir()
    assert found["cpu_limit"] == 0.5
    # AND nothing of torch, which is not imported
    assert not {"torch", "torch_threads", "num_workers"} & found.keys()
