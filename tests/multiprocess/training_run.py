"""A training script for torchrun in which a rank can fail: ``FAULT=kill:1:4`` kills rank 1 before step 4.

It fails only once: a file beside the checkpoints records the failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar.training import AutoParallelPlugin, Booster, Checkpointer, DistCoordinator, guarded, watchdog
from tests.multiprocess.training_models import Mlp


def maybe_fail(folder: Path, rank: int, step: int) -> None:
    kind, failing, at = os.environ.get("FAULT", "none:0:-1").split(":")
    once = folder / "failed"
    if (rank, step) != (int(failing), int(at)) or once.exists():
        return
    once.touch()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    raise ValueError("the first error of all")


@guarded
def main() -> None:
    timeout_s = float(os.environ.get("TIMEOUT", "60"))
    torch.set_num_threads(1)
    autopar.launch_from_torch(seed=1, verbose=False, timeout_s=timeout_s)
    trained(Path(sys.argv[1]), int(sys.argv[2]), timeout_s)


def trained(folder: Path, steps: int, timeout_s: float = 60.0) -> dict[int, float]:
    """Train from the last checkpoint on, in a launched and seeded job, and return the losses by step."""
    warnings.simplefilter("ignore")
    checkpointer = Checkpointer(folder, timeout_s=timeout_s)
    chosen = {"plan": plan} if (plan := checkpointer.plan()) else {"mesh": (dist.get_world_size(),)}
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    booster = Booster(AutoParallelPlugin((torch.empty(4, 8),), **chosen))
    model, optimizer, *_ = booster.boost(model, optimizer)
    resumed = checkpointer.load(model, optimizer)
    coordinator, losses = DistCoordinator(), {}
    with watchdog(120.0) as beat:
        for step in range(resumed.step if resumed else 0, steps):
            maybe_fail(folder, coordinator.rank, step)
            loss = model(torch.randn(4, 8)).square().mean()
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step + 1, model, optimizer)
            losses[step] = float(loss.detach())
            said = {"step": step, "loss": losses[step], "ranks": coordinator.world_size}
            coordinator.print_on_master("LOSS " + json.dumps(said))
            beat()
    checkpointer.wait()
    return losses


if __name__ == "__main__":
    main()
