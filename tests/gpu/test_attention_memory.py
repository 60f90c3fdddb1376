"""What attention holds on a GPU while it runs, beside what the planner counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pulp", reason="the planner needs pulp, which this Python lacks")

import autopar.ops  # noqa: F401  registers attention
from autopar.mesh import Mesh
from autopar.planner.footprint import transients_of_attention as counted
from autopar.planner.footprint.layouts import Layout
from autopar.planner.footprint.local_op import LocalOp
from autopar.sharding import Strategy

MIB = 1 << 20


def laid(shape: tuple[int, ...], by_rows: bool) -> torch.Tensor:
    """Return [b, h, s, d], of which rows of all heads lie together if ``by_rows``, as models make them."""
    b, h, s, d = shape
    made = torch.randn((b, s, h, d) if by_rows else shape, device="cuda").bfloat16()
    return made.transpose(1, 2) if by_rows else made


def layout(x: torch.Tensor) -> tuple[Layout, int]:
    return Layout(tuple(x.shape), x.stride()), x.element_size()


def held(function: Any) -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that a call holds at most besides its results, which come too."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = list(function())
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    return most - sum(t.numel() * t.element_size() for t in results), results


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows together", "heads together"])
@pytest.mark.parametrize(
    ("shape", "g"),
    [
        ((4, 32, 2048, 64), 4),
        ((2, 16, 2048, 128), 16),
        ((1, 8, 8192, 80), 2),
        ((1, 4, 512, 64), 4),
        ((1, 2, 64, 256), 1),
    ],
    ids=str,
)
def test_the_flash_kernel_holds_what_is_counted(shape, g, by_rows) -> None:
    b, h, s, d = shape
    q, k, v = (laid((b, n, s, d), by_rows) for n in (h, g, g))
    options = {"is_causal": True, "scale": d**-0.5, "dropout_p": 0.0, "site": 1, "global_shape": [b, h, s, s]}
    options |= {"offset": [0, 0, 0, 0]}
    node: Any = SimpleNamespace(kwarg=options.get, args=())

    def predicted(operands: list[torch.Tensor], results: list[torch.Tensor], formula: Any) -> int:
        rest: Any = (Strategy((), ()), Mesh((1,)), (0,))
        return formula(
            LocalOp(node, (), tuple(map(layout, operands)), tuple(map(layout, results)), "cuda", *rest), True
        )

    ops = torch.ops.autopar
    ops.attention(q, k, v, None, None, **options)
    forward, (out, lse) = held(lambda: ops.attention(q, k, v, None, None, **options))
    grad = torch.randn_like(out)
    ops.attention_backward(grad, q, k, v, None, out, lse, None, **options)
    backward, made = held(lambda: ops.attention_backward(grad, q, k, v, None, out, lse, None, **options))
    for found, wanted in (
        (forward, predicted([q, k, v], [out, lse], counted._attention_in_blocks)),
        (backward, predicted([grad, q, k, v, out, lse], made, counted._backward_in_blocks)),
    ):
        assert found <= wanted + MIB
        assert wanted <= 1.03 * found + 32 * MIB
