"""Capture, plan and simulate a model of the zoo, and compare it with one device."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar import ir, passes, planner
from autopar.arguments import canonical_names
from autopar.mesh import Mesh
from autopar.runtime.simulation import simulate_program
from autopar.strategies import find_rule, flops, strategies
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import (
    TOLERANCE,
    Promoted,
    Subject,
    assert_equal,
    cluster_where_sharding_pays,
    eager,
)
from tests.zoo.entry import Entry

LEAST = 0.95
"""Smallest share of FLOPs, and of bytes of activations, that must be in ops that can be sharded."""

MESHES = ((4,), (2, 2), (2, 2, 2))


@dataclass(frozen=True)
class Coverage:
    """How much of a captured program can be sharded.

    Args:
        nodes: number of nodes of the joint graph, without its inputs.
        ops: number of distinct ops.
        without_rule: ops without a rule, which run whole on every rank.
        flops: share of the FLOPs in ops with a strategy that divides the work. An op whose rule has no formula counts
            one for each element that it makes.
        bytes: the same share, of the bytes that ops of the forward make.
    """

    nodes: int
    ops: int
    without_rule: tuple[str, ...]
    flops: float
    bytes: float


@dataclass(frozen=True)
class Record:
    """The results of one model.

    Args:
        seconds: processor time of the capture, all plans and all simulations.
        sharded: a summary of what the plan on the last mesh cuts.
        equal: the meshes on which everything equals one device.
        failures: the error of each mesh that failed, or of "capture".
    """

    name: str
    family: str
    coverage: Coverage | None
    seconds: float
    sharded: str
    equal: tuple[str, ...]
    failures: Mapping[str, str]

    @property
    def is_well(self) -> bool:
        """Whether the model is equal on every mesh and nearly all of it can be sharded."""
        found = self.coverage
        everywhere = set(map(named, MESHES)) <= set(self.equal)
        return everywhere and found is not None and min(found.flops, found.bytes) >= LEAST


def named(mesh: tuple[int, ...]) -> str:
    """Format a mesh for the page."""
    return f"({', '.join(map(str, mesh))}{',' * (len(mesh) == 1)})"


def coverage(graph: ir.Graph) -> Coverage:
    computed = [n for n in graph.nodes if n.op != "placeholder"]
    work = {n.name: _work(graph, n) for n in computed}
    made = {n.name: sum(m.bytes for m in n.outputs if m) for n in computed if n.phase == "forward"}
    cut = {n.name for n in computed if _can_be_cut(graph, n)}
    return Coverage(
        len(computed),
        len({n.op for n in computed}),
        tuple(sorted({n.packet for n in computed if find_rule(n) is None})),
        sum(w for n, w in work.items() if n in cut) / max(1.0, sum(work.values())),
        sum(b for n, b in made.items() if n in cut) / max(1, sum(made.values())),
    )


def _work(graph: ir.Graph, node: ir.Node) -> float:
    stated = flops(node, tuple(graph.meta(v) for v in node.inputs))
    return stated or float(sum(m.numel for m in node.outputs if m))


def _can_be_cut(graph: ir.Graph, node: ir.Node) -> bool:
    options = strategies(node, tuple(graph.meta(v) for v in node.inputs), Mesh((2,)))
    return any(s.work < 1 or any(o is not None and o.axes for o in s.outputs) for s in options)


def captured(entry: Entry) -> Subject:
    """Return the entry's model with its capture and the results of one device."""
    model, inputs = entry.made()
    with Promoted() if entry.dtype is torch.float64 else warnings.catch_warnings():
        capture = ColoTracer().capture(model, inputs)
        return Subject(model, inputs, capture, eager(model, inputs))


def planned_on(of: Subject, shape: tuple[int, ...], time_limit_s: float = 10.0) -> planner.Planned:
    mesh = Mesh(shape)
    options = planner.Options(aliases=canonical_names(of.model), time_limit_s=time_limit_s, gap=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the record has missing rules
        return planner.plan_graph(of.capture.graph, mesh, cluster_where_sharding_pays().sized(mesh.size), options)


def check(entry: Entry, of: Subject, shape: tuple[int, ...]) -> planner.Planned:
    """Plan on a mesh, simulate, and compare every output, gradient and buffer with one device.

    Raises:
        AssertionError: if they differ.
    """
    planned, mesh, graph = planned_on(of, shape), Mesh(shape), of.capture.graph
    outputs, result = simulate_program(passes.lower(planned.program, graph, mesh), graph, mesh, of.named(), 0)
    assert of.reference is not None
    assert_equal(replace(result, outputs=outputs), of.reference, TOLERANCE[entry.dtype])
    return planned


def measure(entry: Entry, meshes: tuple[tuple[int, ...], ...] = MESHES) -> Record:
    """Return everything that the page says about a model, failures included."""
    started = time.process_time()
    failures: dict[str, str] = {}
    equal: list[str] = []
    found, sharded = None, ""
    try:
        of = captured(entry)
        found = coverage(of.capture.graph)
    except Exception as error:  # noqa: BLE001  the record has every failure
        return Record(entry.name, entry.family, None, time.process_time() - started, "", (), {"capture": _text(error)})
    for shape in meshes:
        try:
            planned = check(entry, of, shape)
            sharded = _sharded(of, planned) if math.prod(shape) > 1 else sharded
            equal.append(named(shape))
        except Exception as error:  # noqa: BLE001  likewise
            failures[named(shape)] = _text(error)
    return Record(entry.name, entry.family, found, time.process_time() - started, sharded, tuple(equal), failures)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def _sharded(of: Subject, planned: planner.Planned) -> str:
    """Describe how many parameters are stored in shards, and the specs of an input and of the largest parameters."""
    graph, tensors = of.capture.graph, planned.program.tensors
    specs = {i: tensors[i.node].spec for i in graph.inputs if i.kind in ("parameter", "input")}
    stored = {i: s for i, s in specs.items() if i.kind == "parameter"}
    cut = [i for i, s in stored.items() if s.axes]
    largest = sorted(cut, key=lambda i: -graph.meta(ir.Value(i.node)).bytes)[:2]
    batch = next((f"{i.name} {s}" for i, s in specs.items() if i.kind == "input" and s.axes), "no input")
    return "; ".join([batch, f"{len(cut)} of {len(stored)} parameters", *(f"{i.name} {stored[i]}" for i in largest)])
