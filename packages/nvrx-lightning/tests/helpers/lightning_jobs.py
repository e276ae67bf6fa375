# SPDX-License-Identifier: Apache-2.0
"""A small Lightning training on CPU, and a trainer of one rank for it."""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class SmallModule(LightningModule):
    """Linear regression; `at_step` is called with the number of each training step."""

    def __init__(self, at_step=None, validates=True):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.at_step = at_step
        if not validates:
            self.val_dataloader = None

    def training_step(self, batch):
        if self.at_step is not None:
            self.at_step(self.trainer.global_step)
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return _loader()

    def val_dataloader(self):
        return _loader()


def _loader():
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(40, 4, generator=generator)), batch_size=2)


def trainer(directory, callbacks, **options):
    """Return a trainer of one gloo rank that saves a checkpoint every second step."""
    saver = ModelCheckpoint(directory / "ckpt", every_n_train_steps=2, save_top_k=-1)
    options = {"max_steps": 6, "val_check_interval": 4, "limit_val_batches": 2, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy="ddp",
        logger=False,
        default_root_dir=os.fspath(directory),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver, *callbacks],
        **options,
    )
