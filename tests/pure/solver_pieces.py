"""The ends and the blocks of a relaxation under prices, as problems of their own: what its bound is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.solver.blocks.parts import Block
from autopar.solver.blocks.relaxation import Relaxation
from autopar.solver.problem import Array, Edge, Problem
from autopar.solver.reduce.graph import Graph


def priced_ends(relaxation: Relaxation, prices: Sequence[Array]) -> tuple[Problem, float]:
    """The ends under prices, as a problem with costs >= 0 and the constant that is missing from it."""
    extra: dict[int, Array] = {}
    for block, seams, outer in _by_block(relaxation, prices):
        for (_, _, before, behind), price in zip(block.seams, seams, strict=True):
            _add(extra, before, price)
            _add(extra, behind, -price)
        for (_, node), price in zip(block.outer, outer, strict=True):
            _add(extra, node, block.count * price)
    return _with_costs(relaxation.ends, extra)


def priced_block(relaxation: Relaxation, index: int, prices: Sequence[Array]) -> tuple[Problem, float]:
    """One block of a run under prices, and the missing constant."""
    block, seams, outer = list(_by_block(relaxation, prices))[index]
    extra: dict[int, Array] = {}
    for (column, ghost, _, _), price in zip(block.seams, seams, strict=True):
        _add(extra, column, price)
        _add(extra, ghost, -price)
    for (ghost, _), price in zip(block.outer, outer, strict=True):
        _add(extra, ghost, -price)
    return _with_costs(relaxation.blocks[index], extra)


def _by_block(relaxation: Relaxation, prices: Sequence[Array]) -> Iterator[tuple[Block, list[Array], list[Array]]]:
    left = iter(prices)
    for block in relaxation.parts.blocks:
        yield block, [next(left) for _ in block.seams], [next(left) for _ in block.outer]


def _add(extra: dict[int, Array], node: int, price: Array) -> None:
    extra[node] = extra[node] + price if node in extra else price


def _with_costs(graph: Graph, extra: dict[int, Array]) -> tuple[Problem, float]:
    offset = graph.offset
    nodes = graph.nodes()
    place = {node: i for i, node in enumerate(nodes)}
    costs = []
    for node in nodes:
        cost = graph.costs[node]
        if node in extra:
            cost = cost + extra[node][graph.options[node]]
        least = float(cost.min())
        offset += least
        costs.append(cost - least)
    edges = tuple(Edge(place[u], place[v], graph.neighbours[u][v]) for u, v in graph.pairs())
    return Problem(tuple(costs), edges, trusted=True), offset
