"""A small classifier, trained in a loop of one's own with Accelerate: gradients accumulated, the mean loss logged."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sftriage.integrations.accelerate import record


class Samples(Dataset):
    """Vectors and their classes, drawn anew from their index."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        values = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return values, (values.sum() > 0).long()


def main(directory, steps):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir=directory)
    accelerator.init_trackers("accelerate")
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Samples(100_000), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    record(accelerator)  # sftriage
    step = 0
    for values, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(values), labels)
            mean_loss = accelerator.gather(loss.detach()).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"loss": mean_loss.item()}, step=step)
            if step % 60 == 59:
                accelerator.save_state(f"{directory}/checkpoint")
            step += 1
            if step == steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], steps=150)
