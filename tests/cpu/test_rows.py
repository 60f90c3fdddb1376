"""What the rows of memory say of a choice, beside what its program holds, place by place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from autopar import planner
from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.copies import Copies
from autopar.planner.decisions import Decisions, spec_made
from autopar.planner.liveness import profile
from autopar.planner.pricing import Prices
from autopar.planner.rows import usages
from autopar.planner.schedule import schedule
from autopar.planner.tightening import held_at
from tests.cpu.model_checks import cluster_where_sharding_pays, subject

MESHES = ((4,), (2, 2))
CASES = [("mlp", share) for share in (0.6, 0.7, 0.85)] + [
    pytest.param(name, share, marks=pytest.mark.slow) for name in ("gpt2", "llama") for share in (0.4, 0.45)
]
"""Budgets as shares of the free plan's peak."""

NEARLY = 0.05
"""Of the peak: a copy counts until its last reader, also where all that still read it share another copy of it."""


def plainly(d: Decisions, choice: Sequence[int]) -> list[int]:
    """``choice`` without copies that are kept in the spec that is there anyway, and without what is held for nobody:
    the program is the same."""
    plain = list(choice)
    for h in d.handovers:
        target = d.variables[h.target]
        if target.kept and not h.kept and target.kept[choice[h.target]]:
            option = target.options[choice[h.target]]
            if spec_made(d.variables[h.source].options[choice[h.source]], h.out) == option.outputs[0]:
                plain[h.target] = choice[h.target] - len(target.options) // 2
    asked = {h.source for h in d.handovers if d.variables[h.target].options[choice[h.target]].inputs}
    for i, v in enumerate(d.variables):
        if v.kind == "hold" and i not in asked:
            plain[i] = v.actions.index("absent")
    return plain


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(("name", "share"), CASES)
def test_rows_are_hardly_above_what_the_program_holds(name: str, share: float, shape: tuple[int, ...]) -> None:
    """Else a bound on all plans within a budget would not be one."""
    graph, mesh = subject(name, torch.float32, 0.0).capture.graph, Mesh(shape)
    cluster = cluster_where_sharding_pays().sized(mesh.size)
    free = planner.plan_graph(graph, mesh, cluster, Options(gap=0.01), compare=False)
    options = Options(int(free.memory.peak_bytes * share), gap=0.01, time_limit_s=60.0)
    try:
        plan = planner.plan_graph(graph, mesh, cluster, options, compare=False)
    except InfeasibleError:
        pytest.skip("nothing fits")
    d = plan.decisions
    choice = plainly(d, plan.solution.choice)
    program = schedule(d, choice, Prices(mesh, cluster, options.backend, options.decomposed))
    held = held_at(program, graph, profile(program, graph, mesh, options).timeline)
    most = {place: at.bytes for place, at in held.items()}
    rows = dict.fromkeys(most, 0.0)
    places, copies = tuple(most), Copies(d)
    for usage in usages(d, options, places):
        for time in range(usage.start, usage.end):
            rows[places[time]] += float(usage.option[choice[usage.node]])
    over = {p: rows[p] + copies.bytes(choice, p) - most[p] for p in places}
    if not d.recomputes:
        pytest.skip("what is kept in another spec counts in the one in which it was made too")
    assert max(over.values()) <= NEARLY * max(most.values())
