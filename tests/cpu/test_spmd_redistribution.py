"""Redistribution on simulated ranks against slices of the whole tensor; integers in float64, so equality is exact."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from autopar import spmd
from autopar.errors import SpecError
from autopar.mesh import Mesh
from autopar.sharding import LocalLength, ShardingSpec, Step, all_pairs, cheapest_path, steps_from
from autopar.sharding.redistribution import StepKind
from autopar.spmd.collectives import permutation
from autopar.spmd.ranks import LocalRank, local_ranks
from tests.alpha_beta import uneven, uniform
from tests.steps import simulate_step

parse = ShardingSpec.parse
COMBINE = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}


def reachable(start: ShardingSpec, mesh: Mesh) -> list[ShardingSpec]:
    """Every spec that steps lead to, ``start`` included."""
    found = {start: None}
    frontier = [start]
    while frontier:
        spec = frontier.pop()
        new = [after for _, after in steps_from(spec, spec.ndim, mesh) if after not in found]
        found |= dict.fromkeys(new)
        frontier += new
    return sorted(found, key=str)


def scatter(whole: Tensor, spec: ShardingSpec, mesh: Mesh) -> list[Tensor]:
    """The shards of ``whole``, which ``spec`` does not call partial."""
    places = (mesh.coordinate(r) for r in range(mesh.size))
    return [whole[spec.local_slices(whole.shape, mesh, c)].clone() for c in places]


def scatter_addends(shape: Sequence[int], spec: ShardingSpec, mesh: Mesh) -> tuple[list[Tensor], Tensor]:
    """Shards of random addends of a tensor that is partial by ``spec``, and the whole tensor."""
    axes = [a for a, _ in spec.partial]
    places = itertools.product(*(range(mesh.shape[a]) for a in axes))
    addends = {place: torch.randint(-9, 10, tuple(shape)).double() for place in places}
    coordinates = [mesh.coordinate(r) for r in range(mesh.size)]
    shards = [addends[tuple(c[a] for a in axes)][spec.local_slices(shape, mesh, c)].clone() for c in coordinates]
    whole = None
    for addend in addends.values():
        whole = addend if whole is None else COMBINE[spec.partial[0][1]](whole, addend)
    assert whole is not None
    return shards, whole / math.prod(mesh.shape[a] for a, kind in spec.partial if kind == "avg")


def walk(shards: list[Tensor], specs, steps, shape: Sequence[int], mesh: Mesh) -> list[Tensor]:
    for spec, step in zip(specs, steps, strict=False):
        shards = simulate_step(local_ranks(mesh), shards, step, spec, shape)
    return shards


def reduced(shards: list[Tensor], spec: ShardingSpec, shape: Sequence[int], mesh: Mesh) -> list[Tensor]:
    for axis, kind in spec.partial:
        step = Step("all_reduce", axis, reduction=kind)
        shards, spec = simulate_step(local_ranks(mesh), shards, step, spec, shape), step.apply(spec)
    return shards


def assert_shards(shards: list[Tensor], expected: list[Tensor], note: str) -> None:
    for rank, (shard, want) in enumerate(zip(shards, expected, strict=True)):
        assert shard.is_contiguous(), note
        assert shard.dtype == want.dtype, note
        assert shard.shape == want.shape, f"{note}, rank {rank}"
        assert torch.equal(shard, want), f"{note}, rank {rank}"


EXHAUSTIVE = [
    ((2,), [(5,), (8,), (1,), (0,)]),
    ((2,), [(5, 6), (4, 3, 2), (3, 1, 4)]),
    ((4,), [(3,), (9, 2)]),
    ((2, 2), [(7,), (8,), (7, 4), (4, 8), (3, 4, 2)]),
    ((2, 4), [(9,), (16,), (7, 16), (5, 3, 8), (8, 8, 8)]),
]
SAMPLED = [
    ((2, 2, 2), [(11,), (8, 8), (7, 9), (4, 3, 8)]),
    ((2, 2), [(4, 6, 3, 5), (4, 2, 8, 4)]),
    ((2, 4), [(8, 3, 16, 2)]),
    ((2, 2, 2), [(8, 5, 2, 4)]),
    ((3, 2), [(6, 7, 2, 12)]),
]


def check_pairs(mesh: Mesh, shape: Sequence[int], pairs) -> None:
    for number, (src, dst) in enumerate(pairs):
        # Latency sends small tensors round few corners, bandwidth round many: both kinds of paths are wanted.
        costs = uniform(mesh) if number % 2 else uneven(mesh)
        scale = 8 if number % 3 else 8_000_000
        path = cheapest_path(src, dst, shape, scale, mesh, costs)
        shards, whole = scatter_addends(shape, src, mesh)
        shards = reduced(walk(shards, path.specs, path.steps, shape, mesh), dst, shape, mesh)
        assert_shards(shards, scatter(whole, ShardingSpec(dst.dims), mesh), f"{path} of {shape} on {mesh}")


@pytest.mark.parametrize(("mesh", "shape"), [(Mesh(m), s) for m, shapes in EXHAUSTIVE for s in shapes], ids=str)
def test_every_pair_of_specs(mesh, shape):
    torch.manual_seed(0)
    specs = reachable(ShardingSpec.replicated(len(shape)), mesh)
    check_pairs(mesh, shape, itertools.product(specs, repeat=2))


@pytest.mark.parametrize(("mesh", "shape"), [(Mesh(m), s) for m, shapes in SAMPLED for s in shapes], ids=str)
def test_a_sample_of_pairs_on_larger_meshes(mesh, shape):
    torch.manual_seed(0)
    specs = reachable(ShardingSpec.replicated(len(shape)), mesh)
    check_pairs(mesh, shape, [random.Random(i).choices(specs, k=2) for i in range(200)])


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [(Mesh((2, 2, 2)), (9,)), (Mesh((2, 2, 2)), (7, 8)), (Mesh((2, 2, 2)), (8, 3, 4)), (Mesh((2, 4)), (3, 8, 2, 5))],
    ids=str,
)
def test_every_step_from_every_spec(mesh, shape):
    torch.manual_seed(0)
    partial = ShardingSpec(((),) * len(shape), tuple((a, "sum") for a in range(mesh.ndim)))
    kinds = set()
    for spec in reachable(partial, mesh):
        shards, whole = scatter_addends(shape, spec, mesh) if spec.partial else (None, torch.randn(shape).double())
        for step, after in steps_from(spec, len(shape), mesh):
            if step.fits(spec, shape, mesh):
                before = shards if shards is not None else scatter(whole, spec, mesh)
                result = reduced(walk(before, [spec], [step], shape, mesh), after, shape, mesh)
                assert_shards(result, scatter(whole, ShardingSpec(after.dims), mesh), f"{spec} {step} on {mesh}")
                kinds.add(step.kind)
    assert kinds == set(get_args(StepKind)) - ({"all_to_all"} if len(shape) == 1 else set())


@pytest.mark.parametrize("kind", ["sum", "max", "min", "avg"])
@pytest.mark.parametrize(
    ("mesh", "shape"), [(Mesh((2, 2)), (7, 4)), (Mesh((2, 4)), (8, 5)), (Mesh((2, 2)), ())], ids=str
)
def test_partial_sources(mesh, shape, kind):
    torch.manual_seed(0)
    starts = [ShardingSpec(((),) * len(shape), ((0, kind), (1, kind))), ShardingSpec(((),) * len(shape), ((1, kind),))]
    specs = reachable(starts[0], mesh)
    pairs = [(s, d) for s in [*starts, *(s for s in specs if s.partial)] for d in specs]
    seconds = all_pairs([p[0] for p in pairs], specs, shape, 8, mesh, uniform(mesh))
    finite = [p for i, p in enumerate(pairs) if math.isfinite(seconds[i, specs.index(p[1])])]
    check_pairs(mesh, shape, finite[:: max(1, len(finite) // 150)])


def test_a_sum_and_an_average_in_one_spec():
    torch.manual_seed(0)
    src = ShardingSpec(((), ()), ((0, "sum"), (1, "avg")))
    check_pairs(Mesh((2, 4)), (8, 6), [(src, parse(t)) for t in ("RR", "S0S1", "S1S0", "S10R", "RS01")])


STEPS = [
    ("S0R", Step("all_gather", 0, 0)),
    ("RS0", Step("all_gather", 0, 1)),
    ("RS0", Step("all_to_all", 0, 1, 0)),
    ("RR", Step("slice", 0, 1)),
    ("S01R", Step("permute", 1, 0, axes=(1, 0))),
    ("S0S1", Step("permute", 0, axes=(0, 1))),
]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("text", "step"), STEPS, ids=str)
def test_every_dtype_travels_unchanged(text, step, dtype):
    mesh, spec = Mesh((2, 2)), parse(text)
    whole = torch.arange(5 * 6).reshape(5, 6).to(dtype)
    shards = walk(scatter(whole, spec, mesh), [spec], [step], whole.shape, mesh)
    expected = scatter(whole, step.apply(spec), mesh)
    if dtype == torch.float8_e4m3fn:
        shards, expected = ([x.float() for x in xs] for xs in (shards, expected))
    assert_shards(shards, expected, f"{step} in {dtype}")


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint8, torch.int64, torch.bfloat16], ids=str)
def test_integers_and_booleans_are_reduced_in_their_own_terms(dtype, kind):
    mesh = Mesh((2,))
    addends = [torch.tensor([0, 0, 1]).to(dtype), torch.tensor([0, 1, 1]).to(dtype)]
    expected = COMBINE[kind](*(a.long() for a in addends)).to(dtype)
    spec = ShardingSpec(((),), ((0, kind),))
    step = Step("reduce_scatter", 0, 0, reduction=kind)
    assert_shards(walk(addends, [spec], [step], (3,), mesh), [expected[:2], expected[2:]], f"{kind} of {dtype}")


def test_complex_numbers_have_sums_and_averages_but_no_maximum():
    mesh = Mesh((2,))
    addends = [torch.tensor([1 + 2j, 3j]), torch.tensor([5 + 4j, 1 + 1j]).conj()]
    for kind, divisor in (("sum", 1), ("avg", 2)):
        spec, step = ShardingSpec(((),), ((0, kind),)), Step("all_reduce", 0, reduction=kind)
        expected = (addends[0] + addends[1]) / divisor
        assert_shards(walk(addends, [spec], [step], (2,), mesh), [expected, expected], kind)
    with pytest.raises(SpecError, match="The reduction max is not defined"):
        spmd.all_reduce(LocalRank(mesh, (0,)), addends[0], 0, "max")


def test_integers_have_no_average():
    with pytest.raises(SpecError, match="The reduction avg is not defined"):
        spmd.all_reduce(LocalRank(Mesh((2,)), (0,)), torch.arange(3), 0, "avg")


def test_shards_that_are_not_contiguous_are_taken_as_they_are():
    mesh, spec = Mesh((2, 2)), parse("S01R")
    whole = torch.arange(8 * 6).double().reshape(8, 6)
    for step, after in steps_from(spec, 2, mesh):
        shards = [s.t().contiguous().t() for s in scatter(whole, spec, mesh)]
        assert_shards(walk(shards, [spec], [step], whole.shape, mesh), scatter(whole, after, mesh), str(step))


def test_a_step_never_changes_its_input_nor_shares_memory_with_a_slice():
    mesh, whole = Mesh((2,)), torch.arange(8.0)
    spec = ShardingSpec(((),), ((0, "sum"),))
    shards = [whole.clone(), whole.clone()]
    for step, _ in steps_from(spec, 1, mesh):
        walk(shards, [spec], [step], (8,), mesh)
        assert torch.equal(shards[0], whole)
    cut = spmd.slice_shard(LocalRank(mesh, (0,)), whole, 0, 0)
    assert cut.untyped_storage().nbytes() == 4 * whole.itemsize


def test_lengths_and_offsets_are_those_of_the_spec():
    mesh, spec, shape = Mesh((2, 4)), parse("S10R"), (13, 3)
    for rank in local_ranks(mesh):
        here = spec.local_slices(shape, mesh, rank.coordinate)[0]
        assert spmd.offset(rank, 13, (1, 0)) == here.start
        assert spmd.length(rank, 13, (1, 0)) == here.stop - here.start


def test_a_lowered_step_names_lengths_as_numbers_where_all_ranks_agree():
    mesh = Mesh((2, 4))
    gather = Step("all_gather", 1, 0)
    assert spmd.step_call(gather, parse("S01R"), (8, 3), mesh) == (
        spmd.all_gather,
        {"dim": 0, "axis": 1, "length": 4},
    )
    assert spmd.step_call(gather, parse("S01R"), (9, 3), mesh)[1]["length"] == LocalLength(9, (0,))
    assert spmd.step_call(gather, parse("S1R"), (9, 3), mesh)[1]["length"] == 9
    swap = Step("permute", 0, axes=(0, 1))
    assert spmd.step_call(swap, parse("S0S1"), (5, 4), Mesh((2, 2)))[1]["shape"] == (LocalLength(5, (1,)), 2)


def test_a_permutation_sends_every_shard_exactly_once():
    for mesh, axes, order in ((Mesh((2, 4)), (0, 1), (1, 0)), (Mesh((2, 3, 4)), (2, 0, 1), (0, 1, 2))):
        sources = permutation(mesh, axes, order)
        assert sorted(sources) == list(range(mesh.size))
        assert sources != tuple(range(mesh.size))


def test_half_precision_sums_do_not_overflow_between_ranks():
    mesh = Mesh((4,))
    addends = [torch.tensor([x], dtype=torch.float16) for x in (60000.0, 60000.0, -60000.0, -60000.0)]
    spec, step = ShardingSpec(((),), ((0, "sum"),)), Step("all_reduce", 0)
    assert [x.item() for x in walk(addends, [spec], [step], (1,), mesh)] == [0.0] * 4
