"""``autopar check``: show what works on this machine, then plan a model, simulate all ranks and compare gradients."""

from __future__ import annotations

import argparse
import copy
import logging
import math
from collections.abc import Mapping
from typing import Any

from autopar.cli import models, surroundings
from autopar.cli.plan import constraints_of, mesh_of

TOLERANCE = 1e-5
"""Largest accepted relative difference in float64; some models compute norms in float32 whatever their dtype."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "examples:\n  autopar check\n  autopar check gpt2 --layers 1 --mesh 2,2\n\n"
        "Lists torch, solvers, devices, links, libraries. Then plans a model, by default a small one, on the mesh,\n"
        "runs all ranks in this process, and compares each gradient with that of a single device.\n"
    )
    models.add_arguments(parser, required=False)
    parser.set_defaults(batch=4, sequence=32)
    parser.add_argument("--mesh", metavar="N,M", default="2,2", help="shape of the mesh (default 2,2)")
    parser.add_argument(
        "--cluster", metavar="NAME", default="cpu-2", help="cluster whose costs the plan is made for (default cpu-2)"
    )
    parser.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar="GLOB=SPEC",
        help="force the spec of a tensor; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    import torch

    from autopar import api

    print(surroundings.text() + "\n")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, inputs = models.load_model(arguments, meta=False) if arguments.model else _small_model()
    model, inputs = model.double(), _to_double(inputs)
    expected = _on_one_device(copy.deepcopy(model), inputs)
    mesh, constraints = mesh_of(arguments.mesh), constraints_of(arguments.constraint)
    plan = api.plan(model, inputs, mesh=mesh, cluster=arguments.cluster, constraints=constraints)
    found = api.simulate(model, inputs, plan=plan)
    worst, name = max(_differences(found.grads, expected))
    print(f"{plan.model} on mesh {plan.mesh}: {len(plan.collectives)} collectives, {len(expected)} gradients compared")
    print(f"largest relative difference {worst:.2g}, in {name}")
    print(f"peak memory {found.peak_memory:,} B measured, {plan.peak_memory:,} B planned")
    if worst <= TOLERANCE:
        print("The planned program computes what the model computes.")
        return 0
    print(f"The planned program differs by more than {TOLERANCE:g}. Set dropout to 0: ranks draw other numbers.")
    return 1


def _small_model() -> tuple[Any, Any]:
    import torch
    from torch import nn

    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)), (torch.randn(8, 16),)


def _to_double(inputs: Any) -> Any:
    import torch

    if isinstance(inputs, torch.Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {k: _to_double(v) for k, v in inputs.items()}
    return tuple(map(_to_double, inputs))


def _on_one_device(model: Any, inputs: Any) -> dict[str, Any]:
    """Return the gradients of the loss by parameter name, or of the sum of the output if there is no loss."""
    import torch

    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    out = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    loss = getattr(out, "loss", None)
    (out.sum() if loss is None else loss).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Return each parameter's largest difference, relative to its largest gradient.

    A tensor whose gradients are all small is compared with a thousandth of the largest gradient of the model.
    """
    largest = max((float(g.abs().max()) for g in expected.values()), default=0.0)

    def difference(name: str) -> float:
        if name not in found:
            return math.inf
        scale = max(float(expected[name].abs().max()), 1e-3 * largest, 1e-300)
        return float((found[name].reshape(expected[name].shape) - expected[name]).abs().max()) / scale

    return [(difference(name), name) for name in expected]
