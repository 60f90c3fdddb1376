"""Bytes that an op holds while it runs, beside its operands and results: what its implementation makes and drops.

An op of ATen is one kernel as the dispatcher sees it, and makes nothing but its results. The ops of autopar are made of
several, and what each holds at its worst moment is written down here, beside a test that measures it. ``n`` elements of
integers or flags, which such an op makes by the dozen, are bounded, not followed.
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
from autopar.planner.footprint import transients_of_windows as windows
from autopar.planner.footprint.layouts import NEEDS_CONTIGUOUS
from autopar.planner.footprint.local_op import Formulas, LocalOp, local_op, windowed
from autopar.planner.footprint.op_work import VIEWS
from autopar.sharding import Strategy
from autopar.strategies import find_lowering, halos

COPIED = NEEDS_CONTIGUOUS - VIEWS
"""Their operands are held twice where they are not contiguous."""


def transients(op: LocalOp) -> int:
    """Bytes beside operands and results; 0 where nothing is known of the op."""
    formula = FORMULAS.get(op.call[0])
    copied = sum(op.nbytes(x) for x in op.operands if not x[0].is_contiguous) if op.call[0] in COPIED else 0
    return copied + (max(0, formula(op)) if formula is not None and op.operands else 0)


def min_transients(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh, device: str) -> int:
    """The same whatever the strides of the operands: at least so much, since what is not contiguous may be copied
    besides. What a contraction copies hangs on strides alone. Of operands with halos, what the window has besides the
    rank's own rows, since these may have gone by then."""
    if node.packet == "autopar.contract" or (node.packet not in FORMULAS and find_lowering(node) is None):
        return 0
    one = local_op(node, option, metas, mesh, device)
    operands = list(one.operands)
    for h in halos(node, option, tuple(metas), mesh) or ():
        x, size = operands[h.operand]
        operands[h.operand] = windowed(x, h, one.at).layout, size
    read = replace(one, operands=tuple(operands))
    return max(0, sum(map(one.nbytes, operands)) - sum(map(one.nbytes, one.operands)) + transients(read))


FORMULAS: Formulas = {
    name: formula
    for family in (attention, indexing, losses, norms, products, windows)
    for name, formula in family.FORMULAS.items()
}
