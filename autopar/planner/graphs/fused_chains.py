"""Which tensors a fusing back end keeps in registers: those inside a chain of pointwise ops and reductions.

Such a back end (Inductor) compiles connected pointwise ops and reductions into one kernel, which reads what comes from
outside, writes what is read outside, and is launched once. Priced one by one, these ops would be half of GPT-2's
predicted time.

Two of them that hand a tensor on share a *group* if the same number of other ops (contractions, gathers, ...) lie
before both, counted along the longest path. Then no other op can lie between two members, so that the group can be one
kernel. A back end may find a few chains more, as where an op waits for another branch; the price errs on the careful
side. Views pass through a group as changes of index. Redistributions inside a group are priced by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Node, TensorMeta, Value
from autopar.planner.footprint.op_work import VIEWS
from autopar.sharding import Strategy
from autopar.strategies import find_rule

REDUCTIONS = frozenset(
    f"aten.{n}" for n in ("sum", "mean", "amax", "amin", "var", "var_mean", "std", "prod", "any", "all", "logsumexp")
) | {
    "aten._softmax",
    "aten._log_softmax",
    "aten._softmax_backward_data",
    "aten._log_softmax_backward_data",
    "aten.native_layer_norm",
    "aten.native_layer_norm_backward",
    "autopar.sumexp",
    "autopar.batch_var_mean",
    "autopar.batch_norm",
    "autopar.batch_norm_backward_reduce",
    "autopar.batch_norm_backward_input",
}
"""What Inductor fuses besides pointwise ops."""


@dataclass(frozen=True)
class FusedTraffic:
    """What one fused op moves to and from memory.

    Args:
        reads: positions among the node's operands that come from outside its group and that no earlier member has read.
            Each group reads a tensor once.
        writes: results that someone outside the group reads, or that leave the program.
        leads: whether the op is its group's first, which pays for the launch.
        dim: the length of the rows that one of our kernels keeps in registers; 0 if rows may be cut.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    leads: bool
    dim: int = 0

    def fits(self, node: Node, option: Strategy, metas: Sequence[TensorMeta]) -> bool:
        """Whether the kernel has whole rows under a strategy.

        Tensors are neither cut along the last dim nor partial sums, which only the gradient of a weight may be.
        """
        tensors = [*zip(metas, option.inputs, strict=True), *zip(node.outputs, option.outputs, strict=True)]
        return all(
            not (meta.shape[-1] == self.dim and spec.dims[-1]) and not (spec.partial and meta.numel > self.dim)
            for meta, spec in tensors
            if meta is not None and spec is not None and meta.shape
        )


def fused_traffic(graph: Graph) -> Mapping[str, FusedTraffic]:
    """Return what each pointwise op and reduction of ``graph`` moves, by name, if its group is one kernel."""
    group = _groups(graph)
    outside = _read_outside(graph, group)
    read: set[tuple[str, Value]] = set()
    led: set[str] = set()
    found: dict[str, FusedTraffic] = {}
    for node in graph.nodes:
        if node.name not in group:
            continue
        name = group[node.name]
        reads = set()
        for position, operand in enumerate(node.inputs):
            value = _origin(graph, operand)
            if group.get(value.node) != name and (name, value) not in read:
                read.add((name, value))
                reads.add(position)
        writes = frozenset(i for i in range(len(node.outputs)) if Value(node.name, i) in outside)
        found[node.name] = FusedTraffic(frozenset(reads), writes, name not in led)
        led.add(name)
    return found


def fusible(node: Node) -> bool:
    """Whether a fusing back end compiles ``node`` into its neighbours' kernel."""
    if node.op == "placeholder" or node.packet in VIEWS:
        return False
    rule = find_rule(node)
    return node.packet in REDUCTIONS or (rule is not None and rule.elementwise)


def _groups(graph: Graph) -> dict[str, str]:
    """Return the group of each fusible node, by the name of the group's first node."""
    parent: dict[str, str] = {}
    before: dict[str, int] = {}

    def find(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    order = {n.name: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        sources = [graph.by_name[_origin(graph, v).node] for v in node.inputs]
        before[node.name] = max((before[s.name] + (not _transparent(s)) for s in sources), default=0)
        if not fusible(node):
            continue
        parent[node.name] = node.name
        for s in sources:
            if s.name in parent and s.phase == node.phase and before[s.name] == before[node.name]:
                first, second = sorted((find(s.name), find(node.name)), key=order.__getitem__)
                parent[second] = first
    return {name: find(name) for name in parent}


def _transparent(node: Node) -> bool:
    return node.op == "placeholder" or node.packet in VIEWS or fusible(node)


def _origin(graph: Graph, value: Value) -> Value:
    """Return the tensor that a chain of views shows."""
    node = graph.by_name[value.node]
    while node.packet in VIEWS and node.inputs:
        value = node.inputs[0]
        node = graph.by_name[value.node]
    return value


def _read_outside(graph: Graph, group: Mapping[str, str]) -> set[Value]:
    """Return the results of fusible nodes that must be in memory."""
    found = {_origin(graph, output.value) for output in graph.outputs}
    for reader, value in _reads(graph):
        origin = _origin(graph, value)
        if origin.node in group and group.get(reader.name) != group[origin.node]:
            found.add(origin)
    return found


def _reads(graph: Graph) -> Iterator[tuple[Node, Value]]:
    """Yield every (reader, operand) except those of views, whose own readers count instead."""
    for node in graph.nodes:
        if node.packet not in VIEWS:
            yield from ((node, value) for value in node.inputs)
