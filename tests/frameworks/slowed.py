"""Runs a training script with the data set of one rank wrapped: each sample takes longer from some sample on."""

import os
import runpy
import sys
import time

from torch.utils.data._utils import fetch

RANK, AFTER, SLOW_S = int(os.environ["SLOW_RANK"]), int(os.environ["SLOW_AFTER"]), float(os.environ["SLOW_S"])


class Slowed:
    """Another data set, later."""

    def __init__(self, dataset):
        self.dataset, self.taken = dataset, 0

    def __getitem__(self, index):
        self.taken += 1
        if self.taken > AFTER:
            time.sleep(SLOW_S)
        return self.dataset[index]


class SlowedFetcher(fetch._MapDatasetFetcher):
    def __init__(self, dataset, *args):
        # (the small one is for evaluations)
        super().__init__(dataset if len(dataset) < 1000 else Slowed(dataset), *args)


# Lightning's own launcher says no more than a rank's number on its host.
if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == RANK:
    fetch._MapDatasetFetcher = SlowedFetcher
sys.argv.pop(0)
sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
runpy.run_path(sys.argv[0], run_name="__main__")
