"""Matrix decompositions and solvers. Batch dims and right-hand sides may be cut, matrices are whole."""

from __future__ import annotations

from autopar.ir import Node
from autopar.strategies.registry import Metas, aten, autopar, rule
from autopar.strategies.rules.terms import names, replicated, term

SQUARE = "... [i] [j]"

rule(aten.linalg_inv_ex, f"{SQUARE} -> {SQUARE}, ...")
rule(aten.linalg_cholesky_ex, f"{SQUARE} -> {SQUARE}, ...")
rule(aten.linalg_matrix_exp, f"{SQUARE} -> {SQUARE}")
rule(aten.linalg_lu_factor_ex, f"{SQUARE} -> {SQUARE}, ... [pivot], ...")
rule(autopar.linalg_det, f"{SQUARE} -> ..., {SQUARE}, ... [pivot]")
rule(autopar.linalg_slogdet, f"{SQUARE} -> ..., ..., {SQUARE}, ... [pivot]")
rule(aten._linalg_eigh, f"{SQUARE} -> ... [value], {SQUARE}")
rule(aten.linalg_qr, f"{SQUARE} -> ... [i] [k], ... [k] [j]")
rule(aten._linalg_svd, f"{SQUARE} -> ... [i] [u], ... [value], ... [v] [j]")
rule(aten.linalg_lu, f"{SQUARE} -> ... [i] [p], ... [i] [k], ... [k] [j]")
rule(aten.linalg_eig, f"{SQUARE} -> ... [value], {SQUARE}")
rule(aten._linalg_eigvals, f"{SQUARE} -> ... [value]")
rule(aten.linalg_householder_product, f"{SQUARE}, ... [k] -> {SQUARE}")
rule(aten.cholesky_inverse, f"{SQUARE} -> {SQUARE}")
rule(aten.cholesky_solve, f"... [i] r, {SQUARE} -> ... [i] r", linear=((0,),))


def _pseudo_inverse(node: Node, metas: Metas) -> str:
    """Write the rule. A tolerance applies to each matrix, or to all of them."""
    tolerances = ("..." if m.shape else "-" for m in metas[1:])
    return f"{', '.join([SQUARE, *tolerances])} -> ... [j] [i]"


rule(aten.linalg_pinv, _pseudo_inverse)
rule(aten._pdist_forward, replicated)
rule(aten._pdist_backward, replicated, linear=((0,),))


def _solved(node: Node, metas: Metas) -> str:
    """Write the rule of ``A x = B`` with ``r`` right-hand sides, or one. The other results depend only on A."""
    if len(metas[1].shape) == len(metas[0].shape) - 1:
        return f"{SQUARE}, ... [i] -> ... [j], {SQUARE}, ... [pivot], ..."
    sides = ("[i] r", "[j] r") if node.kwarg("left", True) else ("r [j]", "r [i]")
    return f"{SQUARE}, ... {sides[0]} -> ... {sides[1]}, {SQUARE} / r, ... [pivot] / r, ... / r"


rule(autopar.linalg_solve, _solved, linear=((1,),))


def _triangular(node: Node, metas: Metas) -> str:
    sides = ("[i] r", "[j] r") if node.kwarg("left", True) else ("r [j]", "r [i]")
    return f"{SQUARE}, ... {sides[0]} -> ... {sides[1]}"


rule(aten.linalg_solve_triangular, _triangular, linear=((1,),))


def _lu_solved(node: Node, metas: Metas) -> str:
    sides = ("[i] r", "[j] r") if node.kwarg("left", True) else ("r [j]", "r [i]")
    return f"{SQUARE}, ... [pivot], ... {sides[0]} -> ... {sides[1]}"


rule(aten.linalg_lu_solve, _lu_solved, linear=((2,),))
rule(aten.trace, replicated, linear=((0,),))


# Weight normalization: a direction and a length for each row or column.


def _weight_norm(node: Node, metas: Metas) -> str:
    direction, length = _weight_norm_terms(node, metas, 2)
    return f"{direction}, {length} -> {direction}, {length}"


def _weight_norm_backward(node: Node, metas: Metas) -> str:
    direction, length = _weight_norm_terms(node, metas, 4)
    return f"{direction}, {direction}, {length}, {length} -> {direction}, {length}"


def _weight_norm_terms(node: Node, metas: Metas, position: int) -> tuple[str, str]:
    dims = names(len(metas[0].shape))
    dim = int(node.args[position]) if position < len(node.args) else 0  # type: ignore[arg-type]
    whole = [i for i in range(len(dims)) if i != dim]
    return term(dims, whole), " ".join(d if i == dim else "1" for i, d in enumerate(dims))


rule(aten._weight_norm_interface, _weight_norm)
rule(aten._weight_norm_interface_backward, _weight_norm_backward, linear=((0,),))
