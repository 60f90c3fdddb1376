"""A bound on a problem with repeated blocks from one block of each run and the ends, whatever the number of copies.

A choice of the whole problem has every ghost equal to its original. Prices let go of that (Lagrange): with a price
vector p on a seam's column and -p on its ghost, the prices of all copies cancel along the run but for its two ends, so

    optimum >= min of (ends + p at the node before the run - p at the ghost behind it + m * q at outer nodes)
               + m * min of (block + p at the column - p at its ghost - q at ghosts of outer nodes)

holds for any p and q. Message passing within the pieces, which trade prices, finds good ones (see
``pieces``).
"""

from __future__ import annotations

from autopar import settings
from autopar.solver.blocks.parts import Parts
from autopar.solver.problem import Problem, UsagePrices
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.reductions import reduce
from autopar.solver.reduce.usage import with_usages_priced


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


def _reduced(problem: Problem, kept: set[int]) -> Graph:
    graph = Graph(problem, kept)
    reduce(graph, WorkBudget(settings.WORK, each=settings.EACH))
    return graph
