"""A bound on a problem with repeated blocks from one block of each run and the ends, whatever the number of copies.

A choice of the whole problem has every ghost equal to its original. Prices let go of that (Lagrange): with a price
vector p on a seam's column and -p on its ghost, the prices of all copies cancel along the run but for its two ends, so

    optimum >= min of (ends + p at the node before the run - p at the ghost behind it + m * q at outer nodes)
               + m * min of (block + p at the column - p at its ghost - q at ghosts of outer nodes)

holds for any p and q. Message passing within the pieces, which trade prices, finds good ones (see
``pieces``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar import settings
from autopar.solver.blocks.parts import Parts, Tied
from autopar.solver.problem import Array, Edge, IndexArray, Problem, UsagePrices
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.reductions import reduce
from autopar.solver.reduce.usage import with_usages_priced


@dataclass(frozen=True, eq=False)
class Core:
    """What is left of the tied problem once its pieces are reduced: choices differ by as much as the tied ones for
    which they stand.

    Args:
        graphs: of the ends and of each block, less options that some of their nodes' likes have lost.
        places: their nodes' numbers in ``problem``.
    """

    tied: Tied
    problem: Problem
    graphs: tuple[Graph, ...]
    places: tuple[dict[int, int], ...]
    offset: float

    def expand(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The tied choice of a choice."""
        full = np.zeros(len(self.tied.problem.costs), dtype=np.int64)
        for graph, place, tied in self._pieces():
            full[tied] = graph.expand({node: choice[at] for node, at in place.items()})
        return tuple(full.tolist())

    def project(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice near a tied one."""
        chosen = np.zeros(len(self.problem.costs), dtype=np.int64)
        for graph, place, tied in self._pieces():
            near = graph.project(tuple(choice[at] for at in tied))
            chosen[[place[node] for node in near]] = list(near.values())
        return tuple(chosen.tolist())

    def _pieces(self) -> Iterator[tuple[Graph, dict[int, int], IndexArray]]:
        return zip(self.graphs, self.places, (self.tied.ends, *self.tied.blocks), strict=True)


class Relaxation:
    """The parts, their usages paid for, reduced as far as any prices allow."""

    def __init__(self, parts: Parts, usage_prices: UsagePrices) -> None:
        self.parts = parts
        ends_kept: set[int] = set()
        for block in parts.blocks:
            ends_kept.update(node for _, _, before, behind in block.seams for node in (before, behind))
            ends_kept.update(node for _, node in block.outer)
        self.ends = _reduced(with_usages_priced(parts.ends, usage_prices), ends_kept)
        self.blocks = []
        for block in parts.blocks:
            kept = {node for column, ghost, _, _ in block.seams for node in (column, ghost)}
            kept |= {ghost for ghost, _ in block.outer}
            self.blocks.append(_reduced(with_usages_priced(block.problem, usage_prices), kept))

    def core(self, tied: Tied) -> Core:
        """The reduced pieces tied together; of limits nothing is left.

        Raises:
            InfeasibleError: blocks cannot choose alike.
        """
        ends, blocks = self.ends.copy(), [graph.copy() for graph in self.blocks]
        _share_options(self.parts, ends, blocks)
        graphs = (ends, *blocks)
        weights = [1, *(block.count for block in self.parts.blocks)]
        numbers: dict[int, int] = {}  # of tied nodes
        places = tuple(
            {node: numbers.setdefault(int(at[node]), len(numbers)) for node in graph.nodes()}
            for graph, at in zip(graphs, (tied.ends, *tied.blocks), strict=True)
        )
        costs: list[Array] = [np.zeros(0)] * len(numbers)
        edges: list[Edge] = []
        for graph, place, weight in zip(graphs, places, weights, strict=True):
            for node, at in place.items():
                cost = weight * graph.costs[node]
                costs[at] = costs[at] + cost if len(costs[at]) else cost
            matrices = [graph.neighbours[u][v] for u, v in graph.pairs()]
            counted = {id(m): m if weight == 1 else weight * m for m in matrices}
            edges += [Edge(place[u], place[v], counted[id(graph.neighbours[u][v])]) for u, v in graph.pairs()]
        offset = sum(weight * graph.offset for graph, weight in zip(graphs, weights, strict=True))
        if costs and offset > 0:  # counts too, where gaps are told as shares
            costs[0], offset = costs[0] + offset, 0.0
        return Core(tied, Problem(tuple(costs), tuple(edges), trusted=True), graphs, places, offset)


def _share_options(parts: Parts, ends: Graph, blocks: Sequence[Graph]) -> None:
    """Ghosts and originals keep the options that all of them have, as where all copies choose alike."""
    left = -1
    while left != (left := sum(graph.size()[1] for graph in (ends, *blocks))):
        for block, graph in zip(parts.blocks, blocks, strict=True):
            for column, ghost, before, behind in block.seams:
                _intersect((graph, column), (graph, ghost))
                _intersect((ends, before), (graph, ghost))
                _intersect((ends, behind), (graph, column))
            for ghost, node in block.outer:
                _intersect((ends, node), (graph, ghost))


def _intersect(here: tuple[Graph, int], there: tuple[Graph, int]) -> None:
    (one, u), (other, v) = here, there
    mine, theirs = one.options[u], other.options[v]
    one.keep(u, np.isin(mine, theirs))
    other.keep(v, np.isin(theirs, mine))


def _reduced(problem: Problem, kept: set[int]) -> Graph:
    graph = Graph(problem, kept)
    reduce(graph, WorkBudget(settings.WORK, each=settings.EACH))
    return graph
