"""What Inductor compiles in place of autopar's ops, and the backend on one process."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar import codegen, spmd
from autopar.codegen import transfers
from autopar.codegen.decompositions import DECOMPOSITIONS
from autopar.errors import AutoparError
from autopar.mesh import Cluster
from tests.cpu.test_offloading import RANK, LateCopies, everything_offloaded, executed
from tests.models import ZOO

ops = torch.ops.autopar


def examples() -> dict[str, tuple[object, tuple[object, ...], dict[str, object]]]:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 7), torch.randn(4, 6)
    target = torch.tensor([[0, 9, -100, 12, 3], [8, 14, 7, 2, -100], [10, 11, 13, 6, 5]])
    lse = x.exp().sum(-1).log()
    image, statistic, scale = torch.randn(4, 3, 5, 2), torch.randn(3), torch.rand(3) + 0.5
    loss, smoothed = {"ignore_index": -100, "offset": 7}, {"own": 0.9, "each": 0.01}
    wider = {"kind": "linear", "align": False, "scales": [0.0, 0.0], "n": [5, 2], "out": [7, 6]}
    random = {"p": 0.3, "site": 5, "global_shape": [3, 11, 15], "offset": [0, 3, 8]}
    q, k, v, grad = torch.randn(4, 2, 4, 6, 8).unbind()
    plain = {"is_causal": True, "scale": 0.3, "dropout_p": 0.0, "site": 1, "global_shape": [2, 4, 6, 6]}
    plain["offset"] = [0, 0, 0, 0]
    out, sums = ops.attention(q, k[:, :2], v[:, :2], None, None, **plain)
    mask = torch.rand(2, 1, 6, 6) > 0.3
    shares = torch.rand(3, 5), torch.rand(x.shape[-1])
    return {
        "contract": (ops.contract, (x, torch.randn(9, 7), "abk,nk->abn"), {}),
        "contract, nothing summed": (ops.contract, (x, torch.randn(7, 5), "abk,kb->akb"), {}),
        "attention": (ops.attention, (q, k[:, :2], v[:, :2], mask, None), plain),
        "attention_backward": (
            ops.attention_backward,
            (grad, q, k[:, :2], v[:, :2], None, out, sums, None),
            plain,
        ),
        "sumexp": (ops.sumexp, (x, x.amax(-1)), {}),
        "rescaled": (ops.rescaled, (lse, x[..., 0], x[..., 1]), {}),
        "nll": (ops.nll, (x, lse, target), loss),
        "nll_backward": (ops.nll_backward, (torch.randn(3, 5), x, lse, target), loss),
        "nll, smoothed": (ops.nll, (x, lse, target), loss | smoothed),
        "nll_backward, smoothed": (ops.nll_backward, (torch.randn(3, 5), x, lse, target), loss | smoothed),
        "nll, weighted": (ops.nll, (x, lse, target, *shares), loss),
        "nll_backward, weighted": (ops.nll_backward, (torch.randn(3, 5), x, lse, target, *shares), loss),
        "lookup": (ops.lookup, (weight, torch.tensor([[0, 3, 5], [7, 8, 4]])), {"offset": 4}),
        "dropout": (ops.dropout, (x, torch.tensor(2**61 + 11)), random),
        "dropout of nothing": (ops.dropout, (x, torch.tensor(3)), {**random, "p": 0.0}),
        "batch_moments": (ops.batch_moments, (image,), {}),
        "batch_var_mean": (ops.batch_var_mean, (image,), {}),
        "interpolate": (ops.interpolate, (image,), wider),
        "interpolate_backward": (ops.interpolate_backward, (torch.randn(4, 3, 7, 6),), wider),
        "batch_norm": (ops.batch_norm, (image, scale, statistic, statistic, scale), {"count": 40}),
    }


def held(x: Tensor) -> int:
    """Bytes that live as long as ``x`` does."""
    return x.untyped_storage().nbytes()


@pytest.mark.parametrize("name", examples())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_each_decomposition_is_its_op(name, dtype) -> None:
    op, args, options = examples()[name]
    cast = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    if name == "attention_backward":  # it reads sums in their own dtype
        cast[5:7] = ops.attention(*cast[1:5], None, **options)
    expected = op(*cast, **options)
    found = DECOMPOSITIONS[op.default](*cast, **options)
    assert [x.dtype for x in tree_leaves(found)] == [x.dtype for x in tree_leaves(expected)]
    assert list(map(held, tree_leaves(found))) == list(map(held, tree_leaves(expected)))
    rough = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **rough)


INDEXED = {
    "nll": lambda rows, index, own: ops.nll(rows.T, rows.new_ones(len(index)), index, ignore_index=-100, **own),
    "lookup": lambda rows, index, own: ops.lookup(rows, index, **own),
}
"""Ops with the rows of one rank, of which ``own`` says where they begin, and how many all have."""


def compiled(name, rows, index, **own):
    return codegen.compiled(lambda rank, inputs: (INDEXED[name](*inputs, own),))(None, [rows, index])[0]


@pytest.mark.parametrize(
    "wrong", [pytest.param(-1, marks=pytest.mark.slow), 5, pytest.param(999, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_is_nobodys_is_an_error_when_compiled_too(name, wrong) -> None:
    """One of another rank's rows is none; nor is a label that does not count."""
    own, rows, index = {"offset": 3, "vocabulary": 5}, torch.randn(2, 3), torch.tensor([0, 3, 4])
    torch.testing.assert_close(compiled(name, rows, index, **own), INDEXED[name](rows, index, own))
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(name, rows, index.clone().index_fill_(0, torch.tensor(1), wrong), **own)


