"""The decisions of a deep graph with some of its layers removed.

Questions about many plans of which few are taken in the end are asked of a graph from whose middle equal layers are
removed: what the known ways to train may choose, and about how long their step takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.ir import Arg, Graph, Node, Value
from autopar.planner.problem.variables import Decisions, Variable
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
    cut = _LayerCut.of(d, [run for run in runs if len(run.copies) == depth], layers)
    graph = cut.graph()
    if graph is None:
        return None
    kept = [i for i, v in enumerate(d.variables) if cut.is_kept(_node_of(v))]
    position = np.full(len(d.variables), -1, dtype=np.int64)
    position[kept] = np.arange(len(kept))
    for run in cut.runs:
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


def _node_of(v: Variable) -> str:
    if v.value is not None:
        return v.value.node
    return v.node.name if v.node is not None else v.key.split("@")[0]


@dataclass
class _LayerCut:
    """The removal of rows ``begin`` to ``end`` of the runs.

    Args:
        at: the run, row and column of each node.
    """

    d: Decisions
    runs: Sequence[Run]
    begin: int
    end: int
    at: dict[str, tuple[int, int, int]]

    @staticmethod
    def of(d: Decisions, runs: Sequence[Run], layers: int) -> _LayerCut:
        at = {}
        for r, run in enumerate(runs):
            for row, variables in enumerate(run.copies.tolist()):
                for column, i in enumerate(variables):
                    node = d.variables[i].node
                    if node is not None and d.variables[i].key == node.name:
                        at[node.name] = r, row, column
        begin = layers // 2
        return _LayerCut(d, runs, begin, begin + len(runs[0].copies) - layers, at)

    def is_kept(self, name: str) -> bool:
        found = self.at.get(name)
        return found is None or not self.begin <= found[1] < self.end

    def graph(self) -> Graph | None:
        """Return the remaining graph; None if it cannot be closed over the gap."""
        graph = self.d.graph
        owners = {i.name: i.node for i in reversed(graph.inputs) if i.kind in ("parameter", "buffer")}
        nodes, outputs = [], []
        for node in graph.nodes:
            if self.is_kept(node.name):
                read = self._with_neighbours(node)
                if read is None:
                    return None
                nodes.append(read)
        for output in graph.outputs:
            owner = owners.get(output.name)
            if owner is not None and not self.is_kept(owner):
                continue
            value = self._value_read(output.value, owner)
            if value is None:
                return None
            outputs.append(replace(output, value=value))
        remaining = tuple(i for i in graph.inputs if self.is_kept(i.node))
        return replace(graph, nodes=tuple(nodes), inputs=remaining, outputs=tuple(outputs))

    def _with_neighbours(self, node: Node) -> Node | None:
        """Return ``node`` reading from the layers that are now next to its own."""
        read = {}
        for value in node.inputs:
            found = self._value_read(value, node.name)
            if found is None:
                return None
            read[value] = found
        if all(a == b for a, b in read.items()):
            return node
        kwargs = tuple((k, _renamed(a, read)) for k, a in node.kwargs)
        return replace(node, args=tuple(_renamed(a, read) for a in node.args), kwargs=kwargs)

    def _value_read(self, value: Value, reader: str | None) -> Value | None:
        """Return what ``reader`` reads instead of ``value``: the same value, as many layers before or after its own."""
        there, here = self.at.get(value.node), self.at.get(reader or "")
        if there is None or here is None or there[0] != here[0]:
            return value if self.is_kept(value.node) else None
        gone, (run, row, column) = self.end - self.begin, there
        now = row - gone if here[1] >= self.end else row
        node = self.d.variables[int(self.runs[run].copies[now if now < self.begin else now + gone, column])].node
        return None if node is None else value._replace(node=node.name)


def _renamed(arg: Arg, names: dict[Value, Value]) -> Arg:
    if isinstance(arg, Value):
        return names[arg]
    if isinstance(arg, tuple):
        return tuple(_renamed(item, names) for item in arg)
    return arg
