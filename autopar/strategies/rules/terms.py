"""Write terms of the notation from shapes and arguments."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import cast

from autopar.ir import Arg, Node, TensorMeta
from autopar.strategies.registry import Metas


def names(ndim: int, prefix: str = "d") -> list[str]:
    """Return a factor for each of ``ndim`` dims: ``d0 d1 d2``."""
    return [f"{prefix}{i}" for i in range(ndim)]


def term(dims: Iterable[str], fixed: Container[int] = ()) -> str:
    """Join the dims to a term, with brackets around the positions in ``fixed``."""
    return " ".join(f"[{d}]" if i in fixed else d for i, d in enumerate(dims)) or "-"


def replicated(node: Node, metas: Metas) -> str:
    """Write the rule in which no dim of any operand or result is ever cut."""
    sides = ((metas, "x"), (node.outputs, "y"))
    return " -> ".join(", ".join(_whole(m, f"{s}{i}_") for i, m in enumerate(side)) for side, s in sides)


def _whole(meta: TensorMeta | None, prefix: str) -> str:
    shape = meta.shape if meta else ()
    return term(names(len(shape), prefix), range(len(shape)))


def arg(node: Node, position: int, default: Arg = None, name: str = "") -> Arg:
    """Return the argument at ``position``, or the keyword argument ``name``, or ``default``."""
    if position < len(node.args):
        return node.args[position]
    return node.kwarg(name, default) if name else default


def int_arg(node: Node, position: int, default: int = 0, name: str = "") -> int:
    return int(cast(int, arg(node, position, default, name)))


def ints_arg(node: Node, position: int, name: str = "") -> tuple[int, ...]:
    """Return a list of integers. A single integer becomes a list, an absent list is empty."""
    value = arg(node, position, (), name)
    if value is None:
        return ()
    return tuple(cast(Sequence[int], value)) if isinstance(value, tuple) else (int(cast(int, value)),)


def dim_arg(node: Node, position: int, ndim: int, default: int = 0, name: str = "dim") -> int:
    """Return a dim, counted from the front."""
    return wrap(int_arg(node, position, default, name), ndim)


def dims_arg(node: Node, position: int, ndim: int) -> tuple[int, ...]:
    """Return a list of dims, counted from the front; all dims if it is absent or empty."""
    dims = ints_arg(node, position, "dim")
    return tuple(wrap(d, ndim) for d in dims) if dims else tuple(range(ndim))


def wrap(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim
