"""``hub.py HOST PORT STORE SECRET PID_FILE``: a job's hub, as `sftriage run` starts it, until it ends or this does."""

import sys
import time
from pathlib import Path

from sftriage.base.files import write_atomically
from sftriage.runtime.hub_server import HubServer

if __name__ == "__main__":
    host, port, store, secret, pid_file = sys.argv[1:]
    server = HubServer((host, int(port)), Path(store), Path(secret))
    write_atomically(Path(pid_file), str(server.pid))
    while Path(f"/proc/{server.pid}/exe").exists():
        time.sleep(0.05)
    sys.exit("the hub has ended")
