"""``hanging.py RINGS HOST FIRST WORLD_SIZE RANKS WAY...``: some ranks in a process, the first of which hangs in a step.

It writes the pid of its worker, 0 without one, and hangs in the ways named: ``account`` (it answers requests with known
evidence), ``old`` (with its stacks, as an older sftriage), ``keeps`` (native code keeps its interpreter), ``later`` (it
is stopped once RINGS has a file ``hang``); with ``worker`` it has a child that is stopped.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sftriage.trainer import executor
from sftriage.trainer.monitor import Monitor

WAYS = sys.argv[6:]
Answers = Callable[[bytes], dict[str, object]]


def evidence_of(worker: int) -> Answers:
    """Makes the answers of a rank with a worker."""
    frame = {"function": "hangs_here", "file": "train.py", "line": 9, "own": True}
    call = {"op": "all_reduce", "sizes": [[3]], "dtypes": ["Float"], "frames": [frame]}
    group = {"name": "0", "description": "default_pg", "members": None, "first": 1, "calls": [0, 0], "pending": [2]}
    threads = [{"name": "Main\x1bThread", "main": True, "frames": [frame]}]
    workers = [{"pid": worker, "state": ""}] if worker else []
    account = {"calls": [call], "groups": [group | {"of_a_later_version": 7}], "workers": workers, "timeout_s": 1800}

    return lambda token: {
        "rank_evidence": account | {"threads": threads if token.startswith(b"hang-detail ") else []},
    }


def answer_with(answers: Answers) -> None:
    """Let a rank answer so from now on."""

    def answer_to(self: executor.Answering, token: bytes) -> None:
        text = json.dumps({"asked": token.decode(), **answers(token)})
        executor.write_atomically(self._answer, text, mode=None, synced=False)

    executor.Answering._answer_to = answer_to  # type: ignore[method-assign]


def loads() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs_here() -> None:
    if "keeps" in WAYS:
        ctypes.PyDLL(None).sleep(600)
    os.read(0, 1)


def main() -> None:
    rings, host, first, world_size, ranks = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    worker = os.fork() if "worker" in WAYS else 0
    if "worker" in WAYS and not worker:
        loads()
        os._exit(0)
    if worker:
        os.waitid(os.P_PID, worker, os.WSTOPPED | os.WNOWAIT)
    if "account" in WAYS:
        answer_with(evidence_of(worker))
    if "old" in WAYS:
        answer_with(lambda token: {"threads": executor._threads(os.getpid(), leave_out=threading.get_ident())})
    some = [Monitor(rings=rings, host=host, rank=first + at, world_size=world_size) for at in range(ranks)]
    sys.stdout.write(f"{worker}\n")
    sys.stdout.flush()
    while "later" in WAYS:
        with some[0].step(), some[0].stage("data"):
            time.sleep(0.01)
        if (rings / "hang").exists():
            os.kill(os.getpid(), signal.SIGSTOP)
    with some[0].step(7), some[0].stage("data"):
        hangs_here()


if __name__ == "__main__":
    main()
