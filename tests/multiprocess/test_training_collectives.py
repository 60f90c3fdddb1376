"""Clipping, loss scaling and the utilities of a loop on several processes."""

from __future__ import annotations

import os
import socket
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import autopar
from autopar.training import (
    DataParallelGradientHandler,
    DistCoordinator,
    GradScaler,
    MixedPrecisionOptimizer,
    all_gather_tensors,
    all_reduce_mean,
    all_reduce_sum,
    clip_grad_norm_,
    clip_grad_value_,
    is_rank_0,
    priority_execution,
)
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import Mlp, seeded

pytestmark = pytest.mark.multiprocess

S, R = Shard, Replicate()
PLACED = [
    ((5, 3), (S(0), R)),
    ((3, 4), (S(0), S(0))),
    ((4, 7), (R, S(1))),
    ((6,), (R, R)),
    ((4, 6), (S(1), S(0))),
    ((), (R, R)),
]
"""Shapes and placements on a 2 x 2 mesh: uneven, with an empty shard, replicated over one axis, and over both."""


def placed(whole: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)


def parameters(dtype: torch.dtype, *, partial: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters with gradients in all of these placements and a plain one, and the same on one device."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(1)
    cut, whole = [], []
    for shape, placements in PLACED:
        p = torch.nn.Parameter(torch.randn(shape, dtype=dtype))
        p.grad = torch.randn(shape, dtype=dtype)
        whole.append(p)
        cut.append(torch.nn.Parameter(placed(p.detach(), mesh, placements)))
        cut[-1].grad = placed(p.grad, mesh, placements)
    plain = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    plain.grad = torch.randn(3, dtype=dtype)
    twin = torch.nn.Parameter(plain.detach().clone())
    twin.grad = plain.grad.clone()
    unused = torch.nn.Parameter(torch.ones(2))
    cut, whole = [*cut, plain, unused], [*whole, twin, unused]
    if partial:
        p = torch.nn.Parameter(torch.randn(4, 3, dtype=dtype))
        summands = torch.randn(2, 4, 3, dtype=dtype)
        p.grad = summands.sum(0)
        whole.append(p)
        cut.append(torch.nn.Parameter(placed(p.detach(), mesh, (R, R))))
        part = summands[mesh.get_coordinate()[0]]
        cut[-1].grad = DTensor.from_local(part, mesh, (Partial(), R), run_check=False)
    return cut, whole


def error(cut: list[torch.Tensor], whole: list[torch.Tensor]) -> float:
    pairs = [(c.grad, w.grad) for c, w in zip(cut, whole, strict=True) if w.grad is not None]
    full = [(c.full_tensor() if isinstance(c, DTensor) else c, w) for c, w in pairs]
    return max(float((c - w).abs().max()) for c, w in full)


def _clipped(p: float, max_norm: float, partial: bool) -> dict[str, float]:
    cut, whole = parameters(torch.float64, partial=partial)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        norm = clip_grad_norm_(cut, max_norm, p)
    # torch takes the norm of the tensors' norms, which for these orders is the norm of all elements.
    expected = torch.nn.utils.clip_grad_norm_(whole, max_norm, p)
    plain = type(norm) is torch.Tensor and norm.ndim == 0
    return {
        "norm": float((norm - expected).abs() / expected),
        "gradients": error(cut, whole),
        "collectives": reduced.call_count,
        "plain": plain,
    }


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, float("inf")])
def test_the_norm_of_any_mixture_is_that_of_one_device(four: RankPool, p: float):
    for found in four.run(_clipped, p, 0.3, False):
        assert found.pop("plain")
        assert found.pop("collectives") == 1
        assert max(found.values()) < 1e-12, found


def test_partial_sums_are_summed_before_they_are_measured(four: RankPool):
    for found in four.run(_clipped, 2.0, 0.3, True):
        assert found["norm"] < 1e-12
        assert found["gradients"] < 1e-12


def test_small_gradients_stay(four: RankPool):
    for found in four.run(_clipped, 2.0, 1e6, False):
        assert found["gradients"] == 0


def _clamped() -> float:
    cut, whole = parameters(torch.float64, partial=True)
    clip_grad_value_(cut, 0.4)
    torch.nn.utils.clip_grad_value_(whole, 0.4)
    return error(cut, whole)


def test_values_are_clamped_as_on_one_device(four: RankPool):
    assert max(four.run(_clamped)) < 1e-12


def _nonfinite_and_low() -> tuple[str, float]:
    cut, whole = parameters(torch.bfloat16, partial=False)
    expected = sum(float(w.grad.float().square().sum()) for w in whole if w.grad is not None) ** 0.5
    low = abs(float(clip_grad_norm_(cut, 1e9)) - expected) / expected
    if dist.get_rank() == 3:
        cut[0].grad.to_local().fill_(float("nan"))
    try:
        clip_grad_norm_(cut[2:3], 1.0, error_if_nonfinite=True)
        cut[1].grad.to_local().fill_(float("inf"))
        clip_grad_norm_(cut[:3], 1.0, error_if_nonfinite=True)
    except Exception as caught:  # noqa: BLE001  which one it is, the test asserts
        return str(caught), low
    return "", low


def test_a_norm_that_is_not_finite_is_an_error_where_asked_and_low_precision_is_measured_in_float32(four: RankPool):
    for text, low in four.run(_nonfinite_and_low):
        assert "not finite" in text
        assert low < 1e-5


