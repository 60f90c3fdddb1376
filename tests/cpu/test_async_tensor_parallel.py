"""Products decomposed beside their gather or scatter: exact in every plan, shorter, never more than predicted."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar import _torch, passes, planner, spmd
from autopar.arguments import canonical_names
from autopar.mesh import Cluster, Mesh
from autopar.runtime.simulation import simulate_program
from autopar.sharding.spec import chunk
from autopar.spmd import LocalRank, local_ranks
from tests.cpu.model_checks import Ran, assert_equals_one_device, cluster_where_sharding_pays, subject

F64 = torch.float64


def decomposed(program) -> list:
    return [op for op in program.ops if op.kind == "decomposed"]


# The ring.

EQUATIONS = [("bsk,nk->bsn", 0, 1), ("bsk,kn->bsn", 0, 0), ("nk,bsk->nbs", 1, 1), ("bhsd,bhdt->bhst", 0, 2)]


def operands(equation: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = {"b": 2, "s": rows, "h": 3, "k": 6, "n": 4, "d": 6, "t": 3}
    inputs = equation.split("->", maxsplit=1)[0].split(",")
    return tuple(torch.randn([sizes[c] for c in term], dtype=F64) for term in inputs)


def shard(x: torch.Tensor, dim: int, rank: LocalRank, axis: int) -> torch.Tensor:
    return x.narrow(dim, *chunk(x.shape[dim], rank.mesh.shape[axis], rank.coordinate[axis]))


@pytest.mark.parametrize(("equation", "operand", "dim"), EQUATIONS)
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 3), (4,)], ids=str)
@pytest.mark.parametrize("rows", [7, 8])
def test_a_product_beside_the_gather_of_an_operand(equation, operand, dim, mesh, rows) -> None:
    ranks = local_ranks(Mesh(mesh))
    whole = operands(equation, rows)
    if whole[operand].shape[dim] < max(mesh):
        pytest.skip("a rank would be empty")
    expected = torch.ops.autopar.contract(*whole, equation)
    for axis in range(len(mesh)):
        given = {"equation": equation, "operand": operand, "dim": dim, "axis": axis}
        given["length"] = whole[operand].shape[dim]
        calls = []
        for rank in ranks:
            mine = list(whole)
            mine[operand] = shard(whole[operand], dim, rank, axis)
            calls.append((mine, given | {"keep": True}))
        for product, gathered in spmd.simulate_ring(spmd.RINGS[spmd.gather_product], ranks, calls):
            torch.testing.assert_close(product, expected)
            assert product.is_contiguous()
            assert torch.equal(gathered, whole[operand])
        alone = spmd.simulate_ring(spmd.RINGS[spmd.gather_product], ranks, [(args, given) for args, _ in calls])
        assert all(torch.is_tensor(p) and p.shape == expected.shape for p in alone)


@pytest.mark.parametrize(("equation", "operand", "dim"), EQUATIONS)
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("rows", [7, 8])
def test_a_sum_of_products_that_is_scattered_as_it_is_made(equation, operand, dim, mesh, rows) -> None:
    ranks = local_ranks(Mesh(mesh))
    whole = operands(equation, rows)
    first, second = equation.split("->")[0].split(",")
    out = equation.split("->")[1]
    summed = next(c for c in first if c not in out)
    made = out.index((first, second)[operand][dim])
    if whole[operand].shape[dim] < max(mesh):
        pytest.skip("a rank would be empty")
    expected = torch.ops.autopar.contract(*whole, equation)
    for axis in range(len(mesh)):
        given = {"equation": equation, "operand": operand, "dim": dim, "axis": axis}
        calls = [
            ([shard(x, t.index(summed), rank, axis) for x, t in zip(whole, (first, second), strict=True)], given)
            for rank in ranks
        ]
        for rank, mine in zip(ranks, spmd.simulate_ring(spmd.RINGS[spmd.product_scatter], ranks, calls), strict=True):
            torch.testing.assert_close(mine, shard(expected, made, rank, axis))


def test_torchs_fused_ops_are_asked_for_the_same(monkeypatch) -> None:
    """Where GPUs reach each other's memory: the operands and dims that the ops of torch take, by what they document."""
    mesh, asked = Mesh((2,)), []

    class Near(LocalRank):
        def symmetric(self, axis: int) -> str:
            return f"group {axis}"

    ranks = [Near(mesh, (r,)) for r in range(2)]
    x, w = torch.randn(2, 6, 4, dtype=F64), torch.randn(5, 4, dtype=F64)
    expected = torch.ops.autopar.contract(x, w, "bsk,nk->bsn")

    def gathers(shard, matrix, dim, group, *, keep):
        asked.append((dim, group, keep))
        return torch.cat([shard, x.narrow(dim, 3, 3)], dim) @ matrix, x if keep else None

    def scatters(part, matrix, dim, group):
        asked.append((dim, group))
        return (part @ matrix).chunk(2, dim)[0] * 2

    monkeypatch.setattr(_torch, "fused_gather_product", gathers)
    monkeypatch.setattr(_torch, "fused_product_scatter", scatters)
    given = {"equation": "bsk,nk->bsn", "operand": 0, "dim": 1, "axis": 0}
    product, gathered = spmd.gather_product(ranks[0], x[:, :3], w, **given, length=6, keep=True)
    torch.testing.assert_close(product, expected)
    assert gathered is x
    part = spmd.product_scatter(ranks[0], x / 2, w, **given)
    torch.testing.assert_close(part, expected[:, :3])
    assert asked == [(1, "group 0", True), (1, "group 0")]
    columns = spmd.gather_product(ranks[0], x[:, :3], w.t(), **{**given, "equation": "bsk,kn->bsn"}, length=6)
    torch.testing.assert_close(columns, expected)


