"""Determinants and solvers that return factors of their matrix.

torch factors the transposed matrix if the matrix is contiguous, and the gradient, which is traced when a program is
captured, reads the factors accordingly. The memory layout of a shard is not known then, so these ops fix it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.ops.registration import define, once_differentiable

aten = torch.ops.aten


def _laid_out(a: Tensor, contiguous: bool) -> Tensor:
    return a.contiguous() if contiguous else a.mT.contiguous().mT


def _det(a: Tensor, *, contiguous: bool) -> tuple[Tensor, ...]:
    return tuple(t.contiguous() for t in aten._linalg_det(_laid_out(a, contiguous)))


def _slogdet(a: Tensor, *, contiguous: bool) -> tuple[Tensor, ...]:
    return tuple(t.contiguous() for t in aten._linalg_slogdet(_laid_out(a, contiguous)))


def _solve(a: Tensor, b: Tensor, *, left: bool, contiguous: bool) -> tuple[Tensor, ...]:
    return tuple(t.contiguous() for t in aten._linalg_solve_ex(_laid_out(a, contiguous), b, left=left))


def _fake(op: Any) -> Callable[..., tuple[Tensor, ...]]:
    def made(*operands: Tensor, contiguous: bool, **options: bool) -> tuple[Tensor, ...]:
        return tuple(t.new_empty(t.shape) for t in op(*operands, **options))

    return made


define("linalg_det(Tensor a, *, bool contiguous) -> (Tensor, Tensor, Tensor)", _det, _fake(aten._linalg_det))
define(
    "linalg_slogdet(Tensor a, *, bool contiguous) -> (Tensor, Tensor, Tensor, Tensor)",
    _slogdet,
    _fake(aten._linalg_slogdet),
)
define(
    "linalg_solve(Tensor a, Tensor b, *, bool left, bool contiguous) -> (Tensor, Tensor, Tensor, Tensor)",
    _solve,
    _fake(aten._linalg_solve_ex),
)
for _name in ("linalg_det", "linalg_slogdet", "linalg_solve"):
    once_differentiable(_name)
