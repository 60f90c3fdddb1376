"""torch.compile next to autopar: Inductor compiles a plain part of the model that reads the parallel part.

    torchrun --nproc-per-node 2 examples/integrations/compiled_parts.py

autopar compiles the model that you give it. Everything outside that model, such as the head and the loss here, is
ordinary PyTorch, and you can use torch.compile on it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchrun_script import batch

import autopar


def main(steps: int = 6, backend: str = "inductor") -> list[float]:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128))
    body = autopar.autoparallelize(body, torch.empty(64, 32), cluster="cpu-2")
    head = nn.Linear(128, 10)  # the same seed and data keep it equal on all ranks

    @torch.compile(backend=backend)
    def loss_of(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(features), labels)

    optimizer = torch.optim.AdamW([{"params": body.parameters()}, {"params": head.parameters()}], lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = loss_of(body(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        print(f"first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
