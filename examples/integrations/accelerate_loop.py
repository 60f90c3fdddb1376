"""Hugging Face Accelerate: its loop and its launcher around a parallel model.

    accelerate launch --cpu --num_processes 2 examples/integrations/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/integrations/accelerate_loop.py

Accelerate gives every rank its own samples, so the plan is made with batch="local". prepare() takes a parallel model
as it is, and wraps it in nothing. Save with Booster or torch.distributed.checkpoint: Accelerate's own save_model takes
no DTensors.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchrun_script import build_model

import autopar
from autopar.training import Booster


def data() -> TensorDataset:
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.reshape(256, -1, 2)[:, :10].sum(-1).argmax(-1))


def main(folder: str | None = None, epochs: int = 2) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    loader = DataLoader(data(), batch_size=32)  # of each rank
    model = autopar.autoparallelize(build_model(), torch.empty(32, 32), batch="local", cluster="cpu-2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    accelerator.print(f"first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
    if folder is not None:
        Booster().save_model(model, Path(folder) / "model.safetensors")  # whole tensors, a parameter at a time
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    main(tempfile.mkdtemp(), parser.parse_args().epochs)
    torch.distributed.destroy_process_group()