def _overflowed(fused: bool, clip: bool) -> dict[str, Any]:
    """The first gradient is replicated, and one rank alone has an overflow, in its shard of another."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    make = [torch.nn.Parameter(placed(torch.randn(8, 4), mesh, (p,))) for p in (R, S(0), S(1))]
    optimizer = torch.optim.AdamW(make, lr=0.1, fused=fused)
    scaler = GradScaler("cpu")
    wrapped = MixedPrecisionOptimizer(optimizer, scaler, max_norm=1.0 if clip else 0.0)
    scales, moved, agree = [], [], []
    for step in range(3):
        wrapped.zero_grad()
        before = [p.full_tensor().detach().clone() for p in make]
        loss = sum((p * p).sum() for p in make)
        wrapped.backward(loss.full_tensor())
        if step == 1 and dist.get_rank() == 2:
            make[1].grad.to_local()[0, 0] = float("inf")
        wrapped.step()
        after = [p.full_tensor().detach() for p in make]
        moved.append(any(not torch.equal(a, b) for a, b in zip(after, before, strict=True)))
        agree.append(all(bool(a.isfinite().all()) for a in after))
        scales.append(scaler.get_scale())
    return {"scales": scales, "moved": moved, "finite": all(agree)}


@pytest.mark.parametrize(("fused", "clip"), [(False, False), (True, False), (False, True)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(four: RankPool, fused: bool, clip: bool):
    for found in four.run(_overflowed, fused, clip):
        assert found["moved"] == [True, False, True]
        assert found["scales"] == [2.0**16, 2.0**15, 2.0**15]
        assert found["finite"]


def _torch_s_own_scaler() -> dict[str, Any]:
    """A parallel model whose first parameters are whole, with torch's scaler."""
    warnings.simplefilter("ignore")
    x = seeded(lambda: torch.randn(4, 8))
    constraints = {"up.weight": "RR", "up.bias": "R", "down.weight": "RS1"}
    model = autopar.autoparallelize(seeded(Mlp), (x,), mesh=(2, 2), constraints=constraints)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    moved = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if step == 1 and dist.get_rank() == 3:
            model.down.weight.grad.to_local().fill_(float("nan"))
        before = [p.to_local().detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        after = [p.to_local() for p in model.parameters()]
        moved.append(any(not torch.equal(a, b) for a, b in zip(after, before, strict=True)))
    return {"moved": moved, "scale": scaler.get_scale(), "first": str(next(model.parameters()).placements)}


def test_torch_s_own_scaler_skips_the_step_of_a_parallel_model_on_all_ranks(four: RankPool):
    for found in four.run(_torch_s_own_scaler):
        assert "Shard" not in found["first"]
        assert found["moved"] == [True, False, True]
        assert found["scale"] == 2.0**15


def _averaged() -> list[float]:
    model = torch.nn.Linear(1, 1)
    for p in model.parameters():
        p.grad = torch.full_like(p, float(dist.get_rank()))
    DataParallelGradientHandler(model, None).handle_gradient()
    return [p.grad.item() for p in model.parameters()]


def test_a_handler_averages_the_gradients_of_a_plain_module(four: RankPool):
    assert four.run(_averaged) == [[1.5, 1.5]] * 4


def _utilities(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    x = torch.tensor([float(rank), 1.0])
    gathered = all_gather_tensors([torch.full((rank,), float(rank))] * rank)
    coordinator = DistCoordinator()
    path = Path(folder, "made")
    with priority_execution(executor_rank=1):
        if rank == 1:
            time.sleep(0.2)
            path.touch()
        seen = path.exists()
    coordinator.block_all()
    return {
        "sum": all_reduce_sum(x.clone()).tolist(),
        "mean": all_reduce_mean(x.clone()).tolist(),
        "gathered": [t.tolist() for t in gathered],
        "first": is_rank_0(),
        "seen": seen,
        "master": coordinator.is_master(),
        "last": coordinator.is_last_process(),
        "only": coordinator.on_master_only()(lambda: "done")(),
    }


def test_utilities_on_four_ranks(four: RankPool):
    with tempfile.TemporaryDirectory() as folder:
        found = four.run(_utilities, folder)
    for rank, each in enumerate(found):
        assert each["sum"] == [6.0, 4.0]
        assert each["mean"] == [1.5, 1.0]
        assert each["gathered"] == [[1.0], [2.0, 2.0], [2.0, 2.0], *[[3.0] * 3] * 3]
        assert each["seen"]
        assert each["first"] is each["master"] is (rank == 0)
        assert each["last"] is (rank == 3)
        assert each["only"] == ("done" if rank == 0 else None)


def _launched(ports: dict[str, int]) -> list[tuple[int, int, str, float]]:
    """Join by each launcher's variables, one after the other."""
    rank, size, found = os.environ["RANK"], os.environ["WORLD_SIZE"], []
    for kind, port in ports.items():
        dist.destroy_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
        os.environ.update(zip(VARIABLES[kind], (rank, rank, size), strict=True))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        coordinator = getattr(autopar, f"launch_from_{kind}")(verbose=False, timeout_s=60.0)
        found.append((coordinator.rank, coordinator.world_size, os.environ["LOCAL_RANK"], float(torch.rand(()))))
    return found


VARIABLES = {
    "torch": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_each_launcher_s_variables_make_the_process_group():
    pool = RankPool(2)
    try:
        first, second = pool.run(_launched, {kind: free_port() for kind in VARIABLES})
    finally:
        pool.close()
    assert [f[:3] for f in first] == [(0, 2, "0")] * 3
    assert [f[:3] for f in second] == [(1, 2, "1")] * 3
    assert [f[3] for f in first] == [f[3] for f in second]  # seeded alike
