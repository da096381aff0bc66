"""A job whose ranks work on a device, and whose hosts only launch: on one rank, kernels of one stage become slow.

``on_device.py DEVICE RANKS STEPS SLOW_RANK STAGE``, the stage ``forward`` or ``backward``: from the middle of the steps
on. The device is ``cuda``, an NVIDIA GPU that all ranks share, or ``queue``: a queue that takes real time, put where
the recorder looks for `torch.cuda`. In `backward` each host waits for its device and then for the other ranks, so the
devices are together at its end.
"""

import multiprocessing
import os
import sys
import time
from types import SimpleNamespace

MS_NS = 1_000_000
KERNEL_NS, SLOW_NS = 6 * MS_NS, 66 * MS_NS


class QueuedEvent:
    def __init__(self, queue):
        self._queue, self._at_ns = queue, 0

    def record(self, stream):
        self._at_ns = self._queue.through_ns()

    def query(self):
        return time.monotonic_ns() >= self._at_ns

    def elapsed_time(self, end):
        return (end._at_ns - self._at_ns) / 1e6


class Queue:
    """One stream: what is launched is done one after the other. `launch` and `synchronize` are for the job."""

    def __init__(self):
        self._free_ns = 0

    def through_ns(self):
        return max(time.monotonic_ns(), self._free_ns)

    def launch(self, ns):
        self._free_ns = self.through_ns() + ns

    def synchronize(self):
        time.sleep(max(0, self._free_ns - time.monotonic_ns()) / 1e9)

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return False

    def current_stream(self):
        return self

    def Event(self, enable_timing):
        return QueuedEvent(self)


def the_device(name):
    """What launches so many nanoseconds of work, and what waits for it."""
    if name == "queue":
        queue = Queue()
        sys.modules["torch"] = SimpleNamespace(cuda=queue)
        return queue.launch, queue.synchronize
    import torch

    torch.cuda.init()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    for _ in range(3):  # the first ones find the clock low
        began.record()
        torch.cuda._sleep(cycles)
        ended.record()
        torch.cuda.synchronize()
    cycles_per_ns = cycles / (began.elapsed_time(ended) * 1e6)
    return lambda ns: torch.cuda._sleep(int(ns * cycles_per_ns)), torch.cuda.synchronize


class Parameter:
    """What a model's only parameter is to whoever watches it."""

    requires_grad = is_leaf = True

    def __init__(self):
        self._hook = lambda parameter: None

    def register_post_accumulate_grad_hook(self, hook):
        self._hook = hook
        return SimpleNamespace(remove=lambda: None)

    def has_its_gradient(self):
        self._hook(self)

    def parameters(self):
        return [self]


def train(rank, ranks, steps, slow_rank, slow_stage, device, barrier):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    import sftriage

    launch, synchronize = the_device(device)
    barrier.wait()
    model = Parameter()
    with sftriage.Monitor() as monitor:
        monitor.watch(model)
        for step in range(steps):
            slow = slow_stage if rank == slow_rank and step >= steps // 2 else None
            with monitor.step():
                with monitor.stage("data"):
                    time.sleep(0.001)
                with monitor.stage("forward"):
                    launch(SLOW_NS if slow == "forward" else KERNEL_NS)
                with monitor.stage("backward"):
                    launch(SLOW_NS if slow == "backward" else KERNEL_NS)
                    model.has_its_gradient()
                    synchronize()
                    barrier.wait()
                with monitor.stage("optimizer"):
                    launch(MS_NS)


if __name__ == "__main__":
    device, ranks, steps, slow_rank, slow_stage = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    # A forked child cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks)
    workers = [
        context.Process(target=train, args=(rank, ranks, steps, slow_rank, slow_stage, device, barrier))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode) for worker in workers))
