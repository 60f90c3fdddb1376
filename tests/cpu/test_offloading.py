"""What a plan offloads goes to the host and comes back: the same step as on one device, and less of its memory."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

import autopar
from autopar import codegen, passes, planner, spmd
from autopar.arguments import canonical_names
from autopar.mesh import Mesh
from autopar.planner.memory.exact import profile
from autopar.planner.pricing.prices import Prices
from autopar.planner.search.fitting import fitted
from autopar.plans.serial import program_from, program_to
from autopar.program import AGAIN
from autopar.runtime.meter import MemoryMeter
from autopar.runtime.simulation import simulate_program
from autopar.spmd import transfers
from tests.cpu.model_checks import assert_equals_one_device, cluster_where_sharding_pays, run, subject
from tests.models import ZOO
from tests.offloading import offloaded, saved

RANK = spmd.local_ranks(Mesh((1,)))[0]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "every second": lambda x: x[:, ::2],
    "a view from the middle": lambda x: x[1:3],
    "expanded": lambda x: x[:1].expand(4, 6, 5),
    "a scalar": lambda x: x[1, 2, 3],
    "empty": lambda x: x[:, :0],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_back_is_what_went(layout, dtype) -> None:
    x = LAYOUTS[layout](torch.arange(4 * 6 * 5).reshape(4, 6, 5).to(dtype))
    held = spmd.arrived(spmd.offload(RANK, x))
    back = spmd.arrived(spmd.fetch(RANK, held))
    assert back.dtype == x.dtype
    assert torch.equal(back, x)
    storages = {t.untyped_storage().data_ptr() for t in (x, held.tensor, back) if t.numel()}
    assert len(storages) == (3 if x.numel() else 0)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "a view from the middle"])
def test_a_dense_tensor_comes_back_with_its_strides(layout) -> None:
    """Ops of the backward were captured for them."""
    x = LAYOUTS[layout](torch.randn(4, 6, 5))
    assert spmd.arrived(spmd.fetch(RANK, spmd.arrived(spmd.offload(RANK, x)))).stride() == x.stride()


def test_the_devices_memory_does_not_count_what_the_host_holds() -> None:
    x = torch.randn(1000)
    with MemoryMeter() as meter:
        meter.hold([x])
        sent = spmd.offload(RANK, x)
        held = spmd.arrived(sent)
        assert meter.held == 4000
        del x
        assert meter.held == 4000, "a transfer keeps what it copies alive"
        del sent
        gc.collect()  # torch keeps frames of the first call under a mode in cycles
        assert meter.held == 0
        back = spmd.arrived(spmd.fetch(RANK, held))
        assert meter.held == meter.peak == 4000
    assert back.numel() == held.tensor.numel()


MESHES = [(1,), (2,), (2, 2)]


@cache
def everything_offloaded(name, mesh):
    """The planned program of a model, and that with all that its backward reads of the forward sent to the host."""
    of = subject(name, ZOO[name].dtypes[-1])
    options = planner.Options(aliases=canonical_names(of.model), gap=0.05)
    on = Mesh(mesh)
    cluster = cluster_where_sharding_pays().sized(on.size)
    program = planner.plan_graph(of.capture.graph, on, cluster, options, compare=False).program
    return of, program, offloaded(program)


QUICK = ("mlp", "cnn", "gpt2", "mixtral")
CASES = [
    pytest.param(name, mesh, marks=[] if name in QUICK else pytest.mark.slow, id=f"{name}-{mesh}")
    for name in ZOO
    for mesh in MESHES
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_step_that_offloads_everything_is_exact(name, mesh) -> None:
    of, kept, program = everything_offloaded(name, mesh)
    assert sum(op.kind == "fetch" for op in program.ops) > len(saved(kept)) / 2
    lowered = passes.lower(program, of.capture.graph, Mesh(mesh))
    outputs, rest = simulate_program(lowered, of.capture.graph, Mesh(mesh), of.named(), 0)
    assert_equals_one_device(of, dataclasses.replace(rest, outputs=outputs), ZOO[name].dtypes[-1])


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_random_plan_that_recomputes_and_offloads_is_exact(name, mesh) -> None:
    dtype = ZOO[name].dtypes[-1]
    of = subject(name, dtype)
    ran = run(of, mesh, search=f"random+recompute:{MESHES.index(mesh)}")
    assert any(op.is_transfer or op.name.endswith(AGAIN) for op in ran.planned.program.ops)
    assert_equals_one_device(of, ran.result, dtype)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "t5"])
def test_the_emitted_step_holds_exactly_what_is_predicted(name) -> None:
    """Offloaded tensors are gone from the device where the program waits for their copies."""
    of, kept, program = everything_offloaded(name, (1,))
    assert of.reference is not None
    measured, gradients = executed(of, program)
    for meaning, gradient in gradients.items():
        torch.testing.assert_close(gradient, of.reference.grads[meaning], rtol=1e-9, atol=1e-9)
    assert measured == pytest.approx(predicted(of, program), abs=16)
    assert measured <= executed(of, kept)[0]


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_transfers_give_way_to_a_budget_and_the_step_stays_exact(name) -> None:
    """Fetched later and waited for sooner, as far as that saves memory."""
    of, _, program = everything_offloaded(name, (1,))
    program = early(program)
    options = planner.Options(optimizer="sgd", device="cpu")
    before = profile(program, of.capture.graph, Mesh((1,)), options)
    prices = Prices(Mesh((1,)), cluster_where_sharding_pays().sized(1))
    late, memory = fitted(program, before, of.capture.graph, prices, options, 0.0)
    assert memory.peak_bytes < before.peak_bytes
    assert {op.name for op in late.ops} == {op.name for op in program.ops}
    measured, gradients = executed(of, late)
    assert measured == pytest.approx(max(memory.timeline[:-1]), abs=16)
    for meaning, gradient in gradients.items():
        torch.testing.assert_close(gradient, of.reference.grads[meaning], rtol=1e-9, atol=1e-9)


def early(program):
    """``program`` with all that comes back fetched as the backward begins."""
    turn = next(i for i, op in enumerate(program.ops) if op.phase == "backward" and op.kind != "input")
    fetches = [op for op in program.ops if op.kind == "fetch"]
    before, behind = program.ops[:turn], program.ops[turn:]
    return dataclasses.replace(program, ops=(*before, *fetches, *(op for op in behind if op.kind != "fetch")))


@pytest.mark.parametrize(("mesh", "share"), [((2,), 0.85), ((2, 2), 0.8)], ids=str)
def test_fetches_that_could_begin_early_bar_no_budget(mesh, share) -> None:
    of, on = subject("cnn", torch.float32), Mesh(mesh)
    cluster = cluster_where_sharding_pays().sized(on.size)
    free = planner.plan_graph(of.capture.graph, on, cluster, planner.Options(), compare=False)
    budget = int(share * free.memory.peak_bytes)
    planned = planner.plan_graph(
        of.capture.graph, on, cluster, planner.Options(memory_budget_bytes=budget, time_limit_s=20), compare=False
    )
    assert planned.memory.peak_bytes <= budget
    assert any(op.kind == "fetch" for op in planned.program.ops)


def executed(of, program, compiled=lambda function: function):
    """Peak bytes and gradients of the emitted source on one rank."""
    lowered = passes.lower(program, of.capture.graph, Mesh((1,)))
    source = codegen.load(codegen.emit(lowered, Mesh((1,)), ["A test."]))
    seed = {("seed", "seed"): torch.zeros((), dtype=torch.int64)}
    with MemoryMeter() as meter, torch.no_grad():
        feeds = [(of.named() | seed)[i.kind, i.name] for i, _ in lowered.inputs]
        meter.hold(feeds)
        made = compiled(source["forward"])(RANK, feeds)
        kept, back = made[: len(lowered.results)], [*made[len(lowered.results) :]]
        del made
        back += [torch.ones(of.capture.graph.by_name[i.node].outputs[0].shape).to(kept[0]) for i, _ in lowered.tangents]
        gradients = compiled(source["backward"])(RANK, back)
    return meter.peak, {o.name: g for (o, _), g in zip(lowered.gradients, gradients, strict=True)}


def predicted(of, program) -> int:
    """Peak bytes until the backward ends, without optimizer state."""
    memory = profile(program, of.capture.graph, Mesh((1,)), planner.Options(optimizer="sgd", device="cpu"))
    return max(memory.timeline[:-1])


class LateCopies:
    """A device whose copies are made as late as they may be: when someone waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self.queue: list[Callable[[], object]] = []
        monkeypatch.setattr(transfers, "_has_own_memory", lambda device: True)
        monkeypatch.setattr(transfers, "_pinned_like", self.unset)
        monkeypatch.setattr(transfers, "_copy_on_host_stream", self.launch)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)

    def unset(self, x: Tensor) -> Tensor:
        return torch.empty_like(x).fill_(float("nan") if x.is_floating_point() else 1)

    def launch(self, source: Tensor, target: Tensor, device: object) -> int:
        self.queue.append(lambda: target.copy_(source))
        return len(self.queue)

    def wait_event(self, event: int) -> None:
        while self.done < event:
            self.queue[self.done]()
            self.queue[self.done] = int
            self.done += 1


@pytest.mark.parametrize("name", ["mlp", "cnn", "llama", "mixtral"])
def test_nothing_is_read_before_its_copy_is_waited_for(name, monkeypatch) -> None:
    of, _, program = everything_offloaded(name, (1,))
    device = LateCopies(monkeypatch)
    _, gradients = executed(of, program)
    assert device.done == len(device.queue) == sum(op.is_transfer for op in program.ops)
    for meaning, gradient in gradients.items():
        torch.testing.assert_close(gradient, of.reference.grads[meaning], rtol=1e-4, atol=1e-5)


def test_offloading_is_written_and_read_with_the_program() -> None:
    _, _, program = everything_offloaded("mlp", (2, 2))
    assert program_from(json.loads(json.dumps(program_to(program)))) == program


def test_the_source_shows_what_goes_to_the_host_and_when_it_is_there() -> None:
    of, _, program = everything_offloaded("mlp", (1,))
    lowered = passes.lower(program, of.capture.graph, Mesh((1,)))
    source = codegen.emit(lowered, Mesh((1,)), ["A test."])
    launched = next(line for line in source.splitlines() if "spmd.offload(rank, " in line)
    assert "_on_host_launched = " in launched
    assert "1.0 us" in launched
    name = launched.split(" = ")[0].strip()
    assert f"{name.removesuffix('_launched')} = spmd.arrived({name})" in source
    assert f"del {name}" in source


def test_without_a_backward_nothing_is_offloaded() -> None:
    of, _, program = everything_offloaded("gpt2", (1,))
    inference = passes.forward_only(passes.lower(program, of.capture.graph, Mesh((1,))))
    assert not any(node.target in (spmd.offload, spmd.arrived) for node in inference.forward.graph.nodes)


def test_a_plan_says_what_the_host_holds() -> None:
    model, inputs = ZOO["gpt2"].made(torch.float32)
    plan = autopar.plan(model, inputs, mesh=(1,), search="random+recompute:0", optimizer="sgd")
    away = {name for name, a in plan.activations.items() if a.action == "offload"}
    fetched = {op.reads[0] for op in plan.program.ops if op.kind == "fetch"}
    assert away
    assert sum(plan.program.tensors[name].bytes for name in fetched) >= plan.host_memory > 0
    assert f"{len(fetched)} activations" in str(plan)
    again = autopar.Plan.from_json(plan.to_json())
    assert (again.host_memory, again.program, again.digest) == (plan.host_memory, plan.program, plan.digest)
