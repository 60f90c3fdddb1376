"""The decisions of a deep graph with some of its layers removed.

Questions about many plans of which few are taken in the end are asked of a graph from whose middle equal layers are
removed: what the known ways to train may choose, and about how long their step takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.graphs.layers import LayerCut
from autopar.planner.problem.variables import Decisions
from autopar.solver import Run
from autopar.solver.problem import IndexArray


@dataclass(frozen=True)
class FewerLayers:
    """The decisions that remain.

    Args:
        kept: for each remaining variable its index in the full decisions.
        position: for each variable of the full decisions its index here, or that of its equal in a layer before the
            gap.
        layers: the number of repeated layers that remain.
        depth: the number of repeated layers in the full decisions.
    """

    decisions: Decisions
    kept: IndexArray
    position: IndexArray
    layers: int
    depth: int

    def choice(self, whole: Sequence[int]) -> tuple[int, ...] | None:
        """Return a choice of the full decisions as one of these; None if layers differ in it."""
        of_all = np.asarray(whole, dtype=np.int64)
        remaining = of_all[self.kept]
        return tuple(remaining.tolist()) if (remaining[self.position] == of_all).all() else None


def with_fewer_layers(d: Decisions, runs: Sequence[Run], layers: int) -> FewerLayers | None:
    """Return ``d`` with only ``layers`` of the longest of ``runs``.

    None if there are no more layers than that, or if something outside the layers reads from those that would be
    removed.

    Args:
        runs: runs of equal blocks of the variables of ``d``.
        layers: at least 4, so that what is next to the gap reads from layers alone.
    """
    depth = max((len(run.copies) for run in runs), default=0)
    if depth <= layers:
        return None
    deep = [run for run in runs if len(run.copies) == depth]
    cut = LayerCut.leaving(d.graph, [[_nodes(d, row) for row in run.copies.tolist()] for run in deep], layers)
    graph = cut.graph()
    if graph is None:
        return None
    kept = [i for i, v in enumerate(d.variables) if cut.is_kept(v.about)]
    position = np.full(len(d.variables), -1, dtype=np.int64)
    position[kept] = np.arange(len(kept))
    for run in deep:
        positions = position[run.copies]
        like = positions[(positions[: cut.begin] >= 0).argmax(axis=0), np.arange(positions.shape[1])]
        position[run.copies] = np.where(positions >= 0, positions, like)
    if (position < 0).any():
        return None
    fewer = replace(
        d,
        graph=graph,
        variables=[d.variables[i] for i in kept],
        uses=[],
        index={d.variables[i].key: position for position, i in enumerate(kept)},
    )
    return FewerLayers(fewer, np.array(kept), position, layers, depth)


def _nodes(d: Decisions, row: Sequence[int]) -> list[str | None]:
    """Return the node of each variable that decides how one runs."""
    nodes = ((d.variables[i].node, d.variables[i].key) for i in row)
    return [node.name if node is not None and key == node.name else None for node, key in nodes]
