"""The known ways to train in parallel, as constraints on the planner's own problem.

Each mesh axis has a role. A *data* axis cuts the batch through every op, and stores parameters whole (DDP) or cut,
gathered once and kept for the backward (ZeRO-1 and 2) or gathered where used (ZeRO-3, FSDP). A *tensor* axis cuts
weights by Megatron's pairs, with sequence parallel also what lies between them. What a role leaves open the solver
completes, so that a baseline is the best plan of its kind, priced and simulated as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from autopar.errors import AutoparError
from autopar.ir import Node, Value
from autopar.mesh import Mesh
from autopar.planner.dataflow import Dataflow
from autopar.planner.decisions import Decisions, Variable
from autopar.planner.tensor_parallel import FREE, TensorParallel, find_tensor_parallel
from autopar.sharding import ShardingSpec, Strategy
from autopar.solver import Edge, Problem, Usage, solve

Mask = npt.NDArray[np.bool_]
Store = Literal["whole", "cut"]


@dataclass(frozen=True)
class Baseline:
    """Roles of the mesh axes.

    Args:
        name: as people call it.
        data: axes that cut the batch.
        stored: those of them that cut stored parameters.
        keep: what is gathered in the forward is kept for the backward.
        tensor: axes that cut weights by columns and rows.
        sequence: tensor axes also cut the sequence between a row and the next column.
    """

    name: str
    data: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    keep: bool = False
    tensor: tuple[int, ...] = ()
    sequence: bool = False


def baselines(mesh: Mesh) -> tuple[Baseline, ...]:
    """Every baseline that ``mesh`` has axes for. On several axes the last one is the innermost."""
    axes = tuple(a for a in range(mesh.ndim) if mesh.shape[a] > 1)
    if not axes:
        return ()
    outer, inner = axes[:-1], axes[-1:]
    found = [
        Baseline("DDP", data=axes),
        Baseline("ZeRO-1/2", data=axes, stored=axes, keep=True),
        Baseline("ZeRO-3", data=axes, stored=axes),
        Baseline("TP", tensor=axes),
        Baseline("TP+SP", tensor=axes, sequence=True),
    ]
    if outer:
        found += [
            Baseline("HSDP", data=axes, stored=inner),
            Baseline("DDP x TP", data=outer, tensor=inner),
            Baseline("FSDP x TP", data=outer, stored=outer, tensor=inner),
            Baseline("FSDP x TP+SP", data=outer, stored=outer, tensor=inner, sequence=True),
        ]
    return tuple(found)


@dataclass
class Restrictions:
    """Turns baselines into what each variable of ``decisions`` may choose."""

    decisions: Decisions
    _tensor: dict[tuple[int, ...], TensorParallel] = field(default_factory=dict)

    @cached_property
    def flow(self) -> Dataflow:
        return Dataflow(self.decisions.graph)

    @cached_property
    def batch(self) -> Mapping[str, frozenset[str]]:
        """The factors of each op that stand for the batch."""
        return self.flow.trace(self.flow.batch())

    def masks(self, baseline: Baseline) -> list[Mask] | None:
        """The options that each variable may choose; None where the baseline does not apply to this model and mesh."""
        tensor = self._tensor_parallel(baseline.tensor)
        if baseline.tensor and (tensor is None or not tensor.pairs):
            return None
        if baseline.sequence and not (tensor and any(tensor.sequence.values())):
            return None
        if baseline.data and not self._has_batch(baseline.data):
            return None
        return [self._mask(v, baseline, tensor) for v in self.decisions.variables]

    def _has_batch(self, axes: tuple[int, ...]) -> bool:
        """Whether some input's batch can be cut over ``axes``."""
        variables = (self.decisions.variables[self.decisions.index[v.node]] for v in self.flow.batch())
        return any(o.outputs[0] is not None and o.outputs[0].dims[:1] == (axes,) for v in variables for o in v.options)

    def _tensor_parallel(self, axes: tuple[int, ...]) -> TensorParallel | None:
        if not axes:
            return None
        if axes not in self._tensor:
            self._tensor[axes] = find_tensor_parallel(self.flow, self.batch, lambda n, f: self._can_cut(n, f, axes))
        return self._tensor[axes]

    def _can_cut(self, node: Node, factor: str, axes: tuple[int, ...]) -> bool:
        variable = self.decisions.variables[self.decisions.index[node.name]]
        return any(all(o.axes[a] == factor for a in axes) for o in variable.options)

    def _mask(self, v: Variable, baseline: Baseline, tensor: TensorParallel | None) -> Mask:
        if v.kind == "op" and v.node is not None:
            return self._op(v, v.node, baseline, tensor)
        if v.kind == "parameter" and v.node is not None:
            return self._parameter(v, v.node, baseline, tensor)
        if v.kind == "input" and v.node is not None:
            return _some([_cuts_batch(o, Value(v.node.name) in self.flow.batch(), baseline.data) for o in v.options])
        if v.kept and any(v.kept):
            return _some([k == baseline.keep for k in v.kept])
        if v.actions:
            return _some([a in ("keep", "absent", "none") for a in v.actions])
        return np.ones(len(v.options), dtype=bool)

    # -- ops -------------------------------------------------------------------------------------------------------

    def _op(self, v: Variable, node: Node, baseline: Baseline, tensor: TensorParallel | None) -> Mask:
        mask = np.ones(len(v.options), dtype=bool)
        for axes, allows in (
            (baseline.data, self._data_role(node)),
            (baseline.tensor, self._tensor_role(node, baseline, tensor)),
        ):
            each = [np.array([allows(o.axes[a]) for o in v.options]) for a in axes]
            both = np.logical_and.reduce([mask, *each])
            whole = np.logical_and.reduce([mask, *(np.array([not o.axes[a] for o in v.options]) for a in axes)])
            mask = both if both.any() else whole if whole.any() else mask
        return mask

    def _data_role(self, node: Node) -> Callable[[str], bool]:
        factors = self.batch.get(node.name, frozenset())
        return lambda axis: axis in factors if factors else _is_whole(axis)

    def _tensor_role(self, node: Node, baseline: Baseline, tensor: TensorParallel | None) -> Callable[[str], bool]:
        if tensor is None:
            return lambda axis: True
        factor = tensor.factors.get(node.name)
        batch = self.batch.get(node.name, frozenset())
        if factor == FREE:
            return lambda axis: axis not in batch
        if factor is not None:
            return lambda axis: axis == factor
        between = tensor.sequence.get(node.name, frozenset()) if baseline.sequence else frozenset()
        return lambda axis: axis in between if between else _is_whole(axis)

    # -- parameters ------------------------------------------------------------------------------------------------

    def _parameter(self, v: Variable, node: Node, baseline: Baseline, tensor: TensorParallel | None) -> Mask:
        specs = [o.outputs[0] for o in v.options if o.outputs[0] is not None]
        label = tensor.parameters.get(node.name) if tensor else None
        at = [label == FREE or all(_where(s, a) == label for a in baseline.tensor) for s in specs]
        allowed = [s for s, ok in zip(specs, at, strict=True) if ok] or specs
        whole = [s for s in allowed if all(_where(s, a) is None for a in baseline.data)] or allowed
        if not baseline.stored:
            return np.array([s in whole for s in specs])
        meta = node.outputs[0]
        assert meta is not None
        replicated = [a for a in baseline.data if a not in baseline.stored]
        cut = [s for s in allowed if all(_where(s, a) is None for a in replicated) and _on_one_dim(s, baseline.stored)]
        best = min((_evenness(s, meta.shape, baseline.stored, self.decisions.mesh) for s in cut), default=None)
        chosen = [s for s in cut if _evenness(s, meta.shape, baseline.stored, self.decisions.mesh) == best] or whole
        return np.array([s in chosen for s in specs])


