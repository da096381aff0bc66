"""Ranks of which rank 1 is killed at step 20 of the first attempt; the others wait for it, until they are restarted."""

import os
import signal
import time

import sftriage

RESTARTED = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
monitor = sftriage.Monitor()
for step in range(40 if RESTARTED else 4000):
    with monitor.step(), monitor.stage("data"):
        time.sleep(0.01)
        if step == 20 and monitor.info.rank == 1 and not RESTARTED:
            os.kill(os.getpid(), signal.SIGKILL)
