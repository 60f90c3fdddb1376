"""Linear algebra without checks of values, for which a captured program never stops.

On one device a singular matrix raises an error; in the captured program its results are infinite, nan or wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributions import constraints

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
    """Compute the distance as a norm, which can be cut."""
    result: Tensor = torch.linalg.vector_norm(materialize(x) - materialize(y), p)
    return result


@replaces(aten.pdist.default)
def pdist(tracer: Any, x: Tensor, p: float = 2) -> Tensor:
    """Select the distances above the diagonal of all pairs, whose rows can be cut; products would lose digits."""
    points = materialize(x)
    first, second = torch.triu_indices(len(points), len(points), 1).unbind()
    result: Tensor = aten.cdist.default(points, points, p, 2)[first, second]
    return result


@replaces(aten.linalg_lu_factor.default)
def lu_factor(tracer: Any, a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor]:
    factors, pivots, _ = torch.linalg.lu_factor_ex(materialize(a), pivot=pivot)
    return factors, pivots


@contextlib.contextmanager
def unchecked_covariances() -> Iterator[None]:
    """Compute covariances without checks of values during an export.

    torch's own versions check the number of weights, and its distributions check whether a matrix is square and
    symmetric before they check whether it is a covariance.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(type(constraints.positive_definite), "check", _definite))
        for owner in (torch, Tensor):
            stack.enter_context(mock.patch.object(owner, "cov", _cov))
            stack.enter_context(mock.patch.object(owner, "corrcoef", _corrcoef))
        yield


def _definite(_: Any, value: Tensor) -> Tensor:
    symmetric = torch.isclose(value, value.mT, atol=1e-6).flatten(-2).all(-1)
    definite: Tensor = torch.linalg.cholesky_ex(value).info.eq(0)
    return symmetric & definite


def _cov(
    input: Tensor,  # noqa: A002
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Return the covariance of rows, whose columns are observations."""
    x = input.reshape(1, -1) if input.ndim < 2 else input
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        x = x - x.mean(1, keepdim=True)
        return (x @ x.mH / max(x.shape[1] - correction, 0)).squeeze()
    total = weights.sum()
    x = x - (x * weights).sum(1, keepdim=True) / total
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    return (x @ (x * weights).mH / (total - lost).clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:  # noqa: A002
    c = _cov(input)
    if not c.ndim:
        return c / c
    deviation = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / deviation.unsqueeze(1) / deviation
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)
