"""A job whose launcher sets no RANK: its processes know who they are by torch.distributed alone."""

import os
import subprocess
import sys

from sftriage.recorder import find_rings
from sftriage.windows.rings import open_ring
from tests.integration.processes import DEADLINE_S

TRAINER = """
import sys
import torch.distributed as dist
import sftriage
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
with sftriage.Monitor() as monitor:
    with monitor.step(), monitor.stage("data"):
        pass
dist.barrier()
dist.destroy_process_group()
"""


def test_each_process_records_as_the_rank_that_it_is(tmp_path):
    # GIVEN two processes that find each other by a file
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["SFTRIAGE_RINGS"] = str(tmp_path)
    trainers = [
        subprocess.Popen([sys.executable, "-c", TRAINER, tmp_path / "meeting", str(rank)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [trainer.wait(DEADLINE_S) for trainer in trainers] == [0, 0]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    # THEN each has a ring of its own, of a job of two
    found = []
    for path in find_rings(tmp_path):
        with open_ring(path) as ring:
            found.append((ring.info.rank, ring.info.world_size, len(ring.read().steps)))
    assert sorted(found) == [(0, 2, 1), (1, 2, 1)]
