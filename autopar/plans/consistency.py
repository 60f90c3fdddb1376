"""Check that the parts of a plan fit together, so that tables, reports and figures find all they look up."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.holding import ACTIONS, Stored
from autopar.plans.record import PlanRecord
from autopar.program import Op, Program
from autopar.sharding import ShardingSpec

MOST_RANKS = 1 << 24
"""Largest mesh that a plan may have."""


def check_consistent(plan: PlanRecord) -> None:
    """Check every reference from one part of the plan to another.

    Raises:
        ValueError: if something is named that does not exist.
    """
    _require(plan.mesh.size <= MOST_RANKS, f"a mesh of {plan.mesh.size} ranks")
    _check_program(plan.program, plan.mesh.ndim)
    for name, spec in (*plan.specs.items(), *((n, a.spec) for n, a in plan.activations.items())):
        _require(max(spec.axes, default=0) < plan.mesh.ndim, f"spec {spec} of {name} on mesh {plan.mesh}")
    for name, activation in plan.activations.items():
        _require(activation.action in ACTIONS, f"{name} is held by {activation.action!r:.40}, which is not known")
    for name in plan.parameters:
        _require(name in plan.specs, f"parameter {name} without a spec")
    if plan.facts is not None:
        ends = len(plan.program.ops)
        placed = all(-1 <= at < ends for at, *_ in plan.facts.intervals)
        held = all(-1 <= at <= ends for points in plan.facts.history.values() for at, _ in points)
        _require(placed and held, "facts about an op that does not exist")
        _require(len(plan.facts.axes) == plan.mesh.ndim, f"facts of {len(plan.facts.axes)} axes")


def _check_program(program: Program, axes: int) -> None:
    made: set[str] = set()
    names: set[str] = set()
    for op in program.ops:
        _require(op.name not in names, f"two ops {op.name}")
        _require(made.issuperset(op.reads), f"op {op.name} reads {op.reads} before all of it exists")
        _require(_has_parts(op), f"op {op.name} lacks what a {op.kind} needs")
        known = isinstance(ACTIONS.get(op.form), Stored) or not (op.stores or op.restores)
        _require(known, f"op {op.name} stores a value by {op.form!r:.40}, which is not known")
        _require(all(-1 <= a < axes for a in _axes(op)), f"op {op.name} names an axis that the mesh does not have")
        for tensor in op.writes:
            _require(tensor.name not in made, f"two tensors {tensor.name}")
            _require(tensor.spec.ndim == len(tensor.meta.shape), f"spec {tensor.spec} of {tensor.meta}")
            made.add(tensor.name)
        names.add(op.name)
    for _, name in program.results:
        _require(name in made, f"the result {name} does not exist")


def _has_parts(op: Op) -> bool:
    """Whether the op has the operands, results and step that its kind needs."""
    if op.kind == "wait":
        return bool(op.reads)
    if op.kind == "redistribute":
        together = len(op.bucket) or 1
        return op.step is not None and len(op.reads) == len(op.writes) == together
    if op.stores or op.restores or op.kind == "copy":
        return len(op.reads) == len(op.writes) == 1
    if op.kind == "decomposed":
        both = op.strategy is not None and op.step is not None and len(op.writes) in (1, 2)
        return both and 0 <= op.operand < len(op.reads)
    if op.kind == "input":
        return not op.reads and len(op.writes) == 1
    within = all(0 <= at < len(op.reads) for at in (*(h.operand for h in op.halos), *(s.operand for s in op.sent)))
    return op.strategy is not None and op.step is None and op.operand < len(op.reads) and within


def _axes(op: Op) -> Iterator[int]:
    """Yield every mesh axis that the op names."""
    steps = (*((op.step,) if op.step is not None else ()), *op.bucket)
    for step in steps:
        yield from (step.axis, *step.axes)
    yield from (h.axis for h in op.halos)
    yield from (s.axis for s in op.sent)
    yield from op.loan.axes if op.loan is not None else ()
    for spec in _specs(op):
        yield from spec.axes


def _specs(op: Op) -> Iterator[ShardingSpec]:
    yield from (t.spec for t in op.writes)
    if op.strategy is not None:
        yield from op.strategy.inputs
        yield from (s for s in op.strategy.outputs if s is not None)


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise ValueError(found)
