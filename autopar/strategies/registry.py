"""The table of sharding rules by op."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

from autopar.errors import RuleError
from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.halo import Halo
from autopar.sharding.loan import Loan
from autopar.sharding.local import LocalChoice, LocalLength, LocalOffset
from autopar.sharding.spec import REDUCTIONS, Reduction
from autopar.sharding.strategy import Strategy
from autopar.strategies.combine import Combine
from autopar.strategies.notation import parse

LocalArg: TypeAlias = Union[Any, LocalChoice, LocalLength, LocalOffset]
"""An ``ir.Arg`` in which ``LocalChoice``, ``LocalLength`` and ``LocalOffset`` may stand for integers."""

LocalCall: TypeAlias = tuple[str, tuple[LocalArg, ...], tuple[tuple[str, LocalArg], ...]]
"""What a rank runs: op, args and kwargs, in the form of ``ir.Node``."""

Metas: TypeAlias = Sequence[TensorMeta]
Moves: TypeAlias = tuple[tuple[str, str], ...]
LinearSets: TypeAlias = tuple[tuple[int, ...], ...]
Notation: TypeAlias = Union[str, Callable[[Node, Metas], str]]
Linear: TypeAlias = Union[LinearSets, Callable[[Node, Metas], LinearSets]]
Flops: TypeAlias = Union[str, Callable[[Node, Metas], float]]
Windows: TypeAlias = Callable[[Node, Strategy, Metas, Mesh], Union[tuple[Halo, ...], None]]
Lowering: TypeAlias = Callable[[Node, Strategy, Metas, Mesh], LocalCall]
Lending: TypeAlias = Callable[[Node, Strategy, Metas, Mesh], Union[Loan, None]]
Combining: TypeAlias = Callable[[Node, Strategy, Metas, Mesh], Union[Combine, None]]


class OpName:
    """Builds an op's name from attributes, as torch writes it: ``aten.sum.dim_IntList``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, part: str) -> OpName:
        if part.startswith("__"):
            raise AttributeError(part)
        return OpName(f"{self._name}.{part}")

    def __str__(self) -> str:
        return self._name


aten = OpName("aten")
autopar = OpName("autopar")


@dataclass(frozen=True)
class Rule:
    """How one op may be sharded.

    Args:
        op: ``aten.mm``, or with the overload, ``aten.sum.dim_IntList``, which takes precedence.
        notation: the rule's text, or a function that writes it if dims depend on the node's arguments.
        linear: sets of operand positions (in ``Node.inputs``) that may be partial sums together while all other
            operands are whole; every result is then a partial sum.
        reduction: the reduction that completes a result if a factor that it lacks is cut.
        shape_args: maps arguments (by position or name) that are the shape of a result to the result's index.
        flops: ``"product"`` for twice the product of all factors' sizes, or a function; 0 if omitted.
        elementwise: whether each element of the result depends only on the operands' elements at the same place.
        even: whether factors are cut only if they divide evenly.
        moves: pairs of factors (a, e) that one mesh axis may cut together: e in the terms that have it, a in all
            others. The op then exchanges what has to be elsewhere.
        rings: pairs of factors (s, t) that one mesh axis may cut together, t even if it is not cut by itself. Blocks of
            the operands that have t then go round a ring, and no result is partial.
    """

    op: str
    notation: Notation
    linear: Linear = ()
    reduction: Reduction = "sum"
    shape_args: Mapping[int | str, int] = field(default_factory=dict)
    flops: Flops | None = None
    elementwise: bool = False
    even: bool = False
    moves: Moves | Callable[[Node, Metas], Moves] = ()
    rings: Moves | Callable[[Node, Metas], Moves] = ()


_rules: dict[str, Rule] = {}
_lowerings: dict[str, Lowering] = {}
_windows: dict[str, Windows] = {}
_combining: dict[str, Combining] = {}
_lending: dict[str, Lending] = {}
_on_change: list[Callable[[], None]] = []


