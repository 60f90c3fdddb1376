"""Mixed precision: the plan's own autocast, torch's autocast around the call, and torch's GradScaler.

torchrun --nproc-per-node 2 examples/integrations/amp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchrun_script import batch, build_model

import autopar


def train(precision: str, steps: int) -> list[float]:
    """Train in one of three ways and return the losses.

    ``"planned"`` puts the casts into the plan, ``"autocast"`` uses torch's autocast around the call, and ``"scaled"``
    uses torch's GradScaler, with which all ranks take the same decisions.
    """
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "scaled", init_scale=1024.0)
    around = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast")
    with around:  # capture and call must run under the same autocast
        planned = "bf16" if precision == "planned" else None
        model = autopar.autoparallelize(build_model(), torch.empty(64, 32), cluster="cpu-2", mixed_precision=planned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        with around:
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main(steps: int = 8) -> dict[str, list[float]]:
    losses = {precision: train(precision, steps) for precision in ("planned", "autocast", "scaled")}
    if dist.get_rank() == 0:
        for precision, found in losses.items():
            print(f"{precision:<9} first loss {found[0]:.4f}, last {found[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
