"""Contract two tensors in one op, so that any of its dims can be cut."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ops.registration import define, differentiate


@dataclass(frozen=True)
class Contraction:
    """An equation with its letters sorted by their role in a batched matrix product."""

    x: str
    w: str
    out: str
    batch: str  # of both operands and the result
    rows: str  # of x and the result
    columns: str  # of w and the result
    summed: str  # of both operands only

    @functools.cached_property
    def swapped(self) -> Contraction:
        return Contraction(self.w, self.x, self.out, self.batch, self.columns, self.rows, self.summed)


@functools.cache
def parse(equation: str) -> Contraction:
    """Parse an einsum equation of two operands, such as ``"bsk,nk->bsn"``.

    Raises:
        AutoparError: if a letter occurs twice in a term, or in only one of the three terms.
    """
    inputs, arrow, out = equation.partition("->")
    x, comma, w = inputs.partition(",")
    terms = (set(x), set(w), set(out))
    once = any(len(terms[i] - terms[i - 1] - terms[i - 2]) for i in range(3))
    twice = len(x) + len(w) + len(out) != sum(map(len, terms))
    if not (arrow and comma) or once or twice or not all(letter.isalpha() for letter in x + w + out):
        raise AutoparError(
            "A contraction needs two operands, no letter twice in a term, and each letter in at least two terms.",
            found=repr(equation),
            hint='write, for example, "bsk,nk->bsn", and sum over a dim of one operand before contracting.',
        )
    return Contraction(
        x,
        w,
        out,
        batch="".join(c for c in out if c in x and c in w),
        rows="".join(c for c in out if c not in w),
        columns="".join(c for c in out if c not in x),
        summed="".join(c for c in x if c not in out),
    )


def _sizes(terms: Contraction, x: Tensor, w: Tensor) -> dict[str, Any]:
    if len(terms.x) != x.dim() or len(terms.w) != w.dim() or x.dtype != w.dtype:
        raise AutoparError(
            f"The operands do not fit the contraction {terms.x},{terms.w}->{terms.out}.",
            found=f"{x.dtype} {list(x.shape)} and {w.dtype} {list(w.shape)}",
        )
    sizes = dict(zip(terms.x, x.shape, strict=True))
    for letter, size in zip(terms.w, w.shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            raise AutoparError(
                f"The operands of the contraction {terms.x},{terms.w}->{terms.out} differ in {letter}.",
                found=f"{list(x.shape)} and {list(w.shape)}",
            )
    return sizes


def _matrix(x: Tensor, letters: str, *groups: str) -> Tensor:
    """Return the operand with its dims reordered and merged to one dim per group, copied only if strides require it."""
    permutation, parts = _layout(letters, groups)
    if permutation:
        x = x.permute(permutation)
    if not parts:
        return x
    return x.reshape([math.prod(x.shape[part]) for part in parts])


def _spread(x: Tensor, letters: str, out: str) -> Tensor:
    """Return the operand with its dims in the result's order, and a dim of length one for each that it lacks."""
    x = x.permute([letters.index(letter) for letter in out if letter in letters])
    return x[tuple(slice(None) if letter in letters else None for letter in out)]


@functools.cache
def _layout(letters: str, groups: tuple[str, ...]) -> tuple[list[int], list[slice]]:
    """Return the permutation that makes groups adjacent, and the dims of each group; empty if nothing changes."""
    order = "".join(groups)
    permutation = [letters.index(letter) for letter in order] if order != letters else []
    ends = list(itertools.accumulate(map(len, groups)))
    parts = [slice(end - len(group), end) for group, end in zip(groups, ends, strict=True)]
    return permutation, parts if [len(group) for group in groups] != [1] * len(groups) else []


def _contract(x: Tensor, w: Tensor, equation: str) -> Tensor:
    terms = parse(equation)
    sizes = _sizes(terms, x, w)
    if not terms.summed:  # with out=, since `*` would inherit the operands' memory layout
        out = x.new_empty([sizes[letter] for letter in terms.out])
        return torch.mul(_spread(x, terms.x, terms.out), _spread(w, terms.w, terms.out), out=out)
    if terms.out == terms.batch + terms.columns + terms.rows:
        terms, x, w = terms.swapped, w, x
    order = terms.batch + terms.rows + terms.columns
    product = _product(terms, x, w).view([sizes[letter] for letter in order])
    if order == terms.out:
        return product
    return product.permute([order.index(letter) for letter in terms.out]).contiguous()


def _product(terms: Contraction, x: Tensor, w: Tensor) -> Tensor:
    """Return the product, [batch, rows, columns], with one call of the fastest kernel."""
    if not terms.batch:
        return torch.mm(_matrix(x, terms.x, terms.rows, terms.summed), _matrix(w, terms.w, terms.summed, terms.columns))
    left = _matrix(x, terms.x, terms.batch, terms.rows, terms.summed)
    return torch.bmm(left, _matrix(w, terms.w, terms.batch, terms.summed, terms.columns))


def _contract_fake(x: Tensor, w: Tensor, equation: str) -> Tensor:
    terms = parse(equation)
    sizes = _sizes(terms, x, w)
    return x.new_empty([sizes[letter] for letter in terms.out])


def _contract_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.equation = inputs
    ctx.save_for_backward(x, w)


def _contract_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    terms = parse(ctx.equation)
    contract: Callable[[Tensor, Tensor, str], Tensor] = torch.ops.autopar.contract
    return (
        contract(grad, _conjugate(w), f"{terms.out},{terms.w}->{terms.x}") if ctx.needs_input_grad[0] else None,
        contract(grad, _conjugate(x), f"{terms.out},{terms.x}->{terms.w}") if ctx.needs_input_grad[1] else None,
        None,
    )


def _conjugate(x: Tensor) -> Tensor:
    return x.conj_physical() if x.is_complex() else x


define("contract(Tensor x, Tensor w, str equation) -> Tensor", _contract, _contract_fake)
differentiate("contract", _contract_gradient, _contract_context)
