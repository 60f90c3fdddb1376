"""The known ways to train in parallel, as constraints on the planner's own problem.

Each mesh axis has a role. A *data* axis cuts the batch through every op, and stores parameters whole (DDP) or cut; cut
parameters are gathered once and kept for the backward (ZeRO-1 and 2) or gathered where they are used (ZeRO-3, FSDP). A
*context* axis does the same with the sequence; in attention it cuts the queries' sequence or the heads. Data axes may
be *expert* axes too: each rank keeps some of the experts, and tokens go there. A *tensor* axis cuts weights by
Megatron's pairs, with sequence parallel also what lies between them. The solver completes what a role leaves open, so
that a baseline is the best plan of its kind, priced and simulated like any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.holding import ABSENT, KEEP
from autopar.ir import Node, Value
from autopar.mesh import Mesh
from autopar.planner.baselines.tensor_parallel import FREE, Label, TensorParallel, find_tensor_parallel
from autopar.planner.graphs.dataflow import Dataflow
from autopar.planner.pricing.objective import Objective
from autopar.planner.problem.decide import Decisions, Variable
from autopar.planner.problem.restricted import solve_alike
from autopar.sharding import ShardingSpec, Strategy
from autopar.sharding.strategy import MOVED, RING, moved_axes
from autopar.solver import Gap
from autopar.strategies.registry import find_lending

Mask = npt.NDArray[np.bool_]
Role: TypeAlias = tuple[Literal["among", "but", "whole"], frozenset[str]]
"""What a mesh axis may do with an op: take one of these factors, anything but these, or leave it whole."""

KEPT_LAYERS = 4
"""The number of equal layers from which the others' restrictions are read off."""

UNCUT: Role = ("whole", frozenset())


@dataclass(frozen=True)
class Baseline:
    """A known way to train, as roles of the mesh axes.

    Args:
        name: its usual name.
        data: axes that cut the batch.
        stored: data and context axes that cut stored parameters.
        keep: whether what is gathered in the forward is kept for the backward.
        tensor: axes that cut weights by columns and rows.
        sequence: whether tensor axes also cut the sequence between a row and the next column.
        context: axes that cut the sequence.
        experts: data axes over which tokens go to the ranks of their experts.
    """

    name: str
    data: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    keep: bool = False
    tensor: tuple[int, ...] = ()
    sequence: bool = False
    context: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()

    @property
    def of_inputs(self) -> tuple[int, ...]:
        """Axes that cut the inputs, and with them every activation."""
        return self.data + self.context


def baselines(mesh: Mesh) -> tuple[Baseline, ...]:
    """Return every baseline that ``mesh`` has axes for. On several axes the last one is the innermost.

    Weights cut over all axes come last. Where time is short and the batch cannot be cut over all ranks, a plan is
    compared only with the first baseline that applies, and on many ranks none is slower than these.
    """
    axes = tuple(a for a in range(mesh.ndim) if mesh.shape[a] > 1)
    if not axes:
        return ()
    outer, inner = axes[:-1], axes[-1:]
    found = [
        Baseline("DDP", data=axes),
        Baseline("ZeRO-1/2", data=axes, stored=axes, keep=True),
        Baseline("ZeRO-3", data=axes, stored=axes),
    ]
    if outer:
        found += [
            Baseline("HSDP", data=axes, stored=inner),
            Baseline("DDP x TP", data=outer, tensor=inner),
            Baseline("FSDP x TP", data=outer, stored=outer, tensor=inner),
            Baseline("FSDP x TP+SP", data=outer, stored=outer, tensor=inner, sequence=True),
            Baseline("FSDP x CP", data=outer, stored=axes, context=inner),
        ]
    if len(axes) > 2:
        data, context = outer[:-1], outer[-1:]
        found.append(
            Baseline("FSDP x CP x TP+SP", data=data, stored=outer, tensor=inner, sequence=True, context=context)
        )
    found.append(Baseline("CP", stored=axes, context=axes))
    for name, experts in (("EP x FSDP", axes), *((f"EP over axis {a} x FSDP", (a,)) for a in axes if outer)):
        found.append(Baseline(name, data=axes, stored=axes, experts=experts))
    return *found, Baseline("TP", tensor=axes), Baseline("TP+SP", tensor=axes, sequence=True)


