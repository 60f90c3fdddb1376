"""Where the limit ends a search, a plan still does not hang on how fast the machine is, or how busy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, Planned, plan_graph
from autopar.solver import clock
from autopar.solver.integer import highs
from tests.baseline_laws import captured

CASES = [
    ("mlp", (2, 2), 0.5, 1.0),
    ("gpt2", (2,), 0.5, 2.0),
    pytest.param("outside", (2, 2), 0.6, 1.0, marks=pytest.mark.slow),
]
"""Model, mesh, a budget as a share of the free plan's peak, and seconds, which are too few."""

PACES = (40.0, 140.0)
"""Machines that have done what is counted as a second long before one has gone on the wall."""


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    def each() -> Iterator[float]:
        for pace in PACES:
            began = time.monotonic()
            wall = SimpleNamespace(monotonic=lambda began=began, pace=pace: began + (time.monotonic() - began) / pace)
            monkeypatch.setattr(clock, "time", wall)
            # HiGHS has a clock of its own, on which a busy machine may be late.
            monkeypatch.setattr(
                highs, "until_the_limit", lambda seconds, pace=pace: pace * clock.until_the_limit(seconds)
            )
            yield pace

    return each()


@pytest.mark.parametrize(("name", "mesh", "share", "limit_s"), CASES)
def test_the_plan_in_little_time_is_the_same_on_any_machine(
    name: str, mesh: tuple[int, ...], share: float, limit_s: float, paces: Iterator[float]
):
    graph, on = captured(name), Mesh(mesh)
    cluster = Cluster.load("dgx-h100").sized(on.size)
    free = plan_graph(graph, on, cluster, Options(), compare=False)
    asked = Options(int(share * free.memory.peak_bytes), time_limit_s=limit_s)
    found = [plan_graph(graph, on, cluster, asked) for _ in paces]
    assert not found[0].solution.proven, "the search had time enough"
    assert _all_of(found[0]) == _all_of(found[1])


def _all_of(planned: Planned) -> tuple[object, ...]:
    solution = planned.solution
    ops = [(op.kind, op.name, op.node, str(op.step), op.seconds) for op in planned.program.ops]
    return ops, solution.objective, solution.lower_bound, planned.memory.peak_bytes, planned.timeline.seconds
