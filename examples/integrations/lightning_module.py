"""PyTorch Lightning: a LightningModule whose network is parallel.

    torchrun --nproc-per-node 2 examples/integrations/lightning_module.py

`configure_model` makes the network parallel once Lightning has started its processes. The strategy does not wrap the
model. Each rank passes its own samples, so the plan uses batch="local". Checkpoints hold whole tensors.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchrun_script import build_model

import autopar
from autopar.training.lightning_strategy import AutoparStrategy


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = build_model()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self.network, "plan"):
            self.network = autopar.autoparallelize(self.network, torch.empty(32, 32), batch="local", cluster="cpu-2")

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.network(x).argmax(-1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str, epochs: int = 2, resume: str | None = None) -> tuple[list[float], float]:
    from accelerate_loop import data

    lightning.seed_everything(0, verbose=False)
    best = ModelCheckpoint(monitor="accuracy", mode="max", save_last=True)
    trainer = lightning.Trainer(
        strategy=AutoparStrategy(),
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        callbacks=[best],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net()
    loaders = DataLoader(data(), batch_size=32), DataLoader(data(), batch_size=32)
    trainer.fit(net, *loaders, ckpt_path=resume)
    found = trainer.validate(net, loaders[1], ckpt_path="best", verbose=False)
    return net.losses, found[0]["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/autopar-lightning")  # the same on every rank
    parser.add_argument("--resume", default=None, help="a checkpoint")
    options = parser.parse_args()
    losses, accuracy = main(options.folder, options.epochs, options.resume)
    if torch.distributed.get_rank() == 0:
        print(f"first loss {losses[0]:.4f}, last {losses[-1]:.4f}, accuracy {accuracy:.4f}")
    torch.distributed.destroy_process_group()
