"""The second demo of Colossal-Auto's documentation: a ResNet trains within a memory budget.

    python examples/integrations/colossal_resnet.py

Colossal-Auto uses activation checkpointing. Here the solver decides for each budget which activations to keep, to
recompute or to offload. The example runs every plan and measures its peak memory; the gradients are the same for all
plans. It needs no GPU and no process group.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import autopar

IMAGES = (8, 3, 32, 32)


def build_model() -> nn.Module:
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
        num_labels=10,
        downsample_in_first_stage=False,
    )
    return ResNetForImageClassification(config)


def main(shares: tuple[float, ...] = (1.0, 0.9, 0.8), *, time_limit: float = 20.0) -> list[tuple[int, int, int, float]]:
    """Return budget, planned and measured peak in bytes, and loss for each share of the peak without a budget."""
    torch.manual_seed(0)
    model = build_model().train()
    inputs = {"pixel_values": torch.randn(IMAGES), "labels": torch.randint(10, IMAGES[:1])}
    asked = dict(mesh=(1,), cluster="cpu-2", optimizer="sgd", time_limit=time_limit)
    free = autopar.plan(model, inputs, **asked)
    rows = []
    print(f"{'budget':>12} {'planned':>12} {'measured':>12} {'recomputed':>10} {'offloaded':>9} {'step':>9}  loss")
    for share in shares:
        budget = int(free.peak_memory * share)
        plan = autopar.plan(model, inputs, memory_budget=budget, **asked) if share < 1 else free
        found = autopar.simulate(model, inputs, plan=plan)
        actions = [a.action for a in plan.activations.values()]
        loss = float(found.outputs.loss)
        print(
            f"{budget:12,} {plan.peak_memory:12,} {found.peak_memory:12,} {actions.count('recompute'):10} "
            f"{actions.count('offload'):9} {plan.step_time * 1e3:6.2f} ms  {loss:.6f}"
        )
        rows.append((budget, plan.peak_memory, found.peak_memory, loss))
    return rows


if __name__ == "__main__":
    main()
