"""Layers taken out of a captured model: what is left is the model with fewer layers, and tells of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.baselines.roles import Restrictions, baselines
from autopar.planner.graphs.layers import Shortened, shortened
from autopar.planner.options import Options
from autopar.planner.pipeline.stages import seams
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.search.candidates import baseline_candidates
from autopar.planner.search.search import plan_graph
from autopar.solver.problem import USAGE_TOLERANCE
from autopar.tracer import ColoTracer

MODELS = {
    "gpt2": lambda n: GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=n, n_head=8, n_positions=256)),
    "llama": lambda n: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=n,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32000,
        )
    ),
    "t5": lambda n: T5ForConditionalGeneration(
        T5Config(
            d_model=256, d_kv=32, d_ff=1024, num_layers=n, num_decoder_layers=n, num_heads=8, decoder_start_token_id=0
        )
    ),
}
DEPTH = {"gpt2": 8, "llama": 22, "t5": 8}


@cache
def captured(name: str, layers: int) -> Graph:
    with torch.device("meta"):
        model = MODELS[name](layers).bfloat16()
    ids = torch.empty(32, 256, dtype=torch.int64, device="meta")
    return ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).graph


@cache
def objective(name: str, mesh: tuple[int, ...]) -> Objective:
    graph, options = captured(name, DEPTH[name]), Options()
    decisions = decide(graph, Mesh(mesh), options, resolve(graph, Mesh(mesh), {}, {}))
    return Objective(decisions, Prices(Mesh(mesh), Cluster.load("dgx-h100").sized(8)))


def ops(graph: Graph) -> Counter[object]:
    """Without what is told in keywords, where random ops have the number of their place."""
    operands = {n.name: tuple(graph.meta(v) for v in n.inputs) for n in graph.nodes}
    return Counter((n.op, n.signature[0], operands[n.name], n.outputs, n.phase) for n in graph.nodes)


@pytest.mark.parametrize(
    ("name", "layers"), [("gpt2", 4), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("llama", 6), ("t5", 4)))]
)
def test_what_is_left_is_the_model_with_fewer_layers(name: str, layers: int) -> None:
    fewer = objective(name, (8,)).with_fewer_layers(layers)
    assert fewer is not None
    remaining, model = fewer.decisions.graph, captured(name, DEPTH[name] - (fewer.depth - layers))
    assert ops(remaining) == ops(model)
    assert Counter(i.kind for i in remaining.inputs) == Counter(i.kind for i in model.inputs)
    assert Counter((o.kind, remaining.meta(o.value)) for o in remaining.outputs) == Counter(
        (o.kind, model.meta(o.value)) for o in model.outputs
    )
    made = set()
    for node in remaining.nodes:
        assert {v.node for v in node.inputs} <= made, "in an order that runs"
        made.add(node.name)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_decided_is_what_is_decided_of_that_model(name: str) -> None:
    fewer = objective(name, (8,)).with_fewer_layers(4)
    assert fewer is not None
    graph, mesh, options = fewer.decisions.graph, Mesh((8,)), Options()
    asked = decide(graph, mesh, options, resolve(graph, mesh, {}, {}))
    found = {v.key: v.options for v in fewer.decisions.variables}
    assert found == {v.key: v.options for v in asked.variables}
    assert {v.key: i for i, v in enumerate(fewer.decisions.variables)} == fewer.decisions.index


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_known_ways_to_train_leave_open_what_they_do_for_all_layers(name: str, mesh: tuple[int, ...]) -> None:
    whole, fewer = objective(name, mesh), objective(name, mesh).with_fewer_layers(4)
    assert fewer is not None
    of_all, of_few = Restrictions(whole.decisions), Restrictions(fewer.decisions)
    for baseline in baselines(Mesh(mesh)):
        asked, told = of_all.masks(baseline), of_few.masks(baseline)
        assert (asked is None) == (told is None)
        if asked is not None and told is not None:
            left, kept = asked.kept(), told.kept()
            for i, position in enumerate(fewer.position.tolist()):
                assert left[i].tolist() == kept[position].tolist(), (baseline.name, whole.decisions.variables[i].key)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_no_baseline_would_have_been_better_than_those_that_are_looked_at(mesh: tuple[int, ...]) -> None:
    graph, cluster, options = captured("llama", DEPTH["llama"]), Cluster.load("dgx-h100").sized(8), Options(10**15)
    told = plan_graph(graph, Mesh(mesh), cluster, options)
    every = plan_graph(graph, Mesh(mesh), cluster, replace(options, compare=True))
    assert len(told.baselines) < len(every.baselines)
    assert told.timeline.seconds <= min(b.step_time for b in every.baselines)
    assert told.solution.choice == every.solution.choice


@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama", (8,)), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", (2, 4)), ("gpt2", (2, 4))))],
)
def test_constraints_tell_the_least_that_a_baseline_holds(model: str, mesh: tuple[int, ...]) -> None:
    for baseline in baseline_candidates(objective(model, mesh), Options()):
        told = baseline.least_bytes
        assert "memory" not in vars(baseline), "measured"
        assert 0.5 * baseline.peak_bytes <= told <= (1 + USAGE_TOLERANCE) * baseline.peak_bytes, baseline.name
        assert baseline.fits(baseline.peak_bytes) and not baseline.fits(baseline.peak_bytes - 1)


def test_layers_that_are_not_there_are_not_taken_out() -> None:
    assert objective("gpt2", (8,)).with_fewer_layers(DEPTH["gpt2"]) is None


def in_layers(graph: Graph, parts: int) -> Shortened | None:
    return shortened(graph, seams(graph).block_of, parts)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_deep_graph_is_the_model_with_the_layers_of_one_stage(name: str) -> None:
    graph = captured(name, 12)
    found = in_layers(graph, 4)
    assert found is not None
    removed = sum(graph.by_name[name].packet == "autopar.attention" for name in found.like)
    assert removed > 2
    model = captured(name, 12 - removed)
    assert ops(found.graph) == ops(model)
    assert Counter((i.kind, i.trainable) for i in found.graph.inputs) == Counter(
        (i.kind, i.trainable) for i in model.inputs
    )
    assert Counter(o.kind for o in found.graph.outputs) == Counter(o.kind for o in model.outputs)


def test_every_node_of_a_removed_layer_has_one_like_it() -> None:
    graph = captured("gpt2", 12)
    found = in_layers(graph, 4)
    assert found is not None
    assert graph.by_name.keys() == found.graph.by_name.keys() | found.like.keys()
    for name, other in found.like.items():
        one, like = graph.by_name[name], found.graph.by_name[other]
        assert (one.op, one.outputs, one.phase) == (like.op, like.outputs, like.phase)


def test_neighbours_are_like_different_layers() -> None:
    """So a stage of as many layers as remain is planned as these are together."""
    graph = captured("gpt2", 12)
    found = in_layers(graph, 4)
    assert found is not None
    attentions = [n.name for n in graph.nodes if n.packet == "autopar.attention"][1:-1]
    like = [found.like.get(name, name) for name in attentions]
    assert all(len(set(like[i : i + 4])) == 4 for i in range(2, len(like) - 5))


def test_a_graph_hardly_deeper_than_a_stage_stays_whole() -> None:
    assert in_layers(captured("gpt2", 8), 2) is None


class Blocks(nn.Module):
    """Blocks of ``kinds`` of a width, in turns. Each also reads what ``reads`` takes of what was made before it."""

    def __init__(
        self, depth: int, kinds: int = 1, reads: Callable[[list[Tensor]], list[Tensor]] = lambda _: []
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8 << i % kinds), nn.Linear(8 << i % kinds, 8)) for i in range(depth)
        )
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for block in self.blocks:
            made.append(sum(self.reads(made), block(made[-1]).relu()))
        return made[-1].sum()

    def graph(self) -> Graph:
        return ColoTracer().capture(self, {"x": torch.zeros(4, 8)}).graph


def removed_blocks(found: Shortened) -> int:
    return sum(name.startswith("relu") for name in found.like)


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_blocks_of_several_kinds_go_together(kinds: int) -> None:
    found = in_layers(Blocks(30, kinds).graph(), 5)
    assert found is not None
    removed = removed_blocks(found)
    assert removed > 10 and removed % kinds == 0
    assert ops(found.graph) == ops(Blocks(30 - removed, kinds).graph())


def test_what_all_layers_read_stays() -> None:
    def first(made: list[Tensor]) -> list[Tensor]:
        return made[1:2]

    found = in_layers(Blocks(16, reads=first).graph(), 4)
    assert found is not None
    assert ops(found.graph) == ops(Blocks(16 - removed_blocks(found), reads=first).graph())


def test_layers_that_read_all_before_them_stay() -> None:
    assert in_layers(Blocks(16, reads=lambda made: made[1:]).graph(), 4) is None
