"""Products decomposed beside their gather or scatter, on a ring of gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar.ops  # noqa: F401  the products are its ops
from autopar import spmd
from autopar.sharding.spec import chunk
from autopar.spmd import ProcessRank
from tests.multiprocess.test_emitted_files import checked
from tests.multiprocess.training_models import gpt2, gradient_distance, pair, tokens
from tests.ranks import run_ranks

pytestmark = pytest.mark.multiprocess
FLOAT = 1e-5
EQUATION = "bsk,nk->bsn"


def _cut(x: Tensor, dim: int, rank: ProcessRank, axis: int) -> Tensor:
    return x.narrow(dim, *chunk(x.shape[dim], rank.mesh.shape[axis], rank.coordinate[axis])).contiguous()


def _products(mesh: tuple[int, ...], compiled: bool) -> dict[str, float]:
    torch.manual_seed(0)
    rank = ProcessRank(init_device_mesh("cpu", mesh))
    x, w = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    expected = torch.ops.autopar.contract(x, w, EQUATION)
    found: dict[str, float] = {}
    for axis in range(len(mesh)):
        given: dict[str, Any] = {"equation": EQUATION, "operand": 0, "dim": 1, "axis": axis}

        def gather(a: Tensor, b: Tensor, given: Any = given) -> Any:
            return spmd.gather_product(rank, a, b, **given, length=7, keep=True)

        def scatter(a: Tensor, b: Tensor, given: Any = given) -> Tensor:
            return spmd.product_scatter(rank, a, b, **given)

        if compiled:
            gather, scatter = (torch.compile(f, backend="aot_eager", fullgraph=True) for f in (gather, scatter))
        product, gathered = gather(_cut(x, 1, rank, axis), w)
        found[f"product {axis}"] = float((product - expected).abs().max())
        found[f"gathered {axis}"] = float((gathered - x).abs().max())
        part = scatter(_cut(x, 2, rank, axis), _cut(w, 1, rank, axis))
        found[f"scattered {axis}"] = float((part - _cut(expected, 1, rank, axis)).abs().max())
    return found


def _trains(search: str) -> dict[str, float]:
    torch.manual_seed(0)
    model, batch = gpt2(n_layer=1).double(), tokens(4)
    reference, model = pair(model, batch, (dist.get_world_size(),), search=search, async_tensor_parallel="always")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, model)]
    found: dict[str, float] = {"taken": sum(op.kind == "decomposed" for op in model.plan.program.ops)}
    for step in range(3):
        losses = []
        for module in (reference, model):
            loss = module(**batch).loss
            loss.backward()
            losses.append(float(loss))
        found[f"loss {step}"] = abs(losses[0] - losses[1])
        found[f"gradients {step}"] = gradient_distance(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_products_of_two_processes(pool) -> None:
    for found in pool.run(_products, (2,), False):
        assert max(found.values()) < 1e-12, found


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 sends nothing into generators")
def test_they_compile_into_one_graph(pool) -> None:
    for found in pool.run(_products, (2,), True):
        assert max(found.values()) < 1e-12, found


def test_a_model_trains_as_on_one_device(pool) -> None:
    for found in pool.run(_trains, "baseline:TP+SP"):
        assert found.pop("taken") > 0
        assert max(found.values()) < FLOAT, found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_products_of_four_processes(mesh) -> None:
    for found in run_ranks(4, _products, mesh, False):
        assert max(found.values()) < 1e-12, found


@pytest.mark.slow
@pytest.mark.parametrize("search", ["baseline:TP+SP", "random:0"])
def test_a_model_trains_on_four_processes(search) -> None:
    for found in run_ranks(4, _trains, search):
        assert found.pop("taken") > 0
        assert max(found.values()) < FLOAT, found


def test_an_emitted_file_runs_them_without_autopar(tmp_path) -> None:
    plan = checked("llama", 2, tmp_path, search="baseline:TP+SP", async_tensor_parallel="always")
    assert {op.step.kind for op in plan.program.ops if op.kind == "decomposed"} == {"all_gather", "reduce_scatter"}


def _compiled() -> dict[str, float]:
    torch.manual_seed(0)
    model, batch = gpt2(n_layer=1), tokens(4)
    options: dict[str, Any] = {"search": "baseline:TP+SP", "async_tensor_parallel": "always", "backend": "inductor"}
    reference, model = pair(model, batch, (2,), **options)
    for module in (reference, model):
        module(**batch).loss.backward()
    taken = sum(op.kind == "decomposed" for op in model.plan.program.ops)
    return {"taken": taken, "gradients": gradient_distance(model, reference)}


@pytest.mark.slow
def test_inductor_compiles_them(pool) -> None:
    for found in pool.run(_compiled, timeout=300.0):
        assert found["taken"] > 0
        assert found["gradients"] < FLOAT * 10, found
