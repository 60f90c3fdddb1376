"""A parallel model in a world of one, started without torchrun: what a user sees of it from outside."""

from __future__ import annotations

import copy
import gc
import hashlib
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar._torch import idle_gloo
from autopar._torch.collectives import _gloo_states
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.runtime.loading import shard_like
from autopar.runtime.optimizers import UNFIT


@pytest.fixture(autouse=True, scope="module")
def _no_group_before() -> None:
    assert not dist.is_initialized()


class Net(nn.Module):
    """One layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self.layer = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, target: Tensor | None = None, *, scale: float = 1.0) -> Any:
        """Predict, and compare."""
        self.calls.add_(1)
        out = self.layer(x) * scale
        return out if target is None else ((out - target).square().mean(), out)


def made(model: nn.Module | None = None, **inputs: Any) -> nn.Module:
    inputs = inputs or {"x": torch.randn(6, 8), "target": torch.randn(6, 4)}
    return autopar.autoparallelize(model if model is not None else Net(), inputs)


def test_the_class_is_swapped_in_place_and_looks_the_same():
    model = Net()
    parallel = made(model)
    assert parallel is model
    assert isinstance(parallel, Net)
    assert type(parallel).__name__ == "ParallelNet"
    assert repr(parallel).startswith("ParallelNet(\n  (layer): Linear(")
    assert parallel.config == {"width": 8}
    assert inspect.signature(parallel.forward) == inspect.signature(Net().forward)
    assert parallel.forward.__doc__ == "Predict, and compare."
    assert [n for n, _ in parallel.named_modules()] == ["", "layer"]
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in parallel.parameters())
    assert parallel.plan.mesh.size == 1


def test_gradients_are_dtensors_however_they_are_asked_for():
    model, reference = made(), Net()
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    reference.load_state_dict(state)
    x, target = torch.randn(6, 8), torch.randn(6, 4)
    seen = []
    model.layer.weight.register_hook(lambda g: seen.append(g * 2))
    for times in (1, 2):  # the second adds to the first
        model(x, target)[0].backward()
        reference(x, target)[0].backward()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert type(a.grad) is DTensor
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)
        assert len(seen) == times
    assert type(seen[0]) is DTensor
    weights = tuple(model.parameters())
    wanted = torch.autograd.grad(reference(x, target)[0], tuple(reference.parameters()))
    for a, b in zip(torch.autograd.grad(model(x, target)[0], weights), wanted, strict=True):
        assert isinstance(a, DTensor)
        torch.testing.assert_close(a.full_tensor(), b)
        torch.testing.assert_close((a + a).to_local(), b + b)
        torch.testing.assert_close(a.clone().norm().full_tensor(), b.norm())


def test_positional_and_keyword_calls_are_one_program():
    model = made()
    x, target = torch.randn(6, 8), torch.randn(6, 4)
    by_position, by_keyword = model(x, target), model(target=target, x=x)
    assert torch.equal(by_position[0], by_keyword[0])
    assert len(model._autopar.programs) == 1


def test_plain_arguments_of_another_value_are_another_program():
    model = made()
    x = torch.randn(6, 8)
    with torch.no_grad():
        assert torch.allclose(model(x, scale=3.0), 3 * model(x))
    assert len(model._autopar.programs) == 3


def test_more_programs_than_are_kept_warn_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autopar.runtime.variants.MAX_VARIANTS", 2)
    model = made()
    with torch.no_grad():
        for size in (6, 5):
            model(torch.randn(size, 8))
        kept = model._autopar.programs[-1]
        with pytest.warns(UserWarning, match=r"pad batches to few sizes, or plan for a range .* dynamic_shapes"):
            model(torch.randn(4, 8))
        assert len(model._autopar.programs) == 2
        assert kept in model._autopar.programs


def test_buffers_that_the_forward_changes_are_changed():
    model = made()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(6, 8), torch.randn(6, 4))
    assert model.calls == 3


class Momentum(nn.Module):
    """Reads a buffer that the same call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) * self.scale.clone()
        self.scale.mul_(2.0)
        return out.square().mean()


def test_a_backward_reads_buffers_as_the_forward_did():
    model, x = Momentum(), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    parallel = autopar.autoparallelize(model, x)
    for _ in range(2):
        for each in (parallel, plain):
            each.zero_grad()
            each(x).backward()
        assert torch.equal(parallel.scale, plain.scale)
        torch.testing.assert_close(parallel.layer.weight.grad.full_tensor(), plain.layer.weight.grad)