def _is_whole(axis: str) -> bool:
    """Whether a mesh axis replicates an op, or passes partial sums through it."""
    return not axis or (axis[0] == "P" and axis[1:].isdigit())


def _some(allowed: Sequence[bool]) -> Mask:
    """The options allowed; all of them where none is."""
    return np.array(allowed if any(allowed) else [True] * len(allowed), dtype=bool)


def _cuts_batch(option: Strategy, has_batch: bool, data: tuple[int, ...]) -> bool:
    spec = option.outputs[0]
    if spec is None or not has_batch:
        return spec is None or spec.is_replicated
    return spec.dims[0] == data and not any(spec.dims[1:])


def _where(spec: ShardingSpec, axis: int) -> int | None:
    """The dim that ``axis`` cuts."""
    return next((d for d, axes in enumerate(spec.dims) if axis in axes), None)


def _on_one_dim(spec: ShardingSpec, axes: tuple[int, ...]) -> bool:
    dims = {_where(spec, a) for a in axes}
    return len(dims) == 1 and None not in dims


def _evenness(
    spec: ShardingSpec, shape: tuple[int, ...], axes: tuple[int, ...], mesh: Mesh
) -> tuple[bool, bool, int, int]:
    """Smallest where the axes cut evenly the largest dim, if it can be one that no other axis cuts; else dim 0."""
    dim = _where(spec, axes[0])
    assert dim is not None
    even = shape[dim] % math.prod(mesh.shape[a] for a in spec.dims[dim]) == 0
    return not even, spec.dims[dim] != axes, -shape[dim] if even else 0, dim


def solve_restricted(
    problem: Problem, masks: Sequence[Mask], *, time_limit: float, backend: str, gap: float
) -> tuple[int, ...] | None:
    """The best choice within ``masks``, in the options of ``problem``; None where there is none or time is out."""
    kept = [np.flatnonzero(m) for m in masks]
    try:
        solution = solve(_sliced(problem, kept), time_limit=time_limit, backend=backend, gap=gap)
    except AutoparError:
        return None
    return tuple(int(k[o]) for k, o in zip(kept, solution.choice, strict=True))


def _sliced(problem: Problem, kept: Sequence[npt.NDArray[np.int64]]) -> Problem:
    names = [k.tobytes() for k in kept]
    made: dict[tuple[object, ...], npt.NDArray[np.float64]] = {}

    def cut(edge: Edge) -> npt.NDArray[np.float64]:
        key = (id(edge.cost), names[edge.u], names[edge.v])
        if key not in made:
            made[key] = np.ascontiguousarray(edge.cost[np.ix_(kept[edge.u], kept[edge.v])])
        return made[key]

    return Problem(
        tuple(c[k] for c, k in zip(problem.costs, kept, strict=True)),
        tuple(Edge(e.u, e.v, cut(e)) for e in problem.edges),
        tuple(Usage(u.node, u.option[kept[u.node]], u.start, u.end) for u in problem.usages),
        problem.limit,
    )


def restricted_choices(
    decisions: Decisions, problem: Problem, *, time_limit: float, backend: str, gap: float, only: str | None = None
) -> Iterator[tuple[Baseline, tuple[int, ...]]]:
    """Each baseline that applies with its best choice in ``problem``. ``time_limit``: seconds for one."""
    restrictions = Restrictions(decisions)
    for baseline in baselines(decisions.mesh):
        if only is not None and baseline.name != only:
            continue
        masks = restrictions.masks(baseline)
        if masks is None:
            continue
        choice = solve_restricted(problem, masks, time_limit=time_limit, backend=backend, gap=gap)
        if choice is not None:
            yield baseline, choice
