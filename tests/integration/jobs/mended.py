"""``mended.py DELAYS``: attempts in which ranks are late in data; each fails but the last.

DELAYS is JSON: for each attempt its steps, and the rank (null: all), the seconds and the last step of a delay.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from sftriage.trainer.monitor import Monitor

attempts = json.loads(sys.argv[1])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
steps, slow, late_s, last = attempts[attempt]
dist.init_process_group("gloo")
rank, together = dist.get_rank(), torch.zeros(1)
with Monitor(("data", "backward"), ("backward",)) as monitor:
    for step in range(steps):
        with monitor.step():
            with monitor.stage("data"):
                time.sleep(0.01 + (late_s if slow in (None, rank) and step <= last else 0.0))
            with monitor.stage("backward"):
                dist.all_reduce(together)
dist.destroy_process_group()
sys.stdout.flush()
os._exit(attempt + 1 < len(attempts))
