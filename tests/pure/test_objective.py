"""The objective: reductions of gradients hide behind the backward's computation, and the bound holds for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autopar.ir import Graph, Input, Node, Output, TensorMeta, Value
from autopar.mesh import Cluster, Measured, Mesh
from autopar.planner import Options
from autopar.planner.pricing.critical_paths import Sections, cost_terms, phase_paths
from autopar.planner.pricing.objective import NEAR_PATH, NEAR_PATH_WEIGHT, Objective
from autopar.planner.pricing.prices import MAX_OVERLAP, Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.problem.variables import Use, Variable, spec_made, spec_read
from autopar.planner.schedule.schedule import schedule
from autopar.planner.schedule.timeline import simulate_streams
from autopar.sharding.paths import cheapest_path
from autopar.solver import Problem, Solution, evaluate, solve
from tests.random_plans import random_solution

LAYERS = 4


def perceptron(batch: int, width: int) -> Graph:
    """Products in a row with weights that are trained, and their backward."""

    def rows(*shape: int) -> tuple[TensorMeta]:
        return (TensorMeta(shape, "float32"),)

    inputs = [Input("x", "input", "x")]
    nodes = [Node("x", "placeholder", outputs=rows(batch, width))]
    for i in range(LAYERS):
        inputs.append(Input(f"w{i}", "parameter", f"w{i}", trainable=True))
        nodes.append(Node(f"w{i}", "placeholder", outputs=rows(width, width)))
    at = "x"
    for i in range(LAYERS):
        nodes.append(Node(f"y{i}", "aten.mm.default", (Value(at), Value(f"w{i}")), outputs=rows(batch, width)))
        at = f"y{i}"
    inputs.append(Input("dy", "tangent", "y"))
    nodes.append(Node("dy", "placeholder", outputs=rows(batch, width), phase="backward"))
    outputs = [Output(Value(at), "output", "y")]
    cotangent = "dy"
    for i in reversed(range(LAYERS)):
        read = f"y{i - 1}" if i else "x"
        for name, op, args, shape in (
            (f"t{i}", "aten.t.default", (read,), (width, batch)),
            (f"dw{i}", "aten.mm.default", (f"t{i}", cotangent), (width, width)),
            (f"u{i}", "aten.t.default", (f"w{i}",), (width, width)),
            (f"dx{i}", "aten.mm.default", (cotangent, f"u{i}"), (batch, width)),
        ):
            nodes.append(Node(name, op, tuple(map(Value, args)), outputs=rows(*shape), phase="backward"))
        outputs.append(Output(Value(f"dw{i}"), "gradient", f"w{i}"))
        cotangent = f"dx{i}"
    return Graph(tuple(nodes), tuple(inputs), tuple(outputs), "perceptron")


@cache
def objective(
    batch: int, width: int, overlap: float = 1.0, shape: tuple[int, ...] = (4,), launched: float = 1.0
) -> Objective:
    graph, mesh, options = perceptron(batch, width), Mesh(shape), Options(outputs="dtensor")
    cluster = Cluster.load("dgx-h100").sized(mesh.size)
    cluster = replace(cluster, measured=replace(cluster.measured or Measured(), overlap=overlap))
    return Objective(decide(graph, mesh, options, resolve(graph, mesh, {}, {})), Prices(mesh, cluster), launched)


def whole(problem: Problem, warm: tuple) -> Solution:
    return solve(problem, gap=1e-9, warm_starts=warm)


MANY_TOKENS, FEW_TOKENS = (65536, 1024), (256, 4096)
"""As many as hide the reductions of the weights' gradients, and too few for that."""


def weightings(asked: Objective) -> list[np.ndarray]:
    """Each path of each phase by itself, beside the first of the others."""
    found = []
    for among in asked.ranges:
        for path in range(among.start, among.stop):
            weights = np.zeros(asked.ranges[-1].stop)
            weights[[path, *(other.start for other in asked.ranges if other is not among)]] = 1.0
            found.append(weights)
    return found


