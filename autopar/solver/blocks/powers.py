"""Runs of equal blocks, exactly and at any depth: a block becomes its min-plus matrix, whose powers are all the copies.

With all but its seams and outer nodes eliminated, a block is a table ``T[s, t, o]``: the least it costs when the block
before it ends in the options ``s`` of the seam's columns, it itself ends in ``t``, and the outer nodes choose ``o``.
For each ``o`` the copies in a row cost the power ``T * T * ... * T`` under ``min`` and ``+``, made by squaring, so in
time that grows with the logarithm of the depth. In the ends, that power is one more table, over the nodes before the
run, their ghosts behind it and the outer nodes; what remains is eliminated like any graph. Blocks need not choose
alike, so the result is the optimum of the problem as it was given, without its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.solver.blocks.parts import Block, Parts
from autopar.solver.clock import tick
from autopar.solver.problem import Array, IndexArray
from autopar.solver.reduce.elimination import (
    Eliminated,
    Factor,
    Late,
    Order,
    eliminate_all,
    factors_of,
    find_order,
    sizes_of,
)
from autopar.solver.reduce.graph import Graph


@dataclass(frozen=True)
class Optimum:
    """The least cost of the parts (without offsets of other prices), and a choice of the whole that has it."""

    value: float
    choice: IndexArray


class Power:
    """``table[o, s, t]`` raised to ``count``, and the states between the copies on a cheapest way."""

    def __init__(self, table: Array, count: int) -> None:
        self.squares = [table]
        for _ in range(count.bit_length() - 1):
            self.squares.append(min_plus_square(self.squares[-1], self.squares[-1]))
        self.bits = [k for k in range(count.bit_length()) if count >> k & 1]
        self.products = [self.squares[self.bits[0]]]
        for k in self.bits[1:]:
            self.products.append(min_plus_square(self.products[-1], self.squares[k]))

    @property
    def table(self) -> Array:
        return self.products[-1]

    def states(self, outer: int, first: int, last: int) -> list[int]:
        """The states after each copy; the last one is ``last``."""
        ways: list[list[int]] = []
        at = last
        for k, product in zip(self.bits[:0:-1], self.products[-2::-1], strict=True):
            middle = _middle(product[outer, first], self.squares[k][outer, :, at])
            ways.append(list(self._inside(k, outer, middle, at)))
            at = middle
        ways.append(list(self._inside(self.bits[0], outer, first, at)))
        return [state for way in reversed(ways) for state in way]

    def _inside(self, k: int, outer: int, first: int, last: int) -> Iterator[int]:
        """The states after each of ``2 ** k`` copies."""
        if k == 0:
            yield last
            return
        middle = _middle(self.squares[k - 1][outer, first], self.squares[k - 1][outer, :, last])
        yield from self._inside(k - 1, outer, first, middle)
        yield from self._inside(k - 1, outer, middle, last)


def _middle(left: Array, right: Array) -> int:
    return int((left + right).argmin())


def min_plus_square(left: Array, right: Array) -> Array:
    """result[o, s, t] = min over k of left[o, s, k] + right[o, k, t]."""
    result = np.full_like(left, np.inf)
    scratch = np.empty_like(left)
    tick("element of a table", left.size * left.shape[2])
    for k in range(left.shape[2]):
        np.add(left[:, :, k, None], right[:, k, None, :], out=scratch)
        np.minimum(result, scratch, out=result)
    return result


@dataclass(frozen=True, eq=False)
class _Plan:
    """How a block will be contracted: ``order`` of its elimination, and the work of all of it in element operations."""

    order: Order
    work: float


def contract(
    parts: Parts, ends: Graph, blocks: Sequence[Graph], most: float, late: Late | None = None
) -> Optimum | None:
    """The optimum of the parts, whose graphs still have every seam and outer node; None where that is too much work
    (``most`` element operations) or got late.

    Raises:
        InfeasibleError: nothing is allowed.
    """
    ends = ends.copy()
    blocks = [block.copy() for block in blocks]
    _share_at_ends(parts, ends, blocks)
    plans = [_plan(block, graph) for block, graph in zip(parts.blocks, blocks, strict=True)]
    scopes = [_scope(block) for block in parts.blocks]
    factors = factors_of(ends)
    order = find_order([*(f.scope for f in factors), *scopes], sizes_of(ends))
    if order.elements + sum(plan.work for plan in plans) > most:
        return None
    runs: list[_Run] = []
    for block, graph, plan in zip(parts.blocks, blocks, plans, strict=True):
        inner = eliminate_all(factors_of(graph), sizes_of(graph), plan.order, _kept(block), late)
        if inner is None:
            return None
        runs.append(_Run(block, graph, inner))
        if late is not None and late():
            return None
    found = eliminate_all([*factors, *(run.factor(ends) for run in runs)], sizes_of(ends), order, (), late)
    if found is None:
        return None
    value = float(found.rest.table) + ends.offset + sum(run.graph.offset * run.block.count for run in runs)
    if not np.isfinite(value):
        raise InfeasibleError("No choice is allowed.", found="every choice of equal blocks takes a forbidden pair")
    return Optimum(value, _choice(parts, ends, runs, found.complete({})))


def share_options(parts: Parts, ends: Graph, blocks: Sequence[Graph]) -> None:
    """Ghosts and originals keep the options that all of them have, as where all copies choose alike."""

    def share(block: Block, graph: Graph) -> None:
        for column, ghost, before, behind in block.seams:
            _intersect((graph, column), (graph, ghost))
            _intersect((ends, before), (graph, ghost))
            _intersect((ends, behind), (graph, column))
        for ghost, node in block.outer:
            _intersect((ends, node), (graph, ghost))

    _until_none_goes(share, parts, ends, blocks)


def _share_at_ends(parts: Parts, ends: Graph, blocks: Sequence[Graph]) -> None:
    """The node before a run is the first copy's ghost, the ghost behind it the last copy's column. A column may have
    options that its ghost has not, and the other way around: each stands for all copies but one."""

    def share(block: Block, graph: Graph) -> None:
        for column, ghost, before, behind in block.seams:
            for node, like in ((before, ghost), (behind, column)):
                ends.keep(node, np.isin(ends.options[node], graph.options[like]))
        for ghost, node in block.outer:
            _intersect((ends, node), (graph, ghost))

    _until_none_goes(share, parts, ends, blocks)


def _until_none_goes(share: Callable[[Block, Graph], None], parts: Parts, ends: Graph, blocks: Sequence[Graph]) -> None:
    left = -1
    while left != (left := sum(graph.size()[1] for graph in (ends, *blocks))):
        for block, graph in zip(parts.blocks, blocks, strict=True):
            share(block, graph)


def _intersect(here: tuple[Graph, int], there: tuple[Graph, int]) -> None:
    (one, u), (other, v) = here, there
    mine, theirs = one.options[u], other.options[v]
    one.keep(u, np.isin(mine, theirs))
    other.keep(v, np.isin(theirs, mine))


def _kept(block: Block) -> tuple[int, ...]:
    """Ghosts of outer nodes, ghosts of seams, columns of seams."""
    return (*(ghost for ghost, _ in block.outer), *(s[1] for s in block.seams), *(s[0] for s in block.seams))


def _scope(block: Block) -> tuple[int, ...]:
    """The nodes of the ends in the same order."""
    return (*(node for _, node in block.outer), *(s[2] for s in block.seams), *(s[3] for s in block.seams))


def _plan(block: Block, graph: Graph) -> _Plan:
    sizes = sizes_of(graph)
    order = find_order([f.scope for f in factors_of(graph)], sizes, _kept(block))
    outer = float(np.prod([float(sizes[ghost]) for ghost, _ in block.outer]))
    states = float(np.prod([float(len(options)) for options in _states(block, graph)]))
    products = 2.0 * block.count.bit_length()
    return _Plan(order, order.elements + products * outer * states**3)


def _states(block: Block, graph: Graph) -> list[IndexArray]:
    """Options in which a copy can end, or the next one find it, for each seam."""
    return [np.union1d(graph.options[column], graph.options[ghost]) for column, ghost, *_ in block.seams]


class _Run:
    """One contracted block and its copies."""

    def __init__(self, block: Block, graph: Graph, inner: Eliminated) -> None:
        self.block = block
        self.graph = graph
        self.inner = inner
        sizes = sizes_of(graph)
        kept = _kept(block)
        table = inner.rest.table.transpose([inner.rest.scope.index(node) for node in kept])
        self.outer = tuple(sizes[ghost] for ghost, _ in block.outer)
        self.options = _states(block, graph)
        self.states = tuple(map(len, self.options))
        full = np.full(self.outer + self.states + self.states, np.inf)
        ghosts, columns = ([seam[at] for seam in block.seams] for at in (1, 0))
        full[self._at(graph, ghosts, graph, columns)] = table
        count = int(np.prod(self.states))
        self.power = Power(full.reshape(int(np.prod(self.outer)), count, count), block.count)

    def _at(self, first: Graph, before: Sequence[int], last: Graph, behind: Sequence[int]) -> tuple[IndexArray, ...]:
        """Where the options of nodes at both ends of a copy, or of the run, are in its table."""
        places = [np.arange(size) for size in self.outer]
        for graph, nodes in ((first, before), (last, behind)):
            places += [np.searchsorted(s, graph.options[n]) for s, n in zip(self.options, nodes, strict=True)]
        return np.ix_(*places)

    def factor(self, ends: Graph) -> Factor:
        scope = _scope(self.block)
        table = self.power.table.reshape(self.outer + self.states + self.states)
        before, behind = ([seam[at] for seam in self.block.seams] for at in (2, 3))
        order = np.argsort(scope)
        return Factor(tuple(scope[i] for i in order), table[self._at(ends, before, ends, behind)].transpose(order))

    def choices(self, ends: Graph, chosen: dict[int, int]) -> Iterator[tuple[int, ...]]:
        """The options of the block's nodes in each copy, in original numbers."""
        outer = [chosen[node] for _, node in self.block.outer]
        first, last = (
            [int(np.searchsorted(s, ends.options[seam[at]][chosen[seam[at]]])) for s, seam in self._seams()]
            for at in (2, 3)
        )
        at = int(np.ravel_multi_index(tuple(outer), self.outer)) if outer else 0
        state, end = (int(np.ravel_multi_index(s, self.states)) if s else 0 for s in (first, last))
        known: dict[tuple[int, int], tuple[int, ...]] = {}
        for following in self.power.states(at, state, end):
            if (state, following) not in known:
                seams = [*self._local(state, 1), *self._local(following, 0)]
                local = dict(zip(_kept(self.block), [*outer, *seams], strict=True))
                known[state, following] = self.graph.expand(self.inner.complete(local))
            yield known[state, following]
            state = following

    def _seams(self) -> Iterator[tuple[IndexArray, tuple[int, int, int, int]]]:
        return zip(self.options, self.block.seams, strict=True)

    def _local(self, state: int, at: int) -> Iterator[int]:
        """Of a state the options of the ghosts (1) or columns (0)."""
        options = np.unravel_index(state, self.states)
        for option, (states, seam) in zip(options, self._seams(), strict=True):
            yield int(np.searchsorted(self.graph.options[seam[at]], states[option]))


def _choice(parts: Parts, ends: Graph, runs: Sequence[_Run], local: dict[int, int]) -> IndexArray:
    whole = np.zeros(len(parts.whole.costs), dtype=np.int64)
    whole[parts.explicit] = ends.expand(local)[: len(parts.explicit)]
    for run in runs:
        for nodes, options in zip(run.block.copies, run.choices(ends, local), strict=True):
            whole[nodes] = options[: len(nodes)]
    return whole
