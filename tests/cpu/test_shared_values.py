"""What all micro-batches of a pipeline compute alike, such as gathered parameters, is computed once and held once."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.pipelines.request import Pipeline
from autopar.pipelining import staged
from autopar.planner import Options
from autopar.planner.memory.exact import profile, saved_bytes
from autopar.planning import as_planned
from autopar.tracer import ColoTracer
from tests.multiprocess.training_models import distance, gpt2, llama, seeded, tokens

CUT = {"llama": {"*.weight": "S0R", "*norm.weight": "S0"}, "gpt2": {"*.weight": "S0R", "*ln_*.weight": "S0"}}
"""Parameters that lie in parts on the ranks of a stage, as in ZeRO."""
BUILDS = {"llama": llama, "gpt2": lambda: gpt2(n_layer=4)}


def planned(name: str, **pipeline: Any) -> tuple[Any, Any, autopar.PipelinePlan]:
    model, batch = seeded(BUILDS[name]), seeded(lambda: tokens(16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(
            model,
            batch,
            mesh={"pp": 2, "dp": 2},
            cluster="dgx-h100",
            time_limit=10.0,
            constraints={**CUT[name], "input:*": "S0R"},
            pipeline=Pipeline(**pipeline),
        )
    assert isinstance(plan, autopar.PipelinePlan)
    return model, batch, plan


def gathered_once(plan: autopar.PipelinePlan) -> int:
    """Return how many tensors are gathered once for all micro-batches."""
    ops = [op for stage in plan.stages for op in stage.program.ops if op.name in stage.program.once]
    return sum(len(op.writes) for op in ops if op.step is not None and op.step.kind == "all_gather")


@pytest.mark.parametrize(
    ("name", "schedule", "chunks"),
    [
        ("gpt2", "zbv", 2),
        pytest.param("llama", "1f1b", 1, marks=pytest.mark.slow),
        pytest.param("llama", "interleaved", 2, marks=pytest.mark.slow),
        pytest.param("gpt2", "gpipe", 1, marks=pytest.mark.slow),
        pytest.param("llama", "zb", 1, marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_that_gathers_once_is_one_device_and_holds_no_more_than_predicted(
    name: str, schedule: str, chunks: int
) -> None:
    model, batch, plan = planned(name, micro_batches=4, schedule=schedule, chunks=chunks)
    assert gathered_once(plan) > 0
    run: Any = autopar.simulate(model, batch, plan=plan)
    expected = model(**batch)
    expected.loss.backward()
    assert distance(run.outputs.loss, expected.loss) < 1e-5
    assert max(distance(run.grads[n], p.grad) for n, p in model.named_parameters()) < 1e-4
    assert all(held <= predicted for held, predicted in zip(run.peaks, plan.peaks, strict=True))


@pytest.fixture(scope="module")
def eight() -> tuple[Any, Any, autopar.PipelinePlan]:
    return planned("llama", micro_batches=8, schedule="gpipe")


def test_a_further_micro_batch_in_flight_gathers_nothing_for_itself(eight: Any) -> None:
    plan = eight[2]
    program, mesh = plan.stages[0].program, plan.stage_mesh
    graph = stage_graphs(eight)[0]
    for in_flight in (2, 8):
        options = Options(in_flight=in_flight, held_batches=8)
        alone = profile(replace(program, once=()), graph, mesh, replace(options, held_batches=1))
        together = profile(program, graph, mesh, options)
        once = sum(program.tensors[name].bytes for name in program.held_once)
        copies = (in_flight - 1) * (saved_bytes(replace(program, once=()), graph, mesh, Options())[0])
        ours = (in_flight - 1) * saved_bytes(program, graph, mesh, options)[0]
        assert 0 < copies - ours <= (in_flight - 1) * once
        assert together.peak_bytes <= alone.peak_bytes - (copies - ours) + once


def test_what_runs_once_is_counted_once_in_the_step(eight: Any) -> None:
    plan = eight[2]
    assert all(seconds > 0 for seconds in plan.costs.first_forward)
    first, second = (plan.timeline.ends[a] - plan.timeline.starts[a] for a in plan.schedule.order[0][:2])
    assert first == pytest.approx(second + plan.costs.first_forward[0])


def test_it_is_saved_and_read(eight: Any, tmp_path: Path) -> None:
    eight[2].save(tmp_path / "plan.json")
    again = autopar.PipelinePlan.load(tmp_path / "plan.json")
    assert [s.program.once for s in again.stages] == [s.program.once for s in eight[2].stages]
    assert again.stages[0].program == eight[2].stages[0].program


def test_a_plan_that_shares_what_differs_is_refused(eight: Any) -> None:
    model, batch, plan = eight
    first = plan.stages[0]
    differs = next(op.name for op in first.program.ops if op.kind == "compute" and op.node.startswith("lookup"))
    changed = replace(first, program=replace(first.program, once=(*first.program.once, differs)))
    with pytest.raises(PlanError, match="once depends on the micro-batch"):
        autopar.simulate(model, batch, plan=replace(plan, stages=(changed, *plan.stages[1:])))


def stage_graphs(of: tuple[Any, Any, autopar.PipelinePlan]) -> list[Graph]:
    """Return the graphs of the stages, as they were planned."""
    model, batch, plan = of
    capture = ColoTracer().capture(model, batch)
    parts = staged(capture.graph, plan.micro_batches, plan.starts, Options())
    return [
        as_planned(replace(capture, graph=stage.graph), each).graph
        for stage, each in zip(parts.stages, plan.stages, strict=True)
    ]