@pytest.mark.parametrize("sizes", [MANY_TOKENS, FEW_TOKENS])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("launched", [1.0, 0.1])
def test_no_sum_is_above_the_objective_and_the_critical_paths_reach_it(
    sizes: tuple[int, int], overlap: float, shape: tuple[int, ...], launched: float
) -> None:
    asked = objective(*sizes, overlap, shape, launched)
    for seed in range(5):
        choice = random_solution(asked.problem(), seed).choice
        sums = [evaluate(asked.problem(weights=w), choice)[0] for w in weightings(asked)]
        assert max(sums) <= asked.seconds(choice) * (1 + 1e-9)
        seconds = asked.path_seconds(choice)
        critical = np.concatenate([np.eye(r.stop - r.start)[seconds[r].argmax()] for r in asked.ranges])
        reached, _ = evaluate(asked.problem(weights=critical), choice)
        assert reached == pytest.approx(asked.seconds(choice), rel=1e-9)


@pytest.mark.parametrize("sizes", [MANY_TOKENS, FEW_TOKENS, (4096, 2048)])
def test_the_minimum_lies_between_the_bound_and_every_other_choice(sizes: tuple[int, int]) -> None:
    asked = objective(*sizes)
    found = asked.minimize(asked.problem(), whole, gap=1e-9)
    assert found.lower_bound <= found.objective == pytest.approx(asked.seconds(found.choice))
    for seed in range(10):
        choice = random_solution(asked.problem(), seed).choice
        assert asked.seconds(choice) >= found.lower_bound * (1 - 1e-9)


def test_what_hides_costs_its_launches_and_little_more() -> None:
    asked = objective(*MANY_TOKENS)
    found = asked.minimize(asked.problem(), whole, gap=1e-9)
    plain = objective(*MANY_TOKENS, 0.0).seconds(found.choice)
    reducing = plain - asked.seconds(found.choice)
    assert reducing > 0
    assert found.gap <= 1e-9


def test_without_overlap_it_is_the_sum_of_both() -> None:
    asked = objective(*FEW_TOKENS, 0.0)
    choice = random_solution(asked.problem(), 3).choice
    for weights in weightings(asked):
        assert asked.seconds(choice) == pytest.approx(evaluate(asked.problem(weights=weights), choice)[0], rel=1e-12)


@pytest.mark.parametrize("sizes", [MANY_TOKENS, FEW_TOKENS])
def test_the_simulated_step_takes_what_the_objective_says(sizes: tuple[int, int]) -> None:
    """Nearly: what is launched last has less computation left to hide behind."""
    asked = objective(*sizes)
    found = asked.minimize(asked.problem(), whole, gap=1e-9)
    program = schedule(asked.decisions, found.choice, asked.prices)
    simulated = simulate_streams(program, asked.prices.overlap).seconds
    assert found.objective * (1 - 1e-3) <= simulated <= found.objective * 1.3


def test_no_overlap_is_free() -> None:
    assert objective(*MANY_TOKENS).prices.overlap == MAX_OVERLAP < 1


def hiding(asked: Objective) -> list[tuple[Variable, Variable, Use]]:
    """What can run beside computation: reads of parameters, and gradients on their way."""
    d = asked.decisions
    ends = ((d.variables[h.source], d.variables[h.target], h) for h in d.uses if h.source != h.target)
    return [(u, v, h) for u, v, h in ends if u.kind == "parameter" or (h.position < 0 and u.phase == "backward")]


def test_seconds_that_can_hide_are_those_of_the_axes_that_the_path_goes_along() -> None:
    asked = objective(*FEW_TOKENS, shape=(2, 4))
    prices, seen = asked.prices, set()
    for u, v, h in hiding(asked):
        launches, of_axes = prices.hideable(u, v, h)
        costs = prices.collectives.of(h.meta.dtype).bucketed
        for i, j in np.argwhere(np.isfinite(launches) & (prices.edge(u, v, h) > 0)):  # what is kept is there
            source, target = spec_made(u.options[i], h.out), spec_read(v.options[j], h.position)
            assert source is not None and target is not None
            path = cheapest_path(source, target, h.meta.shape, h.meta.itemsize, prices.mesh, costs)
            axes = {step.axis for step in path.steps}
            seen.add(frozenset(axes))
            for axis, seconds in enumerate(s[i, j] for s in of_axes):
                # A copy is all launch, and an exchange over several axes takes its time on the slowest.
                several = any(step.kind in ("slice", "permute") for step in path.steps)
                assert (seconds > 1e-9) == (axis in axes) or several
            assert launches[i, j] + sum(s[i, j] for s in of_axes) <= path.seconds * (1 + 1e-6)
    assert seen == {frozenset({0}), frozenset({1}), frozenset({0, 1})}


