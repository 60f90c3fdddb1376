"""Why a tensor has the spec that it has: what every alternative would have cost, and what it would have forced."""

from __future__ import annotations

from autopar.errors import AutoparError, ConstraintError, InfeasibleError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.constraints import resolve
from autopar.planner.options import Options
from autopar.planner.search import Planned, plan_graph
from autopar.planner.specs import stored_specs
from autopar.sharding import ShardingSpec


def explain(planned: Planned, graph: Graph, mesh: Mesh, cluster: Cluster, options: Options, name: str) -> str:
    """A table of every spec that ``name`` could have, by solving again with it forced.

    Raises:
        ConstraintError: the name is not in the model; the hint shows the nearest.
    """
    name = options.aliases.get(name, name)
    shape = _shape(graph, mesh, options, name)
    kept = {k: v for k, v in options.constraints.items() if k != name}
    rows: list[tuple[float, str, str]] = []
    for spec in stored_specs(shape, mesh):
        forced = Options(**{**options.__dict__, "constraints": {**kept, name: str(spec)}})
        try:
            other = plan_graph(graph, mesh, cluster, forced)
        except (InfeasibleError, ConstraintError) as error:
            rows.append((float("inf"), str(spec), error.what))
            continue
        changed = _changed(planned, other, graph)
        note = f"{changed} other tensors change" if changed else "nothing else changes"
        rows.append((other.solution.objective, str(spec), note))
    rows.sort()
    best = planned.solution.objective
    lines = [f"{name}: each spec it could have, with the rest of the plan made best for it"]
    for cost, text, note in rows:
        ratio = f"{cost * 1e3:10.3f} ms  {cost / best:6.2f} x" if cost < float("inf") else "  impossible        "
        lines.append(f"  {text:<12} {ratio}  {note}")
    return "\n".join(lines)


def _shape(graph: Graph, mesh: Mesh, options: Options, name: str) -> tuple[int, ...]:
    for ndim in range(8):
        try:
            forced = resolve(graph, mesh, {name: str(ShardingSpec.replicated(ndim))}, options.aliases)
        except ConstraintError:
            raise
        except AutoparError:
            continue
        for node in forced.placeholders:
            meta = graph.by_name[node].outputs[0]
            return meta.shape if meta else ()
        for output in graph.outputs:
            if output.name in forced.outputs:
                return graph.meta(output.value).shape
        for value in forced.values:
            return graph.meta(value).shape
    return ()


def _changed(a: Planned, b: Planned, graph: Graph) -> int:
    specs = {n: t.spec for n, t in b.program.tensors.items()}
    return sum(1 for n, t in a.program.tensors.items() if n in specs and "|" not in n and specs[n] != t.spec) - 1
