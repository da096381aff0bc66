"""Stacks are sampled where little is allowed: without privileges, in namespaces, without /proc, without threads."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest

from sftriage.reduce.samples import read_samples
from sftriage.reduce.spots import spots
from tests import needs

JOB = """
    import os, resource, sys, threading, time
    import torch
    from pathlib import Path
    from torch.utils.data import DataLoader, Dataset
    from sftriage.sampling.sampler import StackSampler
    from sftriage.sampling.sampler import WORKERS

    class Slow(Dataset):
        def __len__(self):
            return 60
        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.zeros(1)

    without, path = sys.argv[1].split(), Path(sys.argv[2])

    def threads(allowed):
        soft = 0 if not allowed else resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, resource.getrlimit(resource.RLIMIT_NPROC)[1]))

    # (around the thread that a worker would have: torch's own threads there are none of ours)
    if "worker" in without:
        os.register_at_fork(after_in_child=lambda: threads(False))
    WORKERS.attend()
    if "worker" in without:
        os.register_at_fork(after_in_child=lambda: threads(True))
    loader = DataLoader(Slow(), 4, num_workers=1, multiprocessing_context="fork")
    sampler = StackSampler(lambda: (1, "data", 1), period_s=0.001)
    if "trainer" in without:
        threads(False)
    sampler.start()
    threads(True)
    batches = sum(1 for _ in loader)
    sampler.stop()
    why = sampler.keep(path, 1 << 24)
    WORKERS.leave()
    left = [one.name for one in threading.enumerate() if one.name.startswith("sftriage")]
    print(batches, left, why, sep="|")
"""

NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"]
# (the interpreter may lie where only its owner reads)
NOBODY += [f"--{one}=-all,+dac_read_search" for one in ("inh-caps", "ambient-caps", "bounding-set")]
MOUNTS = ["unshare", "--mount"]


def shell(before):
    return [*MOUNTS, "sh", "-c", f'{before} && exec "$@"', "sh"]


@pytest.fixture
def job(tmp_path):
    """Runs the job where little is allowed: what it prints, and its samples."""
    tmp_path.chmod(0o777)
    for above in tmp_path.parents[:2]:
        above.chmod(0o755)

    def run(*where, without=""):
        if shutil.which(where[0]) is None:
            pytest.skip(f"no {where[0]} here: {needs.GET_IT}")
        probe = subprocess.run([*where, "true"], capture_output=True, text=True, timeout=60, check=False)
        if probe.returncode:
            pytest.skip(f"this cannot be made here: {probe.stderr.strip()}")
        path = tmp_path / "s.json"
        command = [*where, sys.executable, "-c", textwrap.dedent(JOB), without, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        batches, left, why = done.stdout.strip().split("|")
        # THEN, whatever is allowed, training has had all its batches, and nothing of ours is left
        assert (batches, left) == ("15", "[]")
        return why, path

    return run


WHERE = {
    "another user, without privileges": NOBODY,
    "in namespaces of users, processes and mounts": [
        "unshare", "--user", "--map-root-user", "--pid", "--mount", "--fork", "--mount-proc"
    ],
    "where processes are hidden from each other": [
        *shell("mount -t proc -o hidepid=2 proc /proc"), *NOBODY
    ],
}  # fmt: skip


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_it_works_where_nobody_may_trace(job, where):
    # GIVEN a trainer that may not look into any other process WHEN it is sampled
    why, path = job(*where)
    # THEN all is there: what the training thread waits for, what its worker does, and how long both have run
    assert why == ""
    samples = read_samples(path)
    (worker,) = samples.workers
    assert any(
        samples.frames[stack[-1]].function.endswith("__getitem__") for stack in worker.threads[0].stacks_N if stack
    )
    assert samples.training.run_ns_N[-1] > 0
    assert worker.threads[0].run_ns_N[-1] > 0


def test_where_the_system_says_nothing_of_threads_their_times_are_unknown(job):
    # GIVEN no /proc at all WHEN the trainer is sampled
    why, path = job(*shell("mount -t tmpfs none /proc"))
    # THEN its stacks and its worker's are there, and of nothing it is said how long it ran
    assert why == ""
    samples = read_samples(path)
    (worker,) = samples.workers
    assert len(worker.time_ns_W) > 0
    for one in (samples.training, worker.threads[0], samples.sampler):
        assert set(one.run_ns_N) == set(one.waited_ns_N) == {-1}
    assert {one.known_ns for one in spots(samples, "data")} == {0}


def test_where_no_thread_can_be_had_training_goes_on_without_stacks(job):
    # GIVEN a user who may have no more threads WHEN a capture begins THEN the reason is what comes of it
    why, path = job(*NOBODY, without="trainer")
    assert why == "no stacks: can't start new thread"
    assert not path.exists()


def test_a_worker_that_can_have_no_thread_is_said_to_be_missing(job):
    # GIVEN a worker that may have no thread of ours WHEN its trainer is sampled
    why, path = job(*NOBODY, without="worker")
    # THEN the trainer's stacks are there, without it
    assert why == ""
    document = json.loads(path.read_text())
    assert document["sftriage"]["workers"] == []
    assert read_samples(path).time_ns_N
