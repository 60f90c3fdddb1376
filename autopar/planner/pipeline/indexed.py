"""What a micro-batch can do besides the strategies of ranks: its ops may count rows from its own first row.

Ranks that hold rows of a tensor may be asked for any of its rows. A micro-batch is asked for its own only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir import Graph, Node, Value
from autopar.sharding import ShardingSpec, Strategy

TIME = 0
"""The mesh axis along which the micro-batches lie."""


@dataclass(frozen=True)
class Option:
    """A way to run an op in a micro-batch.

    Args:
        combined: whether ranks would exchange summaries; a micro-batch has its own.
        plain: whether the op runs as it is on local operands.
        first_rows: operands, by position, that list all rows of the batch in order, and the dim along which they do; a
            micro-batch counts its rows from 0.
    """

    strategy: Strategy
    combined: bool = False
    plain: bool = False
    first_rows: tuple[tuple[int, int], ...] = ()


def _indexed(graph: Graph, node: Node) -> Iterator[Option]:
    """Yield the ways to read or write ``x[rows, i]``, where ``rows`` lists all rows: each sample at its own index."""
    places, writes = node.args[1], node.packet in ("aten.index_put", "aten._unsafe_index_put")
    assert isinstance(places, tuple)
    at = [d for d, index in enumerate(places) if isinstance(index, Value)]
    x, metas = graph.meta(node.inputs[0]), [graph.meta(v) for v in node.inputs[1 : 1 + len(at)]]
    if not at or any(m.dtype in ("bool", "uint8") for m in metas):
        return
    width = max(len(m.shape) for m in metas)
    adjacent = at == list(range(at[0], at[0] + len(at)))
    front = at[0] if adjacent else 0
    picked = graph.meta(node.inputs[-1]) if writes else node.outputs[0]
    if picked is None or len(picked.shape) != len(x.shape) - len(at) + width:
        return

    def options(k: int, cut: int | None, first: tuple[tuple[int, int], ...]) -> Option:
        """Cut dim ``k`` of the indices, and dim ``cut`` of x."""
        of_x = _spec(len(x.shape), cut)
        if cut is None:
            of_x = ShardingSpec.of(of_x.dims, ((TIME, "sum"),))
        listed = {position for position, _ in first}
        of_indices = []
        for position, m in enumerate(metas, 1):
            dim = k - (width - len(m.shape))
            is_cut = position not in listed and dim >= 0 and m.shape[dim] > 1
            of_indices.append(_spec(len(m.shape), dim if is_cut else None))
        of_picked = _spec(len(picked.shape), front + k)
        read = (of_x, *of_indices, *([of_picked] if writes else []))
        return Option(Strategy(read, (of_x if writes else of_picked,), ("rows",)), plain=True, first_rows=first)

    for position, (d, value) in enumerate(zip(at, node.inputs[1:], strict=False), 1):
        along = _rows(graph, value, x.shape[d])
        if along is not None:
            yield options(along + width - len(metas[position - 1].shape), d, ((position, along),))
    accumulates = len(node.args) > 3 and node.args[3] is True
    if writes and accumulates:
        for k in range(width):
            yield options(k, None, ())


def _spec(ndim: int, cut: int | None) -> ShardingSpec:
    return ShardingSpec.of(tuple((TIME,) if d == cut else () for d in range(ndim)))


def _rows(graph: Graph, value: Value, n: int) -> int | None:
    """Return the dim along which an index lists 0 to ``n``; None if it lists anything else."""
    shape = graph.meta(value).shape
    if sum(size != 1 for size in shape) != 1 or max(shape) != n:
        return None
    made = graph.by_name[value.node]
    while made.packet in KEEPING and len(made.inputs) == 1:
        made = graph.by_name[made.inputs[0].node]
    bounds = {"aten.arange.default": (0, *made.args), "aten.arange.start": made.args, "aten.arange.start_step": made.args}
    found = bounds.get(made.op, ())
    return shape.index(n) if found[:2] == (0, n) and found[2:] in ((), (1,)) else None


KEEPING = frozenset(f"aten.{n}" for n in ("view", "reshape", "unsqueeze", "squeeze", "_to_copy", "alias", "clone"))
"""Ops whose result has the elements of their operand in the same order."""

SPECIAL: Mapping[str, Callable[[Graph, Node], Iterator[Option]]] = {
    f"aten.{name}": _indexed for name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put")
}
