"""Train a small GPT-2 as a pipeline of two stages, each on two processes, and compare every loss with one process.

    torchrun --nproc-per-node 4 examples/pipeline_gpt2.py

The loop is an ordinary one: the call of the model runs the whole schedule, and ``backward`` hands out the gradients.
Some labels are -100, unevenly over the rows, so a mean of the micro-batches' means would give other losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

STEPS, BATCH, LENGTH = 20, 8, 32
TOLERANCE = 1e-4
"""Relative difference of a loss that rounding explains."""


def build_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(256, (BATCH, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH, (BATCH, 1), generator=generator)
    return {"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < lengths, ids, -100)}


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def main() -> None:
    expected = train(without_dropout(build_model()))
    model = autopar.autoparallelize(
        without_dropout(build_model()),
        batch(0),
        mesh={"pp": 2, "dp": 2},
        pipeline=autopar.Pipeline(micro_batches=4, schedule="1f1b"),
    )
    losses = train(model)
    if dist.get_rank() == 0:
        print(model.plan)
        worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        print(f"largest relative difference of a loss from one process: {worst:.1e}")
        if worst > TOLERANCE:
            raise SystemExit("the losses differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