@dataclass(frozen=True)
class Masks:
    """The options that each variable may choose: variable ``i`` those of ``distinct[of[i]]``."""

    of: npt.NDArray[np.int64]
    distinct: Sequence[Mask]

    def kept(self) -> list[npt.NDArray[np.int64]]:
        """The indices of each variable's options."""
        distinct = [np.flatnonzero(mask) for mask in self.distinct]
        return [distinct[i] for i in self.of.tolist()]


@dataclass
class Restrictions:
    """Turns baselines into the options that each variable of ``decisions`` may choose.

    Most variables are alike. What decides a mask is numbered once for all baselines, and each number is looked at once.
    """

    decisions: Decisions
    _tensor: dict[tuple[int, ...], TensorParallel] = field(default_factory=dict)
    _cut: dict[tuple[int, tuple[int, ...]], frozenset[str]] = field(default_factory=dict)

    @cached_property
    def flow(self) -> Dataflow:
        return Dataflow(self.decisions.graph)

    @cached_property
    def batch(self) -> Mapping[str, frozenset[str]]:
        """The factors of each op that stand for the batch."""
        return self.flow.trace(self._batch_inputs)

    @cached_property
    def _batch_inputs(self) -> Mapping[Value, frozenset[int]]:
        return self.flow.batch()

    @cached_property
    def sequence(self) -> Mapping[str, frozenset[str]]:
        """The factors of each op that stand for the sequence."""
        return self.flow.trace(self._sequence_inputs)

    @cached_property
    def _sequence_inputs(self) -> Mapping[Value, frozenset[int]]:
        return self.flow.sequence()

    @cached_property
    def _attention(self) -> frozenset[str]:
        """The attentions that the sequence reaches, of which it can be cut."""
        rules = ((node, self.flow.rules[node.name]) for node in self.decisions.graph.nodes if find_lending(node))
        return frozenset(n.name for n, rule in rules if rule and self.sequence[n.name].intersection(rule.cuttable))

    @cached_property
    def _mask_keys(self) -> npt.NDArray[np.int64]:
        """Numbers for all that matters to each variable's mask except what the tensor axes do."""
        return _numbered(map(self._mask_key, self.decisions.variables))

    def _mask_key(self, v: Variable) -> object:
        if v.node is None or v.actions:
            return id(v.options), v.kept, id(v.actions)
        if v.kind == "op":
            name = v.node.name
            return id(v.options), self.batch[name], self.sequence[name], name in self._attention, self.experts.get(name)
        value = Value(v.node.name)
        has_sequence = value in self._sequence_inputs
        cut = value in self._batch_inputs, has_sequence, v.node.name in self.of_experts
        return id(v.options), v.kind, v.node.outputs, *cut

    @cached_property
    def experts(self) -> Mapping[str, frozenset[str]]:
        """What an axis may do with each op on routed rows to cut their experts, or to send rows there."""
        graph, found = self.decisions.graph, {}
        for node in graph.nodes:
            routed = (m.routed for m in (*map(graph.meta, node.inputs), *node.outputs) if m is not None)
            if node.op != "placeholder" and any(routed):
                found[node.name] = self._experts_of(node)
        return found

    def _experts_of(self, node: Node) -> frozenset[str]:
        graph, rule = self.decisions.graph, self.flow.rules[node.name]
        options = self.decisions.variables[self.decisions.index[node.name]].options
        moving = {c for o in options for c in o.axes if MOVED in c and c.split(MOVED)[0] in self.batch[node.name]}
        if moving or rule is None:
            return frozenset(moving)
        ends = [
            *zip(map(graph.meta, node.inputs), rule.inputs, strict=True),
            *zip(node.outputs, rule.outputs, strict=True),
        ]
        return frozenset(f for m, dims in ends if m is not None and m.routed and dims for f in dims[m.routed - 1][:1])

    @cached_property
    def of_experts(self) -> frozenset[str]:
        """The parameters that have a part for each expert, along dim 0."""
        parameters = (i.node for i in self.decisions.graph.inputs if i.kind == "parameter")
        return frozenset(name for name in parameters if self.experts and self._is_of_experts(Value(name)))

    def _is_of_experts(self, value: Value) -> bool:
        if not self.decisions.graph.meta(value).shape:
            return False
        for node, at in self.decisions.graph.consumers.get(value, ()):
            if node.name in self.experts:
                return self.flow.factor(node, at, 0) in self.experts[node.name]
            if len(node.inputs) == len(node.outputs) == 1 and self._is_of_experts(Value(node.name)):
                return True
        return False

    def masks(self, baseline: Baseline) -> Masks | None:
        """Return the options that each variable may choose; None if the baseline does not apply to this model and
        mesh."""
        tensor = self._tensor_parallel(baseline.tensor)
        if baseline.tensor and (tensor is None or not tensor.pairs):
            return None
        if baseline.sequence and not (tensor and any(tensor.sequence.values())):
            return None
        if baseline.data and not self._has_batch(baseline.data):
            return None
        if baseline.context and not (self._attention and self._has_sequence(baseline.context)):
            return None
        if baseline.experts and not self._can_move(baseline.experts):
            return None
        keys = self._mask_keys
        if tensor is not None:
            cuts = _numbered(_cut(v, tensor, sequence=baseline.sequence) for v in self.decisions.variables)
            keys = keys * (cuts.max() + 1) + cuts
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
        made = [self._mask(self.decisions.variables[i], baseline, tensor) for i in first]
        names: dict[bytes, int] = {}
        same = np.array([names.setdefault(m.tobytes(), matches) for matches, m in enumerate(made)])
        return Masks(same[of], made)

    def _has_batch(self, axes: tuple[int, ...]) -> bool:
        """Whether some input's batch can be cut over ``axes``."""
        variables = (self.decisions.variables[self.decisions.index[v.node]] for v in self._batch_inputs)
        return any(o.outputs[0] is not None and o.outputs[0].dims[:1] == (axes,) for v in variables for o in v.options)

    def _has_sequence(self, axes: tuple[int, ...]) -> bool:
        """Whether some input's sequence can be cut over ``axes``."""
        variables = (self.decisions.variables[self.decisions.index[v.node]] for v in self._sequence_inputs)
        return any(o.outputs[0] is not None and o.outputs[0].dims[1:2] == (axes,) for v in variables for o in v.options)

    def _can_move(self, axes: tuple[int, ...]) -> bool:
        """Whether tokens can go to the ranks of their experts over ``axes``."""
        routers = [
            v for v in self.decisions.variables if v.kind == "op" and v.node and v.node.packet == "autopar.route"
        ]
        return bool(routers) and all(any(moved_axes(o) == axes for o in v.options) for v in routers)

    def _tensor_parallel(self, axes: tuple[int, ...]) -> TensorParallel | None:
        if not axes:
            return None
        if axes not in self._tensor:
            self._tensor[axes] = find_tensor_parallel(self.flow, self.batch, lambda n, f: self._can_cut(n, f, axes))
        return self._tensor[axes]

    def _can_cut(self, node: Node, factor: str, axes: tuple[int, ...]) -> bool:
        """Whether ranks can each take a part of ``factor`` without exchanging anything."""
        rule = self.flow.rules[node.name]
        if rule is not None and factor in rule.combined:
            return False
        variable = self.decisions.variables[self.decisions.index[node.name]]
        key = id(variable.options), axes
        if key not in self._cut:
            taken = {tuple({o.axes[a] for a in axes}) for o in variable.options}
            self._cut[key] = frozenset(together[0] for together in taken if len(together) == 1)
        return factor in self._cut[key]

    def _mask(self, v: Variable, baseline: Baseline, tensor: TensorParallel | None) -> Mask:
        if v.kind == "op" and v.node is not None:
            data, cut = self._data_role(v.node), self._tensor_role(v.node, baseline, tensor)
            experts: Role = ("among", self.experts.get(v.node.name, frozenset()))
            moving = baseline.experts if experts[1] else ()
            apart = tuple(a for a in baseline.data if a not in moving)
            sequence = self._context_role(v.node)
            roles = (apart, data), (moving, experts), (baseline.tensor, cut), (baseline.context, sequence)
            return _op_mask(v.options, roles, self.decisions.mesh)
        if v.kind == "parameter" and v.node is not None:
            label = tensor.parameters.get(v.node.name) if tensor else None
            if baseline.experts and v.node.name in self.of_experts:
                return self._expert_parameter(v, v.node, baseline)
            return self._parameter(v, v.node, baseline, label)
        if v.kind in ("input", "received") and v.node is not None:
            value = Value(v.node.name)
            cuts = [baseline.data] if value in self._batch_inputs else []
            cuts += [baseline.context] if value in self._sequence_inputs else []
            return _or_all([_cuts_input(o, cuts) for o in v.options])
        if any(v.kept):
            return _or_all([k == baseline.keep for k in v.kept])
        if v.actions:
            return _or_all([a in (KEEP, ABSENT) for a in v.actions])
        return np.ones(len(v.options), dtype=bool)

    # -- ops -------------------------------------------------------------------------------------------------------

    def _data_role(self, node: Node) -> Role:
        factors = self.batch.get(node.name, frozenset())
        return ("among", factors) if factors else UNCUT

    def _context_role(self, node: Node) -> Role:
        factors, rule = self.sequence.get(node.name, frozenset()), self.flow.rules[node.name]
        if node.name in self._attention and rule is not None:
            options = self.decisions.variables[self.decisions.index[node.name]].options
            rings = {c for o in options for c in o.axes if RING in c}
            return "among", frozenset(rule.cuttable) - self.batch[node.name] | rings
        return ("among", factors) if factors else UNCUT

    def _tensor_role(self, node: Node, baseline: Baseline, tensor: TensorParallel | None) -> Role:
        if tensor is None:
            return "but", frozenset()
        factor = tensor.factors.get(node.name)
        if factor == FREE:
            return "but", self.batch.get(node.name, frozenset())
        if factor is not None:
            return "among", frozenset((factor,))
        between = tensor.sequence.get(node.name, frozenset()) if baseline.sequence else frozenset()
        return ("among", between) if between else UNCUT

    # -- parameters ------------------------------------------------------------------------------------------------

    def _parameter(self, v: Variable, node: Node, baseline: Baseline, label: Label) -> Mask:
        specs = [o.outputs[0] for o in v.options if o.outputs[0] is not None]
        matches = [label == FREE or all(_cut_dim(s, a) == label for a in baseline.tensor) for s in specs]
        allowed = [s for s, ok in zip(specs, matches, strict=True) if ok] or specs
        whole = [s for s in allowed if all(_cut_dim(s, a) is None for a in baseline.of_inputs)] or allowed
        if not baseline.stored:
            return np.array([s in whole for s in specs])
        meta = node.outputs[0]
        assert meta is not None
        replicated = [a for a in baseline.of_inputs if a not in baseline.stored]
        cut = [
            s for s in allowed if all(_cut_dim(s, a) is None for a in replicated) and _on_one_dim(s, baseline.stored)
        ]
        best = min((_evenness(s, meta.shape, baseline.stored, self.decisions.mesh) for s in cut), default=None)
        chosen = [s for s in cut if _evenness(s, meta.shape, baseline.stored, self.decisions.mesh) == best] or whole
        return np.array([s in chosen for s in specs])

    def _expert_parameter(self, v: Variable, node: Node, baseline: Baseline) -> Mask:
        """Experts stay cut over the axes on which tokens move, and are stored cut further over the others."""
        meta, rest = node.outputs[0], tuple(a for a in baseline.stored if a not in baseline.experts)
        assert meta is not None
        specs = [o.outputs[0] for o in v.options if o.outputs[0] is not None]
        own = [s for s in specs if s.dims[0] == baseline.experts]
        cut = [s for s in own if rest and _on_one_dim(s, rest)]
        key = {s: _evenness(s, meta.shape, rest, self.decisions.mesh) for s in cut}
        chosen = [s for s in cut if key[s] == min(key.values())] or [s for s in own if not any(s.dims[1:])]
        return np.array([s in chosen for s in specs])


