"""Run the graph of every micro-batch in one process, op by op, and add up what they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar import spmd
from autopar.ir import Graph, LocalOffset, Value
from autopar.mesh import Mesh
from autopar.passes.lower import _creates_tensor, resolve_op
from autopar.planner.pipeline.microbatches import MicroBatch

Named = Mapping[tuple[str, str], Tensor]
"""Tensors by kind and name of an input or result."""


def interpreted(graph: Graph, given: Named, rank: spmd.Rank) -> dict[tuple[str, str], Tensor]:
    """Return the results of a graph by kind and name."""
    values: dict[Value, Any] = {}

    def argument(arg: Any) -> Any:
        if isinstance(arg, Value):
            return values[arg]
        if isinstance(arg, LocalOffset):
            return spmd.offset(rank, arg.n, arg.axes, arg.micro_rows)
        if isinstance(arg, tuple):
            return [argument(a) for a in arg]
        if isinstance(arg, str) and arg.startswith("torch."):
            return getattr(torch, arg.removeprefix("torch."))
        return complex(arg.removeprefix("complex:")) if isinstance(arg, str) and arg.startswith("complex:") else arg

    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                meaning = graph.input_of[node.name]
                values[Value(node.name)] = given[meaning.kind, meaning.name]
                assert tuple(values[Value(node.name)].shape) == graph.meta(Value(node.name)).shape, meaning
                continue
            # As ``passes.lower`` has it: strides may be others than those of the capture.
            is_view = node.packet in ("aten.view", "aten._unsafe_view") and isinstance(node.args[1], tuple)
            target = resolve_op("aten.reshape.default" if is_view else node.op)
            kwargs = {k: argument(v) for k, v in node.kwargs}
            if _creates_tensor(target):
                kwargs["device"] = torch.device("cpu")
            made = target(*map(argument, node.args), **kwargs)
            several = isinstance(made, (tuple, list))
            for i, (meta, tensor) in enumerate(zip(node.outputs, made if several else [made], strict=False)):
                if meta is not None:
                    assert tuple(tensor.shape) == meta.shape, (node, tensor.shape)
                    values[Value(node.name, i)] = tensor
    return {(o.kind, o.name): values[o.value] for o in graph.outputs}


def ones(graph: Graph) -> dict[tuple[str, str], Tensor]:
    """Return tangents of ones."""
    found = {}
    for i in graph.inputs:
        if i.kind == "tangent":
            meta = graph.meta(Value(i.node))
            found[i.kind, i.name] = torch.ones(meta.shape, dtype=getattr(torch, meta.dtype))
    return found


def whole_batch(graph: Graph, given: Named) -> dict[tuple[str, str], Tensor]:
    (rank,) = spmd.local_ranks(Mesh((1,)))
    return interpreted(graph, {**given, **ones(graph)}, rank)


def in_micro_batches(whole: Graph, of: MicroBatch, given: Named) -> dict[tuple[str, str], Tensor]:
    """Return the results of the whole batch, from those of its micro-batches."""
    (rank,) = spmd.local_ranks(Mesh((1,)))
    held = dict(given)
    if of.prologue is not None:
        held |= {("input", name): t for (_, name), t in interpreted(of.prologue, given, rank).items()}
    tangents = ones(whole)
    before = {i.name: whole.meta(Value(i.node)) for i in whole.inputs if i.kind in ("input", "tangent")}
    made: list[dict[tuple[str, str], Tensor]] = []
    for number in range(of.micro_batches):
        fed = dict(held)
        for i in of.graph.inputs:
            value = (held | tangents)[i.kind, i.name]
            rows = of.graph.meta(Value(i.node)).shape
            if i.kind in ("input", "tangent") and i.name in before and rows != before[i.name].shape:
                value = value[number * rows[0] : (number + 1) * rows[0]]
            fed[i.kind, i.name] = value
        made.append(interpreted(of.graph, fed, spmd.at_micro_batch(rank, number)))
        held |= {("buffer", n): made[-1]["mutation", n] for n, how in of.buffers.items() if how is None}
    results = {}
    for kind, name in made[0]:
        parts = [m[kind, name] for m in made]
        if kind == "gradient" and not name.startswith("input:"):
            how: str | None = "sum"
        else:
            how = of.buffers[name] if kind == "mutation" else of.outputs[name]
        if how == "sum":
            results[kind, name] = torch.stack(parts).sum(0, dtype=parts[0].dtype)
        elif how == "concatenate":
            results[kind, name] = torch.cat(parts)
        else:
            results[kind, name] = parts[-1]
    return results