@pytest.mark.parametrize("name", INDEXED)
def test_a_rank_without_rows_compiles(name) -> None:
    """The last of four ranks that share five."""
    own, rows, index = {"offset": 5, "vocabulary": 5}, torch.randn(0, 3), torch.tensor([0, 3, 4])
    torch.testing.assert_close(compiled(name, rows, index, **own), INDEXED[name](rows, index, own))


def test_attention_that_no_kernel_of_torch_computes_stays_whole() -> None:
    op, args, options = examples()["attention"]
    seed = torch.tensor(3)
    assert DECOMPOSITIONS[op.default](*args[:4], seed, **{**options, "dropout_p": 0.5}) is NotImplemented


def test_every_decomposition_is_tried() -> None:
    assert {op for op, _, _ in ((o.default, *_) for o, *_ in examples().values())} == set(DECOMPOSITIONS)


def test_kernels_for_a_cpu_are_compiled_together_and_kept(monkeypatch, tmp_path) -> None:
    """One unit for all of a graph; the next process that compiles the graph finds what Inductor made of it."""
    from torch._dynamo.utils import counters
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def several(rank, inputs):
        (x,) = inputs
        y = (x.exp() + 1).sum(-1)
        z = torch.mm(x, x).relu() * 2
        return y.sqrt(), (z.softmax(-1) @ x).tanh(), (z + 0.5).argmax(-1)

    x = torch.rand(32, 32)
    expected, units = several(None, [x]), []
    load = codecache.CppPythonBindingsCodeCache.load_async
    monkeypatch.setattr(
        codecache.CppPythonBindingsCodeCache, "load_async", lambda *a, **k: units.append(a[0]) or load(*a, **k)
    )
    for found in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
        counters.clear()
        for value, wanted in zip(codegen.compiled(several)(None, [x]), expected, strict=True):
            torch.testing.assert_close(value, wanted)
        assert counters["inductor"][found] == 1
        torch._inductor.codecache.PyCodeCache.cache_clear()
    assert all(unit.count("namespace unit_") >= 3 for unit in units)
    assert 1 <= len(units) <= 2


