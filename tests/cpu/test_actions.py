"""A way to hold values that the package does not have: once registered it is planned, counted, run, printed and saved
like the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import autopar
from autopar import codegen, passes
from autopar.errors import AutoparError, PlanError
from autopar.holding import ABSENT, ACTIONS, KEEP, Encoded, Rates, register, registered
from autopar.mesh import Mesh
from autopar.planner import Options
from autopar.planner.memory.points import ProgramPoint
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.problem.restricted import solve_sliced
from autopar.planner.schedule.schedule import schedule
from autopar.plans import Plan
from autopar.plans.serial import program_from, program_to
from autopar.program import Program
from autopar.runtime.simulation import simulate_program
from tests.cpu.model_checks import Subject, cluster_where_sharding_pays, subject
from tests.cpu.test_memory_constraints import ROUNDING, highest_over, modelled_and_held
from tests.cpu.test_offloading import executed, predicted
from tests.models import ZOO


@dataclass(frozen=True, eq=False)
class OnChip(Encoded):
    """Encoded by something that is faster than a pass over memory."""

    def seconds(self, whole: float, stored: float, rates: Rates) -> float:
        return 1e-9


SINGLE = OnChip(
    "single",
    "narrowed",
    dtype="float32",
    encode="autopar_tests::narrow",
    decode="autopar_tests::widen",
)
TOLERANCE = 1e-4


@torch.library.custom_op("autopar_tests::narrow", mutates_args=())
def narrow(x: Tensor) -> Tensor:
    return x.to(torch.float32)


@torch.library.custom_op("autopar_tests::widen", mutates_args=())
def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


@pytest.fixture(autouse=True)
def single() -> Iterator[None]:
    with registered(SINGLE):
        yield


def encoded(program: Program) -> int:
    """The number of values that are held so."""
    stored, restored = (sum(op.kind == kind for op in program.ops) for kind in SINGLE.kinds)
    assert stored == restored
    return stored


@cache
def all_so(name: str, mesh: tuple[int, ...]) -> tuple[Subject, Objective, tuple[int, ...], Program]:
    """A model in double precision, and its program that holds so all that can be and the backward needs."""
    of, on = subject(name, torch.float64), Mesh(mesh)
    graph, prices = of.capture.graph, Prices(on, cluster_where_sharding_pays().sized(on.size))
    objective = Objective(decide(graph, on, Options(), resolve(graph, on, {}, {}), recompute=True), prices)
    left = []
    for v in objective.decisions.variables:
        taken = [
            o for o, a in enumerate(v.actions) if a in ((SINGLE, ABSENT) if SINGLE in v.actions else (KEEP, ABSENT))
        ]
        left.append(np.array(taken if v.actions else range(len(v.options))))
    solved = solve_sliced(objective.problem(), left, 20.0, "auto", 1e-6)
    assert solved is not None
    choice = solved.choice
    return of, objective, tuple(choice), schedule(objective.decisions, choice, prices)


@pytest.mark.parametrize(("name", "mesh"), [("mlp", (1,)), ("mlp", (2, 2)), ("gpt2", (2,))], ids=str)
def test_a_step_computes_what_one_device_does(name: str, mesh: tuple[int, ...]) -> None:
    of, _, _, program = all_so(name, mesh)
    assert encoded(program)
    lowered = passes.lower(program, of.capture.graph, Mesh(mesh))
    outputs, rest = simulate_program(lowered, of.capture.graph, Mesh(mesh), of.named(), 0)
    assert of.reference is not None
    for meaning, gradient in rest.grads.items():
        torch.testing.assert_close(gradient, of.reference.grads[meaning], rtol=TOLERANCE, atol=TOLERANCE)
    assert outputs


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_the_emitted_step_holds_what_is_predicted(name: str) -> None:
    of, _, _, program = all_so(name, (1,))
    measured, _ = executed(of, program)
    assert measured == pytest.approx(predicted(of, program), abs=16)


@pytest.mark.parametrize(("name", "mesh"), [("mlp", (1,)), ("mlp", (2, 2)), ("gpt2", (1,))], ids=str)
def test_constraints_count_what_is_held(name: str, mesh: tuple[int, ...]) -> None:
    """Never more anywhere, and as the backward begins hardly less."""
    _, objective, choice, _ = all_so(name, mesh)
    d, options = objective.decisions, Options()
    assert highest_over(d, choice, objective.prices, options) <= ROUNDING
    modelled, held = modelled_and_held(d, choice, objective.prices, options)
    turn = ProgramPoint(d.graph.turn)
    assert modelled[turn] > 0.9 * held[turn]


@cache
def budgeted(mesh: tuple[int, ...], share: float) -> tuple[Plan, int]:
    """A plan of GPT-2 in double precision where the host is far away, within a share of what the free plan holds."""
    model, inputs = ZOO["gpt2"].made(torch.float64)
    near = cluster_where_sharding_pays()
    far = replace(near, host=replace(near.host, latency_s=1.0))
    free = autopar.plan(model, inputs, mesh=mesh, cluster=far, optimizer="sgd")
    budget = int(share * free.peak_memory)
    return autopar.plan(model, inputs, mesh=mesh, cluster=far, optimizer="sgd", memory_budget=budget), budget


@pytest.mark.parametrize("mesh", [(1,), (2,)], ids=str)
def test_the_search_chooses_it_where_it_is_cheapest(mesh: tuple[int, ...]) -> None:
    plan, budget = budgeted(mesh, 0.8)
    assert plan.peak_memory <= budget
    assert encoded(plan.program)
    assert SINGLE.name in {held.action for held in plan.activations.values()}
    assert SINGLE.text in str(plan)


def test_a_plan_is_saved_and_read_and_needs_the_action() -> None:
    plan, _ = budgeted((1,), 0.8)
    assert program_from(json.loads(json.dumps(program_to(plan.program)))) == plan.program
    text = plan.to_json()
    assert Plan.from_json(text).digest == plan.digest
    del ACTIONS[SINGLE.name]
    try:
        with pytest.raises(PlanError, match=SINGLE.name):
            Plan.from_json(text)
    finally:
        ACTIONS[SINGLE.name] = SINGLE


def test_a_plan_that_was_read_is_verified_and_holds_what_it_says() -> None:
    plan = Plan.from_json(budgeted((2,), 0.8)[0].to_json())
    model, inputs = ZOO["gpt2"].made(torch.float64)
    assert autopar.simulate(model, inputs, plan).peak_memory == plan.peak_memory


def test_a_name_is_given_once() -> None:
    with pytest.raises(AutoparError, match="already an action 'single'"):
        register(replace(SINGLE, text="halved"))


def test_the_source_shows_it() -> None:
    of, _, _, program = all_so("mlp", (1,))
    source = codegen.emit(passes.lower(program, of.capture.graph, Mesh((1,))), Mesh((1,)), ["A test."])
    calls = [source.count(f"ops.autopar_tests.{name}.default(") for name in ("narrow", "widen")]
    assert calls == [encoded(program)] * 2
