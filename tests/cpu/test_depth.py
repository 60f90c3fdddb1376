"""Depth is free: layers of captured models fold, whatever the model, and the folded answer is the whole's optimum."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.memory.points import ProgramPoint, end
from autopar.planner.memory.usages import memory_usages
from autopar.planner.options import Options
from autopar.planner.pricing.prices import Prices, costs, edges
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.solver import Problem, evaluate, peak_usage, solve
from autopar.solver.blocks.folding import foldable
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
        memory_usages(decisions, options, [ProgramPoint(turn), end(graph)]),
    )


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_every_inner_layer_is_a_block(name: str) -> None:
    (run,) = find_runs(problem(name, 8))
    assert len(run.copies) in (6, 7, 8)
    assert run.copies.size > 0.7 * len(problem(name, 8).costs)


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
    assert foldable(find_runs(problem("gpt2", 8)))
