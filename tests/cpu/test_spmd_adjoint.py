"""The backward of a redistribution is its adjoint: <R x, y> = <x, R* y>, on simulated ranks, in exact arithmetic."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec, Step, adjoint_path, cheapest_path, steps_from
from autopar.sharding.paths import Path
from tests.alpha_beta import uneven, uniform
from tests.cpu.test_spmd_redistribution import reachable, scatter, scatter_addends, walk

parse = ShardingSpec.parse
PARTIALS = ((0, "sum"),), ((1, "sum"),), ((0, "sum"), (1, "sum")), ((0, "avg"), (1, "avg")), ((0, "avg"), (1, "sum"))


def inner_product(shards: list[Tensor], cotangents: list[Tensor], spec: ShardingSpec, mesh: Mesh) -> float:
    """Of all that the ranks hold with its cotangents; replicas count once."""
    replicas = math.prod(n for axis, n in enumerate(mesh.shape) if axis not in spec.axes)
    return sum(float((x * y).sum()) for x, y in zip(shards, cotangents, strict=True)) / replicas


def check(path: Path, shape: tuple[int, ...], mesh: Mesh) -> None:
    src, dst = path.specs[0], path.specs[-1]
    if src.partial:
        shards, _ = scatter_addends(shape, src, mesh)
    else:
        shards = scatter(torch.randint(-9, 10, shape).double(), src, mesh)
    cotangents = scatter(torch.randint(-9, 10, shape).double(), dst.without_partial(), mesh)
    back = adjoint_path(path, mesh)
    forward = walk(shards, path.specs, path.steps, shape, mesh)
    backward = [y / back.divisor for y in walk(cotangents, back.specs, back.steps, shape, mesh)]
    assert (back.specs[0], back.specs[-1]) == (dst.without_partial(), src.without_partial())
    assert inner_product(forward, cotangents, dst, mesh) == inner_product(shards, backward, src, mesh), str(path)


def starts(ndim: int, mesh: Mesh) -> list[ShardingSpec]:
    found = [s for p in PARTIALS if p[-1][0] < mesh.ndim for s in reachable(ShardingSpec(((),) * ndim, p), mesh)]
    return sorted({*found, *reachable(ShardingSpec.replicated(ndim), mesh)}, key=str)


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [(Mesh((2,)), (5,)), (Mesh((2, 2)), (7, 4)), (Mesh((2, 4)), (8, 16)), (Mesh((2, 2, 2)), (8, 9))],
    ids=str,
)
def test_every_step_has_its_adjoint(mesh, shape):
    torch.manual_seed(0)
    kinds = set()
    specs = starts(len(shape), mesh)
    for spec in specs if mesh.ndim < 3 else specs[::7]:
        for step, after in steps_from(spec, len(shape), mesh):
            if step.fits(spec, shape, mesh):
                check(Path((step,), (spec, after), 0.0, 0, 0), shape, mesh)
                kinds.add(step.kind)
    expected = {"all_gather", "slice", "all_reduce", "reduce_scatter"}
    expected |= {"permute"} if mesh.ndim > 1 else set()
    assert kinds == expected | ({"all_to_all"} if len(shape) > 1 else set())


@pytest.mark.parametrize(("mesh", "shape"), [(Mesh((2, 2)), (6, 5)), (Mesh((2, 4)), (16, 8, 3))], ids=str)
def test_paths_have_theirs(mesh, shape):
    torch.manual_seed(0)
    sources = starts(len(shape), mesh)
    targets = reachable(ShardingSpec.replicated(len(shape)), mesh)
    for seed in range(120):
        src, dst = random.Random(seed).choice(sources), random.Random(-seed).choice(targets)
        costs = uniform(mesh) if seed % 2 else uneven(mesh)
        check(cheapest_path(src, dst, shape, 8_000_000 if seed % 3 else 8, mesh, costs), shape, mesh)


@pytest.mark.parametrize(
    ("spec", "step", "expected"),
    [
        ("S01R", Step("all_gather", 1, 0), Step("slice", 1, 0)),
        ("S0R", Step("slice", 1, 0), Step("all_gather", 1, 0)),
        ("S0R", Step("all_to_all", 0, 0, 1), Step("all_to_all", 0, 1, 0)),
        ("RR P0", Step("all_reduce", 0), None),
        ("RR P0", Step("reduce_scatter", 0, 1), Step("all_gather", 0, 1)),
        ("S01R", Step("permute", 1, 0, axes=(1, 0)), Step("permute", 0, 0, axes=(0, 1))),
        ("S0R", Step("permute", 0, axes=(0, 1)), Step("permute", 0, axes=(0, 1))),
        ("RR P0", Step("permute", 0, axes=(0, 1)), None),
    ],
)
def test_the_adjoint_of_each_kind(spec, step, expected):
    assert step.adjoint(parse(spec)) == expected


def test_a_maximum_has_none():
    with pytest.raises(SpecError, match="not linear"):
        Step("all_reduce", 0, reduction="max").adjoint(parse("RR Pmax0"))
