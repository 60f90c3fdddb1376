"""Every stage ends with the clock, and what was found by then is kept; huge problems have a choice from the start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import InfeasibleError, InputError, SolverError
from autopar.solver import Edge, Problem, Usage, evaluate, relative_gap, solve
from autopar.solver import clock as solver_clock
from autopar.solver.dual.dual import Dual
from autopar.solver.dual.search import Search
from autopar.solver.integer import highs
from autopar.solver.integer.ilp import flow_count
from autopar.solver.priced.search import PricedSearch
from autopar.solver.reduce.dominance import WorkBudget
from autopar.solver.reduce.graph import Graph
from autopar.solver.reduce.incumbent import Incumbent
from autopar.solver.reduce.reductions import reduce
from benchmarks.iopddl import main, read
from benchmarks.iopddl_instances import generate
from tests.brute_force import brute_force
from tests.pure.solver_problems import problems
from tests.pure.test_solver import hard_problem


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """A made-up instance of the contest's kind, with room for little but what is known to fit."""
    path = tmp_path / "made_up.json"
    path.write_text(json.dumps(generate(600, seed=1, room=1.02, most_options=8)))
    return path


@pytest.mark.parametrize("looks", [1, 3, 10, 40, 150])
def test_whenever_time_ends_the_best_so_far_is_kept(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """A clock that jumps far beyond the limit after so many looks: no stage goes on, none loses the warm start."""
    problem = hard_problem(40, 6, limit_share=0.6)
    first = solve(problem, time_limit=1e-6).choice
    assert evaluate(problem, first)[1]
    seen = 0

    def now() -> float:
        nonlocal seen
        seen += 1
        return 0.0 if seen <= looks else 1e6

    monkeypatch.setattr("autopar.solver.reduce.incumbent.now", now)
    solution = solve(problem, time_limit=30.0, warm_starts=[first], gap=0.0)
    assert evaluate(problem, solution.choice) == (solution.objective, True)
    assert solution.objective <= evaluate(problem, first)[0]
    assert 0 <= solution.lower_bound <= solution.objective
    assert seen < looks + 1000


def test_a_gap_that_grows_with_the_work_ends_a_solve() -> None:
    """As where what is left to gain is worth less than the search."""
    problem = hard_problem(60, 8, limit_share=0.6)
    with solver_clock.limited(60.0):
        began = solver_clock.now()
        found = solve(problem, gap=lambda _: 0.1 * (solver_clock.now() - began), time_limit=30.0)
        worked_s = solver_clock.now() - began
    assert evaluate(problem, found.choice) == (found.objective, True)
    assert 0 < relative_gap(found.objective, found.lower_bound) <= 0.1 * worked_s
    assert worked_s < 15  # to prove 7 % takes 51


def test_reductions_end_when_they_are_late() -> None:
    problem = hard_problem(60, 5)
    graph = Graph(problem)
    before = graph.size()
    reduce(graph, WorkBudget(1e9, late=lambda: True))
    assert graph.size() == before


def test_a_sweep_that_is_late_tells_the_bound_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solver.dual.dual.A_LOOK", 5)
    dual = Dual.of(Graph(hard_problem(60, 5)))
    bound = dual.sweep(forward=False).lower_bound
    late = dual.sweep(forward=True, late=lambda: True)
    assert late.lower_bound == pytest.approx(bound)
    assert (late.choice, late.marginals) == ({}, {})


def test_a_search_that_is_late_has_changed_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solver.dual.search.A_LOOK", 5)
    graph = Graph(hard_problem(60, 5))
    start = dict.fromkeys(graph.nodes(), 0)
    search = Search(graph, start)
    assert search.improve_nodes(lambda: True)
    assert sum(search.choice[node] != 0 for node in graph.nodes()) <= 5


@given(problems(limited=True))
@settings(max_examples=60, deadline=None)
def test_a_first_choice_by_prices_is_within_the_limit(problem: Problem) -> None:
    try:
        graph, best = Graph(problem), brute_force(problem).objective
    except InfeasibleError:
        return
    incumbent = Incumbent(problem, 60.0, 0.0, None)
    search = PricedSearch(graph, incumbent)
    search.first()
    if incumbent.choice is not None:
        assert evaluate(problem, incumbent.choice) == (incumbent.objective, True)
        assert incumbent.objective >= best
    assert incumbent.lower_bound <= best * (1 + 1e-9) + 1e-9


def test_under_a_tight_limit_there_is_a_choice_without_any_time(instance: Path) -> None:
    problem = read(instance)
    solution = solve(problem, time_limit=0.5)
    assert evaluate(problem, solution.choice)[1]
    assert solution.lower_bound >= 0


def test_the_limit_is_kept_to_the_byte(tmp_path: Path) -> None:
    """A tolerance on a large limit would be bytes: an instance whose cheap choice is one byte over."""
    path, out = tmp_path / "byte.json", tmp_path / "out.json"
    limit = 10**12
    nodes = {"intervals": [[0, 2]], "costs": [[5, 1]], "usages": [[limit, limit + 1]]}
    problem = {"nodes": nodes, "edges": {"nodes": [], "costs": []}, "usage_limit": limit}
    path.write_text(json.dumps({"problem": problem}))
    assert main([str(path), "--solution", str(out)]) == 0
    assert json.loads(out.read_text()) == [0]


def test_odd_instances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes without edges, empty lifetimes with huge usages, duplicate edges, loops, no limit; then one that has no
    choice, which is told without an end of all."""
    forbidden = 10**18
    fine = {
        "nodes": {"intervals": [[0, 1], [3, 3], [0, 2]], "costs": [[3, 2], [5, 1], [4]], "usages": [[1, 9], [], [0]]},
        "edges": {
            "nodes": [[0, 1], [0, 1], [1, 0], [0, 0]],
            "costs": [[1, 2, 3, 4], [forbidden, 0, 0, 0], [1, 0, 0, 1], [0, 7, 7, 1]],
        },
    }
    none = {**fine, "usage_limit": 0}
    paths = [tmp_path / "fine.json", tmp_path / "none.json"]
    for path, problem in zip(paths, (fine, none), strict=True):
        path.write_text(json.dumps({"problem": problem}))
    out = tmp_path / "out.json"
    assert main([*map(str, paths), "--solution", str(out)]) == 1
    assert len(json.loads(out.read_text())) == 3
    printed = capsys.readouterr()
    assert "fine.json" in printed.out
    assert "none.json: No choice" in printed.err


@pytest.mark.parametrize("backend", ["PULP_CBC_CMD", "cbc", "highs", "HiGHS"])
def test_back_ends_by_their_names(backend: str) -> None:
    problem = hard_problem(14, 4, limit_share=0.6)
    best = solve(problem, gap=0.0).objective
    assert solve(problem, gap=0.0, backend=backend).objective == pytest.approx(best)


@pytest.mark.skipif(not highs.is_installed(), reason="needs HiGHS")
def test_highs_may_have_other_threads_in_this_process() -> None:
    """Their number is one for the whole process, and HiGHS refuses to run with another."""
    script = """
import highspy, numpy as np
from autopar.solver import solve
from tests.pure.test_solver import hard_problem
theirs = highspy.Highs()
for name, value in (("threads", 2), ("output_flag", False)):
    theirs.setOptionValue(name, value)
column = theirs.addVariable(lb=0, ub=1)
theirs.minimize(column)
problem = hard_problem(14, 4, limit_share=0.6)
print(solve(problem, gap=0.0, backend="highs").objective)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    best = solve(hard_problem(14, 4, limit_share=0.6), gap=0.0).objective
    assert float(done.stdout.split()[-1]) == pytest.approx(best)


def test_a_back_end_that_nobody_knows() -> None:
    with pytest.raises(SolverError, match="NO_SUCH_SOLVER"):
        solve(
            Problem((np.zeros(2),), (Edge(0, 0, np.zeros((2, 2))),), (Usage(0, np.zeros(2), 0, 1),)),
            backend="NO_SUCH_SOLVER",
        )


def test_the_clock_can_be_hurried() -> None:
    assert not solver_clock.hurried()


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    instance = {
        "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1], [2, 3]], "usages": [[1], [2, 1]]},
        "edges": {"nodes": [[0, 1]], "costs": [[1, 2]]},
        "usage_limit": 3,
    }
    change(instance)
    return json.dumps({"problem": instance})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"problem": {}}', "no 'nodes'"),
        (changed(lambda p: p["edges"]["costs"].append([1])), "longer"),
        (changed(lambda p: p["edges"].update(costs=[[1, 2, 3]])), "shape"),
        (changed(lambda p: p["edges"].update(nodes=[[0, -1]])), r"nodes \[0, -1\], where there are 2"),
        (changed(lambda p: p["nodes"]["usages"].pop()), "2 nodes with 2 intervals and 1 usages"),
        (changed(lambda p: p.update(usage_limit="3 GB")), "3 GB"),
    ],
)
def test_a_file_that_is_no_instance_is_an_error_that_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read(path)


