"""Gives each parameter's gradient memory of its own, as autograd does on one device.

Gradients are changed in place: they are clipped, scaled and accumulated. If two parameters shared the memory of one
gradient, as the biases of an LSTM cell would, it would be changed twice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from autopar._torch import JointOutput, OpOverload


def separate_gradients(module: fx.GraphModule, outputs: Sequence[JointOutput | None]) -> None:
    """Copy a parameter's gradient if its memory is, or may be, that of another result or of an operand, or if its
    elements share memory.

    Args:
        outputs: meanings of the results.
    """
    graph = module.graph
    output = next(n for n in graph.nodes if n.op == "output")
    results = list(output.args[0])
    parameters = {i for i, o in enumerate(outputs) if o is not None and _is_of_parameter(o)}
    taken = _Memory()
    for i, result in enumerate(results):
        if i not in parameters and isinstance(result, fx.Node):
            taken.take(result)
    for i in sorted(parameters):
        if isinstance(results[i], fx.Node) and not taken.take(results[i]):
            results[i] = _copied(graph, results[i])
    if results != list(output.args[0]):
        output.args = (results,)
        output.meta["val"] = fx.node.map_arg(results, lambda n: n.meta["val"])
        graph.lint()
        module.recompile()


def _is_of_parameter(output: JointOutput) -> bool:
    return output.kind == "gradient" and not isinstance(output.target, int)


@dataclass
class _Memory:
    """The memory that results take, by the node that made it."""

    views: dict[fx.Node, list[Tensor]] = field(default_factory=dict)

    def take(self, result: fx.Node) -> bool:
        """Take what a result shows; return whether that is memory of its own."""
        base, value = _base(result), result.meta["val"]
        others = self.views.setdefault(base, [])
        own = base.op != "placeholder" and not _repeats(value) and all(_are_apart(value, other) for other in others)
        others.append(value)
        return own


def _base(node: fx.Node) -> fx.Node:
    """Return the node that made the memory that ``node`` shows, perhaps through views."""
    while True:
        if (node.target is operator.getitem and _may_be_view(node.all_input_nodes[0])) or _may_be_view(node):
            node = node.all_input_nodes[0]
        else:
            return node


def _may_be_view(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    first = node.target._schema.arguments[:1]
    return bool(first) and first[0].alias_info is not None and not first[0].alias_info.is_write


def _repeats(value: Tensor) -> bool:
    """Whether several elements are the same memory, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _are_apart(a: Tensor, b: Tensor) -> bool:
    """Whether two views of the same memory certainly have no element in common.

    Those of equal strides are boxes in one grid, unless one of them goes on beyond the end of a row.
    """
    between = int(b.storage_offset() - a.storage_offset())
    first = a if between >= 0 else b
    if abs(between) > sum(stride * (size - 1) for stride, size in zip(first.stride(), first.shape, strict=True)):
        return True
    if a.stride() != b.stride() or 0 in a.stride():
        return False
    row, apart = math.inf, False
    for stride, of_a, of_b in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        steps, between = divmod(between, stride)
        if max(of_a, steps + of_b) * stride > row:
            return False
        row, apart = stride, apart or steps >= of_a or -steps >= of_b
    return apart


def _copied(graph: fx.Graph, result: fx.Node) -> fx.Node:
    with graph.inserting_after(result):
        dense: dict[str, fx.node.Argument] = {"memory_format": torch.contiguous_format}
        copy = graph.call_function(torch.ops.aten.clone.default, (result,), dense)
    copy.meta = {**result.meta, "phase": "backward", "val": result.meta["val"].contiguous()}
    return copy
