"""Attention whose work ranks share, by the kernels of a GPU: rows that they lend, and keys that they pass round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar.ops  # noqa: F401  registers attention
from autopar import spmd
from autopar.mesh import Mesh
from autopar.sharding.loan import loan

DEVICE = "cuda"
WAYS, ROWS = 4, 512


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients in double precision."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in wide[1:])
    out = torch.nn.functional.scaled_dot_product_attention(wide[0], keys, values, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, wide, grad.double())]


@pytest.mark.parametrize("passed_round", [False, True], ids=["rows lent", "keys passed round"])
def test_ranks_that_share_attention_get_what_one_gets(passed_round: bool) -> None:
    torch.manual_seed(0)
    mesh = Mesh((WAYS,))
    q, k, v = (torch.randn(2, heads, ROWS, 64, device=DEVICE).bfloat16() for heads in (8, 2, 2))
    grad = torch.randn_like(q)
    terms: dict[str, Any] = {"length": ROWS, "axes": [0], "is_causal": True, "scale": 64**-0.5}
    if not passed_round:
        lent = loan(ROWS, (0,), mesh)
        assert lent is not None
        terms["lent"] = lent.lent
    names = ("ring_attention", "ring_attention_backward")
    forward, backward = (getattr(spmd, n if passed_round else n.replace("ring", "balanced")) for n in names)

    def run(function: Any, *operands: Any) -> list[Any]:
        calls = [([None if x is None else x[r] for x in operands], terms) for r in range(WAYS)]
        return spmd.simulate_ring(spmd.RINGS[function], spmd.local_ranks(mesh), calls)

    def cut(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.contiguous() for part in x.chunk(WAYS, 2))

    keys, values = (cut(x) if passed_round else (x,) * WAYS for x in (k, v))
    made = run(forward, cut(q), keys, values)
    outs, logs = ([m[i] for m in made] for i in (0, 1))
    found = run(backward, cut(grad), cut(q), keys, values, None, outs, logs)
    dq = torch.cat([f[0] for f in found], 2)
    dk, dv = (torch.cat([f[i] for f in found], 2) if passed_round else sum(f[i].float() for f in found) for i in (1, 2))
    for mine, wanted in zip((torch.cat(outs, 2), dq, dk, dv), exact(q, k, v, grad), strict=True):
        error = (mine.double() - wanted).norm() / wanted.norm()
        assert error < 0.01, float(error)
