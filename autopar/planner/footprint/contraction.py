"""The letters of a contraction's equation: which dims of its operands become which dims of its result."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Node

CONTRACTION = "autopar.contract"


@dataclass(frozen=True)
class Terms:
    """Letters of the dims of a contraction's operands and result."""

    operands: tuple[str, str]
    out: str

    def becomes(self, operand: int, dim: int) -> int | None:
        """Return the dim of the result that a dim of an operand becomes; None if the other operand has it too, or it is
        summed."""
        letter = self.operands[operand][dim]
        return self.out.index(letter) if letter in self.out and letter not in self.operands[1 - operand] else None

    def comes_from(self, dim: int) -> tuple[int, int] | None:
        """Return the operand, and its dim, from which alone a dim of the result comes; None if both operands have
        it."""
        at = [(i, t.index(self.out[dim])) for i, t in enumerate(self.operands) if self.out[dim] in t]
        return at[0] if len(at) == 1 else None


def terms(node: Node) -> Terms | None:
    """Return the letters of a contraction; None for other ops."""
    if node.packet != CONTRACTION:
        return None
    left, out = equation(node).split("->")
    first, second = left.split(",")
    return Terms((first, second), out)


def equation(node: Node) -> str:
    return next(a for a in (*node.args, *(a for _, a in node.kwargs)) if isinstance(a, str)).replace(" ", "")
