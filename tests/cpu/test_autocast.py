"""Autocast, inside the model and around the call, is part of the captured program."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError
from autopar.planner.graphs.accumulation import with_gradient_sums
from autopar.planner.graphs.ahead import casts_of_parameters
from autopar.tracer import Capture, ColoTracer
from tests.cpu.model_checks import cluster_where_sharding_pays


class Inside(nn.Module):
    """Autocast written in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = F.relu(self.first(x))
        return self.second(hidden.float()).pow(2).mean()


class Around(nn.Module):
    """A classifier with its loss, to be called under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.norm(F.relu(self.first(x)))), y)


def dtypes_of_products(capture: Capture) -> list[str]:
    products = [n for n in capture.graph.nodes if n.op == "autopar.contract.default" and n.phase == "forward"]
    return [n.outputs[0].dtype for n in products]


def test_products_inside_autocast_run_in_its_dtype() -> None:
    assert dtypes_of_products(ColoTracer().capture(Inside(), (torch.randn(4, 8),))) == ["bfloat16", "float32"]


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_autocast_inside_gives_what_one_device_gives(mesh: tuple[int, ...]) -> None:
    model, x = Inside(), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    loss = plain(x)
    loss.backward()
    result = autopar.simulate(model, (x,), plan=autopar.plan(model, (x,), mesh=mesh, search="random:1"))
    assert torch.allclose(result.outputs, loss, rtol=2e-2)
    for name, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max()
        assert (result.grads[name] - parameter.grad).abs().max() <= 3e-2 * scale, name


def test_autocast_around_the_call_is_captured() -> None:
    model, x, y = Around(), torch.randn(8, 8), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dtypes_of_products(ColoTracer().capture(model, (x, y))) == ["bfloat16", "bfloat16"]
        plain = copy.deepcopy(model)
        loss = plain(x, y)
        plan = autopar.plan(model, (x, y), mesh=(2,))
        result = autopar.simulate(model, (x, y), plan=plan)
    loss.backward()
    assert torch.allclose(result.outputs, loss, rtol=2e-2)
    for name, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max()
        assert (result.grads[name] - parameter.grad).abs().max() <= 3e-2 * scale, name


def test_mixed_precision_is_autocast_around_every_call() -> None:
    model, x, y = Around(), torch.randn(8, 8), torch.randint(0, 4, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = autopar.plan(model, (x, y), mesh=(2,))
    plan = autopar.plan(model, (x, y), mesh=(2,), mixed_precision=torch.bfloat16)
    assert plan.graph_digest == around.graph_digest
    assert plan.options["mixed_precision"] == "bf16"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    result = autopar.simulate(model, (x, y), plan=autopar.Plan.from_json(plan.to_json()))
    assert torch.allclose(result.outputs, loss, rtol=2e-2)
    for name, parameter in model.named_parameters():
        assert result.grads[name].dtype == torch.float32
        assert (result.grads[name] - parameter.grad).abs().max() <= 3e-2 * parameter.grad.abs().max(), name


@pytest.mark.parametrize(
    ("steps", "reduce", "dtype"), [(1, None, "bfloat16"), (2, None, "float32"), (1, "float32", "float32")]
)
def test_a_gradient_is_reduced_in_the_dtype_in_which_it_is_computed(steps: int, reduce: str | None, dtype: str) -> None:
    """Over several micro-batches it is added up in its parameter's dtype."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = ColoTracer().capture(Around(), (torch.randn(8, 8), torch.randint(0, 4, (8,)))).graph
    summed = with_gradient_sums(graph, steps, reduce)
    dtypes = {o.name: summed.meta(o.value).dtype for o in summed.outputs if o.kind == "gradient"}
    assert {dtypes[f"{layer}.weight"] for layer in ("first", "second")} == {dtype}
    assert dtypes["norm.weight"] == "float32"


def test_casts_of_parameters_are_ahead() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = ColoTracer().capture(Around(), (torch.randn(8, 8), torch.randint(0, 4, (8,)))).graph
    ahead = casts_of_parameters(graph)
    cast = {graph.input_of[v.node].name for n in ahead for v in graph.by_name[n].inputs if v.node in graph.input_of}
    assert {"first.weight", "second.weight"} <= cast
    assert not any(graph.by_name[n].phase == "backward" or n in graph.input_of for n in ahead)


def test_a_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AutoparError, match="mixed_precision is not a known precision") as refused:
        autopar.plan(Around(), (torch.randn(8, 8), torch.randint(0, 4, (8,))), mesh=(2,), mixed_precision="int3")
    assert '"bf16"' in str(refused.value)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 6)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, None], ids=str)
def test_statistics_of_half_precision_are_as_kernels_make_them(norm: nn.Module, weights: torch.dtype | None) -> None:
    """torch's own fake tensors give them the dtype of what is normed."""
    x, norm = torch.randn(4, 6, 8, dtype=torch.bfloat16), copy.deepcopy(norm)
    norm.weight, norm.bias = (None, None) if weights is None else (norm.weight, norm.bias)
    norm.to(weights)
    graph = ColoTracer().capture(norm, x.requires_grad_()).graph
    node = next(n for n in graph.nodes if n.packet in ("aten.native_layer_norm", "aten.native_group_norm"))
    with torch.no_grad():
        if isinstance(norm, nn.LayerNorm):
            made = torch.native_layer_norm(x, [8], norm.weight, norm.bias, norm.eps)
        else:
            made = torch.native_group_norm(x, norm.weight, norm.bias, 4, 6, 8, 2, norm.eps)
    assert [m.dtype for m in node.outputs if m] == [str(t.dtype).removeprefix("torch.") for t in made]


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 6), nn.RMSNorm(8)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("seed", range(3))
def test_norms_of_half_precision_with_weights_in_single(norm: nn.Module, seed: int) -> None:
    """Cut or whole, forward and backward agree on the dtype of the statistics, whichever of them is cut."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), copy.deepcopy(norm)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.norm(self.first(x)).relu().float().square().mean()

    model, x = Normed(), torch.randn(4, 6, 8)
    wanted = {"mesh": (4,), "cluster": cluster_where_sharding_pays(), "search": f"random:{seed}"}
    result = autopar.simulate(model, x, plan=autopar.plan(model, x, **wanted))
    model(x).backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert (result.grads[name] - parameter.grad).abs().max() <= 3e-2 * scale, name
