"""Sharding rules, one line per op, and the strategies that they give on a mesh."""

from autopar.strategies import rules  # noqa: F401  registers every rule
from autopar.strategies.combine import Combine, Gathered, Operand
from autopar.strategies.enumerate import (
    bound,
    combine,
    flops,
    halos,
    lent,
    missing_rule,
    strategies,
)
from autopar.strategies.localize import localize
from autopar.strategies.notation import Bound, Equation, bind, parse
from autopar.strategies.registry import Rule, find_lowering, find_rule, lowering, register_rule, registered, rule

__all__ = [
    "Bound",
    "Combine",
    "Equation",
    "Gathered",
    "Operand",
    "Rule",
    "bind",
    "bound",
    "combine",
    "find_lowering",
    "find_rule",
    "flops",
    "halos",
    "lent",
    "localize",
    "lowering",
    "missing_rule",
    "parse",
    "register_rule",
    "registered",
    "rule",
    "strategies",
]
