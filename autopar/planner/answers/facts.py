"""The facts of a plan: where its ops come from, what its devices can do, and its memory over time."""

from __future__ import annotations

import math
from typing import cast

from autopar.cost_models import CollectiveCosts
from autopar.cost_models.communication import CollectiveKind
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.op_work import hidden_share
from autopar.planner.memory.exact import history
from autopar.planner.options import Options
from autopar.planner.pricing.prices import Prices
from autopar.planner.search.search import Planned
from autopar.plans.facts import AxisFacts, Facts, NodeFacts
from autopar.program import Program
from autopar.strategies import flops


def gather_facts(planned: Planned, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options) -> Facts:
    """Gather what tables and reports show besides the plan's own figures."""
    program, at = planned.program, {op.name: i for i, op in enumerate(planned.program.ops)}
    nodes, work, known, hidden = {}, dict[str, float](), dict[int, float](), 0.0
    for node in graph.nodes:
        kind = graph.kinds[node.name]
        if kind not in known:
            metas = tuple(graph.meta(v) for v in node.inputs)
            known[kind] = flops(node, metas) if node.op != "placeholder" else 0.0
        done = known[kind]
        hidden += done * hidden_share(node)
        module = node.module
        if node.op == "placeholder" and graph.input_of[node.name].kind in ("parameter", "buffer"):
            module = graph.input_of[node.name].name.rpartition(".")[0]
        nodes[node.name] = NodeFacts(module, node.op, done)
        if done and node.inputs:
            dtype = graph.meta(node.inputs[0]).dtype
            work[dtype] = work.get(dtype, 0.0) + done
    dtype = max(work, key=lambda d: (work[d], d), default="float32")
    samples, tokens = _batch(graph)
    return Facts(
        nodes=nodes,
        names=_names(graph),
        shapes=_shapes(graph),
        intervals=tuple((at.get(i.op, -1), i.stream, i.start_s, i.end_s) for i in planned.timeline.intervals),
        history=history(program, graph, mesh, options),
        dtype=dtype,
        hidden_flops=hidden,
        peak_flops_per_s=cluster.device.peak(dtype),
        overlap=Prices(mesh, cluster).overlap,
        samples=samples,
        tokens=tokens,
        device=cluster.device.name,
        description=cluster.description,
        memory_bytes=cluster.device.memory_bytes,
        devices_per_node=cluster.devices_per_node,
        axes=_axes(mesh, cluster, program),
    )


def _names(graph: Graph) -> dict[str, str]:
    """Return ``lm_head.weight``, ``input:input_ids``, ``output:loss``, ``lm_head.weight.grad`` and so on, by node."""
    prefix = {"parameter": "", "buffer": "", "constant": ""}
    names = {i.node: f"{prefix.get(i.kind, f'{i.kind}:')}{i.name}" for i in graph.inputs}
    for o in graph.outputs:
        own = (
            f"{o.kind}:{o.name}"
            if o.kind in ("output", "sent")
            else f"{o.name}.grad"
            if o.kind == "gradient"
            else o.name
        )
        names.setdefault(str(o.value), own)
    return names


def _shapes(graph: Graph) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {}
    for i in graph.inputs:
        meta = graph.by_name[i.node].outputs[0]
        if i.kind in ("parameter", "buffer") and meta is not None:
            found[i.name] = (meta.shape, meta.dtype)
    return found


def _batch(graph: Graph) -> tuple[int, int]:
    """Return the samples of the step, and its tokens if the first input is a matrix of integers, as token ids are."""
    metas = [graph.by_name[i.node].outputs[0] for i in graph.inputs if i.kind == "input"]
    first = next((m for m in metas if m is not None and m.shape), None)
    if first is None:
        return 0, 0
    ids = len(first.shape) == 2 and first.dtype in ("int64", "int32")
    return first.shape[0], math.prod(first.shape) if ids else 0


def _axes(mesh: Mesh, cluster: Cluster, program: Program) -> tuple[AxisFacts, ...]:
    costs = CollectiveCosts(mesh, cluster)
    largest: dict[tuple[int, str], int] = {}
    for op in program.ops:
        if op.step is None or not op.exchanges:
            continue
        key = (op.step.axis, op.step.kind)
        largest[key] = max(largest.get(key, 0), op.wire_bytes)
    return tuple(
        AxisFacts(
            name,
            link.ranks_per_node,
            link.nodes,
            _finite(link.intra_bytes_per_s),
            _finite(link.inter_bytes_per_s),
            {k: costs.algorithm(cast("CollectiveKind", k), n, axis) for (at, k), n in largest.items() if at == axis},
        )
        for axis, (name, link) in enumerate(zip(mesh.names, costs.links, strict=True))
    )


def _finite(rate: float) -> float:
    """Return 0 for a level that nothing crosses."""
    return rate if math.isfinite(rate) else 0.0