def test_torchs_fused_ops_take_what_they_are_given() -> None:
    """Without values and GPUs, in a group that only seems to have four ranks: arguments, shapes and strides."""
    import torch.distributed._symmetric_memory
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    group = _torch.group_name(torch.distributed.group.WORLD)
    x, w = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((4, 8, 16), (32, 16)))
    for dim, gathered in ((0, (16, 8, 16)), (1, (4, 32, 16))):
        product, whole = _torch.fused_gather_product(x, w.t(), dim, group, keep=True)
        assert (product.shape, whole.shape) == ((*gathered[:2], 32), gathered)
        alone, nothing = _torch.fused_gather_product(x, w.t(), dim, group, keep=False)
        assert (alone.shape, nothing) == (product.shape, None)
        part = _torch.fused_product_scatter(x, w.t(), dim, group)
        assert part.shape == ((1, 8, 32), (4, 2, 32))[dim]
        assert all(t.is_contiguous() for t in (product, whole, alone, part))


# Plans.


def run(name: str, mesh: tuple[int, ...], search: str, dtype=F64, wanted="always") -> Ran:
    of, on = subject(name, dtype), Mesh(mesh)
    options = planner.Options(
        search=search, async_tensor_parallel=wanted, aliases=canonical_names(of.model), optimizer=0.0
    )
    planned = planner.plan_graph(
        of.capture.graph, on, cluster_where_sharding_pays().sized(on.size), options, compare=search.startswith("base")
    )
    lowered = passes.lower(planned.program, of.capture.graph, on)
    outputs, rest = simulate_program(lowered, of.capture.graph, on, of.named(), 0)
    return Ran(planned, autopar.runtime.simulation.Simulation(outputs, rest.grads, rest.buffers, rest.peak_memory))


QUICK = [("mlp", (3,), 1), ("llama", (2, 2), 0), ("t5", (4,), 1)]
SLOW = [(n, m, s) for n in ("gpt2", "llama", "t5", "vit", "bert") for m in ((2,), (4,), (3,), (2, 2)) for s in (1, 2)]


