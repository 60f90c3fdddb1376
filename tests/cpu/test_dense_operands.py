"""Kernels that read memory as that of contiguous operands, whatever the strides that views before them left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.ir import Value
from autopar.planner.footprint.layouts import MAYBE_VIEWS, NEEDS_CONTIGUOUS
from tests.cpu.capture_checks import captured_once
from tests.cpu.model_checks import cluster_where_sharding_pays
from tests.cpu.rule_samples import KINDS
from tests.cpu.rule_simulation import Sample, find_op

RANDOM = torch.Tag.nondeterministic_seeded
OTHERWISE = (
    MAYBE_VIEWS
    | NEEDS_CONTIGUOUS
    | {
        "aten.as_strided",
        "aten.as_strided_scatter",
        "aten._grouped_mm",
        "aten.native_layer_norm_backward",
    }
)
"""What is called by another name or with copies; ops of strides; a kernel that refuses what is not aligned; one that
reads its forward's statistics so, which nothing turns round."""


def called(case: Sample, operands: list[Tensor]) -> tuple[Any, ...]:
    following = iter(operands)

    def given(arg: Any) -> Any:
        if isinstance(arg, Value):
            return next(following)
        if isinstance(arg, tuple):
            return list(map(given, arg))
        return getattr(torch, arg[6:]) if isinstance(arg, str) and arg.startswith("torch.") else arg

    args, kwargs = list(map(given, case.node.args)), {k: given(v) for k, v in case.node.kwargs}
    made = find_op(case.node.op)(*args, **kwargs)
    return made if isinstance(made, (tuple, list)) else (made,)


def arrangements(case: Sample) -> Iterator[list[Tensor]]:
    """The same operands, one or all of them as views of tensors whose dims have another order."""
    large = [i for i, t in enumerate(case.operands) if t.ndim > 1]
    for which in [large, *([i] for i in large)]:
        for turn in (lambda d: [*range(d)][::-1], lambda d: [0, *range(2, d), 1], lambda d: [1, 0, *range(2, d)]):
            made = [t.clone() for t in case.operands]
            for i in which:
                order = turn(made[i].ndim)
                back = [order.index(d) for d in range(len(order))]
                made[i] = made[i].permute(order).contiguous().permute(back)
            yield made


def alike(a: Tensor, b: Tensor) -> bool:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(wide), b.to(wide), rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_kernel_takes_operands_of_any_strides(kind) -> None:
    wrong = set()
    for case in KINDS[kind]():
        op = find_op(case.node.op)
        tags = getattr(op, "tags", ())
        if not case.values or RANDOM in tags or case.node.packet in OTHERWISE:
            continue
        expected = called(case, [t.clone() for t in case.operands])
        for operands in arrangements(case):
            try:
                found = called(case, operands)
            except RuntimeError as error:
                wrong.add(f"{case.node.op}: {error}")
                continue
            pairs = [(a, b) for a, b in zip(expected, found, strict=True) if isinstance(a, Tensor) and a.numel()]
            if not all(alike(a, b) for a, b in pairs):
                wrong.add(case.node.op)
    assert wrong == set()


class Grouped(nn.Module):
    """A group norm of what a view has turned round, and a gradient that is turned round for it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 6), nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x).transpose(1, 2))
        return (h.transpose(1, 2).softmax(-1) * torch.arange(6.0)).square().sum()


class Turned(nn.Module):
    """A gradient alone that is turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.stem(x.view(4, 3, 4, 4))).flatten(2).transpose(1, 2)).square().sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.up(x).unflatten(-1, (2, 3)).transpose(-1, -2).contiguous()
        return torch.view_as_complex(pairs).abs().pow(3).sum()


class Columns(nn.Module):
    """Batch norm of images of one column, whose gradient is turned round: torch's own on CPUs is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.out = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.stem(x.view(4, 3, 16, 1))).squeeze(3).transpose(1, 2)).square().sum()

    def exact(self, x: Tensor) -> Tensor:
        h = self.stem(x.view(4, 3, 16, 1)).squeeze(3)
        variance, mean = torch.var_mean(h, (0, 2), correction=0, keepdim=True)
        h = (h - mean) / (variance + self.norm.eps).sqrt() * self.norm.weight[:, None] + self.norm.bias[:, None]
        return self.out(h.transpose(1, 2)).square().sum()


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).unflatten(1, (3, 2)).unflatten(3, (2, 3)).permute(0, 3, 1, 2, 4)
        return functional.max_pool3d(h, (2, 2, 1)).square().sum() + functional.adaptive_max_pool3d(h, (1, 2, 3)).sum()


MODELS = {"grouped": Grouped, "turned": Turned, "complex": Complex, "columns": Columns, "pooled": Pooled}


@pytest.mark.parametrize("name", MODELS)
@captured_once()
def test_a_model_of_such_kernels_is_exact(name) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(4, 48) if name in ("turned", "columns") else torch.randn(4, 6, 8)
    searches = {(1,): ("joint",), **dict.fromkeys([(2,), (2, 2)], ("joint", "baseline:DDP", "random:0"))}
    asked = [{"mesh": mesh, "search": search} for mesh, each in searches.items() for search in each]
    plans = [autopar.plan(model, (x,), cluster=cluster_where_sharding_pays(), **options) for options in asked]
    loss = model.exact(x) if isinstance(model, Columns) else model(x)
    loss.backward()
    for plan in plans:
        found = autopar.simulate(model, (x,), plan=plan)
        assert found.peak_memory <= plan.peak_memory
        torch.testing.assert_close(found.outputs, loss.detach())
        for parameter, gradient in found.grads.items():
            torch.testing.assert_close(gradient, model.get_parameter(parameter).grad, rtol=1e-4, atol=1e-4)
