"""The letters of a contraction's equation: which dims of its operands come out where."""

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
        """The dim of the result that a dim of an operand becomes; None where the other operand has it too, or where
        it is summed."""
        letter = self.operands[operand][dim]
        return self.out.index(letter) if letter in self.out and letter not in self.operands[1 - operand] else None

    def comes_from(self, dim: int) -> tuple[int, int] | None:
        """The operand, and its dim, that a dim of the result comes from alone."""
        at = [(i, t.index(self.out[dim])) for i, t in enumerate(self.operands) if self.out[dim] in t]
        return at[0] if len(at) == 1 else None


def terms(node: Node) -> Terms | None:
    """Of a contraction; None for other ops."""
    if node.packet != CONTRACTION:
        return None
    left, out = equation(node).split("->")
    first, second = left.split(",")
    return Terms((first, second), out)


def equation(node: Node) -> str:
    return next(a for a in (*node.args, *(a for _, a in node.kwargs)) if isinstance(a, str)).replace(" ", "")