def _numbered(keys: Iterable[object]) -> npt.NDArray[np.int64]:
    """Number the keys such that equal ones have equal numbers."""
    names: dict[object, int] = {}
    return np.array([names.setdefault(key, len(names)) for key in keys])


def _cut(v: Variable, tensor: TensorParallel, *, sequence: bool) -> object:
    """Return what the tensor axes do with a variable's op or parameter."""
    if v.node is None:
        return None
    name = v.node.name
    between = tensor.sequence.get(name) if sequence else None
    return tensor.factors.get(name), between, tensor.parameters.get(name)


def _op_mask(options: Sequence[Strategy], roles: Sequence[tuple[tuple[int, ...], Role]], mesh: Mesh) -> Mask:
    """Return the strategies in which the axes of each role do as it says. Where they cannot all, since 12 ranks divide
    no batch of 2,048, those of the most ranks do that can, and the others replicate; if there are none, all of them."""
    mask = np.ones(len(options), dtype=bool)
    for axes, role in roles:
        does = {a: np.array([_allows(role, o.axes[a]) for o in options]) for a in axes}
        whole = {a: np.array([not o.axes[a] for o in options]) for a in axes}
        subsets = itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1))
        for some in sorted(subsets, key=lambda some: -math.prod(mesh.shape[a] for a in some)):
            found = np.logical_and.reduce([mask, *(does[a] if a in some else whole[a] for a in axes)])
            if found.any():
                mask = found
                break
    return mask


