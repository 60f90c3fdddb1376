"""Hugging Face Accelerate: train a parallel model with its loop and its launcher.

    accelerate launch --cpu --num_processes 2 examples/integrations/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/integrations/accelerate_loop.py

Accelerate gives every rank its own samples, so the plan uses batch="local". prepare() accepts a parallel model and does
not wrap it. Metrics, save_state, load_state and save_model are Accelerate's own.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchrun_script import build_model

import autopar


def data() -> TensorDataset:
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.reshape(256, -1, 2)[:, :10].sum(-1).argmax(-1))


def accuracy(accelerator: Any, model: nn.Module, loader: Any) -> float:
    right = samples = 0
    model.eval()
    for x, y in loader:
        with torch.no_grad():
            best = model(x).argmax(-1)
        best, y = accelerator.gather_for_metrics((best, y))
        right, samples = right + int((best == y).sum()), samples + len(y)
    model.train()
    assert samples == len(loader.dataset)
    return right / samples


def main(folder: str, epochs: int = 2) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    samples = data()
    loader = DataLoader(samples, batch_size=32)  # per rank
    held_out = DataLoader(Subset(samples, range(75)), batch_size=16)
    model = autopar.autoparallelize(build_model(), torch.empty(32, 32), batch="local", cluster="cpu-2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    losses: list[float] = []

    def epoch() -> None:
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))

    for _ in range(epochs - 1):
        epoch()
    accelerator.save_state(folder)
    epoch()
    accelerator.load_state(folder)  # as a restarted run would
    epoch()
    assert losses[-len(loader) :] == losses[-2 * len(loader) : -len(loader)]
    found = accuracy(accelerator, model, held_out)
    accelerator.print(f"first loss {losses[0]:.4f}, last {losses[-1]:.4f}, accuracy {found:.4f}")
    accelerator.save_model(model, folder)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/autopar-accelerate")  # the same on every rank
    options = parser.parse_args()
    main(options.folder, options.epochs)
    torch.distributed.destroy_process_group()
