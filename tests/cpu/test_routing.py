"""Rows that go to the ranks of their experts and back: every strategy of every op, against whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.ops  # noqa: F401  registers torch.ops.autopar
from autopar import spmd
from autopar.errors import RankError
from autopar.ir import Arg, Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.passes.lower import resolve_op
from autopar.sharding import LocalLength, LocalOffset, ShardingSpec, Strategy
from autopar.sharding.spec import length, offset
from autopar.sharding.strategy import moved_axes
from autopar.spmd import local_ranks
from autopar.strategies import localize, strategies
from tests.cpu.rule_simulation import assert_same, completed, meta, shard

OPS = torch.ops.autopar
MESHES = (Mesh((2,)), Mesh((4,)), Mesh((2, 2)), Mesh((8,)))
BATCH, LENGTH, CHOICES, EXPERTS, COLUMNS, WIDTH = 4, 8, 2, 8, 8, 4
ROUTERS: Mapping[str, Callable[[], Tensor]] = {
    "random": lambda: torch.rand(BATCH, LENGTH, EXPERTS).topk(CHOICES).indices,
    "some experts get none": lambda: torch.rand(BATCH, LENGTH, 3).topk(CHOICES).indices * 2,
    "a token names one expert twice": lambda: torch.randint(0, EXPERTS, (BATCH, LENGTH, 1)).expand(-1, -1, 2).clone(),
}


def rows_of(places: Tensor, keys: Tensor, span: int) -> Tensor:
    """Rows [..., c, e, n] of a value for each place [span, n], by keys on whatever rank."""
    flat = keys.reshape(-1)
    none = flat >= EXPERTS * span
    return places[(flat % span).masked_fill(none, 0)].masked_fill(none.unsqueeze(1), 0).view(*keys.shape, -1)


def keys_of(ids: Tensor, strategy: Strategy, spec: ShardingSpec, mesh: Mesh, rank: Sequence[int]) -> Tensor:
    """The keys that a rank has, by definition: of its experts, and of all tokens of the ranks that it exchanges with,
    in order."""
    span, shape = ids.numel(), (BATCH, COLUMNS, EXPERTS)
    experts = spec.local_slices((BATCH, COLUMNS, EXPERTS), mesh, rank)[2]
    every = (ids.reshape(-1) * span + torch.arange(span)).view(ids.shape)
    tokens = strategy.inputs[0 if len(strategy.inputs) == 1 else 1]
    group = itertools.product(
        *([*range(n)] if a in moved_axes(strategy) else [rank[a]] for a, n in enumerate(mesh.shape))
    )
    keys = torch.cat([every[tokens.local_slices(ids.shape, mesh, at)].flatten() for at in group])
    expert = keys // span
    own = keys[(expert >= experts.start) & (expert < experts.stop)].sort().values
    made = torch.full(spec.local_shape(shape, mesh, rank), EXPERTS * span)
    made.view(-1)[: len(own)] = own
    return made


def call(op: str, operands: Sequence[Tensor], result: TensorMeta, routed: int = 0, **kwargs: Any) -> Node:
    given: tuple[Arg, ...] = tuple(Value(f"x{i}") for i in range(len(operands)))
    made = result._replace(routed=routed)
    return Node("sample", f"autopar.{op}.default", given, tuple(kwargs.items()), (made,), module="model.moe")


def on_ranks(node: Node, strategy: Strategy, metas: Sequence[TensorMeta], mesh: Mesh, shards: Any) -> list[Tensor]:
    """What each rank makes of its shards."""
    name, args, kwargs = localize(node, strategy, metas, mesh)
    assert len(args) == len(shards)
    ranks = local_ranks(mesh)
    calls = []
    for rank in ranks:
        at = rank.coordinate

        def local(arg: Any, at: tuple[int, ...] = at) -> Any:
            if isinstance(arg, LocalLength):
                return length(arg.n, arg.axes, mesh, at)
            return offset(arg.n, arg.axes, mesh, at) if isinstance(arg, LocalOffset) else arg

        calls.append(([s[at] for s in shards], {k: local(v) for k, v in kwargs}))
    function = resolve_op(name)
    if function in spmd.RINGS:
        return spmd.simulate_ring(spmd.RINGS[function], ranks, calls)
    return [function(*a, **k) for a, k in calls]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_strategy_gives_each_rank_the_rows_of_its_tokens_and_experts(router: str, mesh: Mesh) -> None:
    torch.manual_seed(0)
    ids = ROUTERS[router]()
    whole = OPS.route(ids, experts=EXPERTS, columns=COLUMNS)
    node = call("route", [ids], meta(whole), experts=EXPERTS, columns=COLUMNS)
    found = strategies(node, [meta(ids)], mesh)
    assert any(moved_axes(s) for s in found)
    of_spec: dict[ShardingSpec, list[Tensor]] = {}
    for strategy in found:
        made = on_ranks(node, strategy, [meta(ids)], mesh, [shard(ids, strategy.inputs[0], mesh)])
        spec = strategy.outputs[0]
        assert spec is not None
        for rank, keys in zip(local_ranks(mesh), made, strict=True):
            wanted = keys_of(ids, strategy, spec, mesh, rank.coordinate)
            assert torch.equal(keys, wanted), f"{strategy} {strategy.axes}"
        assert all(map(torch.equal, of_spec.setdefault(spec, made), made)), f"{spec} stands for two layouts"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("op", ["send", "collect"])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_strategy_sends_and_collects_the_same_rows(router: str, op: str, each: bool, mesh: Mesh) -> None:
    torch.manual_seed(0)
    ids = ROUTERS[router]()
    keys = OPS.route(ids, experts=EXPERTS, columns=COLUMNS)
    places = torch.randint(-9, 9, (ids.numel(), WIDTH)).double()
    tokens = places.view(*ids.shape, WIDTH)
    if op == "send" and not each:
        tokens = tokens[:, :, 0]
        places = tokens.unsqueeze(2).expand(-1, -1, CHOICES, -1).reshape(-1, WIDTH)
    elif not each:
        tokens = tokens.sum(2)
    rows = rows_of(places, keys, ids.numel())
    first, result = (tokens, rows) if op == "send" else (rows, tokens)
    assert torch.equal(getattr(OPS, op)(first, ids, keys, each=each), result)
    operands = [first, ids, keys]
    metas = [meta(first), meta(ids), meta(keys)]
    node = call(op, operands, meta(result), each=each)
    found = strategies(node, metas, mesh)
    assert any(moved_axes(s) for s in found)
    for strategy in found:
        spec = strategy.inputs[2]
        held = {r.coordinate: keys_of(ids, strategy, spec, mesh, r.coordinate) for r in local_ranks(mesh)}

        def local(x: Tensor, spec: ShardingSpec, held: Any = held) -> dict[tuple[int, ...], Tensor]:
            """The shards of tokens, or the rows of a rank's keys."""
            if x is not rows:
                return shard(x, spec, mesh)
            parts = shard(places, ShardingSpec(((), spec.dims[3]), spec.partial), mesh)
            return {at: rows_of(parts[at], own, ids.numel()) for at, own in held.items()}

        shards = [local(first, strategy.inputs[0]), shard(ids, strategy.inputs[1], mesh), held]
        made = on_ranks(node, strategy, metas, mesh, shards)
        result_spec = strategy.outputs[0]
        assert result_spec is not None
        done = completed({r.coordinate: m for r, m in zip(local_ranks(mesh), made, strict=True)}, result_spec, mesh)
        plain = ShardingSpec(result_spec.dims)
        wanted = local(rows, plain) if op == "send" else shard(tokens, plain, mesh)
        for at, piece in done.items():
            assert_same(piece, wanted[at], f"{strategy} {strategy.axes} on {at}")


