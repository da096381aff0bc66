"""``stepping.py RELEASE [deaf]``: a task of srun that takes steps until RELEASE is there, without torch and without its
peers; ``deaf`` to SIGTERM, it goes on."""

import signal
import sys
import time
from pathlib import Path

import sftriage

if __name__ == "__main__":
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    release = Path(sys.argv[1])
    with sftriage.Monitor() as monitor:
        while not release.exists():
            with monitor.step():
                for stage in ("data", "forward", "backward", "optimizer"):
                    with monitor.stage(stage):
                        time.sleep(0.005)
