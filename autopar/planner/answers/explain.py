"""Why a tensor has its spec: what every alternative would cost, and what it would force elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import ConstraintError, InfeasibleError, SpecError
from autopar.ir import Graph, Input, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.answers.nearby import replan_nearby
from autopar.planner.options import Options
from autopar.planner.problem.constraints import Forced, exchanged, module_outputs, resolve, without_constraint
from autopar.planner.problem.specs import stored_specs
from autopar.planner.problem.variables import is_handed_out
from autopar.planner.search.search import Planned, plan_graph
from autopar.program import Program
from autopar.sharding import ShardingSpec

MAX_SHOWN = 3
"""The number of changed tensors that are named."""


@dataclass(frozen=True)
class Question:
    """A plan, and the problem that it answers."""

    planned: Planned
    graph: Graph
    mesh: Mesh
    cluster: Cluster
    options: Options

    def solve_with(self, constraints: Mapping[str, str], limit_s: float) -> Planned:
        """Solve the same problem under other constraints, without baselines.

        Raises:
            InfeasibleError: nothing was found that fits.
            ConstraintError: the constraints contradict each other.
        """
        options = replace(self.options, constraints=dict(constraints), time_limit_s=limit_s)
        asked = self.graph, self.mesh, self.cluster, options
        nearby = replan_nearby(self.planned, *asked, limit_s) if self.planned.decisions.recomputes else None
        try:
            anew = plan_graph(*asked, compare=False)
        except InfeasibleError:
            if nearby is None:
                raise
            return nearby
        return anew if nearby is None or anew.solution.objective <= nearby.solution.objective else nearby


def explain(planned: Planned, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options, name: str) -> str:
    """Say what each spec of ``name`` would cost, and what each constraint costs; only the latter if ``name`` is empty.

    Every line is the best plan with that one spec forced, so its cost includes what it forces elsewhere.

    Raises:
        ConstraintError: the name is not in the model; the hint shows the nearest.
    """
    question = Question(planned, graph, mesh, cluster, options)
    lines = _alternatives(question, options.aliases.get(name, name)) if name else []
    costs = _constraints(question)
    return "\n".join([*lines, *([""] if lines and costs else []), *costs]) or "The plan has no constraints."


def _alternatives(q: Question, name: str) -> list[str]:
    shape, now = _shape_and_spec(q, name)
    specs = dict.fromkeys((*([now] if now else []), *stored_specs(shape, q.mesh)))
    limit_s = max(q.options.time_limit_s / max(len(specs), 1), 1.0)
    rows = [_row(q, name, spec, limit_s) for spec in specs if spec != now]
    rows += [(q.planned.solution.objective, str(now), _summary(q, q.planned, name))] if now else []
    lines = [f"{name}: each spec it could have, with the rest of the plan made best for it", _heading()]
    best = q.planned.solution.objective
    for cost, spec, text in sorted(rows, key=lambda r: (r[0], r[1])):
        lines.append(f"{'*' if spec == str(now) else ' '} {spec:<12} {_cost(cost, best)}  {text}")
    return [*lines, "* as planned"]


def _heading() -> str:
    return f"  {'spec':<12} {'cost':>13}  {'ratio':>8}  {'step':>12}  what changes elsewhere"


def _cost(cost: float, best: float) -> str:
    if not math.isfinite(cost):
        return f"{'impossible':>13}  {'':>8}"
    return f"{cost * 1e3:10.3f} ms  {cost / best if best else 1.0:6.2f} x"


def _row(q: Question, name: str, spec: ShardingSpec, limit_s: float) -> tuple[float, str, str]:
    kept = without_constraint(q.graph, q.mesh, q.options.constraints, q.options.aliases, name)
    try:
        other = q.solve_with({**kept, name: str(spec)}, limit_s)
    except (InfeasibleError, ConstraintError) as error:
        return math.inf, str(spec), f"{'':>12}  {error.what}"
    return other.solution.objective, str(spec), _summary(q, other, name)


def _summary(q: Question, other: Planned, name: str) -> str:
    step = f"{other.timeline.seconds * 1e3:9.3f} ms"
    return f"{step:>12}  {_difference(q, other, name)}"


def _difference(q: Question, other: Planned, name: str) -> str:
    """Name the tensors whose spec changes, and give the number of collectives if it changes."""
    before, after = named_specs(q.planned, q.graph), named_specs(other, q.graph)
    changed = [f"{n} {before[n]} -> {s}" for n, s in after.items() if n != name and n in before and s != before[n]]
    more = f", and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
    text = "; ".join(changed[:MAX_SHOWN]) + more if changed else "nothing"
    had, has = len(q.planned.program.collectives), len(other.program.collectives)
    return text if had == has else f"{text} ({had} -> {has} collectives)"


def _constraints(q: Question) -> list[str]:
    """Say what the constraints cost together, and what leaving out each one alone would save."""
    constraints = q.options.constraints
    if not constraints:
        return []
    limit_s = max(q.options.time_limit_s / (len(constraints) + 1), 1.0)
    best = q.planned.solution.objective
    free = _objective(q, {}, limit_s)
    lines = [f"constraints: {best * 1e3:.3f} ms with them, {free * 1e3:.3f} ms without: they cost {_share(best, free)}"]
    if len(constraints) > 1:
        for name, spec in constraints.items():
            rest = _objective(q, {k: v for k, v in constraints.items() if k != name}, limit_s)
            lines.append(f"  without {name} = {spec}: {rest * 1e3:.3f} ms, so it costs {_share(best, rest)}")
    return lines


def _objective(q: Question, constraints: Mapping[str, str], limit_s: float) -> float:
    return q.solve_with(constraints, limit_s).solution.objective


def _share(cost: float, without_constraint: float) -> str:
    more = max(cost - without_constraint, 0.0)
    return f"{more * 1e3:.3f} ms ({more / without_constraint if without_constraint else 0.0:.1%})"


def named_specs(planned: Planned, graph: Graph) -> dict[str, ShardingSpec]:
    """Return the specs of parameters, inputs, outputs and modules' outputs, under the names that constraints use."""
    made = {name: t.spec for name, t in planned.program.tensors.items()}
    specs: dict[str, ShardingSpec] = {}
    for i in graph.inputs:
        if i.kind in ("parameter", "buffer", "input"):
            specs[f"input:{i.name}" if i.kind == "input" else i.name] = made[i.node]
    for module, node in module_outputs(graph).items():
        value = str(Value(node.name))
        if value in made:
            specs.setdefault(module, made[value])
    for output, name in planned.program.results:
        if output.kind == "output":
            specs[f"output:{output.name}"] = made[name]
    return specs | exchanged_specs(planned.program, graph)


