"""Specs as DTensor placements: the shards that DTensor makes of them are the spec's own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec
from autopar.spmd.placements import from_placements, to_placements
from tests.cpu.test_spmd_redistribution import reachable

parse = ShardingSpec.parse


def cut_by_dtensor(whole: torch.Tensor, placements, mesh: Mesh, coordinate) -> torch.Tensor:
    """Apply DTensor's own splitting, mesh axis by mesh axis from the left, as ``distribute_tensor`` does."""
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(whole, mesh.shape[axis], with_padding=False, contiguous=False)
            whole = parts[coordinate[axis]]
    return whole


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        ("S01RR", (Shard(0), Shard(0))),
        ("S0S1R", (Shard(0), Shard(1))),
        ("S1S0R", (Shard(1), Shard(0))),
        ("RRS1", (Replicate(), Shard(2))),
        ("RRR Pmax0", (Partial("max"), Replicate())),
        ("S1RR P0", (Partial("sum"), Shard(0))),
    ],
)
def test_the_placements_of_worked_examples(spec, placements):
    mesh = Mesh((2, 4))
    assert to_placements(parse(spec), mesh) == placements
    assert from_placements(placements, 3, mesh) == parse(spec)


@pytest.mark.parametrize(
    ("mesh", "shape"), [(Mesh((2, 4)), (16, 8)), (Mesh((2, 3, 2)), (24, 12)), (Mesh((2, 2)), (5, 7))], ids=str
)
def test_every_spec_that_has_placements_is_cut_by_dtensor_as_by_its_spec(mesh, shape):
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    said = 0
    for spec in reachable(ShardingSpec.replicated(2), mesh):
        even = all(n % ShardingSpec((axes,)).ways(mesh) == 0 for n, axes in zip(shape, spec.dims, strict=True))
        increasing = all(list(d) == sorted(d) for d in spec.dims)
        if not (even or increasing):
            with pytest.raises(SpecError, match="need even shards"):
                to_placements(spec, mesh, shape)
            continue
        placements = to_placements(spec, mesh, shape)
        assert from_placements(placements, 2, mesh) == spec
        for coordinate in itertools.product(*map(range, mesh.shape)):
            expected = whole[spec.local_slices(shape, mesh, coordinate)]
            assert torch.equal(cut_by_dtensor(whole, placements, mesh, coordinate), expected), str(spec)
        said += 1
    assert said >= 3**mesh.ndim, "each axis cuts dim 0, dim 1 or nothing"


def test_another_order_needs_the_shape():
    with pytest.raises(SpecError, match="unknown size"):
        to_placements(parse("S10"), Mesh((2, 4)))


def test_negative_dims_count_from_the_end():
    assert from_placements((Shard(-1),), 3, Mesh((2,))) == parse("RRS0")


@pytest.mark.parametrize("reduction", ["product", "premul_sum"])
def test_reductions_that_no_spec_says_are_refused(reduction):
    with pytest.raises(SpecError, match="No sharding spec expresses"):
        from_placements((Partial(reduction),), 2, Mesh((2,)))
