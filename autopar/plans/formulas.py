"""Read formulas of sizes from a plan's text. sympy's own parser executes its input; this one knows only arithmetic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.errors import PlanError

LONGEST = 1 << 16
"""Most characters of a formula. Formulas of FLOPs have hundreds."""

LARGEST_POWER = 64
"""Largest exponent in a formula."""
_INFIX: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS = ("ceiling", "floor", "Max", "Min", "Mod")


def read_formula(text: str, names: Sequence[str]) -> Any:
    """Return the formula as a sympy expression. Its symbols have no assumptions, so ``subs`` accepts their names.

    Raises:
        PlanError: if the text is not arithmetic on whole numbers and these names.
    """
    try:
        return _Reader(names).read_text(text)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise PlanError(
            "The plan holds a text that is not a formula of its sizes.",
            found=f"{text!r:.120}: {error}",
            hint=f"plan again; a formula may hold sums, products and powers of {', '.join(names)} and whole numbers.",
        ) from None


class _Reader:
    def __init__(self, names: Sequence[str]) -> None:
        import sympy

        self.sympy = sympy
        self.symbols = {name: sympy.Symbol(name) for name in names}

    def read_text(self, text: str) -> Any:
        if len(text) > LONGEST:
            raise ValueError("the text is too long")
        return self.read(ast.parse(text, mode="eval").body)

    def read(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return self.sympy.Integer(node.value)
        if isinstance(node, ast.Name) and node.id in self.symbols:
            return self.symbols[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.read(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self._power(node.left, node.right)
        if isinstance(node, ast.BinOp) and type(node.op) in _INFIX:
            return _INFIX[type(node.op)](self.read(node.left), self.read(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return self._call(node)
        raise ValueError(f"{ast.unparse(node):.60} is not arithmetic")

    def _power(self, base: ast.expr, exponent: ast.expr) -> Any:
        """Read a power of a symbol or a call. A power of a number is refused, since it could fill the memory."""
        power = exponent.value if isinstance(exponent, ast.Constant) else None
        if type(power) is not int or power > LARGEST_POWER or isinstance(base, ast.Constant):
            raise ValueError(f"{ast.unparse(exponent):.60} is not a valid exponent of a size")
        found = self.read(base)
        if found.is_number:
            raise ValueError(f"{ast.unparse(base):.60} is not a size")
        return found**power

    def _call(self, node: ast.Call) -> Any:
        assert isinstance(node.func, ast.Name)
        if node.keywords or not node.args:
            raise ValueError(f"{node.func.id} takes one or more sizes")
        return getattr(self.sympy, node.func.id)(*map(self.read, node.args))
