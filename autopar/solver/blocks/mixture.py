"""A problem of repeated blocks under a limit: some blocks take one choice and the others another.

At the best prices a choice that fits and one that does not cost the same, and equal blocks can only take one of them
together. Here each block takes either, so that the limit is met to within one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.blocks.parts import Parts, Tied
from autopar.solver.dual.multipliers import FEW_ROWS, Multipliers, Plane
from autopar.solver.problem import USAGE_TOLERANCE, Array, Edge, IndexArray, Problem, Usage, UsagePrices, evaluate
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.usage import UsageTable, with_usages_priced

CANDIDATES = 2
"""Choices on either side of the limit that are mixed."""

SolvePriced = Callable[[Problem, Sequence[tuple[int, ...]]], "tuple[int, ...] | None"]


def few_rows(problem: Problem) -> bool:
    """Whether the limit binds at so few times that cutting planes find their prices fast."""
    starts = {u.start for u in problem.usages if u.start < u.end}
    return 0 < len(starts) <= FEW_ROWS and problem.limit > 0 and bool(np.isfinite(problem.limit))


@dataclass
class Mixing:
    """Prices the limit on the tied problem, and offers mixtures of what it finds."""

    incumbent: Incumbent
    tied: Tied
    solve: SolvePriced
    seconds_left: Callable[[], float]

    def __post_init__(self) -> None:
        self.parts: Parts = self.tied.parts
        self.whole = UsageTable(self.parts.whole)
        self.limit = self.parts.whole.limit

    def run(self, start: UsagePrices, seeds: Sequence[Sequence[int]]) -> UsagePrices:
        """The best prices found; the incumbent has then seen the mixtures. ``seeds``: choices of the whole problem."""
        table = UsageTable(self.tied.problem)
        free = Problem(self.tied.problem.costs, self.tied.problem.edges)
        warm: list[tuple[int, ...]] = []

        def plane(choice: tuple[int, ...]) -> Plane:
            return Plane(choice, evaluate(free, choice)[0], table.of(choice) / self.limit - 1.0)

        def oracle(prices: Array) -> Plane | None:
            priced = with_usages_priced(self.tied.problem, UsagePrices(table.times.astype(float), prices / self.limit))
            choice = self.solve(priced, warm[-2:])
            if choice is None:
                return None
            warm.append(choice)
            return plane(choice)

        known = [plane(c) for c in map(self.tied.project, seeds)]
        dual = Multipliers(len(table.times), oracle, [p for p in known if np.isfinite(p.cost)])
        dual.maximise(start.at(table.times) * self.limit, self.seconds_left)
        prices = UsagePrices(table.times.astype(float), dual.prices / self.limit)
        self._offer(dual, prices)
        return prices

    def _offer(self, dual: Multipliers, prices: UsagePrices) -> None:
        ranked = sorted(dual.planes, key=lambda p: p.at(dual.prices))
        fitting = [p for p in ranked if p.fits][:CANDIDATES]
        over = [p for p in ranked if not p.fits][:CANDIDATES]
        for plane in fitting:
            self.incumbent.offer(self.tied.expand(plane.choice), "prices of the limit")
        best: tuple[float, IndexArray, tuple[int, ...]] | None = None
        for light in fitting:
            for heavy in over:
                for mixed, seam in self._mixtures(light, heavy):
                    value = evaluate(self.parts.whole, mixed.tolist())[0]
                    self.incumbent.offer(mixed.tolist(), "blocks of two kinds")
                    estimate = value if np.isfinite(value) else heavy.cost
                    if best is None or estimate < best[0]:
                        best = estimate, seam, tuple(mixed.tolist())
        if best is None:
            return
        patched = self._patched(np.array(best[2]), best[1], prices)
        if patched is not None:
            self.incumbent.offer(patched.tolist(), "blocks of two kinds")

    def _mixtures(self, light: Plane, heavy: Plane) -> Iterator[tuple[IndexArray, IndexArray]]:
        """As many blocks as fit take the choice that is over the limit; with the nodes where the kinds meet."""
        low, high = (np.array(self.tied.expand(p.choice)) for p in (light, heavy))
        for first in (True, False):
            for ends in (high, low):
                count = max(block.count for block in self.parts.blocks)
                least, most = 0, count
                found = None
                while least < most:
                    middle = (least + most + 1) // 2
                    mixed = self._mixed(low, high, ends, middle / count, first=first)
                    if (self.whole.of(mixed) <= self.limit * (1 + USAGE_TOLERANCE)).all():
                        least, found = middle, mixed
                    else:
                        most = middle - 1
                if found is not None:
                    yield found, self._seam(least / count, first=first)

    def _mixed(self, low: IndexArray, high: IndexArray, ends: IndexArray, share: float, *, first: bool) -> IndexArray:
        mixed: IndexArray = ends.copy()
        for block in self.parts.blocks:
            taken = round(share * block.count)
            rows = block.copies[:taken] if first else block.copies[block.count - taken :]
            mixed[block.copies] = low[block.copies]
            mixed[rows] = high[rows]
        return mixed

    def _seam(self, share: float, *, first: bool) -> IndexArray:
        """The nodes of the blocks on both sides of where the kinds meet."""
        near = []
        for block in self.parts.blocks:
            taken = round(share * block.count)
            at = taken if first else block.count - taken
            near.append(block.copies[max(at - 1, 0) : at + 1].ravel())
        return np.concatenate(near)

    def _patched(self, choice: IndexArray, nodes: IndexArray, prices: UsagePrices) -> IndexArray | None:
        """The nodes choose anew, under prices, all others staying."""
        place = {int(n): i for i, n in enumerate(nodes)}
        costs = [self.parts.whole.costs[n].copy() for n in nodes]
        edges = []
        for edge in self.parts.whole.edges:
            u, v = place.get(edge.u), place.get(edge.v)
            if u is not None and v is not None:
                edges.append(Edge(u, v, edge.cost))
            elif u is not None:
                costs[u] += edge.cost[:, choice[edge.v]]
            elif v is not None:
                costs[v] += edge.cost[choice[edge.u]]
        usages = tuple(
            Usage(place[u.node], u.option, u.start, u.end) for u in self.parts.whole.usages if u.node in place
        )
        priced = with_usages_priced(Problem(tuple(costs), tuple(edges), usages), prices)
        found = self.solve(priced, ())
        if found is None:
            return None
        patched: IndexArray = choice.copy()
        patched[nodes] = found
        return patched
