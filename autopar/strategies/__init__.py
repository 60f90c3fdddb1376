"""Sharding rules, one line an op, and the strategies that they give on a mesh."""

from autopar.strategies import rules  # noqa: F401  registers every rule
from autopar.strategies.enumerate import bound, flops, halos, missing_rule, strategies
from autopar.strategies.localize import localize
from autopar.strategies.notation import Bound, Equation, bind, parse
from autopar.strategies.registry import Rule, find_rule, lowering, register_rule, registered, rule

__all__ = [
    "Bound",
    "Equation",
    "Rule",
    "bind",
    "bound",
    "find_rule",
    "flops",
    "halos",
    "localize",
    "lowering",
    "missing_rule",
    "parse",
    "register_rule",
    "registered",
    "rule",
    "strategies",
]