class Features(Momentum):
    """Returns the loss and what it is computed from."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.layer(x) * self.scale.clone()
        self.scale.mul_(2.0)
        return {"loss": out.square().mean(), "out": out}


def test_a_backward_that_was_not_captured_reads_buffers_as_the_forward_did():
    model, x = Features(), torch.randn(6, 8)
    plain = copy.deepcopy(model)
    parallel = autopar.autoparallelize(model, x)
    for _ in range(2):
        for each in (parallel, plain):
            each.zero_grad()
            made = each(x)
            out = made["out"]
            (made["loss"] + (out.full_tensor() if each is parallel else out).sum()).backward()
        assert torch.equal(parallel.scale, plain.scale)
        torch.testing.assert_close(parallel.layer.weight.grad.full_tensor(), plain.layer.weight.grad)


@pytest.mark.parametrize("captured", [True, False])
def test_an_input_that_changes_before_the_backward_is_an_error(captured):
    given = torch.randn(6, 8)
    parallel = autopar.autoparallelize(Features(), given)
    made = parallel(given)
    start = made["loss"] if captured else made["out"].full_tensor().sum()
    given.zero_()
    with pytest.raises(AutoparError, match="changed after the forward"):
        start.backward()
    parallel(given)["loss"].backward()
    given.zero_()


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.layer(x)
        return rows, rows.sigmoid()


@pytest.mark.parametrize("change", [lambda y: y.clamp_(0.4, 0.6), lambda y: y[:, :2].zero_(), lambda y: y.mul_(2.0)])
@pytest.mark.parametrize("at", [0, 1])
def test_an_output_may_be_changed_where_the_backward_does_not_read_it_as_on_one_device(at, change):
    plain, x = Activated(), torch.randn(6, 8)
    parallel = autopar.autoparallelize(copy.deepcopy(plain), x)
    for model in (plain, parallel):
        outputs = model(x)
        change(outputs[at])
        loss = sum(y.sum() for y in outputs)
        if at == 1:  # the sigmoid's derivative is computed from its result
            with pytest.raises((RuntimeError, AutoparError), match=r"modified by an inplace|output that the backward"):
                loss.backward()
        else:
            loss.backward()
    if at == 0:
        torch.testing.assert_close(parallel.layer.weight.grad.full_tensor(), plain.layer.weight.grad)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.trunk(x).relu()
        return self.left(rows), self.right(rows)


@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)])
def test_parameters_that_no_loss_reaches_have_no_gradient_as_on_one_device(of):
    plain, x = Branches(), torch.randn(6, 8)
    parallel = autopar.autoparallelize(copy.deepcopy(plain), x)
    for model in (plain, parallel):
        outputs = model(x)
        sum(outputs[i].square().sum() for i in of).backward()
    for (name, wanted), found in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        assert (found.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)


@pytest.mark.filterwarnings("ignore:Anomaly", "ignore:Error detected")
def test_detect_anomaly_finds_what_is_not_a_number():
    parallel = autopar.autoparallelize(Activated(), torch.randn(6, 8))
    with torch.autograd.detect_anomaly():
        parallel(torch.randn(6, 8))[1].sum().backward()
        with pytest.raises(RuntimeError, match="nan values"):
            parallel(torch.full((6, 8), torch.nan))[1].sum().backward()


def test_with_mixed_precision_calls_run_lower_and_parameters_stay():
    model = Net()
    x, target = torch.randn(6, 8), torch.randn(6, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, out = model(x, target)
    expected.backward()
    gradient = model.layer.weight.grad.clone()
    parallel = autopar.autoparallelize(
        copy.deepcopy(model), {"x": x, "target": target}, mixed_precision="bf16", outputs="whole"
    )
    parallel.zero_grad()
    loss, given = parallel(x=x, target=target)
    loss.backward()
    assert given.dtype == out.dtype == torch.bfloat16
    assert parallel.layer.weight.dtype == parallel.layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    torch.testing.assert_close(parallel.layer.weight.grad.full_tensor(), gradient, rtol=5e-2, atol=5e-3)
    with torch.no_grad():
        assert parallel(x=x, scale=2.0).dtype == torch.bfloat16, "another variant is compiled alike"


def test_a_deep_copy_trains_on_its_own():
    model = made()
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    x, target = torch.randn(6, 8), torch.randn(6, 4)
    before = [p.full_tensor().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    twin(x, target)[0].backward()
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    assert twin(x, target)[0] < model(x, target)[0]


def test_an_average_of_the_weights_is_a_copy():
    model = made()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    x, target = torch.randn(6, 8), torch.randn(6, 4)
    assert torch.allclose(average(x, target)[0], model(x, target)[0])


@pytest.mark.parametrize("save", [pickle.dumps, lambda m: torch.save(m, os.devnull)], ids=["pickle", "torch.save"])
def test_pickling_says_what_to_save_instead(save: Any):
    with pytest.raises(AutoparError, match=r"torch\.distributed\.checkpoint"):
        save(made())


def test_a_state_dict_of_dtensors_survives_torch_save(tmp_path: Path):
    model = made()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = made()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p.full_tensor(), q.full_tensor()) for p, q in pairs)


def test_missing_and_misshapen_entries_of_a_state_dict_are_reported_as_ever():
    model = made()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    wrong = {**Net().state_dict(), "layer.weight": torch.zeros(3, 8)}
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        model.load_state_dict(wrong)


def test_a_whole_tensor_is_placed_like_a_dtensor():
    parameter = next(made().parameters())
    whole = torch.randn(4, 8, dtype=torch.float64)
    placed = shard_like(whole, parameter)
    assert placed.placements == parameter.placements
    assert torch.equal(placed.full_tensor(), whole)
    assert placed.to_local().data_ptr() != whole.data_ptr()


def test_a_batch_is_not_kept():
    x, target = torch.randn(6, 8), torch.randn(6, 4)
    model = made(x=x, target=target)
    watched = weakref.ref(x)
    model(x, target)[0].backward()
    del x
    gc.collect()
    assert watched() is None


def test_a_parallel_model_is_not_made_parallel_again():
    with pytest.raises(PlanError, match="already parallel"):
        made(made())


def test_a_forward_on_the_instance_is_refused():
    model = Net()
    model.forward = lambda x, target: (x.sum(), x)
    with pytest.raises(PlanError, match="replaced on the instance"):
        made(model)
    assert type(model) is Net


def test_a_mesh_larger_than_the_job_names_torchrun():
    model = Net()
    with pytest.raises(MeshError, match="torchrun --nproc-per-node 2"):
        autopar.autoparallelize(model, {"x": torch.randn(6, 8)}, mesh=(2,))
    assert type(model) is Net


class Table(nn.Module):
    """A parameter and a buffer of its own, which ``reset_parameters`` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.rows = nn.Parameter(torch.empty(4))
        self.register_buffer("order", torch.arange(4), persistent=False)
        self.register_buffer("known", torch.ones(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.inner.reset_parameters()
        nn.init.constant_(self.rows, 3.0)
        self.order.copy_(torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.rows + self.order + self.known


def test_only_what_is_on_meta_is_initialised():
    model = Table()
    kept = model.inner.weight.detach().clone()
    model.rows = nn.Parameter(model.rows.detach().to("meta"))
    model.order = model.order.to("meta")
    made(model, x=torch.randn(2, 4))
    assert torch.equal(model.inner.weight.full_tensor(), kept)
    assert torch.equal(model.rows.full_tensor(), torch.full((4,), 3.0))
    assert torch.equal(model.order, torch.arange(4))


def test_what_nothing_initialises_is_named():
    model = Table().to("meta")
    with pytest.raises(AutoparError, match="known is on the meta device and nothing initializes it"):
        made(model, x=torch.randn(2, 4))
    assert type(model) is Table
    assert all(p.is_meta for p in model.parameters())


def test_initialising_leaves_torchs_generator_alone():
    model = nn.Sequential(nn.Linear(4, 4)).to("meta")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    made(model, input=torch.randn(2, 4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.rand(2), expected)


def test_each_unfit_optimizer_names_another():
    assert all(why and instead for why, instead in UNFIT.values())


def test_unfit_optimizers_work_where_nothing_is_cut():
    model = made()
    model(torch.randn(6, 8), torch.randn(6, 4))[0].backward()
    local = [nn.Parameter(p.to_local().clone()) for p in model.parameters()]
    for own, p in zip(local, model.parameters(), strict=True):
        own.grad = p.grad.to_local()
    torch.optim.Rprop(local).step()


SCRIPT = """
import os, torch, torch.distributed as dist, autopar
{start}
model = autopar.autoparallelize(torch.nn.Linear(4, 2), torch.randn(6, 4))
model(torch.randn(6, 4)).sum().backward()
gradient = float(model.bias.grad.full_tensor().sum())
os.write(1, f"{{dist.get_world_size()}} {{model.plan.mesh.size}} {{gradient}}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("", id="joins by itself"),
        pytest.param("dist.init_process_group('gloo')", id="joined before", marks=pytest.mark.slow),
    ],
)
def test_torchrun_starts_it(tmp_path: Path, start: str):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(start=start)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 2 12.0"] * 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="states of threads are told by Linux")
def test_the_process_ends_after_the_threads_of_its_collectives():
    made()
    done: list[int] = []
    caller = threading.get_ident()

    def slow(_: object) -> None:
        if threading.get_ident() != caller:
            hashlib.sha256(bytes(100_000_000)).digest()
        done.append(threading.get_ident())

    for _ in range(500):  # where the collective ends first, the caller runs what follows
        time.sleep(0.002)  # one that has not run lately is not made to wait for the thread that it wakes
        future = dist.all_reduce(torch.ones(2**22), async_op=True).get_future().then(slow)
        idle_gloo(60.0)
        assert done
        future.wait()
        if done.pop() != caller:
            break
    else:
        pytest.fail("no thread of gloo ran anything")
    assert list(_gloo_states()), "threads of gloo bear another name"


def test_every_parallel_model_asks_for_it(tmp_path: Path):
    script = "import atexit, torch, autopar; atexit.register = print\n"
    script += "autopar.autoparallelize(torch.nn.Linear(4, 2), torch.randn(6, 4))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert "idle_gloo" in done.stdout