def _allows(role: Role, axis: str) -> bool:
    kind, factors = role
    if kind == "whole":
        return _is_whole(axis)
    return (axis in factors) == (kind == "among")


def _is_whole(axis: str) -> bool:
    """Whether a mesh axis replicates an op, or passes partial sums through it."""
    return not axis or (axis[0] == "P" and axis[1:].isdigit())


def _or_all(allowed: Sequence[bool]) -> Mask:
    """Return the allowed options; all of them if none is allowed."""
    return np.array(allowed if any(allowed) else [True] * len(allowed), dtype=bool)


def _cuts_input(option: Strategy, cuts: Sequence[tuple[int, ...]]) -> bool:
    """Whether an input's leading dims are cut by these axes, and no others."""
    spec = option.outputs[0]
    if spec is None or not cuts:
        return spec is None or spec.is_replicated
    return spec.dims[: len(cuts)] == tuple(cuts) and not any(spec.dims[len(cuts) :])


def _cut_dim(spec: ShardingSpec, axis: int) -> int | None:
    """Return the dim that ``axis`` cuts."""
    return next((d for d, axes in enumerate(spec.dims) if axis in axes), None)


def _on_one_dim(spec: ShardingSpec, axes: tuple[int, ...]) -> bool:
    dims = {_cut_dim(spec, a) for a in axes}
    return len(dims) == 1 and None not in dims


