"""PyTorch Lightning: a LightningModule whose network is parallel.

    torchrun --nproc-per-node 2 examples/integrations/lightning_module.py

`configure_model` makes the network parallel, once Lightning's processes are there. The strategy leaves the model as it
is and writes one file with whole tensors; each rank passes its own samples, so the plan is made with batch="local".
"""

from __future__ import annotations

import argparse
import os
import tempfile

import lightning
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchrun_script import build_model

import autopar


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = build_model()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not hasattr(self.network, "plan"):
            self.network = autopar.autoparallelize(
                self.network, torch.empty(32, 32), batch="local", cluster="cpu-2"
            )

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint) -> None:
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in checkpoint["state_dict"].items()}
        checkpoint["state_dict"] = whole


class Parallel(SingleDeviceStrategy):
    """A rank's own device; the collectives are in the program, so Lightning has none to do."""

    @property
    def is_global_zero(self) -> bool:
        return int(os.environ.get("RANK", "0")) == 0


def main(folder: str, epochs: int = 2) -> list[float]:
    from accelerate_loop import data

    autopar.launch_from_torch()
    lightning.seed_everything(0, verbose=False)
    samples = data()
    sampler = DistributedSampler(samples, shuffle=False)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    trainer = lightning.Trainer(
        strategy=Parallel(torch.device(device)), max_epochs=epochs, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    net = Net()
    trainer.fit(net, DataLoader(samples, batch_size=32, sampler=sampler))
    return net.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    losses = main(tempfile.mkdtemp(), parser.parse_args().epochs)
    if torch.distributed.get_rank() == 0:
        print(f"first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
    torch.distributed.destroy_process_group()