def test_booleans_that_are_sent_as_bytes_compile() -> None:
    def count(rank, inputs):
        (sent,) = inputs
        return (sent.view(torch.uint8).clone().view(torch.bool).sum(),)

    flags = torch.arange(48) % 3 == 0
    assert codegen.compiled(count)(None, [flags])[0] == 16


def step(model: torch.nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    model.zero_grad()
    made = model(**inputs)
    loss = made if isinstance(made, Tensor) else made[0] if isinstance(made, tuple) else made.loss
    loss.sum().backward()
    return loss.detach(), {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


QUICK = ("mlp",)
MODELS = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in ("mlp", "cnn", "gpt2", "llama", "bert", "vit", "resnet", "mixtral")
]


def equals_eager(model, inputs, plan) -> None:
    found = [
        step(autopar.autoparallelize(copy.deepcopy(model), inputs, plan=plan, backend=backend), inputs)
        for backend in ("eager", "inductor")
    ]
    (eager, eager_grads), (compiled, compiled_grads) = found
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    for parameter, gradient in eager_grads.items():
        torch.testing.assert_close(compiled_grads[parameter], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_step_equals_the_eager_one(name) -> None:
    model, inputs = ZOO[name].made(torch.float32, 0.1)
    equals_eager(model, inputs, autopar.plan(model, inputs, mesh=(1,)))


@pytest.mark.slow
@pytest.mark.parametrize("action", ["recompute", "offload"])
def test_under_a_budget_too(action) -> None:
    """Activations computed again are compiled, and so is what is fetched."""
    model, inputs = ZOO["gpt2"].made(torch.float32, 0.1)
    near, cluster = autopar.plan(model, inputs, mesh=(1,)), Cluster.load("cpu-2")
    far = replace(cluster, host=replace(cluster.host, bandwidth_bytes_per_s=1.0))  # nothing goes to the host
    plan = autopar.plan(
        model,
        inputs,
        mesh=(1,),
        cluster=cluster if action == "offload" else far,
        memory_budget=int(0.85 * near.peak_memory),
    )
    assert action in {record.action for record in plan.activations.values()}
    equals_eager(model, inputs, plan)


@pytest.mark.parametrize(
    ("name", "seed"), [("mlp", 0), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in ("cnn", "llama", "vit"))]
)
def test_programs_that_recompute_and_offload_are_compiled(name, seed) -> None:
    model, inputs = ZOO[name].made(torch.float32, 0.1)
    plan = autopar.plan(model, inputs, mesh=(1,), search=f"random+recompute:{seed}")
    assert any(op.kind == "fetch" for op in plan.program.ops)
    equals_eager(model, inputs, plan)


TRANSFERS = ("offload", "offloaded", "fetch", "fetched")
LAUNCHES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single", "wait_tensor")


class Calls(TorchDispatchMode):
    """Names of the collectives and transfers that a program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1].rstrip("_")
        if name in TRANSFERS + LAUNCHES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_transfers_and_collectives_start_and_end_in_the_order_of_the_plan() -> None:
    model, inputs = ZOO["mlp"].made(torch.float32)
    plan = autopar.plan(model, inputs, mesh=(1,), search="random+recompute:0")
    parallel = autopar.autoparallelize(model, inputs, plan=plan, backend="inductor")
    step(parallel, inputs)
    with Calls() as calls:
        step(parallel, inputs)
    called = re.findall(r"spmd\.(offload|fetch|arrived|wait|all_\w+|reduce_\w+)\((?:rank, )?(\w+)", plan.source)
    expected = []
    for name, operand in called:
        if name == "arrived":
            expected.append("offloaded" if "_on_host_launched" in operand else "fetched")
        else:
            expected.append(next((launch for launch in LAUNCHES if launch.startswith(name)), name))
    assert {"offload", "fetched", "all_gather_into_tensor"} <= set(expected)
    assert calls.names == expected


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cnn", "llama", "mixtral"))]
)
def test_compiled_code_reads_nothing_before_its_copy_is_waited_for(name, monkeypatch) -> None:
    of, _, program = everything_offloaded(name, (1,))
    device = LateCopies(monkeypatch)
    _, gradients = executed(of, program, codegen.compiled)
    assert device.done == len(device.queue) == sum(op.is_transfer for op in program.ops)
    for meaning, gradient in gradients.items():
        torch.testing.assert_close(gradient, of.reference.grads[meaning], rtol=1e-4, atol=1e-5)


def test_what_was_under_way_when_a_compiled_program_failed_is_not_kept(monkeypatch) -> None:
    def program(rank, inputs):
        (x,) = inputs
        inputs.clear()
        sent = spmd.offload(rank, x), spmd.offload(rank, x + 1)
        return tuple(spmd.arrived(s) for s in sent)

    run = codegen.compiled(program)
    assert [held.tensor.tolist() for held in run(RANK, [torch.ones(3)])] == [[1.0] * 3, [2.0] * 3]
    monkeypatch.setattr(spmd, "arrived", lambda transfer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(RANK, [torch.ones(3)])
    assert not transfers._IN_FLIGHT.transfers


def test_an_emitted_file_with_transfers_of_its_own_runs_as_it_is(tmp_path) -> None:
    model, inputs = ZOO["mlp"].made(torch.float32)
    plan = autopar.plan(model, inputs, mesh=(1,), search="random+recompute:0")
    assert any(op.kind == "fetch" for op in plan.program.ops)
    file = tmp_path / "step.py"
    plan.emit(file)
    options = {"plan": plan, "backend": "inductor"}
    found = [
        step(autopar.autoparallelize(copy.deepcopy(model), inputs, source=source, **options), inputs)
        for source in (None, file)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_a_compiled_model_takes_other_batches_and_steps() -> None:
    model, inputs = ZOO["mlp"].made(torch.float32)
    parallel = autopar.autoparallelize(copy.deepcopy(model), inputs, mesh=(1,), backend="inductor")
    smaller = {k: t[:5] for k, t in inputs.items()}
    for batch in (inputs, smaller, inputs):
        loss, grads = step(parallel, batch)
        model.zero_grad()
        expected = model(**batch)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for parameter, value in model.named_parameters():
            torch.testing.assert_close(grads[parameter], value.grad)
    with torch.no_grad():
        torch.testing.assert_close(parallel(**smaller), model(**smaller))


def test_an_unknown_backend_is_named() -> None:
    model, inputs = ZOO["mlp"].made(torch.float32)
    with pytest.raises(AutoparError, match="There is no backend='tensorrt'") as raised:
        autopar.plan(model, inputs, mesh=(1,), backend="tensorrt")
    assert "inductor" in str(raised.value)


class Block(nn.Module):
    """Norms behind a residual, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16), nn.LayerNorm(16)])
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 24)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.layers[0](x)
        for norm, layer in zip(self.norms[:2], self.layers[:2], strict=True):
            y = y + layer(norm(y))
        return nn.functional.cross_entropy(self.layers[2](self.norms[2](y)), target)


@pytest.mark.parametrize("planned_for", ["eager", "inductor"])
@pytest.mark.slow
def test_inductor_calls_the_kernels_that_a_plan_asks_for(planned_for) -> None:
    """Of a plan for Inductor those between whose ops a collective may stand."""
    model, inputs = Block(), {"x": torch.randn(8, 16), "target": torch.randint(0, 24, (8,))}
    plan = autopar.plan(model, inputs, mesh=(1,), cluster="dgx-h100:1", backend=planned_for)
    fused = {"add_norm", "norm_backward"}
    assert "statistics" in plan.kernels
    assert fused & set(plan.kernels) == (fused if planned_for == "eager" else set())
    assert "softmax_statistics(" in plan.source
    loss, gradients = step(autopar.autoparallelize(copy.deepcopy(model), inputs, plan=plan, backend="inductor"), inputs)
    expected = model(**inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
