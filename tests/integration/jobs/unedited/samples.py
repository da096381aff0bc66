"""A dataset, and a wrapper around it that is slow where the environment says so: nothing that a training script sees.

``SLOW_RANK``: which rank's; ``SLOW_AFTER``: from which of its samples on; ``SLOW_S``: how long a sample takes it then,
and ``SLOW_SHARE``: at least this share of the time from one sample to the next before. So a rank is slow for its job on
a busy machine too, whose steps are longer.
"""

import os
import time

import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    def __init__(self, n_samples: int, width: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.values = torch.randn(n_samples, width, generator=generator)
        self.labels = torch.randint(0, 4, (n_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values[index], self.labels[index]


class Slowed(Dataset):
    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.taken = dataset, 0
        self.after = int(os.environ.get("SLOW_AFTER", "0"))
        self.slow_s = float(os.environ.get("SLOW_S", "0"))
        self.share = float(os.environ.get("SLOW_SHARE", "0"))
        self.looked_s = 0.0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> object:
        self.taken += 1
        # (the first half has the script's beginning in it)
        if self.taken == self.after // 2:
            self.looked_s = time.monotonic()
        elif self.taken == self.after:
            usual_s = (time.monotonic() - self.looked_s) / (self.after - self.after // 2)
            self.slow_s = max(self.slow_s, self.share * usual_s)
        if self.taken > self.after:
            time.sleep(self.slow_s)
        return self.dataset[index]


def samples(n_samples: int, width: int) -> Dataset:
    found = Samples(n_samples, width)
    return Slowed(found) if os.environ.get("SLOW_RANK") == os.environ.get("RANK") else found
