"""Megatron's column and row pairs, found from the rules.

Shoeybi et al. 2019; between the pairs, with sequence parallel: Korthikanti et al. 2022. The forward is labelled in
order. A product whose activation is whole takes its weight by columns (a factor of the weight that the result keeps).
The cut then passes through every op that has its factor, including the heads of attention. The next product finds it
among its summed factors and takes its weight by rows; its result is a sum, whole again. A lookup takes its table by
rows. Where a cut cannot pass, as through a norm over what is cut, the columns it came from are left to the solver, and
with them what is computed from them, up to the next product of a weight. The backward follows from what the forward
decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, Union

from autopar.ir import Node, Value
from autopar.planner.graphs.dataflow import Dataflow
from autopar.strategies import flops

FREE: Final = "free"
Label: TypeAlias = Union[int, Literal["free"], None]
"""The dim of a tensor that the tensor axes cut; "free" leaves it to the solver, None is whole."""

CanCut = Callable[[Node, str], bool]


@dataclass(frozen=True)
class TensorParallel:
    """What the tensor axes do.

    Args:
        factors: for each op the factor that they cut, "free", or None.
        parameters: the dim of each parameter that they cut, by node.
        sequence: for each op the factors that stand for the dim along which sums may be scattered.
    """

    factors: Mapping[str, str | None]
    parameters: Mapping[str, Label]
    sequence: Mapping[str, frozenset[str]]

    @property
    def pairs(self) -> bool:
        """Whether anything is cut at all."""
        return any(isinstance(label, int) for label in self.parameters.values())


def find_tensor_parallel(flow: Dataflow, batch: Mapping[str, frozenset[str]], can_cut: CanCut) -> TensorParallel:
    """Choose columns and rows.

    Args:
        batch: the factors of each op that stand for the batch, which are left to the data axes.
    """
    walk = _Labeller(flow, batch, can_cut)
    walk.run()
    starts = {v: frozenset((d,)) for v, d in walk.scattered.items()}
    return TensorParallel(walk.factors, walk.parameters, flow.trace(starts))


@dataclass
class _Labeller:
    """The labels so far, and what is needed to go back.

    Args:
        unpaired: products whose columns could not pass; their cut is left to the solver.
        log: what was recorded, in order.
        log_length: the length of the log when each op was reached.
    """

    flow: Dataflow
    batch: Mapping[str, frozenset[str]]
    can_cut: CanCut
    unpaired: set[str] = field(default_factory=set)
    labels: dict[Value, Label] = field(default_factory=dict)
    origins: dict[Value, frozenset[str]] = field(default_factory=dict)
    factors: dict[str, str | None] = field(default_factory=dict)
    parameters: dict[str, Label] = field(default_factory=dict)
    scattered: dict[Value, int] = field(default_factory=dict)
    log: list[tuple[dict[Any, Any], Any]] = field(default_factory=list)
    log_length: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Label every op. Where columns cannot pass, go back to the product that they come from."""
        nodes, order = self.flow.graph.nodes, self.flow.graph.order
        at = 0
        while at < len(nodes):
            node = nodes[at]
            at += 1
            if node.op == "placeholder" or self._is_state(node):
                continue
            self.log_length[node.name] = len(self.log)
            blocked = self._visit(node)
            if blocked:
                self.unpaired |= blocked
                at = min(order[name] for name in blocked)
                self._undo(self.log_length[nodes[at].name])

    def _record(self, table: dict[Any, Any], key: object, what: object) -> None:
        if key not in table:
            self.log.append((table, key))
        table[key] = what

    def _undo(self, since: int) -> None:
        for table, key in self.log[since:]:
            del table[key]
        del self.log[since:]

    def _is_state(self, node: Node) -> bool:
        """Whether an op reads parameters alone. It is labelled when its reader is."""
        return bool(node.inputs) and all(v in self.flow.state for v in node.inputs)

    def _visit(self, node: Node) -> frozenset[str]:
        factor = self._inherited(node)
        starts = frozenset[str]()
        if factor is None and node.phase == "forward":
            blocked = self._blocked_columns(node)
            if blocked:
                return blocked
            factor, starts = self._new_cut(node)
        if factor is None and self._mostly_free(node):
            factor = FREE
        self._record_choice(node, factor, starts)
        return frozenset()

    def _mostly_free(self, node: Node) -> bool:
        """Whether what is left to the solver is among the largest operands. The weights of experts, which scale their
        results, leave them as they are."""
        operands = [v for v in node.inputs if v not in self.flow.state]
        sized = ((self.flow.graph.meta(v).numel, self.labels.get(v) == FREE) for v in operands)
        return max(sized, default=(0, False))[1]

    def _inherited(self, node: Node) -> str | None:
        """Return the factor that most labelled operands ask for, the first among equals."""
        votes: dict[str, int] = {}
        for p, value in enumerate(node.inputs):
            label = self.labels.get(value)
            if isinstance(label, int):
                factor = self.flow.factor(node, p, label)
                if factor is not None and factor not in self.batch.get(node.name, ()) and self._passes(node, factor):
                    votes[factor] = votes.get(factor, 0) + 1
        return max(votes, key=lambda f: votes[f]) if votes else None

    def _passes(self, node: Node, factor: str) -> bool:
        """Whether an op may be cut by ``factor``. Before the loss only products of weights sum over what is cut: the
        sums of a norm would have to be exchanged."""
        if not self.can_cut(node, factor):
            return False
        if any(self.flow.result_dim(node, i, factor) is not None for i in range(len(node.outputs))):
            return True
        return self.flow.graph.order[node.name] >= self._last_product or self._reads_weights(node)

    @cached_property
    def _last_product(self) -> int:
        """The number of the last product of weights in the forward: what follows it is the loss, and the backward."""
        nodes = [n for n in self.flow.graph.nodes if n.phase == "forward" and self._reads_weights(n)]
        return max((self.flow.graph.order[n.name] for n in nodes if self._is_product(n)), default=0)

    def _reads_weights(self, node: Node) -> bool:
        return any(v in self.flow.state for v in node.inputs)

    def _blocked_columns(self, node: Node) -> frozenset[str]:
        """Return the products from whose columns the cut operands come, if this op needs them whole."""
        cut = [v for v in node.inputs if isinstance(self.labels.get(v), int) and v not in self.flow.state]
        return frozenset(o for v in cut for o in self.origins.get(v, ()))

    def _new_cut(self, node: Node) -> tuple[str | None, frozenset[str]]:
        """Return a column cut of a product's weight, or a row cut of a lookup's table."""
        rule = self.flow.rules[node.name]
        weights = list(self.flow.weights(node))
        if rule is None or not weights or len(weights) == len(node.inputs):
            return None, frozenset()
        taken = {f for p, dims in enumerate(rule.inputs) if p not in weights for d in dims for f in d}
        kept = {f for dims in rule.outputs for d in dims or () for f in d}
        product = self._is_product(node)
        for p in weights:
            own = [d[0] for d in rule.inputs[p] if d and d[0] not in taken and self.can_cut(node, d[0])]
            rows = [f for f in own if f not in kept]
            columns = [f for f in own if f in kept]
            if len(rule.inputs[p]) > 1 and rows:
                return rows[0], frozenset()
            if product and columns and len(rule.inputs[p]) > 1:
                if node.name in self.unpaired:
                    return FREE, frozenset()
                return columns[0], frozenset((node.name,))
        return None, frozenset()

    def _record_choice(self, node: Node, factor: str | None, starts: frozenset[str]) -> None:
        """Record the choice, and what it means for results and weights."""
        self._record(self.factors, node.name, factor)
        weights = list(self.flow.weights(node))
        before = frozenset(o for v in node.inputs for o in self.origins.get(v, ()))
        for i, meta in enumerate(node.outputs):
            value = Value(node.name, i)
            if factor == FREE:
                self._record(self.labels, value, None if self._ends_freedom(node, weights) else FREE)
            elif factor is not None and meta is not None:
                self._record(self.labels, value, self.flow.result_dim(node, i, factor))
                if self.labels[value] is None:
                    self._scatter(node, value, weights)
                else:
                    self._record(self.origins, value, before | starts)
        for p in weights:
            self._label_state(node, p, factor)

    def _ends_freedom(self, node: Node, weights: list[int]) -> bool:
        """Whether a product of a weight and what was left to the solver ends that freedom, as a row product ends a
        column."""
        activations = [v for p, v in enumerate(node.inputs) if p not in weights]
        return bool(weights) and self._is_product(node) and any(self.labels.get(v) == FREE for v in activations)

    def _is_product(self, node: Node) -> bool:
        return flops(node, tuple(self.flow.graph.meta(v) for v in node.inputs)) > 0

    def _label_state(self, node: Node, position: int, factor: str | None) -> None:
        rule = self.flow.rules[node.name]
        if rule is None or factor is None:
            return
        value = node.inputs[position]
        if factor == FREE:
            self._assign(value, FREE)
            return
        dim = next((d for d, f in enumerate(rule.inputs[position]) if f[:1] == (factor,)), None)
        if dim is not None:
            self._assign(value, dim)

    def _assign(self, value: Value, label: Label) -> None:
        """Follow a weight back to its parameter; the first to come decides."""
        if value in self.labels:
            return
        self._record(self.labels, value, label)
        node = self.flow.graph.by_name[value.node]
        if node.op == "placeholder":
            self._record(self.parameters, node.name, label)
            return
        rule = self.flow.rules[node.name]
        dims = rule.outputs[value.index] if rule else None
        named = dims[label] if isinstance(label, int) and dims else ()
        factor = named[0] if named else FREE
        if node.name not in self.factors:
            self._record(self.factors, node.name, factor)
        for p in range(len(node.inputs)):
            self._label_state(node, p, factor)

    def _scatter(self, node: Node, value: Value, weights: list[int]) -> None:
        """Record the dim along which a row product's sum may be scattered: the first that is neither batch nor
        weight."""
        rule = self.flow.rules[node.name]
        if node.phase != "forward" or rule is None or not weights:
            return
        others = {f for p, dims in enumerate(rule.inputs) if p not in weights for d in dims for f in d}
        for dim, factors in enumerate(rule.outputs[value.index] or ()):
            if factors and factors[0] in others - self.batch.get(node.name, frozenset()):
                self._record(self.scattered, value, dim)
                return
