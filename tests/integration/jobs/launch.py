"""A launcher whose ranks share what they import of torch, which takes longer than most jobs: as torchrun, with less.

``launch.py RANKS [--max-restarts N] SCRIPT ARGS...``: each rank runs the script. When one fails, the others are ended,
and so is the job, or it starts again.
What DistributedDataParallel and optimizers import when they are first used, as long again, they share too.
With ``NODES``, the ranks are those of the host NODE_RANK of so many, which meet at MEET_AT, a port of the first one.
"""

import contextlib
import importlib
import os
import re
import runpy
import signal
import socket
import sys
from pathlib import Path

import torch.distributed as dist

NODES = int(os.environ.get("NODES", "1"))
NODE = int(os.environ["NODE_RANK"]) if NODES > 1 else 0


def become(rank: int, ranks: int, address: str, port: int, script: str, attempt: int) -> None:
    """Run the script as a rank, in a session of its own, as torchrun has it."""
    os.setsid()
    of_all = {"RANK": NODE * ranks + rank, "WORLD_SIZE": NODES * ranks, "MASTER_ADDR": address, "MASTER_PORT": port}
    here = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_USE_AGENT_STORE": True}
    again = {"TORCHELASTIC_RESTART_COUNT": attempt} if attempt else {}
    os.environ.update({name: str(value) for name, value in (of_all | here | again).items()})
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    # Gloo's threads live on: they may crash what is ending, and hang a model that goes after its group.
    sys.stdout.flush()
    os._exit(0)


def run(attempt: int, ranks: int, script: str) -> bool:
    """Run all ranks of this host to their end; whether one failed."""
    address, _, port = os.environ.get("MEET_AT", "127.0.0.1:0").partition(":")
    listening = socket.create_server((address, int(port))) if NODE == 0 else None
    port = int(port) if listening is None else listening.getsockname()[1]
    # Nothing has a thread yet, or any more: ranks are forked from here.
    pids = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            become(rank, ranks, address, port, script, attempt)
        pids.add(pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    store = listening and dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    failed = 0
    try:
        while pids and not failed:
            pid, status = os.wait()
            pids.discard(pid)
            failed = os.waitstatus_to_exitcode(status)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        del store
    return bool(failed)


def main() -> int:
    ranks, *words = sys.argv[1:]
    restarts = int(words[1]) if words[0] == "--max-restarts" else 0
    sys.argv = words[2:] if restarts else words
    script = sys.argv[0]
    text = Path(script).read_text(encoding="utf-8")
    for module in re.findall(r"^(?:from|import) (torch[\w.]*)", text, re.MULTILINE):
        importlib.import_module(module)
    if "torch.optim" in text:
        importlib.import_module("torch._dynamo")
    attempt = 0
    while (failed := run(attempt, int(ranks), script)) and attempt < restarts:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        attempt += 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
