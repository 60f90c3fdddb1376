"""Norms behind residuals that run again in the backward: what they cost, and by which kernels they run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
import torch
from torch import fx

from autopar import passes
from autopar.holding import ABSENT, RECOMPUTE
from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.graphs.kernel_patterns import Fusion, fusions
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.problem.restricted import solve_sliced
from autopar.planner.schedule.schedule import schedule
from autopar.program import AGAIN, Program
from tests.cpu.model_checks import assert_equal, subject
from tests.cpu.test_kernels_in_plans import by_kernels, calls, cluster, simulated

MESH = Mesh((2,))


@cache
def stated() -> tuple[Objective, Fusion]:
    """With reruns among the decisions, and a sum with the norm behind it, written out."""
    graph = subject("llama", torch.float32).capture.graph
    d = decide(graph, MESH, Options(), resolve(graph, MESH, {}, {}), recompute=True)
    norms = [f for f in fusions(graph) if f.kernel == "add_norm" and dict(f.reads).get("residual")]
    return Objective(d, Prices(MESH, cluster("cuda"))), norms[1]


@cache
def running_again(names: tuple[str, ...]) -> tuple[float, Program]:
    """Cost and program of the best choice that runs again just ``names``, and keeps none of their results."""
    objective, _ = stated()
    kept = []
    for v in objective.decisions.variables:
        options = np.arange(len(v.options))
        if v.kind == "rerun" and v.node:
            options = options[1:] if v.node.name in names else options[:1]
        if v.kind == "hold" and v.value and v.value.node in names:
            options = np.array([o for o in options if v.actions[o] in (RECOMPUTE, ABSENT)])
        kept.append(options)
    solved = solve_sliced(objective.problem(), kept, 20.0, "auto", 1e-6)
    assert solved is not None
    choice = solved.choice
    return objective.seconds(choice), schedule(objective.decisions, choice, objective.prices)


def names(nodes: Iterable[fx.Node]) -> list[str]:
    """Of the ops that run."""
    return [n.meta["op"].node for n in nodes if "op" in n.meta]


def seconds(program: Program) -> float:
    return sum(op.seconds for op in program.ops)


@pytest.mark.parametrize("first", [0, 1, -2, -1], ids=["all", "without the sum", "the last two", "the last"])
def test_what_runs_again_costs_what_the_program_takes(first: int) -> None:
    """Whether the ops are one kernel, its rest, or by themselves."""
    (cost, program), (least, without) = running_again(stated()[1].nodes[first:]), running_again(())
    assert seconds(program) > seconds(without)
    assert cost - least == pytest.approx(seconds(program) - seconds(without), rel=0.02)


@pytest.mark.parametrize(("first", "kernels"), [(0, ("add_norm",)), (1, ("add_norm",)), (-2, ())])
def test_a_norm_is_one_kernel_also_where_the_sum_before_it_is_kept(first: int, kernels: tuple[str, ...]) -> None:
    nodes = stated()[1].nodes[first:]
    by_name = {op.name: op for op in running_again(nodes)[1].ops}
    assert all(by_name[name + AGAIN].kernels == kernels for name in nodes)


def test_the_kernel_runs_where_its_ops_would_and_gives_what_they_give() -> None:
    """Its operands are there when the backward begins, but its results would live from then on."""
    of, nodes = subject("llama", torch.float32), stated()[1].nodes
    lowered, plain = (passes.lower(running_again(n)[1], of.capture.graph, MESH) for n in (nodes[1:], ()))
    composed = passes.compose(lowered, of.capture.graph)
    assert calls(composed, "add_norm") == calls(passes.compose(plain, of.capture.graph), "add_norm") + 1
    there = names(lowered.backward.graph.nodes)
    ahead = set(there[: there.index(nodes[1])])
    found = list(composed.backward.graph.nodes)
    at = next(i for i, n in enumerate(found) if str(n.target) == "autopar.add_norm.default")
    assert ahead.intersection(names(found[:at]))
    result, launched = by_kernels(composed, of, MESH)
    assert "add_norm" in launched
    assert_equal(result, simulated(lowered, of, MESH), 2e-5)
