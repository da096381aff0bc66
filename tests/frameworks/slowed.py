"""Runs a training script with the data set of one rank wrapped: each sample takes longer from some sample on."""

import os
import runpy
import sys
from pathlib import Path

from torch.utils.data._utils import fetch

sys.path.append(str(Path(__file__).parents[1] / "integration" / "jobs" / "unedited"))
from samples import Slowed


class SlowedFetcher(fetch._MapDatasetFetcher):
    def __init__(self, dataset, *args):
        # (the small one is for evaluations)
        super().__init__(dataset if len(dataset) < 1000 else Slowed(dataset), *args)


# Lightning's own launcher says no more than a rank's number on its host.
if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == os.environ["SLOW_RANK"]:
    fetch._MapDatasetFetcher = SlowedFetcher
sys.argv.pop(0)
sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
runpy.run_path(sys.argv[0], run_name="__main__")