def test_what_is_sent_along_one_axis_runs_beside_what_is_sent_along_another() -> None:
    cut = Sections({"forward": (0,), "backward": (0,)})
    order = cost_terms(cut, 2)
    _, backward = phase_paths(cut, 2, 1)
    seconds = {"compute": 3.0, "reduce": 2.0, "gather": 0.0, "wait": 0.0}
    taken = np.array([seconds[b.work] if b.phase == "backward" else 0.0 for b in order])
    assert (backward.paths @ taken).max() == 3.0
    assert backward.works @ taken == 3.0 + 2 * 2.0


def test_what_is_sent_along_one_axis_adds_up_whether_it_is_waited_for_or_not() -> None:
    asked = objective(*FEW_TOKENS, 1.0, (2, 2))
    order = cost_terms(asked.sections, 2)
    for seed in range(10):
        choice = random_solution(asked.problem(), seed).choice
        taken = asked.seconds_by_term(choice).term_s
        for axis in (0, 1):
            sent = sum(s for b, s in zip(order, taken, strict=True) if b.work != "compute" and b.axis == axis)
            assert asked.seconds(choice) >= MAX_OVERLAP * sent * (1 - 1e-9)


def test_seconds_of_a_wait_are_those_on_its_axes() -> None:
    asked = objective(*FEW_TOKENS, 1.0, (2, 2))
    d, prices = asked.decisions, asked.prices
    apart = 0
    for use in d.uses:
        whole, parts = prices.blocking_seconds(d, use), prices.blocking_seconds_by_axis(d, use)
        assert sum(parts) == pytest.approx(whole, rel=1e-9)
        assert all((part >= 0).all() for part in parts)
        apart += sum(bool((np.isfinite(part) & (part > 0)).any()) for part in parts) == 2
    assert apart


def test_weights_kept_for_more_decisions_have_a_little_on_every_path_that_is_nearly_the_longest() -> None:
    asked = objective(2048, 256)
    found = asked.minimize(asked.problem(), whole, gap=1e-9)
    other = objective(2048, 256)
    other.start_from(asked, found.choice)
    seconds = asked.path_seconds(found.choice)
    for paths in asked.ranges:
        weights, longest = other.weights[paths], seconds[paths].max()
        assert weights.sum() == pytest.approx(1.0)
        assert (weights[seconds[paths] >= (1 - NEAR_PATH) * longest] > 0).all()
        assert (weights >= (1 - NEAR_PATH_WEIGHT) * asked.weights[paths] - 1e-12).all()
    cost, best = evaluate(asked.problem(weights=other.weights), found.choice)[0], asked.seconds(found.choice)
    assert best * (1 - NEAR_PATH_WEIGHT * NEAR_PATH) <= cost <= best * (1 + 1e-9)
    plain = objective(2048, 256)
    plain.start_from(asked)
    assert (plain.weights == asked.weights).all()


def test_no_more_weights_are_tried_than_a_known_bound_leaves_open() -> None:
    """The first weights are far from the best: told that there is nothing better, it ends with them."""
    first = objective.__wrapped__(*FEW_TOKENS)
    found = first.minimize(first.problem(), whole, gap=1e-9, most=1)
    solved: list[float] = []
    for bound in (-np.inf, found.objective):
        asked = objective.__wrapped__(*FEW_TOKENS)

        def counted(problem: Problem, warm: tuple, bound: float = bound) -> Solution:
            solved.append(bound)
            return whole(problem, warm)

        again = asked.minimize(asked.problem(), counted, gap=1e-9, bound=bound)
        assert again.lower_bound <= again.objective <= found.objective
    assert solved.count(found.objective) == 1 < solved.count(-np.inf)


def test_a_solve_that_time_cut_off_is_taken_up_again_with_the_same_weights() -> None:
    """Where known choices lead to no others, what is open is the sum itself."""
    asked = objective.__wrapped__(*FEW_TOKENS, 0.0)
    solved: list[Problem] = []

    def cut(problem: Problem, warm: Sequence[Sequence[int]]) -> Solution:
        solved.append(problem)
        found = whole(problem, warm)
        return replace(found, lower_bound=0.5 * found.lower_bound, cut_off=True) if len(solved) == 1 else found

    found = asked.minimize(asked.problem(), cut, gap=1e-9)
    assert len(solved) == 2
    assert found.gap <= 1e-9
