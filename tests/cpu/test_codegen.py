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
        short = collective.seconds < 0.05e-6
        assert ("under 0.1 us" if short else f"{collective.seconds * 1e6:.1f} us") in text


def test_collectives_inside_an_op_say_the_same() -> None:
    """Rows of images that are cut, and what ranks tell each other of their parts of a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    kinds = set()
    for seed in range(6):
        made = autopar.plan(model, torch.randn(8, 3, 8, 8), mesh={"dp": 2}, search=f"random:{seed}")
        lines = made.source.splitlines()
        launches = [i for i, line in enumerate(lines) if re.search(r"= spmd\.(all_|reduce_|permute|shift)", line)]
        kinds |= {lines[i].split("= spmd.")[1].split("(")[0] for i in launches}
        said = [f"{lines[i - 1]} {lines[i]}" for i in launches]
        assert [s for s in said if not re.search(r'[\d,]+ bytes over axis 0 "dp", (under )?[\d.]+ us', s)] == []
        assert len(launches) == len(made.collectives)
    assert {"shift", "all_gather"} <= kinds
    program = autopar.plan(model, torch.randn(8, 3, 8, 8), mesh=(2,), search="baseline:DDP").source
    assert "moments = batch_moments(layer0)  # float32[2, 4]" in program
    assert "summaries = spmd.wait(layer1_summaries_launched)  # float32[2, 2, 4]" in program


@pytest.mark.parametrize("name", MODELS)
def test_every_line_is_short_and_every_name_is_assigned_once_before_it_is_freed(name: str) -> None:
    source = plan(name).source
    assert [line for line in source.splitlines() if len(line) > 120] == []
    for text in functions(source):
        stores = (n.id for n in ast.walk(ast.parse(f"def f{text}")) if isinstance(n, ast.Name) and is_store(n))
        assert [name for name, count in Counter(stores).items() if count > 1 and name != "_"] == []


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
    assert "batch_var_mean" not in forward
    assert "batch_norm_backward_reduce" not in backward


def test_statistics_that_ranks_reduce_stay_apart() -> None:
    of, on = subject("cnn", torch.float64), Mesh((2,))
    options = planner.Options(constraints={"input:pixel_values": "S0RRR"}, search="baseline:DDP")
    found = planner.plan_graph(of.capture.graph, on, cluster_where_sharding_pays().sized(2), options)
    composed = passes.compose(passes.lower(found.program, of.capture.graph, on), of.capture.graph)
    called = {str(n.target) for n in composed.forward.graph.nodes}
    assert "autopar.batch_moments.default" in called
    assert "aten._native_batch_norm_legit_functional.default" not in called


def body(function: str) -> list[str]:
    """What a function does, without comments and what it takes and returns."""
    inside = function.split("inputs.clear()")[1].split("return (", maxsplit=1)[0]
    lines = (line.partition("  #")[0].strip() for line in inside.splitlines())
    return [line for line in lines if line and not line.startswith(("#", "del ", "spmd.section"))]


class Idle(nn.Module):
    """Says much that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.arange(6) + 0 - 0
        y = (x * self.weight * 1.0 / 1).view(4, 6) + places.unsqueeze(0).expand(1, 6)
        self.seen.copy_(y.detach().expand(4, 6))
        return y.sum(), y * 1, x + 0.0


def test_what_does_nothing_is_not_in_the_program() -> None:
    model, x = Idle(), torch.randn(4, 6)
    x[0, 0] = -0.0
    plan = autopar.plan(model, (x,), mesh=(1,))
    forward, backward = map(body, functions(plan.source))
    assert [line for line in forward if " * " in line] == ["mul = x * weight"]
    assert [line for line in forward if "/ 1" in line or "- 0" in line or "copy" in line] == []
    assert [line for line in forward if " + 0" in line] == [f"{forward[-1].partition(' ')[0]} = x + 0.0"]
    assert [line for line in backward if " * 1" in line or "/ 1" in line] == []
    result = autopar.simulate(model, (x,), plan=plan)
    expected = model(x)
    torch.testing.assert_close(result.outputs, expected)
    assert not torch.signbit(result.outputs[2][0, 0])


def test_values_are_named_after_what_they_are() -> None:
    forward, backward = functions(plan("gpt2", (1,)).source)
    assert "attention(\n        h0_attn_query, h0_attn_key, h0_attn_value, " in forward
    assert "nll(lm_head, lse, " in forward
    # The gradient with which a module's backward begins, though several are added up to it.
    _, backward = functions(plan("llama", (1,)).source)
    assert "d_layers0_mlp_down_proj_input = d_layers0_mlp_down_proj @ " in backward
    forward, _ = functions(plan("resnet", (1,)).source)
    assert "new_embedder_embedder_normalization_running_mean," in forward.split("return (")[1]


class Mixture(nn.Module):
    """Parameters of the model itself, and ops with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.experts = nn.Parameter(torch.randn(4, 8, 16))
        self.out = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x)).flatten(2).transpose(1, 2)
        best, which = h.max(-1)
        values = (torch.einsum("bsd,edf->bsef", h, self.experts).relu().mean(2) @ self.out).topk(2, -1).values
        return (values.square().sum(-1) * best).mean() + (which > 3).float().mean()


def test_what_is_redistributed_into_a_result_has_its_name() -> None:
    """The gradient of a parameter is that already as a partial sum, wherever in the model it is made."""
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(8, 3, 6, 6)
    made = autopar.plan(model, (x,), mesh=(2,), search="baseline:DDP", cluster=cluster_where_sharding_pays())
    forward, backward = functions(made.source)
    call = r"norm, norm_mean, norm_rstd = torch.native_group_norm\(\s*stem.contiguous\(\), norm_weight,"
    assert re.search(call, forward)
    assert "max_values, max_indices = " in forward
    assert "output0_partial = " in forward
    for name in ("experts", "out", "stem_weight"):
        assert re.search(rf"\bd_{name}_partial\b.* = ", backward), name
        assert re.search(rf"\bd_{name}_reduced_launched = spmd.all_reduce\(|bucket_reduced_launched", backward), name
    model(x).backward()
    for name, gradient in autopar.simulate(model, (x,), plan=made).grads.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_calls_are_those_that_a_person_writes() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(3, 4, 3, stride=2, padding=(1, 2), bias=False)
            self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1, dilation=2, groups=2)
            self.along = nn.Conv1d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(self.down(x)).flatten(2)
            return nn.functional.pad(self.along(x), (0, 1), value=2.0).amax(1, keepdim=True).sum()

    model, x = Convolutions(), torch.randn(2, 3, 8, 8)
    plan = autopar.plan(model, (x,), mesh=(1,))
    forward, backward = functions(plan.source)
    for call in (
        "F.conv2d(x, down_weight, stride=2, padding=[1, 2])",
        "F.conv_transpose2d(down, up_weight, up_bias, stride=2, dilation=2, groups=2, output_padding=1)",
        "F.conv1d(reshape, along_weight, along_bias)",
        "[0, 1], value=2.0)",
        ".amax(1, keepdim=True)",
    ):
        assert call in forward
    assert "_, d_down_weight, _ = aten.convolution_backward" in backward
    model.zero_grad()
    model(x).backward()
    for name, gradient in autopar.simulate(model, (x,), plan=plan).grads.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    assert float(load(plan.source)["forward"](None, [*model.parameters(), x, torch.tensor(0)])[0]) == float(model(x))
