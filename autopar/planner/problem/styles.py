"""Constraints in words: ``replicate``, ``shard``, ``column`` and ``row``, optionally with mesh axes.

==============  ======================================================================================
``replicate``   whole on every rank
``shard``       the largest dim that divides evenly, else dim 0, over all axes; of activations dim 0, the batch
``column``      the dim of a weight that the product keeps; of biases and activations the last dim
``row``         the dim of a weight that the product sums, or by which a table is looked up; of others none
==============  ======================================================================================

``column`` and ``row`` cut over the last axis, where tensor parallelism is; ``"column tp"`` and ``"shard 0 1"`` name
other axes. On a module, ``column`` and ``row`` apply to its layer as in tensor parallelism by hand: to what it returns
and to its own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import ConstraintError
from autopar.ir import Graph, Node, Value
from autopar.mesh import Mesh
from autopar.planner.graphs.dataflow import Dataflow
from autopar.sharding import ShardingSpec

STYLES = ("replicate", "shard", "column", "row")
LAYER_STYLES = ("column", "row")
"""Styles that also apply to a module's own parameters."""


def is_style(text: str) -> bool:
    return any(text.split(maxsplit=1)[:1] == [style] for style in STYLES)


def style_spec(
    text: str, shape: tuple[int, ...], mesh: Mesh, graph: Graph, parameter: str | None, module: str = ""
) -> ShardingSpec:
    """Return the spec that a style means for a tensor of ``shape``.

    Args:
        parameter: the tensor's node, if it is a parameter.
        module: the module by which it was named. The columns of an embedding table are not those of a product that is
            tied to it.

    Raises:
        ConstraintError: the style names an axis that the mesh does not have.
    """
    style, *named = text.split()
    axes = _axes(named, text, mesh) or (tuple(range(mesh.ndim)) if style == "shard" else (mesh.ndim - 1,))
    dim = None if style == "replicate" or not shape else _dim(style, shape, axes, mesh, graph, parameter, module)
    return ShardingSpec(tuple(axes if d == dim else () for d in range(len(shape))))


def _axes(named: Sequence[str], text: str, mesh: Mesh) -> tuple[int, ...]:
    found = []
    for name in named:
        if name in mesh.names:
            found.append(mesh.names.index(name))
        elif name in map(str, range(mesh.ndim)):
            found.append(int(name))
        else:
            raise ConstraintError(
                f"The style {text!r} names an axis that the mesh does not have.",
                found=f"{name!r} on mesh {mesh}",
                hint=f"one of {', '.join(mesh.names)}.",
            )
    return tuple(found)


def _dim(
    style: str,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    mesh: Mesh,
    graph: Graph,
    parameter: str | None,
    module: str,
) -> int | None:
    if style == "shard":
        group_size = math.prod(mesh.shape[a] for a in axes)
        even = [d for d, n in enumerate(shape) if n % group_size == 0]
        return max(even, key=lambda d: (shape[d], -d)) if even and parameter else 0
    if parameter is None or len(shape) < 2:
        return len(shape) - 1 if style == "column" else None
    column, row = weight_dims(Dataflow(graph), Value(parameter), module)
    return column if style == "column" else row


def weight_dims(flow: Dataflow, weight: Value, module: str = "") -> tuple[int | None, int | None]:
    """Return the dims of a weight that its first reader keeps and sums.

    The first reader in ``module`` counts, or else the first anywhere. It may read the weight transposed or viewed.
    """
    first: tuple[int | None, int | None] = (None, None)
    names = {weight: tuple(range(len(flow.graph.meta(weight).shape)))}
    for node in flow.graph.nodes:
        for position, value in enumerate(node.inputs):
            if value not in names or node.op == "placeholder":
                continue
            if all(v in flow.state for v in node.inputs):
                _follow_dims(flow, node, position, names)
            else:
                found = _column_and_row(flow, node, position, names[value])
                if found != (None, None) and node.module == module:
                    return found
                first = found if first == (None, None) else first
    return first


def _follow_dims(flow: Dataflow, node: Node, position: int, names: dict[Value, tuple[int, ...]]) -> None:
    """Follow each dim of a weight through an op on weights alone; -1 where it is no longer one dim."""
    source = names[node.inputs[position]]
    for i, meta in enumerate(node.outputs):
        dims = [-1] * len(meta.shape if meta else ())
        for d, name in enumerate(source):
            factor = flow.factor(node, position, d)
            at = flow.result_dim(node, i, factor) if factor is not None else None
            if at is not None:
                dims[at] = name
        names.setdefault(Value(node.name, i), tuple(dims))


def _column_and_row(flow: Dataflow, node: Node, position: int, names: tuple[int, ...]) -> tuple[int | None, int | None]:
    rule = flow.rules[node.name]
    if rule is None:
        return None, None
    others = [{f for d in dims for f in d} for p, dims in enumerate(rule.inputs) if p != position]
    kept = {f for dims in rule.outputs for d in dims or () for f in d}
    summed = [factors - kept for factors in others]
    # A bias has the dims that the product keeps, too. Only what the weight is multiplied with takes dims of it.
    taken = set().union(*(o for o, s in zip(others, summed, strict=True) if s or not any(summed)))
    column = row = None
    for d, name in enumerate(names):
        factor = flow.factor(node, position, d)
        if factor is None or name < 0:
            continue
        if factor in kept and factor not in taken and column is None:
            column = name
        if factor not in kept and row is None:
            row = name
    return column, row