def _evenness(
    spec: ShardingSpec, shape: tuple[int, ...], axes: tuple[int, ...], mesh: Mesh
) -> tuple[bool, bool, int, int]:
    """Return a sorting key that is smallest where the axes cut the largest dim evenly.

    It prefers a dim that no other axis cuts; of dims that are cut unevenly, dim 0.
    """
    dim = _cut_dim(spec, axes[0])
    assert dim is not None
    even = shape[dim] % math.prod(mesh.shape[a] for a in spec.dims[dim]) == 0
    return not even, spec.dims[dim] != axes, -shape[dim] if even else 0, dim


def _masks(objective: Objective) -> Callable[[Baseline], Masks | None]:
    """Return a function from baselines to their masks. For a deep model they are read off a graph with fewer layers."""
    fewer = objective.with_fewer_layers(KEPT_LAYERS)
    if fewer is None:
        return Restrictions(objective.decisions).masks
    restrictions, place = Restrictions(fewer.decisions), fewer.position

    def masks(baseline: Baseline) -> Masks | None:
        found = restrictions.masks(baseline)
        return found and replace(found, of=found.of[place])

    return masks


def restricted_choices(
    objective: Objective, *, time_limit: float, backend: str, gap: float | Gap, only: str | None = None
) -> Iterator[tuple[Baseline, tuple[int, ...]]]:
    """Yield each baseline that applies, with its best choice.

    Args:
        time_limit: seconds for each baseline.
    """
    masks_of = _masks(objective)
    problem = objective.problem()
    folded = objective.fold(problem)
    for baseline in baselines(objective.decisions.mesh):
        if only is not None and baseline.name != only:
            continue
        masks = masks_of(baseline)
        if masks is None:
            continue
        choice = solve_alike(problem, masks.kept(), time_limit, backend, gap, folded)
        if choice is not None:
            yield baseline, choice
