"""Exact elimination of all nodes but a few, whatever their degree: tables over several nodes (Bertele & Brioschi 1972).

A node leaves by ``min over its options of the sum of all tables that it is in``, a table over its neighbours. Tables
grow with the width of the graph: small for the layers of a network with few options each, hopeless for many options,
so the work is counted before anything is done.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar import settings
from autopar.solver.clock import tick
from autopar.solver.problem import Array
from autopar.solver.reduce.graph import Graph

Late = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Factor:
    """Seconds for the options of the nodes of ``scope``, one axis each; ascending node numbers."""

    scope: tuple[int, ...]
    table: Array


@dataclass(frozen=True)
class Order:
    """Nodes in the order in which they leave; ``elements``: of all the tables on the way, ``largest``: of one."""

    nodes: tuple[int, ...]
    elements: float
    largest: float


@dataclass(frozen=True, eq=False)
class Eliminated:
    """``rest``: over the nodes that were kept. The nodes that left follow from those."""

    rest: Factor
    trail: tuple[tuple[int, tuple[Factor, ...]], ...]

    def complete(self, choice: Mapping[int, int]) -> dict[int, int]:
        """The best options of all nodes, given those of the kept ones; the first among equals."""
        full = dict(choice)
        for node, factors in reversed(self.trail):
            full[node] = int(sum(_line(f, node, full) for f in factors).argmin())  # type: ignore[union-attr]
        return full


def factors_of(graph: Graph) -> list[Factor]:
    """The costs of what remains of a graph; its usages are left out."""
    singles = [Factor((node,), graph.costs[node]) for node in graph.nodes()]
    return singles + [Factor(pair, graph.neighbours[pair[0]][pair[1]]) for pair in graph.pairs()]


def sizes_of(graph: Graph) -> dict[int, int]:
    return {node: len(graph.costs[node]) for node in graph.nodes()}


def find_order(
    scopes: Iterable[Collection[int]], sizes: Mapping[int, int], kept: Collection[int] = (), most: float = math.inf
) -> Order:
    """An order in which tables stay small: always the node that makes the smallest one. One that would need more than
    ``most`` elements is not looked for to its end, and said to need infinitely many."""
    around: dict[int, set[int]] = {node: set() for node in sizes}
    for scope in scopes:
        for node in scope:
            around[node].update(scope)
    for node, others in around.items():
        others.discard(node)
    weights = {node: math.log(size) for node, size in sizes.items()}

    def weight(node: int) -> float:
        return weights[node] + math.fsum(weights[other] for other in around[node])

    present = {node: weight(node) for node in sizes if node not in kept}
    heap = [(w, node) for node, w in present.items()]
    heapq.heapify(heap)
    nodes, elements, largest = [], 0.0, 0.0
    while heap:
        w, node = heapq.heappop(heap)
        if present.get(node) != w:
            continue
        del present[node]
        nodes.append(node)
        elements += math.exp(w)
        largest = max(largest, w)
        if elements > most:
            return Order((), math.inf, math.inf)
        others = around.pop(node)
        for other in others:
            around[other] |= others
            around[other] -= {node, other}
        for other in others:
            if other in present:
                present[other] = weight(other)
                heapq.heappush(heap, (present[other], other))
    elements += math.exp(math.fsum(weights[node] for node in kept))
    return Order(tuple(nodes), elements, math.exp(largest))


def eliminate_all(
    factors: Sequence[Factor],
    sizes: Mapping[int, int],
    order: Order,
    kept: Sequence[int] = (),
    late: Late | None = None,
) -> Eliminated | None:
    """Every node of ``order`` leaves; None where it got late on the way."""
    of: dict[int, list[Factor]] = {node: [] for node in sizes}
    constant = 0.0
    for factor in factors:
        for node in factor.scope:
            of[node].append(factor)
    trail = []
    for node in order.nodes:
        if late is not None and late():
            return None
        mine = of.pop(node)
        trail.append((node, tuple(mine)))
        made = _without(node, mine, sizes)
        tick("element of a table", made.table.size * sizes[node])
        for other in made.scope:
            of[other] = [f for f in of[other] if node not in f.scope]
            of[other].append(made)
        if not made.scope:
            constant += float(made.table)
    last = tuple(sorted(kept))
    rest = {id(f): f for node in last for f in of[node]}
    table = _sum(list(rest.values()), last, sizes)
    return Eliminated(Factor(last, table + constant), tuple(trail))


def _without(node: int, factors: Sequence[Factor], sizes: Mapping[int, int]) -> Factor:
    """The sum of the factors, minimised over the options of ``node``."""
    scope = tuple(sorted({other for f in factors for other in f.scope} - {node}))
    shape = tuple(sizes[other] for other in scope)
    aligned = [_aligned(f, (node, *scope)) for f in sorted(factors, key=lambda f: f.table.size)]
    if math.prod(shape) * sizes[node] <= settings.AT_ONCE:
        total = aligned[0]
        for table in aligned[1:]:
            total = total + table
        return Factor(scope, np.broadcast_to(total, (sizes[node], *shape)).min(axis=0))
    result = np.full(shape, np.inf)
    scratch = np.empty(shape)
    for option in range(sizes[node]):
        *small, largest = (table[option if len(table) > 1 else 0] for table in aligned)
        part: Array = small[0] if small else np.zeros(1)
        for table in small[1:]:
            part = part + table
        np.minimum(result, np.add(part, largest, out=scratch), out=result)
    return Factor(scope, result)


def _aligned(factor: Factor, scope: tuple[int, ...]) -> Array:
    """The factor's table with the axes of ``scope``, of size 1 where it does not depend on a node."""
    axes = [factor.scope.index(node) for node in scope if node in factor.scope]
    shape = [factor.table.shape[factor.scope.index(n)] if n in factor.scope else 1 for n in scope]
    return np.asarray(factor.table.transpose(axes).reshape(shape))


def _sum(factors: Sequence[Factor], scope: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    total = np.zeros(tuple(sizes[node] for node in scope))
    for factor in factors:
        total = total + _aligned(factor, scope)
    return total


def _line(factor: Factor, node: int, choice: Mapping[int, int]) -> Array:
    """What a factor says about one node, the others having chosen."""
    return np.asarray(factor.table[tuple(slice(None) if n == node else choice[n] for n in factor.scope)])
