"""The emitted program as text: what a person reads."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import passes, planner
from autopar.codegen.load import load
from autopar.mesh import Mesh
from tests.cpu.model_checks import cluster_where_sharding_pays, subject
from tests.models import ZOO

MODELS = ["gpt2", "llama", "resnet", "cnn", "vit", "bert"]


@cache
def plan(name: str, mesh: tuple[int, ...] = (2, 2)) -> autopar.Plan:
    search = "baseline:ZeRO-3" if mesh != (1,) else "joint"
    model, inputs = ZOO[name].made(torch.float32, 0.1)
    cluster = cluster_where_sharding_pays()
    return autopar.plan(model, inputs, mesh=mesh, search=search, cluster=cluster, time_limit=20)


def functions(source: str) -> tuple[str, str]:
    forward, backward = source.split("def backward")
    return forward.split("def forward")[1], backward


def is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def test_the_header_says_what_the_program_is_and_what_it_is_predicted_to_take() -> None:
    made = plan("gpt2")
    head = made.source.split('"""')[1]
    said = ["GPT2LMHeadModel", f"on mesh {made.mesh}", made.digest, made.graph_digest, autopar.__version__]
    said += [f"{made.peak_memory:,} bytes", f"{made.step_time * 1e3:.3f} ms", f"{len(made.collectives)} collectives"]
    assert [s for s in said if s not in head] == []


def test_names_are_the_module_paths_of_the_model() -> None:
    forward, backward = functions(plan("gpt2", (1,)).source)
    assert "h1_mlp_c_fc = F.linear(h1_ln_2, h1_mlp_c_fc_weight.t(), h1_mlp_c_fc_bias)  # float32[8, 6, 48]" in forward
    assert "d_h0_attn_c_proj_weight = h0_attn.flatten(0, 1).t() @ " in backward
    assert re.search(r"\bprimals_|\btangents_|contract", forward + backward) is None


def test_each_collective_says_its_axis_bytes_and_seconds() -> None:
    made = plan("gpt2")
    lines = made.source.splitlines()
    launches = [i for i, line in enumerate(lines) if re.search(r"spmd\.(all_|reduce_|permute)", line)]
    assert len(launches) == len(made.collectives)
    said = [next(line for line in (lines[i], lines[i - 1]) if " bytes over " in line) for i in launches]
    for text, collective in zip(said, made.collectives, strict=True):
        assert f"{collective.bytes:,} bytes over axis {collective.axis}" in text
        assert f"{collective.seconds * 1e6:.1f} us" in text


@pytest.mark.parametrize("name", MODELS)
def test_every_line_is_short_and_every_name_is_assigned_once_before_it_is_freed(name: str) -> None:
    source = plan(name).source
    assert [line for line in source.splitlines() if len(line) > 120] == []
    for text in functions(source):
        stores = (n.id for n in ast.walk(ast.parse(f"def f{text}")) if isinstance(n, ast.Name) and is_store(n))
        assert [name for name, count in Counter(stores).items() if count > 1] == []


def test_names_do_not_grow_with_the_way_of_a_value() -> None:
    """Gradients that add up along the residuals, and go from spec to spec between."""
    model, inputs = ZOO["llama"].made(torch.float32)
    options = {"search": "random+recompute:2", "accumulation_steps": 2}
    source = autopar.plan(model, inputs, mesh=(2,), cluster=cluster_where_sharding_pays(), **options).source
    names = {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
    assert max(map(len, names)) < 70
    assert [line for line in source.splitlines() if len(line) > 120] == []


def test_keys_of_modules_may_be_any_text() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in ('the "big" one', "a\\b\n", "für")})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = torch.tanh(layer(x))
            return x.sum()

    model, x = Keyed(), torch.randn(4, 8)
    plan = autopar.plan(model, (x,), mesh=(2,), cluster="cpu-2")
    program = load(plan.source)
    parameters = [name for kind, name, *_ in program["INPUTS"] if kind == "parameter"]
    assert sorted(parameters) == sorted(n for n, _ in model.named_parameters())
    assert "the_big_one_weight" in plan.source and "für_weight" in plan.source


def test_what_was_taken_apart_is_together_again() -> None:
    forward, backward = functions(plan("resnet", (1,)).source)
    assert forward.count("aten._native_batch_norm_legit_functional.default(") == 6
    assert backward.count("aten.native_batch_norm_backward.default(") == 6
    assert "squared_deviation" not in forward
    assert "batch_norm_backward_reduce" not in backward


def test_statistics_that_ranks_reduce_stay_apart() -> None:
    of, on = subject("cnn", torch.float64), Mesh((2,))
    options = planner.Options(constraints={"input:pixel_values": "S0RRR"}, search="baseline:DDP")
    found = planner.plan_graph(of.capture.graph, on, cluster_where_sharding_pays().sized(2), options)
    composed = passes.compose(passes.lower(found.program, of.capture.graph, on), of.capture.graph)
    called = {str(n.target) for n in composed.forward.graph.nodes}
    assert "autopar.squared_deviation.default" in called
    assert "aten._native_batch_norm_legit_functional.default" not in called
