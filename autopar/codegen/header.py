"""The docstring of an emitted program."""

from __future__ import annotations

import sys

from autopar.plans import Plan


def header(plan: Plan) -> list[str]:
    """Return the lines of the program's docstring: model, mesh, plan, and the plan's predictions."""
    sent = sum(c.bytes for c in plan.collectives)
    axes = enumerate(zip(plan.mesh.shape, plan.mesh.names, strict=True))
    names = ", ".join(f"axis {i} of {n}" + f" {name!r}" * (name != str(i)) for i, (n, name) in axes)
    return [
        f"{plan.model} on mesh {plan.mesh}: the program that every rank runs.",
        "",
        f"plan       {plan.digest}, for graph {plan.graph_digest}",
        f"autopar    {sys.modules['autopar'].__version__}",
        f"mesh       {names}",
        f"cluster    {plan.cluster}",
        f"predicted  {plan.step_time * 1e3:.3f} ms for forward and backward, peak memory {plan.peak_memory:,} bytes;",
        f"           {len(plan.collectives)} collectives of {sent:,} bytes",
        "",
        "Comments show dtype and local shape on rank 0, and for a sharded tensor its spec and global shape:",
        "S0R is cut along dim 0 by mesh axis 0, P1 is a partial sum over axis 1. Names are module paths of the model,",
        "and d_ marks a gradient. Functions empty their input lists, so every tensor is freed after its last use.",
    ]
