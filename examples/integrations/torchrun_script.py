"""An ordinary training script for torchrun: one line makes the model parallel, and the loop stays the same.

torchrun --nproc-per-node 2 examples/integrations/torchrun_script.py --steps 20
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import autopar


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch, the same on every rank; a label is the index of the largest of ten sums."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return x, x.reshape(64, -1, 2)[:, :10].sum(-1).argmax(-1)


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = autopar.autoparallelize(build_model(), torch.empty(64, 32), cluster="cpu-2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        print(f"first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
        print(model.compare_with_prediction(5))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
    dist.destroy_process_group()
