"""What the solver leaves out of captured models costs nothing: its optimum is that of the whole integer program."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from autopar.ir import Graph as Captured
from autopar.mesh import Cluster, Mesh
from autopar.planner.options import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.solver import Problem, evaluate, solve
from autopar.solver.integer.highs import is_installed, solve_highs
from autopar.solver.integer.ilp import IlpLimits, build
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.reductions import drop_forbidden
from autopar.tracer import ColoTracer

pytestmark = pytest.mark.skipif(not is_installed(), reason="the whole integer programs take CBC minutes")

SMALL = {"vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
DECODER = SMALL | {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
LENGTH = 16
MODELS = ("gpt2", "llama", "t5", "mixtral")
SLOW = pytest.mark.slow
CASES = [
    ("gpt2", (4,)),
    ("llama", (4,)),
    ("mixtral", (4,)),
    *(pytest.param(*case, marks=SLOW) for case in [("t5", (4,)), *((name, (2, 2)) for name in MODELS)]),
]


def model(name: str, layers: int) -> torch.nn.Module:
    if name == "gpt2":
        config = transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=96, n_positions=64)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, num_hidden_layers=layers))
    if name == "mixtral":
        experts = {"num_hidden_layers": layers, "num_local_experts": 4, "num_experts_per_tok": 2}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, **experts))
    config = transformers.T5Config(
        d_model=64, d_ff=128, num_layers=layers, num_heads=4, d_kv=16, vocab_size=96, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@cache
def captured(name: str, layers: int) -> Captured:
    ids = torch.empty(8, LENGTH, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        return ColoTracer().capture(model(name, layers), {"input_ids": ids, "labels": ids}).graph


@cache
def problem(name: str, layers: int, shape: tuple[int, ...]) -> Problem:
    """The sum that is minimised first for a model, as the planner states it."""
    graph, mesh, options = captured(name, layers), Mesh(shape), Options()
    decisions = decide(graph, mesh, options, resolve(graph, mesh, {}, {}))
    return Objective(decisions, Prices(mesh, Cluster.load("dgx-h100").sized(mesh.size))).problem()


@cache
def optimum(name: str, layers: int, shape: tuple[int, ...]) -> float:
    """By an integer program of every node, option and edge; what no choice allows is left out."""
    asked = problem(name, layers, shape)
    graph = Graph(asked)
    drop_forbidden(graph)
    assert len(graph.nodes()) == len(asked.costs)
    found = solve_highs(build(graph, solve(asked).objective), IlpLimits(300.0, 0.0), None)
    assert found.finished
    assert found.choice is not None
    objective, allowed = evaluate(asked, graph.expand(found.choice))
    assert allowed
    return objective


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_reduced_problem_has_the_optimum_of_the_whole(name: str, shape: tuple[int, ...]) -> None:
    best = optimum(name, 2, shape)
    found = solve(problem(name, 2, shape), gap=0.0)
    assert found.proven
    assert found.objective == pytest.approx(best, rel=1e-7)
    assert found.lower_bound <= best * (1 + 1e-7)
