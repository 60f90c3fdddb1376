"""A plan under the names of another graph that differs from its own in nothing but names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.ir import Graph, Node, Value
from autopar.planner.memory.exact import MemoryProfile
from autopar.planner.problem.variables import Decisions, Variable
from autopar.planner.search.search import Planned
from autopar.program import LocalTensor, Op, Program

OF_INPUT = "input:"


@dataclass(frozen=True)
class Names:
    """The names of another graph.

    Args:
        nodes: by those of nodes here.
        ends: by those of inputs and outputs here.
    """

    nodes: Mapping[str, str]
    ends: Mapping[str, str]

    @classmethod
    def between(cls, a: Graph, b: Graph) -> Names | None:
        """Return the names of ``b`` by those of ``a``; None where more than names differs."""
        if len(a.nodes) != len(b.nodes):
            return None
        names = cls({n.name: m.name for n, m in zip(a.nodes, b.nodes, strict=True)}, dict(_ends(a, b)))
        same = all(map(names._are_equal, a.nodes, b.nodes)) and len({*names.ends.values()}) == len(names.ends)
        ends = tuple(replace(i, node=names.nodes[i.node], name=names.end(i.name)) for i in a.inputs)
        results = tuple(replace(o, value=names.value(o.value), name=names.end(o.name)) for o in a.outputs)
        parts = (g.part and replace(g.part, exchanged=frozenset()) for g in (a, b))
        whole = a.has_loss == b.has_loss and len({*parts}) == 1
        return names if same and whole and ends == b.inputs and results == b.outputs else None

    def value(self, value: Value) -> Value:
        return value._replace(node=self.nodes[value.node])

    def end(self, name: str) -> str:
        own = name.removeprefix(OF_INPUT)
        return name[: len(name) - len(own)] + self.ends.get(own, own)

    def constraint(self, key: str) -> str:
        """Return the key of a constraint, as ``PlanOptions.constraints`` and ``received:NAME`` have it."""
        kind, found, name = key.rpartition(":")
        own = name.removesuffix(".grad") if found else name
        return kind + found + self.ends.get(own, own) + name[len(own) :]

    def tensor(self, name: str) -> str:
        """Return the name of an op or a tensor: that of a value, with what happened to it behind a ``|`` or ``@``."""
        end = min((at for at in map(name.find, "|@") if at >= 0), default=len(name))
        return self._of_value(name[:end]) + name[end:]

    def _of_value(self, name: str) -> str:
        if name in self.nodes:
            return self.nodes[name]
        node, dot, index = name.rpartition(".")
        return self.nodes.get(node, node) + dot + index

    def _are_equal(self, n: Node, m: Node) -> bool:
        same = (n.op, n.phase, n.outputs, n.signature) == (m.op, m.phase, m.outputs, m.signature)
        return same and tuple(map(self.value, n.inputs)) == m.inputs


def _ends(a: Graph, b: Graph) -> Iterator[tuple[str, str]]:
    mine, others = ([*(i.name for i in g.inputs), *(o.name for o in g.outputs)] for g in (a, b))
    return ((m.removeprefix(OF_INPUT), o.removeprefix(OF_INPUT)) for m, o in zip(mine, others, strict=False))


def renamed(planned: Planned, graph: Graph, names: Names, more_bytes: int = 0) -> Planned:
    """Return the plan of ``graph``, whose names are ``names``.

    Args:
        more_bytes: that it holds throughout, for more micro-batches in flight.
    """
    memory, intervals = planned.memory, planned.timeline.intervals
    if more_bytes:
        kinds = {**memory.by_kind, "activations": memory.by_kind.get("activations", 0) + more_bytes}
        memory = MemoryProfile(tuple(held + more_bytes for held in memory.timeline), memory.peak_at, kinds)
    return replace(
        planned,
        program=_program(planned.program, names),
        decisions=_decisions(planned.decisions, graph, names),
        memory=memory,
        timeline=replace(planned.timeline, intervals=tuple(replace(i, op=names.tensor(i.op)) for i in intervals)),
        timings=dict(planned.timings),
        baselines=(),
        trace=(),
    )


def _program(program: Program, names: Names) -> Program:
    tensors: dict[int, LocalTensor] = {}

    def tensor(t: LocalTensor) -> LocalTensor:
        return tensors.setdefault(id(t), replace(t, name=names.tensor(t.name)))

    def op(op: Op) -> Op:
        return replace(
            op,
            name=names.tensor(op.name),
            node=names.nodes.get(op.node, op.node),
            reads=tuple(map(names.tensor, op.reads)),
            writes=tuple(map(tensor, op.writes)),
        )

    return replace(
        program,
        ops=tuple(map(op, program.ops)),
        results=tuple(
            (replace(o, value=names.value(o.value), name=names.end(o.name)), names.tensor(t))
            for o, t in program.results
        ),
        offloaded_optimizer=tuple(map(names.end, program.offloaded_optimizer)),
        once=tuple(map(names.tensor, program.once)),
    )


def _decisions(d: Decisions, graph: Graph, names: Names) -> Decisions:
    def variable(v: Variable) -> Variable:
        kind, found, name = v.key.partition("output:")
        return replace(
            v,
            key=names.tensor(v.key) if kind or not found else found + names.end(name),
            node=None if v.node is None else graph.by_name[names.nodes[v.node.name]],
            value=None if v.value is None else names.value(v.value),
        )

    variables = list(map(variable, d.variables))
    return replace(
        d,
        graph=graph,
        variables=variables,
        index={v.key: i for i, v in enumerate(variables)},
        widened=frozenset(map(names.value, d.widened)),
    )