def test_rows_beyond_the_room_are_an_error_that_names_the_layer_and_what_would_do() -> None:
    mesh, ids = Mesh((4,)), torch.zeros(BATCH, LENGTH, CHOICES, dtype=torch.int64)
    whole = TensorMeta((BATCH, 3, EXPERTS), "int64")
    node = call("route", [ids], whole, experts=EXPERTS, columns=3)
    moving = next(s for s in strategies(node, [meta(ids)], mesh) if moved_axes(s))
    with pytest.raises(RankError) as error:
        on_ranks(node, moving, [meta(ids)], mesh, [shard(ids, moving.inputs[0], mesh)])
    assert "model.moe" in str(error.value)
    assert "64 rows, 4.00 times the mean; there is room for 24" in str(error.value)
    assert "expert_room=4.25" in str(error.value)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_products_of_routed_rows_are_those_of_every_expert(mesh: Mesh) -> None:
    torch.manual_seed(0)
    ids = ROUTERS["random"]()
    span, wide = ids.numel(), 6
    keys = OPS.route(ids, experts=EXPERTS, columns=COLUMNS)
    there = keys.reshape(-1) < EXPERTS * span
    expert = (keys.reshape(-1) // span).masked_fill(~there, 0)
    places, upper = torch.randn(span, WIDTH).double(), torch.randn(span, wide).double()
    rows, grad = rows_of(places, keys, span), rows_of(upper, keys, span)
    weight, bias = torch.randn(EXPERTS, WIDTH, wide).double(), torch.randn(EXPERTS, wide).double()
    per_row = torch.einsum("tk,tkn->tn", rows.view(-1, WIDTH), weight[expert]) * there.unsqueeze(1)
    product = OPS.routed_mm(rows, weight, keys, span=span)
    torch.testing.assert_close(product.view(-1, wide), per_row)
    torch.testing.assert_close(OPS.routed_mm(rows, weight.mT.contiguous(), keys, span=span, transposed=True), product)
    outer = torch.einsum("tk,tn->tkn", rows.view(-1, WIDTH), grad.view(-1, wide))
    of_weight = OPS.routed_mm_weight(rows, grad, keys, span=span, experts=EXPERTS)
    torch.testing.assert_close(of_weight, torch.zeros_like(weight).index_add(0, expert, outer))
    torch.testing.assert_close(OPS.of_expert(bias, keys, span=span), rows_of(bias[ids].view(-1, wide), keys, span))
    summed = torch.zeros_like(bias).index_add(0, expert, grad.view(-1, wide))
    torch.testing.assert_close(OPS.sum_of_expert(grad, keys, span=span, experts=EXPERTS), summed)

    routing = call("route", [ids], meta(keys), experts=EXPERTS, columns=COLUMNS)
    layout: dict[ShardingSpec, dict[tuple[int, ...], Tensor]] = {}
    for way in strategies(routing, [meta(ids)], mesh):
        spec = way.outputs[0]
        assert spec is not None
        layout[spec] = {r.coordinate: keys_of(ids, way, spec, mesh, r.coordinate) for r in local_ranks(mesh)}

    def sharded(x: Tensor, spec: ShardingSpec) -> dict[tuple[int, ...], Tensor]:
        if x.shape[:3] != keys.shape:
            return shard(x, spec, mesh)
        own = layout[ShardingSpec(spec.dims[:3])]
        if x is keys:
            return own
        values = places if x is rows else upper if x is grad else expected_places[x.shape[-1], id(x)]
        parts = shard(values, ShardingSpec(((), spec.dims[3]), spec.partial), mesh)
        return {at: rows_of(parts[at], k, span) for at, k in own.items()}

    def places_of(x: Tensor) -> Tensor:
        made = torch.zeros(span, x.shape[-1]).double()
        made[keys.reshape(-1)[there] % span] = x.reshape(-1, x.shape[-1])[there]
        return made

    cases: list[tuple[str, list[Tensor], Tensor, dict[str, Any]]] = [
        ("routed_mm", [rows, weight, keys], product, {}),
        ("routed_mm_weight", [rows, grad, keys], of_weight, {"experts": EXPERTS}),
        ("of_expert", [bias, keys], OPS.of_expert(bias, keys, span=span), {}),
        ("sum_of_expert", [grad, keys], summed, {"experts": EXPERTS}),
    ]
    expected_places = {(r.shape[-1], id(r)): places_of(r) for _, _, r, _ in cases if r.dim() == 4}
    for op, operands, result, options in cases:
        node = call(op, operands, meta(result), span=span, **options)
        metas = [*map(meta, operands)]
        for strategy in strategies(node, metas, mesh):
            if ShardingSpec(strategy.inputs[-1].dims[:3]) not in layout:
                continue  # no router makes it
            shards = [sharded(x, s) for x, s in zip(operands, strategy.inputs, strict=True)]
            made = on_ranks(node, strategy, metas, mesh, shards)
            spec = strategy.outputs[0]
            assert spec is not None
            done = completed({r.coordinate: m for r, m in zip(local_ranks(mesh), made, strict=True)}, spec, mesh)
            wanted = sharded(result, ShardingSpec(spec.dims))
            for at, piece in done.items():
                assert_same(piece, wanted[at], f"{op} by {strategy} {strategy.axes} on {at}", 1e-9)
