"""What attention is counted to hold on a GPU, against what an H200 held (torch 2.11, 27 November 2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.ir import Node
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint import transients_of_attention as counted
from autopar.planner.footprint.layouts import by_rows as rows_together
from autopar.planner.footprint.layouts import contiguous
from autopar.planner.footprint.local_op import LocalOp
from autopar.sharding import Strategy

ROUNDING = 1024
"""Bytes by which the allocator rounded two seeds up."""


def gradient(
    shape: tuple[int, int, int, int], g: int, device: str = "cuda", by_rows: bool = False, **kwargs: Any
) -> LocalOp:
    """Return the gradient of causal attention in half precision: ``g`` heads of keys, operands contiguous unless the
    rows of all heads lie together."""
    b, h, s, d = shape
    options = {"is_causal": True, "dropout_p": 0.0} | kwargs
    node = Node("a", "autopar.attention_backward", (), tuple(options.items()), ())
    own, shared = ((contiguous((b, n, s, d)), 2) for n in (h, g))
    laid, keys = ((rows_together((b, n, s, d)) if by_rows else contiguous((b, n, s, d)), 2) for n in (h, g))
    operands = (own, laid, keys, keys, own, (contiguous((b, h, s)), 4))
    return LocalOp(node, (), operands, (own, shared, shared), device, Strategy((), ()), Mesh((1,)), (0,))


@pytest.mark.parametrize("by_rows", [False, True], ids=["heads together", "rows together"])
@pytest.mark.parametrize(
    ("shape", "g", "held"),
    [((4, 32, 2048, 64), 4, 202376192), ((2, 16, 2048, 128), 16, 67372032), ((1, 8, 8192, 80), 2, 67372032)],
    ids=str,
)
def test_the_gradient_holds_what_a_gpu_held(shape, g, held, by_rows) -> None:
    assert 0 <= held - counted._backward_in_blocks(gradient(shape, g, by_rows=by_rows)) <= ROUNDING


@pytest.mark.parametrize(
    "other",
    [{"device": "cuda without flash"}, {"dropout_p": 0.1}],
    ids=["a GPU without flash attention", "dropout"],
)
def test_where_the_flash_kernel_is_not_used_the_formulas_hold_scores(other) -> None:
    shape, held = (4, 32, 2048, 64), counted._backward_in_blocks
    assert held(gradient(shape, 4, **other)) > 4 * held(gradient(shape, 4))


def test_causal_queries_that_do_not_end_with_the_last_key_are_left_to_the_formulas() -> None:
    op = gradient((4, 32, 2048, 64), 4)
    assert counted._backward_in_blocks(op, ends_alike=False) > counted._backward_in_blocks(op)
    free = replace(op, node=replace(op.node, kwargs=()))
    assert counted._backward_in_blocks(free, ends_alike=False) == counted._backward_in_blocks(op)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("dgx-h100", "cuda"),
        ("dgx-a100", "cuda"),
        ("mi300x", "cuda"),
        ("p3.16xlarge", "cuda without flash"),
        ("cpu-2", "cpu"),
    ],
)
def test_a_device_says_whose_kernels_run(name, kernels) -> None:
    assert Cluster.load(name).device.kernels == kernels
