"""Checks that only raise: a captured program assumes that they pass, which torch.compile cannot do."""

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
def assume_checks_pass() -> Iterator[list[str]]:
    """Make ``if x.max() >= n: raise`` and ``assert (x > 0).all().item()`` pass while tracing; yield their locations.

    The values that they check do not exist yet. Any other use of a tensor as a truth value is unaffected.
    ``torch.bincount`` with a ``minlength`` returns exactly that many counts, which assumes that all values are below
    it.
    """
    found: list[str] = []
    ordinary, ordinary_item, ordinary_bincount = Tensor.__bool__, Tensor.item, torch.bincount

    def record_check(frame: FrameType) -> bool | None:
        passing = passing_value(frame.f_code, frame.f_lineno)
        if passing is not None:
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return passing

    def truth(tensor: Tensor) -> bool:
        passing = record_check(sys._getframe(1))
        return ordinary(tensor) if passing is None else passing

    def item(tensor: Tensor) -> Any:
        passing = record_check(sys._getframe(1)) if tensor.dtype == torch.bool else None
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
    """Return the truth value with which a condition at ``line`` raises nothing; None if it is no such check."""
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
    """Whether a check spans a line; a condition in parentheses can begin below the line that the interpreter names."""
    return check.lineno <= line <= (check.test.end_lineno or check.lineno)


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether the last statement raises, and those before it only prepare the message."""
    return isinstance(body[-1], ast.Raise) and all(isinstance(s, (ast.Assign, ast.Raise)) for s in body)


def _value(test: ast.expr, *, passing: bool) -> bool | None:
    """Return the value that all operands of ``test`` need to make it ``passing``; None if they need different ones."""
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
    """Whether an operand may be a tensor: plain names are mostly options, and ``is`` and ``in`` never give tensors."""
    if isinstance(operand, ast.Compare):
        return not any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in operand.ops)
    return isinstance(operand, ast.Call) and not (isinstance(operand.func, ast.Name) and operand.func.id != "bool")
