"""What crosses from layer to layer is found at the same place in every layer, also where layers take turns."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from autopar.mesh import Cluster, Mesh
from autopar.planner import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.search.keeping import layer_boundaries
from autopar.tracer import ColoTracer

LAYERS = 14


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_embd=32, n_head=2, vocab_size=64, n_positions=16))


def gemma2() -> PreTrainedModel:
    """Every second layer attends to a window."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Gemma2Config(
        num_hidden_layers=LAYERS, head_dim=16, vocab_size=64, sliding_window=8, attn_implementation="eager", **sizes
    )
    return Gemma2ForCausalLM(config)


@cache
def objective(make: object, *, recompute: bool) -> Objective:
    assert callable(make)
    with torch.device("meta"):
        model = make()
        ids = torch.zeros(4, 16, dtype=torch.int64)
    graph, mesh = ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).graph, Mesh((2,))
    decisions = decide(graph, mesh, Options(), resolve(graph, mesh, {}, {}), recompute=recompute)
    return Objective(decisions, Prices(mesh, Cluster.load("dgx-h100").sized(2)))


@pytest.mark.parametrize(("make", "kinds"), [(gpt2, 1), (gemma2, 2)], ids=["gpt2", "gemma2"])
def test_every_layer_has_one_boundary_at_the_same_place(make: object, kinds: int) -> None:
    joint = objective(make, recompute=True)
    (run,) = joint.runs
    assert run.layers == kinds
    assert len(run.copies) * kinds >= LAYERS - 2 * kinds
    layers = run.copies.reshape(len(run.copies) * kinds, -1)
    boundaries = layer_boundaries(joint.decisions, joint.runs)
    columns = [layers[row].tolist().index(at) for at in boundaries for row in range(len(layers)) if at in layers[row]]
    assert len(columns) >= len(layers) - 1
    assert len(set(columns)) == 1


def test_nothing_that_all_layers_read_is_a_boundary() -> None:
    joint = objective(gemma2, recompute=True)
    boundaries = layer_boundaries(joint.decisions, joint.runs)
    values = [joint.decisions.variables[i].value for i in boundaries]
    readers = [len(joint.decisions.graph.consumers[v]) for v in values if v is not None]
    assert max(readers) < LAYERS
