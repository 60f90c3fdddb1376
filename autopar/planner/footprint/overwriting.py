"""Which ops may overwrite an operand: ops whose results are memory of their own, and ops that can run in place."""

from __future__ import annotations

from autopar.ir import Graph, Node, Value
from autopar.planner.footprint.layouts import MAYBE_VIEWS
from autopar.planner.footprint.op_work import VIEWS
from autopar.program import Op

MAKES_NEW = frozenset(
    {
        "aten.add",
        "autopar.contract",
        "aten.mm",
        "aten.bmm",
        "aten.addmm",
        "aten.baddbmm",
        "aten.sum",
        "aten.convolution",
        "aten.convolution_backward",
        "aten.native_layer_norm_backward",
        "aten.embedding_dense_backward",
        "autopar.experts_mm",
        "autopar.experts_mm_weight",
        "autopar.routed_mm",
        "autopar.routed_mm_weight",
    }
)
"""Ops whose results are never views."""


OVERWRITABLE = MAKES_NEW | {
    "aten.mul",
    "aten.sub",
    "aten.div",
    "aten.relu",
    "aten.threshold_backward",
    "aten.native_layer_norm",
    "aten.gelu",
    "aten.gelu_backward",
    "aten.silu",
    "aten.silu_backward",
    "aten.max_pool2d_with_indices_backward",
    "autopar.dropout",
    "autopar.batch_norm",
    "autopar.batch_norm_backward_input",
}
"""Ops whose results may be overwritten: they are never views, and are added to others or activated."""


OVERWRITING = {
    "aten.add.Tensor": 2,
    "aten.mul.Tensor": 2,
    "aten.relu.default": 1,
    "aten.threshold_backward.default": 1,
    "aten.gelu_backward.default": 1,
    "aten.silu_backward.default": 1,
}
"""Ops that can write their result into one of their first operands, with the number of these."""


def may_overwrite(node: Node, graph: Graph) -> bool:
    """Whether ``node`` can overwrite an operand that nobody reads afterwards: one of its result's shape and dtype, as
    all must be."""
    count = OVERWRITING.get(node.op, 0)
    if not count or not all(isinstance(a, Value) for a in node.args[:count]) or (count == 2 and node.kwargs):
        return False
    made = node.outputs[0]
    return made is not None and len(made.shape) > 1 and all(graph.meta(v) == made for v in node.inputs)


def only_reads(op: Op, graph: Graph) -> bool:
    """Whether an op is done with its operands once it has run, and makes memory of its own.

    A kernel for several ops reads when the last of them would.
    """
    if op.kind != "compute" or op.alias or op.kernels:
        return False
    return graph.by_name[op.node].packet not in VIEWS | MAYBE_VIEWS
