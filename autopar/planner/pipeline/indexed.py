"""What a micro-batch can do besides the strategies of ranks: its ops may count rows from its own first row.

Ranks that hold rows of a tensor may be asked for any of its rows. A micro-batch is asked for its own only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.ir import Arg, Graph, Node, Value
from autopar.sharding import ShardingSpec, Strategy

Special = Callable[[Graph, Node], Iterator["Option"]]

TIME = 0
"""The mesh axis along which the micro-batches lie."""


@dataclass(frozen=True)
class Option:
    """A way to run an op in a micro-batch.

    Args:
        combined: whether ranks would exchange summaries; a micro-batch has its own.
        plain: whether the op runs as it is on local operands.
        args: those of the plain op, if they differ from the node's.
        average: whether the op averages over the batch: a micro-batch's result counts one part of as many.
        first_rows: operands, by position, that list all rows of the batch in order, and the dim along which they do. A
            micro-batch counts its own rows from 0.
    """

    strategy: Strategy
    combined: bool = False
    plain: bool = False
    args: tuple[Arg, ...] | None = None
    average: bool = False
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


def _along(graph: Graph, node: Node) -> Iterator[Option]:
    """Yield the same for indices along one dim: ``index_add(x, dim, rows, y)`` and ``index_select(x, dim, rows)``."""
    x, indices = (graph.meta(v) for v in node.inputs[:2])
    dim = node.args[1]
    if not isinstance(dim, int) or not x.shape or not indices.shape:
        return
    at, adds = dim % len(x.shape), node.packet == "aten.index_add"
    cut = _spec(len(x.shape), at)
    if _rows(graph, node.inputs[1], x.shape[at]) is not None:
        read = (cut, _spec(1, None), *([cut] if adds else []))
        yield Option(Strategy(read, (cut,), ("rows",)), plain=True, first_rows=((1, 0),))
    if adds:
        partial = ShardingSpec.of(_spec(len(x.shape), None).dims, ((TIME, "sum"),))
        yield Option(Strategy((partial, _spec(1, 0), cut), (partial,), ("rows",)), plain=True)


def _mean(graph: Graph, node: Node) -> Iterator[Option]:
    """Yield the ways to average over the batch, or to take the gradient of such an average."""
    metas, made = [graph.meta(v) for v in node.inputs], node.outputs[0]
    assert made is not None
    longest = max((m.shape for m in metas), key=len)
    for dim in range(len(longest)):
        read = []
        for m in metas:
            own = dim - (len(longest) - len(m.shape))
            read.append(_spec(len(m.shape), own if own >= 0 and m.shape[own] > 1 else None))
        if made.shape == longest:
            yield Option(Strategy(tuple(read), (_spec(len(longest), dim),), ("mean",)), plain=True, average=True)
        elif not made.shape or (node.packet == "aten.mean" and _averages(node, dim, len(longest))):
            partial = ShardingSpec.of(((),) * len(made.shape), ((TIME, "sum"),))
            yield Option(Strategy(tuple(read), (partial,), ("mean",)), plain=True, average=True)


def _averages(node: Node, dim: int, ndim: int) -> bool:
    dims = node.args[1] if len(node.args) > 1 else None
    return not isinstance(dims, tuple) or not dims or dim in [d % ndim for d in dims if isinstance(d, int)]


def _mean_loss(position: int) -> Special:
    """Return the ways to run a loss whose argument at ``position`` says that it averages."""

    def special(graph: Graph, node: Node) -> Iterator[Option]:
        given = node.args[position] if position < len(node.args) else node.kwarg("reduction", 1)
        return _mean(graph, node) if given == 1 else iter(())

    return special


def _spec(ndim: int, cut: int | None) -> ShardingSpec:
    return ShardingSpec.of(tuple((TIME,) if d == cut else () for d in range(ndim)))


def _rows(graph: Graph, value: Value, n: int) -> int | None:
    """Return the dim along which an index lists 0 to ``n`` in order, each equally often; None if it lists anything
    else."""
    shape = graph.meta(value).shape
    if sum(size != 1 for size in shape) != 1 or max(shape) % n:
        return None
    times = max(shape) // n
    listed = _bounds(graph, value) == (0, n, 1) if times == 1 else False
    return shape.index(max(shape)) if listed or _bags(graph, value, n, times) else None


def _bags(graph: Graph, value: Value, n: int, times: int) -> bool:
    """Whether ``value`` is the bag of each of ``times`` elements in ``n`` bags, as ``tracer`` finds it by search."""
    minus = graph.by_name[value.node]
    found = graph.by_name[minus.inputs[0].node] if minus.packet == "aten.sub" and minus.inputs else minus
    if minus.args[1:] != (1,) or found.packet != "aten.searchsorted" or not found.kwarg("right"):
        return False
    starts, places = found.inputs[:2]
    return _bounds(graph, starts) == (0, n * times, times) and _bounds(graph, places) == (0, n * times, 1)


def _bounds(graph: Graph, value: Value) -> tuple[object, ...]:
    """Return first, end and step of the numbers that a value lists; () if they are not known."""
    made = graph.by_name[value.node]
    while len(made.inputs) == 1 and (made.packet in KEEPING or graph.meta(made.inputs[0]) == made.outputs[0]):
        if made.packet not in KEEPING and made.packet != "aten.slice":
            return ()
        made = graph.by_name[made.inputs[0].node]
    before = (0,) if made.op == "aten.arange.default" else ()
    return (*before, *made.args, 1)[:3] if made.packet == "aten.arange" else ()


KEEPING = frozenset(f"aten.{n}" for n in ("view", "reshape", "unsqueeze", "squeeze", "_to_copy", "alias", "clone"))
"""Ops whose result has the elements of their operand in the same order."""

SPECIAL: Mapping[str, Special] = {
    **{f"aten.{name}": _indexed for name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put")},
    "aten.index_add": _along,
    "aten.index_select": _along,
    "aten.mean": _mean,
    **{f"aten.{name}": _mean_loss(2) for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")},
    **{
        f"aten.{name}_backward": _mean_loss(3)
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
    },
    "aten.binary_cross_entropy": _mean_loss(3),
    "aten.binary_cross_entropy_backward": _mean_loss(4),
    "aten.binary_cross_entropy_with_logits": _mean_loss(4),
}
"""What a micro-batch can do beyond an op's strategies, by op."""
