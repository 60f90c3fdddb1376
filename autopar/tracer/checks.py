"""Checks of values that do nothing but raise: a captured program takes them as passed, as torch.compile cannot."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextlib.contextmanager
def taken_as_passed() -> Iterator[list[str]]:
    """While tracing, ``if x.max() >= n: raise`` and ``assert (x > 0).all().item()`` pass; yields where they stand.

    The values that they look at do not exist yet. Every other use of a tensor as a truth value is left as it is.
    ``torch.bincount`` with a ``minlength`` makes no more counts than that: that all values are below it is taken as
    passed too.
    """
    found: list[str] = []
    ordinary, ordinary_item, ordinary_bincount = Tensor.__bool__, Tensor.item, torch.bincount

    def passing_at(frame: FrameType) -> bool | None:
        passing = passing_value(frame.f_code, frame.f_lineno)
        if passing is not None:
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return passing

    def truth(tensor: Tensor) -> bool:
        passing = passing_at(sys._getframe(1))
        return ordinary(tensor) if passing is None else passing

    def item(tensor: Tensor) -> Any:
        passing = passing_at(sys._getframe(1)) if tensor.dtype == torch.bool else None
        return ordinary_item(tensor) if passing is None else passing

    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:  # noqa: A002
        if minlength < 1:
            return ordinary_bincount(input, weights, minlength)
        frame = sys._getframe(1)
        found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return _counts(input, weights, minlength)

    with (
        mock.patch.object(torch, "bincount", bincount),
        mock.patch.object(Tensor, "bincount", bincount),
        mock.patch.object(Tensor, "__bool__", truth),
        mock.patch.object(Tensor, "item", item),
        mock.patch.dict(os.environ, {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}),  # that library's own switch
    ):
        yield found


def _counts(values: Tensor, weights: Tensor | None, length: int) -> Tensor:
    if weights is None:
        added = torch.ones_like(values, dtype=torch.int64)
    else:
        added = weights.detach() if weights.dtype in (torch.float32, torch.float64) else weights.detach().double()
    return torch.zeros(length, dtype=added.dtype, device=values.device).index_add(0, values, added)


@lru_cache(maxsize=1024)
def passing_value(code: CodeType, line: int) -> bool | None:
    """What a tensor in the condition at ``line`` must be for nothing to be raised; None where that is no such check."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    at = line - max(first, 1) + 1
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and _spans(node, at):
            return _value(node.test, passing=True)
        if isinstance(node, ast.If) and _spans(node, at) and not node.orelse and _only_raises(node.body):
            return _value(node.test, passing=False)
    return None


def _spans(check: ast.Assert | ast.If, line: int) -> bool:
    """A condition in parentheses can begin below the line that the interpreter names."""
    return check.lineno <= line <= (check.test.end_lineno or check.lineno)


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether the last statement raises, and those before only prepare its message."""
    return isinstance(body[-1], ast.Raise) and all(isinstance(s, (ast.Assign, ast.Raise)) for s in body)


def _value(test: ast.expr, *, passing: bool) -> bool | None:
    """The truth value of each operand of ``test`` that makes all of it ``passing``; None where operands disagree."""
    values = {passing != negated for operand, negated in _operands(test) if _may_be_tensor(operand)}
    return values.pop() if len(values) == 1 else None


def _operands(test: ast.expr, negated: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, not negated)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values:
            yield from _operands(operand, negated)
    else:
        yield test, negated


def _may_be_tensor(operand: ast.expr) -> bool:
    """Names alone are mostly options, and identity and membership never give tensors."""
    if isinstance(operand, ast.Compare):
        return not any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in operand.ops)
    return isinstance(operand, ast.Call) and not (isinstance(operand.func, ast.Name) and operand.func.id != "bool")