def exchanged_specs(program: Program, graph: Graph) -> dict[str, ShardingSpec]:
    """Return the specs in which a pipeline stage exchanges values with its neighbours, by the names that constraints
    use."""
    results = {(output.kind, output.name): tensor for output, tensor in program.results}
    return {
        name: program.tensors[end.node if isinstance(end, Input) else results[end.kind, end.name]].spec
        for name, end in exchanged(graph).items()
    }


def _shape_and_spec(q: Question, name: str) -> tuple[tuple[int, ...], ShardingSpec | None]:
    """Return the shape of what ``name`` means, and its spec in the plan.

    Raises:
        ConstraintError: it means nothing.
    """
    forced = _resolved(q, name)
    made = q.planned.program.tensors
    for node in forced.placeholders:
        return made[node].meta.shape, made[node].spec
    results = {o.name: tensor for o, tensor in q.planned.program.results if is_handed_out(o)}
    for output in forced.outputs:
        return made[results[output]].meta.shape, made[results[output]].spec
    for value in forced.values:
        found = made.get(str(value))
        return q.graph.meta(value).shape, found.spec if found and not found.spec.partial else None
    return (), None


def _resolved(q: Question, name: str) -> Forced:
    """Resolve a constraint on ``name`` alone, to be replicated, whatever its number of dims."""
    try:
        return resolve(q.graph, q.mesh, {name: "replicate"}, q.options.aliases)
    except SpecError as error:
        raise ConstraintError(error.what, found=error.found, hint=error.hint) from None