def test_other_files_are_solved_where_one_cannot_be_read(
    instance: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records.json"
    assert main([str(tmp_path / "none.json"), str(instance), "--time-limit", "5", "--json", str(records)]) == 1
    assert "none.json: The file cannot be read." in capsys.readouterr().err
    assert [r["file"] for r in json.loads(records.read_text())] == [instance.name]


def test_a_bound_is_known_as_soon_as_a_choice_is(instance: Path) -> None:
    problem = read(instance)
    found = solve(problem, time_limit=1e-6)
    least = sum(cost.min() for cost in problem.costs)
    assert max(least, 1e-9) <= found.lower_bound <= solve(problem, time_limit=20.0).objective


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_least_of_each_part_is_a_bound(problem: Problem) -> None:
    try:
        optimum = brute_force(problem).objective
        graph = Graph(problem)
        before = graph.least()
        reduce(graph, WorkBudget(1e9))
    except InfeasibleError:
        return
    assert before <= optimum + 1e-9
    assert graph.least() <= optimum + 1e-9


def test_flows_are_counted_no_further_than_asked() -> None:
    graph = Graph(hard_problem(20, 4))
    count = flow_count(graph)
    assert count == sum(matrix.size for u, v in graph.pairs() for matrix in [graph.neighbours[u][v]])
    assert count > flow_count(graph, 30) > 30
    assert flow_count(graph, count) == count


def test_a_solution_that_could_not_be_written_is_told_before_anything_is_solved(instance: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(instance), "--solution", str(tmp_path / "none" / "solution.json")])
    assert ended.value.code == 2
