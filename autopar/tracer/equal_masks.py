"""Merges masks that a model computes twice, so that selections by them match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import OpOverload, storage_key

aten = torch.ops.aten


_UNDECLARED_WRITES = {aten.batch_norm.default, aten.instance_norm.default}


def merge_equal_masks(graph: fx.Graph) -> None:
    """Merge masks that are computed twice, if nothing that they read is ever changed.

    ``y[x > 0] = h[x > 0]`` and ``loss(h[x > 0], y[x > 0])`` compute a mask twice.
    """
    if not any(node.target in (aten.index.Tensor, aten.index_put_.default) for node in graph.nodes):
        return
    written = {storage_key(value) for node in graph.nodes for value in written_tensors(node)}
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        value, target = node.meta.get("val"), node.target
        if not isinstance(value, Tensor) or not isinstance(target, OpOverload) or target.namespace != "aten":
            continue
        read = [n.meta.get("val") for n in node.all_input_nodes]
        changes = any(isinstance(v, Tensor) and storage_key(v) in written for v in (value, *read))
        if changes or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            continue
        computed = fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
        earlier = first.setdefault((target, str(computed)), node)
        if target._opname == "to" and storage_key(value) == storage_key(read[0]):  # a conversion that changes nothing
            earlier = computed[0][0]
        same[node] = earlier
        if earlier is not node and value.dtype == torch.bool:
            node.replace_all_uses_with(earlier)


def written_tensors(node: fx.Node) -> Iterator[Tensor]:
    """Yield the tensors that a node changes, or may change."""
    if node.op != "call_function":
        return
    target, written = node.target, node.all_input_nodes
    if isinstance(target, OpOverload) and target.namespace == "aten" and target not in _UNDECLARED_WRITES:
        changed = {a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
        named = [v for name, v in given.items() if name in changed]
        written = [n for v in named for n in (v if isinstance(v, (list, tuple)) else [v]) if isinstance(n, fx.Node)]
    yield from (v for n in written if isinstance(v := n.meta.get("val"), Tensor))
