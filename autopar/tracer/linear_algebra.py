"""Linear algebra without its checks: those look at values, which a captured program never stops for.

A singular matrix raises on one device; in the captured program what is made of it is infinite, not a number, or wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.tracer.flat import materialize
from autopar.tracer.replacements import replaces

aten = torch.ops.aten


@replaces(aten.linalg_solve.default)
def solve(tracer: Any, a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    result: Tensor = torch.linalg.solve_ex(materialize(a), materialize(b), left=left)[0]
    return result


@replaces(aten.linalg_inv.default, aten.inverse.default)
def inverse(tracer: Any, a: Tensor) -> Tensor:
    result: Tensor = torch.linalg.inv_ex(materialize(a))[0]
    return result


@replaces(aten.linalg_cholesky.default)
def cholesky(tracer: Any, a: Tensor, *, upper: bool = False) -> Tensor:
    result: Tensor = torch.linalg.cholesky_ex(materialize(a), upper=upper)[0]
    return result


@replaces(aten.dist.default)
def dist(tracer: Any, x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    """As a norm, which can be cut."""
    result: Tensor = torch.linalg.vector_norm(materialize(x) - materialize(y), p)
    return result


@replaces(aten.linalg_lu_factor.default)
def lu_factor(tracer: Any, a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    factors, pivots, _ = torch.linalg.lu_factor_ex(materialize(a), pivot=pivot)
    return factors, pivots
