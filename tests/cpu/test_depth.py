"""Depth is free: layers of captured models fold, whatever the model, and the folded answer is the whole's optimum."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.memory.points import ProgramPoint, end
from autopar.planner.memory.usages import MemoryUsages
from autopar.planner.options import Options
from autopar.planner.pricing.prices import Prices, costs, edges
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.solver import Problem, evaluate, peak_usage, solve
from autopar.solver.blocks.repetition import find_runs
from autopar.tracer import ColoTracer


def llama(layers: int) -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=4096,
        )
    )


def gpt2(layers: int) -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=layers, n_head=8, n_positions=512))


@cache
def captured(name: str, layers: int) -> Graph:
    with torch.device("meta"):
        model = {"llama": llama, "gpt2": gpt2}[name](layers).bfloat16()
    ids = torch.empty(8, {"llama": 4096, "gpt2": 512}[name], dtype=torch.int64, device="meta")
    return ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).graph


@cache
def problem(name: str, layers: int) -> Problem:
    graph, mesh, options = captured(name, layers), Mesh((8,)), Options()
    decisions = decide(graph, mesh, options, resolve(graph, mesh, {}, {}))
    prices = Prices(mesh, Cluster.load("dgx-h100").sized(8))
    turn = next(i for i, node in enumerate(graph.nodes) if node.phase == "backward" and node.op != "placeholder")
    return Problem(
        costs(decisions, prices),
        edges(decisions, prices),
        MemoryUsages.of(decisions, options).at_points([ProgramPoint(turn), end(graph)]),
    )


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_every_inner_layer_is_a_block(name: str) -> None:
    (run,) = find_runs(problem(name, 8))
    assert len(run.copies) in (6, 7, 8)
    assert run.copies.size > 0.7 * len(problem(name, 8).costs)


@pytest.mark.parametrize("layers", [4, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_graph_knows_its_equal_layers(name: str, layers: int) -> None:
    graph = captured(name, layers)
    attentions = [n.name for n in graph.nodes if n.packet == "autopar.attention"]
    assert [graph.likes.get(a) for a in attentions[1:-2]] == attentions[2:-1]
    for node, like in graph.likes.items():
        a, b = graph.by_name[node], graph.by_name[like]
        assert (a.op, a.outputs, a.phase) == (b.op, b.outputs, b.phase)
        assert [graph.meta(v) for v in a.inputs] == [graph.meta(v) for v in b.inputs]


def test_equal_weights_of_one_layer_are_told_apart() -> None:
    """Of StableLM under autocast the two of a gated feed-forward, and queries and keys, whose halves are rotated."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4, vocab_size=64)
    model = StableLmForCausalLM(StableLmConfig(**sizes, num_hidden_layers=8, use_cache=False))
    with torch.autocast("cpu", torch.bfloat16):
        ids = torch.zeros(2, 8, dtype=torch.int64)
        graph = ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).graph
    (run,) = graph.repetition.runs
    assert len(run.copies) == 7
    assert run.copies.size > 0.8 * len(graph.nodes)


class Dropping(torch.nn.Module):
    """Layers of which each drops more than the one before."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, linear in enumerate(self.linears):
            x = torch.nn.functional.dropout(linear(x).relu(), 0.1 + 0.01 * i)
        return x.sum()


def test_equal_layers_may_drop_another_share() -> None:
    graph = ColoTracer().capture(Dropping(8), {"x": torch.zeros(4, 8)}).graph
    assert sum(graph.by_name[node].packet == "aten.relu" for node in graph.likes) >= 5


def test_decisions_take_over_what_repeats_in_the_graph() -> None:
    graph, mesh, options = captured("gpt2", 8), Mesh((8,)), Options()
    d = decide(graph, mesh, options, resolve(graph, mesh, {}, {}))
    asked = Problem(costs(d, prices := Prices(mesh, Cluster.load("dgx-h100").sized(8))), edges(d, prices))
    (alone,), (known,) = find_runs(asked), find_runs(replace(asked, shift=d.shift))
    assert {tuple(sorted(row)) for row in known.copies.tolist()} == {
        tuple(sorted(row)) for row in alone.copies.tolist()
    }


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_folded_optimum_is_the_whole_s(name: str) -> None:
    asked = Problem(problem(name, 8).costs, problem(name, 8).edges)
    flat, folded = solve(asked, folding=lambda _: None), solve(asked)
    assert "folding" in folded.method
    assert folded.proven
    assert flat.proven
    assert folded.objective == pytest.approx(flat.objective, rel=2e-4)
    assert folded.lower_bound <= flat.objective * (1 + 1e-9)
    assert evaluate(asked, folded.choice) == (folded.objective, True)


def test_twice_the_layers_are_as_many_variables() -> None:
    solutions = [solve(Problem(problem("llama", n).costs, problem("llama", n).edges)) for n in (8, 16)]
    assert solutions[0].size["folded_nodes"] == solutions[1].size["folded_nodes"]
    assert solutions[0].size["folded_pairs"] == solutions[1].size["folded_pairs"]
    assert all(s.proven for s in solutions)


def test_a_limit_that_binds_is_kept() -> None:
    asked = problem("llama", 8)
    free = solve(Problem(asked.costs, asked.edges))
    limit = 0.9 * peak_usage(asked, free.choice)
    solution = solve(replace(asked, limit=limit), time_limit=30.0, gap=0.01)
    assert peak_usage(asked, solution.choice) <= limit * (1 + 1e-9)
    assert free.lower_bound <= solution.objective * (1 + 1e-9)
    assert solution.lower_bound <= solution.objective
    assert solution.gap < 0.1


def test_runs_of_real_models_are_long_enough_to_fold() -> None:
    assert find_runs(problem("gpt2", 8))
