"""torch.distributed.checkpoint: save under one plan, load under another and on one device; also write safetensors.

torchrun --nproc-per-node 2 examples/integrations/checkpoints.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchrun_script import batch, build_model

import autopar
from autopar.training import Booster


def parallel(cut: dict[str, str]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = autopar.autoparallelize(build_model(), torch.empty(64, 32), mesh=(dist.get_world_size(),), constraints=cut)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x, y = batch(number)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def main(folder: str) -> dict[str, float]:
    """Return the loss of the next step for the saved model and for each model that loads it."""
    torch.manual_seed(0)
    model, optimizer = parallel({"*.weight": "shard"})
    for number in range(3):
        step(model, optimizer, number)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{folder}/dcp")
    Booster().save_model(model, Path(folder) / "model.safetensors")  # whole tensors, for other programs
    found = {"saved": step(model, optimizer, 3)}

    other, its_optimizer = parallel({"0.weight": "RS0", "3.weight": "replicate"})  # another plan
    states = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(states, checkpoint_id=f"{folder}/dcp")
    set_state_dict(other, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    found["another plan"] = step(other, its_optimizer, 3)

    plain = build_model()  # one device
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    states = dict(zip(("model", "optimizer"), get_state_dict(plain, plain_optimizer), strict=True))
    dcp.load(states, checkpoint_id=f"{folder}/dcp")
    set_state_dict(plain, plain_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    found["plain"] = step(plain, plain_optimizer, 3)

    from safetensors.torch import load_file

    dist.barrier()
    read = build_model()
    read.load_state_dict(load_file(f"{folder}/model.safetensors"))
    x, y = batch(3)
    found["safetensors"] = float(nn.functional.cross_entropy(read(x), y).detach())
    if dist.get_rank() == 0:
        for name, loss in found.items():
            print(f"{name:<13} loss of the next step {loss:.6f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="a folder that all ranks see (default: a temporary one)")
    given = parser.parse_args().folder
    autopar.launch_from_torch()
    box = [given or tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    main(box[0])
    dist.destroy_process_group()