def rule(
    op: object,
    notation: Notation,
    *,
    linear: Linear = (),
    reduction: Reduction = "sum",
    shape_args: Mapping[int | str, int] | None = None,
    flops: Flops | None = None,
    elementwise: bool = False,
    even: bool = False,
    moves: Moves | Callable[[Node, Metas], Moves] = (),
    rings: Moves | Callable[[Node, Metas], Moves] = (),
    override: bool = False,
) -> Rule:
    """Register how ``op`` may be sharded. The arguments are those of ``Rule``.

    Raises:
        RuleError: if the notation cannot be parsed, or the op has a rule and ``override`` is not set.
    """
    name = op_name(op)
    if isinstance(notation, str):
        parse(notation)
    if reduction not in REDUCTIONS or (reduction != "sum" and linear):
        raise RuleError(
            f"The rule of {name} has an invalid reduction.",
            found=f"reduction={reduction!r}, linear={linear!r}",
            hint=f"use one of {', '.join(REDUCTIONS)}; linear is only for sums.",
        )
    if name in _rules and not override:
        raise RuleError(
            f"{name} already has a sharding rule.",
            found=repr(_rules[name].notation),
            hint="pass override=True to replace it.",
        )
    made = Rule(name, notation, linear, reduction, dict(shape_args or {}), flops, elementwise, even, moves, rings)
    _rules[name] = made
    _changed()
    return made


def lowering(op: object) -> Callable[[Lowering], Lowering]:
    """Decorate a function that returns the call of a rank for ``op``, if more than shapes have to be localized.

    Raises:
        RuleError: if the op has a lowering.
    """
    name = op_name(op)

    def register(function: Lowering) -> Lowering:
        if name in _lowerings:
            raise RuleError(
                f"{name} already has a lowering.",
                found=repr(_lowerings[name]),
                hint="keep one of the two.",
            )
        _lowerings[name] = function
        return function

    return register


def windows(op: object) -> Callable[[Windows], Windows]:
    """Decorate a function that returns the rows each rank reads along a cut dim that ``name'`` is tied to.

    It returns None if the neighbours' shards do not hold them; the strategy is then dropped.
    """

    def register(function: Windows) -> Windows:
        _windows[op_name(op)] = function
        return function

    return register


def combining(*ops: object) -> Callable[[Combining], Combining]:
    """Decorate a function that returns how the ops run if a factor ``{name}`` is cut, None if none is."""

    def register(function: Combining) -> Combining:
        for op in ops:
            _combining[op_name(op)] = function
        return function

    return register


def lending(*ops: object) -> Callable[[Lending], Lending]:
    """Decorate a function that returns the rows that ranks lend to each other when they run the ops, None if none."""

    def register(function: Lending) -> Lending:
        for op in ops:
            _lending[op_name(op)] = function
        return function

    return register


def register_rule(op: object, notation: Notation, **options: Any) -> None:
    """Register how a custom op may be sharded, with a named factor for each dim.

    ``register_rule(torch.ops.mylib.flash, "b h q d, b h [k] d, b h [k] d -> b h q d")``. The op is a name, a torch op
    or one of its overloads; options are those of ``rule``. ``strategies.notation`` documents the notation.

    Raises:
        RuleError: if the notation cannot be parsed, or the op has a rule and ``override=True`` is not passed.
    """
    rule(op, notation, **options)


def op_name(op: object) -> str:
    """Return ``namespace.name`` or ``namespace.name.overload`` of a torch op, a custom op, or a name.

    Raises:
        RuleError: if the object does not name an op.
    """
    text = str(op)
    custom = re.fullmatch(r"<CustomOpDef\((.+)\)>", text)
    name = (custom[1] if custom else text).replace("::", ".").removeprefix("torch.ops.")
    if name != "placeholder" and not re.fullmatch(r"\w+(\.\w+){1,2}", name):
        raise RuleError(
            "This does not name an op.", found=text, hint='pass torch.ops.mylib.flash, or its name, "mylib.flash".'
        )
    return name


def find_rule(node: Node) -> Rule | None:
    """Return the rule of a node's op. That of the overload takes precedence."""
    return _rules.get(node.op) or _rules.get(node.packet)


def find_lowering(node: Node) -> Lowering | None:
    return _lowerings.get(node.op) or _lowerings.get(node.packet)


def find_windows(node: Node) -> Windows | None:
    return _windows.get(node.op) or _windows.get(node.packet)


def find_combining(node: Node) -> Combining | None:
    return _combining.get(node.op) or _combining.get(node.packet)


def find_lending(node: Node) -> Lending | None:
    return _lending.get(node.op) or _lending.get(node.packet)


def registered() -> Mapping[str, Rule]:
    """Return all rules by op."""
    return dict(_rules)


def on_change(function: Callable[[], None]) -> None:
    """Call ``function`` after each change of the table."""
    _on_change.append(function)


def remove(op: object) -> None:
    """Remove everything that is registered for ``op``."""
    _rules.pop(op_name(op), None)
    _lowerings.pop(op_name(op), None)
    _windows.pop(op_name(op), None)
    _combining.pop(op_name(op), None)
    _lending.pop(op_name(op), None)
    _changed()


def _changed() -> None:
    for function in _on_change:
        function()
