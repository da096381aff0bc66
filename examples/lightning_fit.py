"""A small classifier, trained by Lightning under DDP: gradients accumulated, validation, checkpoints."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from sftriage.integrations.lightning import SftriageCallback


class Samples(Dataset):
    """Vectors and their classes, drawn anew from their index."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        values = torch.randn(64, generator=torch.Generator().manual_seed(index))
        return values, (values.sum() > 0).long()


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 2))

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(directory, steps):
    torch.set_num_threads(1)
    callbacks = [ModelCheckpoint(every_n_train_steps=60)]
    callbacks.append(SftriageCallback())
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=steps,
        accumulate_grad_batches=2,
        val_check_interval=80,
        limit_val_batches=4,
        log_every_n_steps=10,
        callbacks=callbacks,
        logger=TensorBoardLogger(directory),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(Samples(100_000), batch_size=8), DataLoader(Samples(64), batch_size=8))


if __name__ == "__main__":
    main(sys.argv[1], steps=150)