@pytest.mark.parametrize(("name", "mesh", "seed"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
def test_a_random_plan_whose_products_are_decomposed_is_exact(name, mesh, seed) -> None:
    ran = run(name, mesh, f"random:{seed}")
    assert decomposed(ran.planned.program)
    assert_equals_one_device(subject(name, F64), ran.result, F64)


@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_no_rank_holds_more_than_is_predicted(mesh) -> None:
    for seed in range(3):
        ran = run("llama", mesh, f"random:{seed}", torch.float32)
        assert decomposed(ran.planned.program)
        assert ran.result.peak_memory <= max(ran.planned.memory.timeline[:-1])


def test_sequence_parallel_is_exact_and_its_program_round_trips() -> None:
    ran = run("llama", (2,), "baseline:TP+SP")
    kinds = {op.step.kind for op in decomposed(ran.planned.program)}
    assert kinds == {"all_gather", "reduce_scatter"}
    assert_equals_one_device(subject("llama", F64), ran.result, F64)


# Predictions.


class Block(nn.Module):
    """A norm and a pair of products, as in a transformer's feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


SEQUENCE_PARALLEL = {
    "input:input": "RS0R",
    "output:0": "RS0R",
    "*.up.weight": "S0R",
    "*.down.weight": "RS0",
    "*.norm": "RS0R",
    "*.up": "RRS0",
}
WEIGHTS_CUT = {k: v for k, v in SEQUENCE_PARALLEL.items() if k != "*.up"}


@cache
def plan(wanted, cluster: str | Cluster = "dgx-h100", *, pairs: bool = True, tokens: int = 16384) -> autopar.Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(4096) for _ in range(2))).bfloat16()
        x = torch.empty(1, tokens, 4096, dtype=torch.bfloat16)
    return autopar.plan(
        model,
        x,
        mesh=(8,),
        cluster=cluster,
        outputs="dtensor",
        async_tensor_parallel=wanted,
        constraints=SEQUENCE_PARALLEL if pairs else WEIGHTS_CUT,
    )


def test_the_solver_takes_them_where_they_are_shorter() -> None:
    without, near = plan(False), plan("auto")
    assert not decomposed(without.program)
    assert decomposed(near.program)
    assert near.objective < without.objective
    assert near.lower_bound <= near.objective
    assert near.step_time < 0.97 * without.step_time
    assert {c.kind for c in near.collectives} >= {"all_gather", "reduce_scatter"}
    assert all(c.bytes and c.seconds for c in near.collectives)
    for op in decomposed(near.program):
        assert max(op.step_s, op.seconds - op.step_s) < op.seconds
    assert plan(True).program == near.program


def test_they_never_lengthen_a_step_that_the_solver_may_choose() -> None:
    assert plan("auto").step_time <= plan("always").step_time


def test_a_plan_without_them_is_taken_where_it_is_shorter() -> None:
    """With so large a batch the weights may as well be gathered, ahead of need."""
    free, without = plan("auto", pairs=False), plan(False, pairs=False)
    assert free.step_time <= without.step_time
    assert free.lower_bound <= free.objective


def test_no_product_is_decomposed_beside_a_gradient_on_its_way_to_the_optimizer() -> None:
    """Its reductions hide behind all that follows, also where the first of them scatters."""
    with torch.device("meta"):
        model = Block(4096).bfloat16()
        x = torch.empty(32, 1024, 4096, dtype=torch.bfloat16, requires_grad=True)
    ddp = autopar.plan(model, x, mesh=(4, 8), cluster="dgx-h100", search="baseline:DDP", async_tensor_parallel="always")
    kinds = [op.step.kind for op in ddp.program.ops if op.is_collective]
    assert "reduce_scatter" in kinds
    assert not decomposed(ddp.program)


def test_only_nvlink_counts_by_default() -> None:
    assert not decomposed(plan("auto", "l40s-pcie").program)


def test_a_plan_with_them_is_the_same_when_it_is_read_again() -> None:
    made = plan("always", tokens=4096)  # so few that weights are not gathered instead
    again = autopar.Plan.from_json(made.to_json())
    assert again.program == made.program
    assert "spmd.gather_product(" in made.source
    assert "spmd.product_scatter(" in made.source
    assert again.options["async_tensor_parallel"] == "always"


def test_an_unknown_wish_is_an_error() -> None:
    with pytest.raises(autopar.errors.AutoparError, match="async_tensor_parallel"):
        planner.Options(async_tensor_parallel="sometimes")
