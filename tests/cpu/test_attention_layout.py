"""Attention and its gradients lie in memory with the rows of all heads together, so that what follows is no copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autopar
from autopar._torch import FakeTensorMode, TorchDispatchMode
from autopar.codegen.decompositions import DECOMPOSITIONS
from autopar.ir import Node, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.layouts import ATTENTION, Layout, results, views_of
from autopar.spmd import local_ranks, simulate_ring
from autopar.spmd.lending import LENDING, balanced_attention, balanced_attention_backward
from autopar.spmd.ring_attention import RING_ATTENTION, ring_attention, ring_attention_backward
from autopar.tracer import ColoTracer
from tests.cpu.test_ops_attention import path  # noqa: F401  a fixture
from tests.models import HEADS, ZOO

OPS = torch.ops.autopar
ORDERS = {"rows together": (0, 2, 1, 3), "heads together": (0, 1, 2, 3), "rows apart": (0, 1, 3, 2)}
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"mask": True},
    "dropout": {"p": 0.3},
    "one head of keys": {"g": 1},
    "one head": {"h": 1, "g": 1},
    "wide values": {"e": 5},
    "keys before the queries": {"is_causal": True, "s": 3, "offset": [0, 0, 3, 0]},
    "one row": {"s": 1},
    "no rows": {"s": 0},
    "no keys": {"t": 0},
}


def laid(order: tuple[int, ...], *shape: int) -> Tensor:
    """Return random values whose dims lie in memory in this order."""
    dense = torch.randn([shape[i] for i in order])
    return dense.permute([order.index(i) for i in range(4)])


def together(x: Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous()


def operands(case, order, dtype, b=2, h=4, g=2, s=6, t=7, d=8, e=8, p=0.0, is_causal=False, mask=False, offset=()):
    given = dict(b=b, h=h, g=g, s=s, t=t, d=d, e=e, p=p, is_causal=is_causal, mask=mask, offset=offset) | case
    b, h, g, s, t, d, e = (given[n] for n in "bhgstde")
    q, k, v = (laid(order, *x).to(dtype) for x in ((b, h, s, d), (b, g, t, d), (b, g, t, e)))
    masked = torch.rand(s, t) < 0.7 if given["mask"] else None
    offset = given["offset"] or [0] * 4
    options = {"is_causal": given["is_causal"], "scale": 0.3, "dropout_p": given["p"], "site": 1}
    seed = torch.tensor(3) if given["p"] else None
    return (q, k, v, masked, seed), {**options, "global_shape": [b, h, offset[2] + s, t], "offset": list(offset)}


def strides(x: Tensor) -> tuple[tuple[int, int], ...]:
    """Return length and stride of each dim that has a stride."""
    return tuple((n, step) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1 and x.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_however_it_is_computed_the_rows_of_all_heads_lie_together(path, case, order, dtype) -> None:  # noqa: F811
    (q, k, v, mask, seed), options = operands(CASES[case], ORDERS[order], dtype)
    out, lse = OPS.attention(q, k, v, mask, seed, **options)
    grad = laid(ORDERS[order], *out.shape).to(dtype)
    args = (grad, q, k, v, mask, out, lse, seed)
    gradients = OPS.attention_backward(*args, **options)
    assert lse.is_contiguous()
    assert all(map(together, (out, *gradients)))
    with FakeTensorMode() as mode:
        fakes = [x if x is None else mode.from_tensor(x) for x in args]
        fake = (*OPS.attention(*fakes[1:5], fakes[7], **options), *OPS.attention_backward(*fakes, **options))
    assert list(map(strides, fake)) == list(map(strides, (out, lse, *gradients)))
    for op, given, made in (("attention", args[1:5], (out, lse)), ("attention_backward", args, gradients)):
        node = Node("x", f"autopar.{op}.default", tuple(Value(f"x{i}") for i in range(3)), ())
        layouts = [Layout(tuple(x.shape), x.stride()) for x in given if x is not None]
        predicted, aliased = results(node, layouts, [tuple(x.shape) for x in made])
        assert not aliased
        for x, layout in zip(made, predicted, strict=True):
            assert strides(x) == strides(torch.empty_strided(layout.shape, layout.strides))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", ["plain", "causal", "keys before the queries"])
def test_so_it_does_where_inductor_takes_it_apart(case, order) -> None:
    (q, k, v, mask, seed), options = operands(CASES[case], ORDERS[order], torch.float32)
    out, lse = DECOMPOSITIONS[OPS.attention.default](q, k, v, mask, seed, **options)
    grad = laid(ORDERS[order], *out.shape)
    gradients = DECOMPOSITIONS[OPS.attention_backward.default](grad, q, k, v, mask, out, lse, seed, **options)
    assert lse.is_contiguous()
    assert all(map(together, (out, *gradients)))


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all keys"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("order", ["rows together", "heads together"])
@pytest.mark.parametrize("lent", [False, True], ids=["ring", "lent rows"])
def test_so_it_does_where_ranks_share_its_work(lent, order, dropout, is_causal) -> None:
    if lent and not is_causal:
        return
    mesh, rows = Mesh((2,)), 8
    whole = {"b": 2, "s": rows, "t": rows, "p": dropout, "is_causal": is_causal}
    (q, k, v, _, seed), options = operands(whole, ORDERS[order], torch.float64)
    expected, lse = OPS.attention(q, k, v, None, seed, **options)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    wanted = OPS.attention_backward(grad, q, k, v, None, expected, lse, seed, **options)
    terms = {"length": rows, "axes": (0,), **({"lent": (0, 2)} if lent else {})}
    forward, backward = (
        (LENDING[balanced_attention], LENDING[balanced_attention_backward])
        if lent
        else (RING_ATTENTION[ring_attention], RING_ATTENTION[ring_attention_backward])
    )
    halves = [slice(0, 4), slice(4, 8)]

    def cut(x: Tensor, rank: int, keys: bool = False) -> Tensor:
        return x if keys and lent else x[:, :, halves[rank]]

    placed = [{**options, **terms, "offset": [0, 0, 4 * r, 0]} for r in range(2)]
    ranks = local_ranks(mesh)
    calls = [((cut(q, r), cut(k, r, True), cut(v, r, True), None, seed), placed[r]) for r in range(2)]
    made = simulate_ring(forward, ranks, calls)
    torch.testing.assert_close(torch.cat([m[0] for m in made], 2), expected)
    calls = [
        (
            (cut(grad, r), cut(q, r), cut(k, r, True), cut(v, r, True), None, *made[r], seed),
            placed[r],
        )
        for r in range(2)
    ]
    found = simulate_ring(backward, ranks, calls)
    torch.testing.assert_close(torch.cat([f[0] for f in found], 2), wanted[0])
    for i in (1, 2):
        parts = [f[i] for f in found]
        torch.testing.assert_close(parts[0] + parts[1] if lent else torch.cat(parts, 2), wanted[i])
    assert all(m[1].is_contiguous() for m in made)
    assert all(map(together, [m[0] for m in made] + [x for f in found for x in f]))


VIEWS = {"aten.transpose", "aten.permute", "aten.view", "aten.reshape", "aten._unsafe_view"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_a_plan_views_what_attention_gives(name) -> None:
    graph = ColoTracer().capture(*ZOO[name].made(torch.float32)).graph
    views, followed = views_of(graph, whole=True), 0
    made = {n.name for n in graph.nodes if n.packet in ATTENTION}
    for node in graph.nodes:
        if node.packet in VIEWS and node.inputs[0].node in made:
            assert node.name in views, node
            made.add(node.name)
            followed += 1
    assert followed >= 8


class Copies(TorchDispatchMode):
    """The shapes of tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.clone.default, torch.ops.aten.contiguous.default):
            self.found.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_program_copies_nothing_that_attention_gives(name) -> None:
    model, inputs = ZOO[name].made(torch.float32)
    plan = autopar.plan(model, inputs, mesh=(1,), cluster="cpu-2")
    with Copies() as copies:
        autopar.simulate(model, inputs, plan=plan)
    assert [shape for shape in copies.found if len(shape) == 4 and HEADS in shape[1:3]] == []
