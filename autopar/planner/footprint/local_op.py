"""One op as a rank runs it, on local shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.layouts import Layout, contiguous, narrowed, with_length
from autopar.sharding import Halo, Strategy
from autopar.sharding.halo import own_rows
from autopar.sharding.local import LocalChoice, LocalLength, LocalOffset
from autopar.sharding.spec import length, offset
from autopar.strategies import find_lowering, localize

SCALARS = 64
"""Bytes of the 0-dim tensors that Python numbers become in between."""


BLOCKS = {"cpu": (1 << 21, 1 << 18, 1 << 17), "cuda": (1 << 27, 1 << 26, 1 << 26)}
"""Elements that attention, cross-entropy and random numbers work on at a time, by kind of device; as in
``autopar.ops``."""


@dataclass(frozen=True)
class LocalOp:
    """One op on one rank: its operands and results, as (layout, bytes of an element), and where it runs.

    Args:
        metas: of the global operands.
        strategy, mesh, at: the op runs with this strategy on the rank at this coordinate.
    """

    node: Node
    metas: tuple[TensorMeta, ...]
    operands: tuple[tuple[Layout, int], ...]
    results: tuple[tuple[Layout, int], ...]
    device: str
    strategy: Strategy
    mesh: Mesh
    at: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The torch device type of ``device``, which may say more of its kernels."""
        return self.device.split()[0]

    @cached_property
    def call(self) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
        """The op that the rank runs, without its overload, and its arguments."""
        if find_lowering(self.node) is None:
            return self.node.packet, self.node.args, dict(self.node.kwargs)
        op, args, kwargs = localize(self.node, self.strategy, self.metas, self.mesh)
        return op.rpartition(".")[0], self._on_rank(args), {k: self._on_rank(v) for k, v in kwargs}

    def _on_rank(self, arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(self._on_rank, arg))
        if isinstance(arg, LocalChoice):
            return arg.values[self.at[arg.axis]]
        if isinstance(arg, (LocalLength, LocalOffset)):
            return (length if isinstance(arg, LocalLength) else offset)(arg.n, arg.axes, self.mesh, self.at)
        return arg

    def nbytes(self, x: tuple[Layout, int]) -> int:
        return x[0].numel * x[1]

    @property
    def written(self) -> int:
        return sum(map(self.nbytes, self.results))


def wide(itemsize: int) -> int:
    """Return the bytes of an element in the accumulation dtype."""
    return max(itemsize, 4)


@dataclass(frozen=True)
class Window:
    """Elements that a rank holds while it makes its window of an operand.

    Args:
        sent: rows that it sends in buffers of their own.
        received: rows that arrive.
        made: the window; 0 if it is a view of the operand.
    """

    sent: int
    received: int
    padding: int
    made: int
    layout: Layout


def windowed(x: Layout, h: Halo, at: Sequence[int]) -> Window:
    """Return the window of shard ``x`` on the rank at coordinate ``at``, as ``spmd.halos`` makes it."""
    own_start, own_stop = own_rows(h.n, len(h.windows))[at[h.axis]]
    start, stop = h.windows[at[h.axis]]
    row = x.numel // max(1, x.shape[h.dim])
    sides = [n for n in (h.before, h.after) if n]
    sent = sum(0 if narrowed(x, h.dim, n).is_contiguous else n * row for n in sides)
    padding = (max(0, -start) + max(0, stop - h.n)) * row
    made = contiguous(with_length(x.shape, h.dim, stop - start))
    inside = own_start <= start and stop <= own_stop
    if inside and narrowed(x, h.dim, stop - start).is_contiguous:
        return Window(sent, sum(sides) * row, 0, 0, made)
    return Window(sent, sum(sides) * row, padding, made.numel, made)


def local_op(
    node: Node,
    option: Strategy,
    metas: Sequence[TensorMeta],
    mesh: Mesh,
    device: str,
    layouts: Sequence[Layout] | None = None,
    at: Sequence[int] = (),
) -> LocalOp:
    """Return ``node`` as the rank at coordinate ``at`` runs it, by default the first rank.

    Args:
        layouts: of its operands; contiguous by default.
    """
    where = tuple(at) if any(at) else None
    shapes = [m.local_shape(s, mesh, where) for m, s in zip(metas, option.inputs, strict=True)]
    given = layouts if layouts is not None else [contiguous(tuple(s)) for s in shapes]
    made = [(m, s) for m, s in zip(node.outputs, option.outputs, strict=True) if m is not None and s is not None]
    return LocalOp(
        node,
        tuple(metas),
        tuple((x, m.itemsize) for x, m in zip(given, metas, strict=True)),
        tuple((contiguous(tuple(m.local_shape(s, mesh, where))), m.itemsize) for m, s in made),
        device,
        option,
        mesh,
        where or (0,) * mesh.ndim,
    )


Formulas = Mapping[str, Callable[[LocalOp], int]]
"""By op name: the bytes that an op holds at its peak, besides its operands and results."""
