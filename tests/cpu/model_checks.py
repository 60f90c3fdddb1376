"""Plan and simulate models of the zoo and compare them with one device; captures and references are cached."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar import passes, planner
from autopar.arguments import canonical_names
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.state import state_bytes
from autopar.planner.problem.constraints import module_outputs
from autopar.runtime.simulation import Simulation, simulate_program
from autopar.spmd import Lowered
from autopar.structure import flatten
from autopar.tracer import Capture, ColoTracer
from tests.models import ZOO

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
FLOOR = 1e-3
"""Errors are relative to at least this share of the model's largest gradient, since some true gradients are zero."""


class Promoted(TorchFunctionMode):
    """Compute in float64 whatever a float64 model computes in float32, so that results can be compared closely."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Reference:
    """The results of one ordinary step on one device, by the names that a capture gives them."""

    outputs: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model of the zoo with its capture and the results of one device (None with dropout)."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    capture: Capture
    reference: Reference | None

    def named(self) -> dict[tuple[str, str], Tensor]:
        call = self.capture.call
        found = {("constant", k): t for k, t in self.capture.constants.items()}
        found |= {("input", n): self.inputs[n] for n in call.names}
        found |= {("parameter", n): p.detach() for n, p in self.model.named_parameters()}
        return found | {("buffer", n): b.detach() for n, b in self.model.named_buffers()}


@cache
def subject(name: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Subject:
    model, inputs = ZOO[name].made(dtype, dropout)
    with Promoted() if dtype is torch.float64 else warnings.catch_warnings():
        capture = ColoTracer().capture(model, inputs)
        reference = None if dropout else eager(model, inputs)
    return Subject(model, inputs, capture, reference)


def eager(model: nn.Module, inputs: Mapping[str, Tensor]) -> Reference:
    """Run one step on one device; gradients are of the loss, or of the sum of the outputs if there is none."""
    model = copy.deepcopy(model)
    cached = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    tensors, returned = flatten(model(**inputs, **cached))
    outputs = dict(zip(returned.paths, tensors, strict=True))
    scalars = [t for t in tensors if t.ndim == 0 and t.requires_grad]
    (outputs.get("loss", scalars[0]) if scalars else sum(t.sum() for t in tensors)).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Reference({k: t.detach() for k, t in outputs.items()}, grads, dict(model.named_buffers()))


@cache
def cluster_where_sharding_pays() -> Cluster:
    """Return slow devices with fast links; on real hardware, replicating would be cheapest for small models."""
    base = Cluster.load("dgx-h100")
    device = dataclasses.replace(
        base.device,
        name="a CPU that plays a slow GPU",
        launch_latency_s=1e-9,
        collective_launch_latency_s=1e-9,
        memory_bytes_per_s=1e9,
        peak_flops_per_s=(("float32", 1e9),),
        matmul_ramp_s=1e-9,
        memory_ramp_s=1e-9,
    )
    link = dataclasses.replace(base.intra_node, latency_s=1e-9)
    return dataclasses.replace(base, device=device, intra_node=link)


@dataclass(frozen=True)
class Ran:
    """A plan with its predictions, and the results of its simulation."""

    planned: planner.Planned
    result: Simulation

    @property
    def collectives(self) -> Counter[str]:
        return Counter(op.step.kind for op in self.planned.program.collectives if op.step)


def run(
    of: Subject,
    mesh: tuple[int, ...],
    constraints: Mapping[str, str] | None = None,
    search: str = "joint",
    seed: int = 0,
    cluster: Cluster | None = None,
) -> Ran:
    """Plan and simulate. Fails if an op has no rule."""
    planned, lowered = plan(of, mesh, constraints, search, cluster)
    return Ran(planned, simulate(lowered, of, mesh, seed))


def plan(
    of: Subject,
    mesh: tuple[int, ...],
    constraints: Mapping[str, str] | None = None,
    search: str = "joint",
    cluster: Cluster | None = None,
) -> tuple[planner.Planned, Lowered]:
    """Plan and lower. Fails if an op has no rule."""
    on = Mesh(mesh)
    options = planner.Options(
        constraints=constraints or {}, aliases=canonical_names(of.model), search=search, time_limit_s=100.0, gap=0.05
    )
    sized = (cluster or cluster_where_sharding_pays()).sized(on.size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = planner.plan_graph(of.capture.graph, on, sized, options)
    assert not planned.notices
    written = Counter(t.name for op in planned.program.ops for t in op.writes)
    assert max(written.values()) == 1, f"written more than once: {[n for n, times in written.items() if times > 1]}"
    return planned, passes.compose(passes.lower(planned.program, of.capture.graph, on), of.capture.graph)


def simulate(lowered: Lowered, of: Subject, mesh: tuple[int, ...], seed: int = 0) -> Simulation:
    outputs, rest = simulate_program(lowered, of.capture.graph, Mesh(mesh), of.named(), seed)
    return dataclasses.replace(rest, outputs=outputs)


def predicted_during_the_step(of: Subject, ran: Ran, mesh: tuple[int, ...]) -> int:
    """Return the predicted peak of forward and backward in bytes, without optimizer state."""
    on, program = Mesh(mesh), ran.planned.program
    states = [
        state_bytes(op.writes[0].meta, op.writes[0].spec, on, meaning.trainable, planner.Options()).optimizer
        for op in program.ops
        if op.kind == "input" and (meaning := of.capture.graph.input_of[op.node]).kind == "parameter"
    ]
    return max(ran.planned.memory.timeline[: len(program.ops)]) - sum(states)


def assert_equals_one_device(of: Subject, result: Simulation, dtype: torch.dtype) -> None:
    """Compare every output, gradient and buffer with one device."""
    assert of.reference is not None
    assert_equal(result, of.reference, TOLERANCE[dtype])


def assert_equal(result: Simulation | Reference, expected: Reference | Simulation, tolerance: float) -> None:
    assert set(result.outputs) == set(expected.outputs)
    assert not {n for n, g in expected.grads.items() if bool(g.any())} - set(result.grads)
    largest = max(float(g.abs().max()) for g in expected.grads.values())
    errors = {}
    for name, value in result.grads.items():
        errors[name] = _error(value, expected.grads.get(name, torch.zeros_like(value)), FLOOR * largest)
    for name, value in result.outputs.items():
        errors[f"output:{name}"] = _error(value, expected.outputs[name], 1e-30)
    for name, value in result.buffers.items():
        errors[f"buffer:{name}"] = _error(value, expected.buffers[name], 1e-30)
    wrong = {n: e for n, e in errors.items() if not e <= tolerance}
    assert not wrong, f"relative errors over {tolerance:g}: {wrong}"


def _error(found: Tensor, expected: Tensor, floor: float) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if not found.numel():
        return 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    difference = (found.to(wide) - expected.to(wide)).abs().max()
    return float(difference / max(float(expected.to(wide).abs().max()), floor))


def data_parallel(name: str, of: Subject, mesh: tuple[int, ...]) -> dict[str, str]:
    """Constrain parameters to be whole, and the batch and the results of large modules to be cut over all axes."""
    whole = {n: _replicated(p.ndim) for n, p in of.model.named_parameters()}
    return whole | _batch(of, mesh) | _results(name, of, mesh, len(mesh))


def fully_sharded(name: str, of: Subject, mesh: tuple[int, ...]) -> dict[str, str]:
    """Constrain dim 0 of every parameter, and the batch, to be cut over all axes."""
    cut = _cut(range(len(mesh)))
    stored = {n: cut + "R" * (p.ndim - 1) for n, p in of.model.named_parameters() if p.ndim}
    return stored | _batch(of, mesh) | _results(name, of, mesh, len(mesh))


def tensor_parallel(name: str, of: Subject, mesh: tuple[int, ...]) -> dict[str, str]:
    """Cut columns, rows, heads and the vocabulary over the last axis, and the batch over the axes before it."""
    model, axis = ZOO[name], len(mesh) - 1
    cuts = [(glob, dim) for globs in (model.column, model.row) for glob, dim in globs.items()]
    stored = {}
    for n, p in of.model.named_parameters():
        dim = next((d for glob, d in cuts if fnmatch.fnmatchcase(n, glob)), None)
        stored[n] = "".join(f"S{axis}" if d == dim else "R" for d in range(p.ndim))
    return stored | _batch(of, mesh[:-1]) | _results(name, of, mesh, len(mesh) - 1)


FORCED = {"data_parallel": data_parallel, "fully_sharded": fully_sharded, "tensor_parallel": tensor_parallel}


def _batch(of: Subject, axes: tuple[int, ...]) -> dict[str, str]:
    return {f"input:{n}": _cut(range(len(axes))) + "R" * (t.ndim - 1) for n, t in of.inputs.items()}


def _results(name: str, of: Subject, mesh: tuple[int, ...], batch_axes: int) -> dict[str, str]:
    """Constrain the results of modules that tensor parallelism reduces to be cut by the batch alone."""
    made = module_outputs(of.capture.graph)
    return {
        module: _cut(range(batch_axes)) + "R" * (len(node.outputs[0].shape) - 1)
        for glob in ZOO[name].whole
        for module, node in made.items()
        if fnmatch.fnmatchcase(module, glob) and node.outputs[0] is not None
    }


def _replicated(ndim: int) -> str:
    return "R" * ndim or "-"


def _cut(axes: range) -> str:
    return "S" + "".join(map(str, axes)) if len(axes) else "R"
