"""A launcher whose ranks share one import of torch, which takes longer than most jobs here: as torchrun, with less.

``launch.py RANKS SCRIPT ARGS...``: each rank runs the script. When one fails, the others are ended, and so is the job.
"""

import os
import runpy
import signal
import socket
import sys
from pathlib import Path

import torch.distributed as dist


def become(rank: int, ranks: int, port: int, script: str) -> None:
    """Run the script as a rank, in a session of its own, as torchrun has it."""
    os.setsid()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def main() -> int:
    ranks, script = int(sys.argv[1]), sys.argv[2]
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    # Nothing has a thread yet: ranks are forked from here.
    pids = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            become(rank, ranks, port, script)
            os._exit(0)
        pids.add(pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
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
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
