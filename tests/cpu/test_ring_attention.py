"""Attention whose queries, keys and values are all cut by their sequence: blocks go round, and it equals one device."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir import Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.problem import specs
from autopar.program import Op
from autopar.sharding.strategy import ring_axes
from autopar.sharding.zigzag import Block, zigzag
from autopar.strategies import strategies
from tests.cpu import test_context_parallel
from tests.cpu.model_checks import Promoted, assert_equal, eager
from tests.cpu.test_context_parallel import WIDTH, gpt2, llama, made, simulated
from tests.favoured import RING, attention_by, on_rings


def planned(*given: Any) -> autopar.Plan:
    with attention_by(RING):
        return test_context_parallel.planned(*given)


def rings(plan: autopar.Plan) -> list[Op]:
    return on_rings(plan.program)


@pytest.mark.parametrize(
    ("build", "mesh", "tokens", "search"),
    [
        (llama, (2,), 16, "CP"),
        (llama, (4,), 30, "CP"),
        (gpt2, (2, 2), 25, "CP"),
        (llama, (2, 2), 24, "FSDP x CP"),
        pytest.param(gpt2, (3,), 61, "CP", marks=pytest.mark.slow),
        pytest.param(llama, (2, 4), 64, "CP", marks=pytest.mark.slow),
        pytest.param(gpt2, (8,), 61, "CP", marks=pytest.mark.slow),
    ],
)
def test_a_model_whose_attention_runs_on_a_ring_equals_one_device(build, mesh, tokens, search) -> None:
    model, inputs = made(build, tokens, rows=2)
    with Promoted():
        expected = eager(model, inputs)
    plan = planned(model, inputs, mesh, search)
    axes = tuple(range(len(mesh))) if search == "CP" else (1,)
    assert [ring_axes(op.strategy) for op in rings(plan)] == [axes] * 4
    found, peak = simulated(model, inputs, plan)
    assert_equal(found, expected, 1e-9)
    assert peak <= plan.peak_memory


def test_dropout_on_a_ring_is_that_of_one_device() -> None:
    model, inputs = made(llama, 32, dropout=0.3)
    with Promoted():
        whole = autopar.plan(model, inputs, mesh=(1,), cluster="dgx-h100")
    cut = planned(model, inputs, (4,))
    assert rings(cut)
    assert_equal(simulated(model, inputs, cut)[0], simulated(model, inputs, whole)[0], 1e-9)


class Documents(nn.Module):
    """Attention in which a token reads those of its own document alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4)
        allowed = document[:, None, :, None] == document[:, None, None, :]
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return out.square().mean()


def test_packed_documents_on_a_ring_are_those_of_one_device() -> None:
    torch.manual_seed(0)
    model = Documents().double()
    document = torch.tensor([0] * 5 + [1] * 2 + [2] * 17).expand(2, 24)
    inputs = {"x": torch.randn(2, 24, 16).double(), "document": document}
    with Promoted():
        with attention_by(RING):
            plan = autopar.plan(model, inputs, mesh=(3,), cluster="dgx-h100")
        assert len(rings(plan)) == 2
        found = autopar.simulate(model, inputs, plan=plan)
        expected = eager(model, inputs)
    assert found.peak_memory <= plan.peak_memory
    for name, grad in expected.grads.items():
        torch.testing.assert_close(found.grads[name], grad, rtol=0, atol=1e-12)


def pairs(rows: Block, keys: Block) -> int:
    """Return the pairs of queries and keys that causal attention has between two blocks."""
    return sum(
        max(0, min(a.start + i + 1, b.start + b.length) - b.start)
        for a, b in product(rows.parts, keys.parts)
        for i in range(a.length)
    )


@pytest.mark.parametrize("ways", [2, 3, 8, 16])
def test_every_rank_does_the_same_for_every_block(ways: int) -> None:
    n = 64 * ways
    blocks = zigzag(n, (0,), Mesh((ways,)))
    for distance in range(ways):
        work = [pairs(blocks[i], blocks[(i - distance) % ways]) for i in range(ways)]
        assert max(work) <= 1.05 * min(work)
    assert sum(pairs(a, b) for a in blocks for b in blocks) == n * (n + 1) // 2


@pytest.mark.parametrize(("rows", "listed"), [(2 * specs.MIN_RING_ROWS - 2, False), (2 * specs.MIN_RING_ROWS, True)])
def test_blocks_of_few_rows_do_not_go_round(rows, listed) -> None:
    q = k = TensorMeta((1, 2, rows, 8), "float32")
    node = Node(
        "attention",
        "autopar.attention.default",
        (Value("q"), Value("k"), Value("v")),
        (("is_causal", True), ("scale", 1.0)),
        (q, TensorMeta((1, 2, rows), "float32")),
    )
    every = strategies(node, (q, k, k), Mesh((2,)))
    kept = specs.without_short_rings(every, (q, k, k), Mesh((2,)))
    assert any(map(ring_axes, every))
    assert any(map(ring_axes, kept)) == listed
    assert [o for o in kept if not ring_axes(o)] == [o for o in every if not ring_axes(o)]


def test_a_plan_says_what_goes_round_and_is_saved_and_read() -> None:
    model, inputs = made(llama, 32)
    plan = planned(model, inputs, (4,))
    again = autopar.Plan.from_json(plan.to_json())
    assert again.program == plan.program
    assert again.digest == plan.digest
    assert "self_attn_attention_lse = spmd.ring_attention(" in plan.source.replace("\n", " ")
    assert "spmd.ring_attention_backward(" in plan.source
    itemsize, head = 8, 8
    shard = 8 * head * itemsize
    each = {op.node: [s.bytes for s in op.sent] for op in rings(plan)}
    keys, queries, lse = 2 * shard, 4 * shard, 4 * 8 * itemsize
    assert each["attention"] == [queries + keys, 3 * keys, queries + lse]
    assert each["attention_backward"] == [3 * queries + keys + lse, 6 * keys, queries + keys]
    assert_equal(simulated(model, inputs, again)[0], simulated(model, inputs, plan)[0], 0.0)


def test_less_is_held_than_where_keys_are_whole() -> None:
    model, inputs = made(llama, 2048)
    on_ring, whole = planned(model, inputs, (8,)), test_context_parallel.planned(model, inputs, (8,))
    assert len(rings(on_ring)) == 4
    assert not rings(whole)
    keys_and_values = 2 * 2048 * WIDTH // 4 * 8
    assert on_ring.peak_memory < whole.peak_memory - keys_and_values / 2
