"""The first demo of Colossal-Auto's documentation: GPT-2 with hybrid SPMD parallelism chosen by the solver.

    torchrun --nproc-per-node 4 examples/integrations/colossal_gpt.py

Colossal-Auto calls ``gm = autoparallelize(model, meta_inputs)``. This example makes the same call on a two-dimensional
mesh, prints the plan, and compares the losses with those of one device.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar


def build_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=96,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        ids = torch.randint(96, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main(steps: int = 5) -> tuple[list[float], list[float]]:
    """Return the losses of the parallel model and of one device."""
    torch.manual_seed(0)
    model = build_model()
    plain = copy.deepcopy(model)
    world = dist.get_world_size()
    mesh = (2, world // 2) if world % 2 == 0 else (world,)
    meta_inputs = {name: torch.empty(4, 32, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    # without constraints the plan would replicate so small a model; these ask for Megatron's tensor parallelism
    cut = {"transformer.h.*.mlp.c_fc.weight": "column", "transformer.h.*.mlp.c_proj.weight": "row"}
    model = autopar.autoparallelize(model, meta_inputs, mesh=mesh, constraints=cut)
    if dist.get_rank() == 0:
        print(model.plan)
    return train(model, steps), train(plain, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    autopar.launch_from_torch()
    ours, plain = main(steps)
    if dist.get_rank() == 0:
        for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
            print(f"step {step}  loss {a:.6f}, on one device {b:.6f}")
    dist.destroy_process_group()
