"""Bytes that an op holds while it runs, besides its operands and results: what its implementation makes and drops.

An op of ATen is one kernel to the dispatcher, and makes nothing but its results. The ops of autopar are made of
several, and what each holds at its peak is written down here, beside a test that measures it. Such an op makes tensors
of ``n`` integers or flags by the dozen; these are bounded, not followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint import transients_of_attention as attention
from autopar.planner.footprint import transients_of_indexing as indexing
from autopar.planner.footprint import transients_of_losses as losses
from autopar.planner.footprint import transients_of_norms as norms
from autopar.planner.footprint import transients_of_products as products
from autopar.planner.footprint import transients_of_routing as routing
from autopar.planner.footprint import transients_of_windows as windows
from autopar.planner.footprint.layouts import ATTENTION, NEEDS_CONTIGUOUS, by_rows
from autopar.planner.footprint.local_op import Formulas, LocalOp, local_op, windowed
from autopar.planner.footprint.op_work import VIEWS
from autopar.sharding import Strategy
from autopar.strategies import find_lowering, halos

COPIED = NEEDS_CONTIGUOUS - VIEWS
"""Ops whose operands are held twice if they are not contiguous."""


def transients(op: LocalOp) -> int:
    """Return the bytes besides operands and results; 0 if nothing is known of the op."""
    formula = FORMULAS.get(op.call[0])
    copied = sum(op.nbytes(x) for x in op.operands if not x[0].is_contiguous) if op.call[0] in COPIED else 0
    return copied + (max(0, formula(op)) if formula is not None and op.operands else 0)


def min_transients(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh, device: str) -> int:
    """Return the least transients that the op has, whatever the strides of its operands.

    It may hold more, since operands that are not contiguous may be copied besides; what a contraction copies depends on
    strides alone. Attention lays its results out by rows, and copies those whose operand is laid out in another way. Of
    operands with halos, the window counts beyond the rank's own rows, which may have gone by then.
    """
    if node.packet == "autopar.contract" or (node.packet not in FORMULAS and find_lowering(node) is None):
        return 0
    one = local_op(node, option, metas, mesh, device)
    operands = list(one.operands)
    if node.packet in ATTENTION:
        operands = [(by_rows(x.shape) if len(x.shape) > 3 else x, size) for x, size in operands]
    for h in halos(node, option, tuple(metas), mesh) or ():
        x, size = operands[h.operand]
        operands[h.operand] = windowed(x, h, one.at).layout, size
    read = replace(one, operands=tuple(operands))
    return max(0, sum(map(one.nbytes, operands)) - sum(map(one.nbytes, one.operands)) + transients(read))


FORMULAS: Formulas = {
    name: formula
    for family in (attention, indexing, losses, norms, products, routing, windows)
    for name, formula in family.FORMULAS.items()
}
"""The formulas of all families of ops."""
