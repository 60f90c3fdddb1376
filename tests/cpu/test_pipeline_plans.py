"""Plans of pipelines: what they tell, that they keep to budgets, and how requests that mean nothing are refused."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import AutoparError, Pipeline, PipelinePlan
from autopar.cli.plan import pipeline_of
from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh, without_axis
from autopar.pipelines.makespan import simulate
from autopar.planner import Options
from autopar.planner.baselines.roles import baselines
from autopar.planner.graphs.accumulation import with_gradient_sums
from autopar.planner.pipeline import search
from autopar.planner.pipeline.search import BY_HAND, pipelines_by_hand
from autopar.planner.pipeline.stages import cut
from autopar.plans.pipeline import load_plan
from autopar.tracer import ColoTracer
from tests.multiprocess.training_models import llama, seeded, tokens

LAYERS, WIDTH, BATCH = 6, 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A chain of equal blocks that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def inputs() -> dict[str, Tensor]:
    return {"x": torch.zeros(BATCH, WIDTH), "y": torch.zeros(BATCH, dtype=torch.int64)}


def planned(mesh: Any = None, **options: Any) -> Any:
    mesh = {"pp": 2, "dp": 2} if mesh is None else mesh
    options.setdefault("pipeline", Pipeline(micro_batches=4, schedule="1f1b"))
    return autopar.plan(Model(), inputs(), mesh, "dgx-h100", **options)


@pytest.fixture(scope="module")
def plan() -> PipelinePlan:
    made = planned()
    assert isinstance(made, PipelinePlan)
    return made


def test_a_mesh_axis_named_pp_makes_a_pipeline(plan: PipelinePlan) -> None:
    assert plan.ranks == 2 and plan.micro_batches == 4 and len(plan.stages) == 2
    assert str(plan.stage_mesh) == "(dp=2)"
    assert plan.in_flight == (2, 1)


def test_every_stage_and_the_step_are_in_the_table(plan: PipelinePlan) -> None:
    text = str(plan)
    assert "1f1b, 2 ranks along pp, 4 micro-batches" in text
    assert "blocks.0" in text and "head" in text
    assert max(map(len, text.splitlines())) <= 100
    timeline = [line for line in text.splitlines() if line.startswith("    0  0")]
    assert len(timeline) == 1 and set("0123abcd") <= set(timeline[0])


def test_a_saved_plan_is_the_same(plan: PipelinePlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = PipelinePlan.load(tmp_path / "plan.json")
    assert loaded.to_json() == plan.to_json()
    assert loaded.digest == plan.digest and str(loaded) == str(plan)
    assert load_plan(tmp_path / "plan.json").digest == plan.digest


def test_a_plan_that_was_changed_is_refused(plan: PipelinePlan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan.to_json().replace("0F0,0F1", "0F1,0F0"))
    with pytest.raises(AutoparError, match="digest"):
        PipelinePlan.load(tmp_path / "plan.json")


def test_the_report_draws_every_action(plan: PipelinePlan, tmp_path: Path) -> None:
    plan.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    actions = sum(map(len, plan.schedule.order))
    assert text.count("<rect") == actions == 16
    assert "backward of stage 1, micro-batch 3" in text


def test_differences_name_the_schedule_and_the_stages(plan: PipelinePlan) -> None:
    other = planned(pipeline=Pipeline(micro_batches=8, schedule="gpipe"))
    text = plan.diff(other)
    assert "1f1b -> gpipe" in text and "micro-batches" in text
    assert plan.diff(plan) == "The pipelines run the same programs in the same order."


def test_the_same_request_gives_the_same_plan(plan: PipelinePlan) -> None:
    assert planned().digest == plan.digest


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "listed"])
def test_the_step_is_between_its_bound_and_the_work_of_all_ranks(schedule: str) -> None:
    made = planned(pipeline=Pipeline(micro_batches=4, schedule=schedule))
    work = sum(sum(made.costs.seconds(a) for a in row) for row in made.schedule.order)
    assert made.lower_bound <= made.step_time
    assert made.step_time >= work / made.ranks


@pytest.mark.parametrize(("chunks", "schedule"), [(2, "interleaved"), (2, "zbv")])
def test_ranks_may_hold_several_stages(chunks: int, schedule: str) -> None:
    made = planned(pipeline=Pipeline(micro_batches=4, schedule=schedule, chunks=chunks))
    assert len(made.stages) == 4
    assert made.stages_of(0) == ((0, 2) if schedule == "interleaved" else (0, 3))


def test_a_split_by_hand_begins_stages_with_the_named_modules() -> None:
    made = planned(pipeline=Pipeline(micro_batches=4, schedule="1f1b", split=["blocks.1"]))
    assert made.blocks[made.starts[1]] == "blocks.1"


def test_a_uniform_split_gives_the_remainder_to_later_stages() -> None:
    made = planned(pipeline=Pipeline(micro_batches=4, schedule="1f1b", split="uniform"))
    model = Model()
    with_parameters = [bool(name) and any(True for _ in model.get_submodule(name).parameters()) for name in made.blocks]
    first, second = sum(with_parameters[: made.starts[1]]), sum(with_parameters[made.starts[1] :])
    assert second - first in (0, 1)


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_a_budget_is_never_exceeded(plan: PipelinePlan, share: float) -> None:
    budget = int(share * plan.peak_memory)
    made = planned(memory_budget=budget, pipeline=Pipeline(micro_batches=4))
    assert made.lower_bound <= made.step_time
    assert made.peak_memory <= budget


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(AutoparError, match="hint:"):
        planned(memory_budget=2000)


class Scored(Model):
    """A model that also returns what its loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4096)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return {"loss": nn.functional.cross_entropy(scores, y), "scores": scores}


def test_an_error_names_an_output_that_takes_much_of_the_budget() -> None:
    asked = Pipeline(micro_batches=8, schedule="1f1b")
    batch = {"x": torch.zeros(64, WIDTH), "y": torch.zeros(64, dtype=torch.int64)}
    with pytest.raises(AutoparError, match=r"output 'scores' takes [\d.]+ [KM]iB for the whole batch") as told:
        autopar.plan(Scored(), batch, {"pp": 2, "dp": 2}, "dgx-h100", pipeline=asked, memory_budget=2000, time_limit=2)
    assert "let the forward return less than 'scores'" in str(told.value)


def test_pipelines_by_hand_stand_beside_the_plan() -> None:
    compared = autopar.compare(Model(), inputs(), {"pp": 2, "dp": 2}, "dgx-h100", pipeline=Pipeline(micro_batches=4))
    names = [row.name for row in compared.baselines]
    assert "1f1b, DDP" in names and "gpipe, ZeRO-3" in names and "interleaved, TP" in names
    assert all(compared.rows[0].step_time <= 1.01 * row.step_time for row in compared.baselines if row.fits)


ON = Mesh((2, 2), ("pp", "dp")), Cluster.load("dgx-h100").sized(4)


def graph() -> Graph:
    return ColoTracer().capture(Model(), inputs()).graph


def test_each_pipeline_by_hand_has_the_schedule_of_its_name() -> None:
    found = dict(pipelines_by_hand(graph(), *ON, Options(), 4))
    assert {name.split(", ")[0] for name in found} == set(BY_HAND)
    assert all(pipeline.schedule.name == name.split(", ")[0] for name, pipeline in found.items())


def searching(mesh: Mesh = ON[0], **options: Any) -> search._PipelineSearch:
    cluster = Cluster.load("dgx-h100").sized(mesh.size)
    return search._PipelineSearch(graph(), mesh, cluster, Options(**options), Pipeline(), lambda _: None)


def test_micro_batches_that_the_longest_axis_divides_come_first() -> None:
    assert list(searching(Mesh((2, 8), ("pp", "dp")))._micro_batch_counts()) == [2, 4, 8, 16]
    assert next(searching(Mesh((2, 2), ("pp", "dp")))._micro_batch_counts()) == 4


def test_a_pipeline_that_does_not_fit_is_estimated_with_what_it_recomputes() -> None:
    free = searching()
    whole = free._whole(4, None)
    drawn = {str(d): d for d in free.drawing.drawn(whole)}
    for name in ("gpipe", "1f1b", "zb"):
        before = drawn[f"{name} of 4 micro-batches"]
        budget = int(0.99 * max(before.peaks))
        tight = searching(memory_budget_bytes=budget).drawing.drawn(whole)
        after = next(d for d in tight if str(d) == str(before))
        assert max(after.peaks) == pytest.approx(budget)
        assert before.seconds < after.seconds < 4 / 3 * before.seconds


def test_the_whole_is_planned_at_no_more_than_the_known_ways_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = searching()._whole(4, None).planned
    for baseline in baselines(searching().stage_mesh):
        known = searching(search=f"baseline:{baseline.name}")
        with contextlib.suppress(PlanError):
            assert chosen.solution.objective <= known._whole(4, None).planned.solution.objective * (1 + 1e-6)
    # Even where no time is left to search.
    monkeypatch.setattr(search, "FREE_SHARE", 1e-9)
    hurried = searching()._whole(4, None).planned
    fsdp = searching(search="baseline:ZeRO-3")._whole(4, None).planned
    assert hurried.solution.objective <= fsdp.solution.objective * (1 + 1e-6)


@pytest.mark.parametrize(("estimated_s", "anew"), [(math.inf, 0), (0.0, 1)])
def test_a_stage_that_takes_longer_than_estimated_is_planned_anew(
    monkeypatch: pytest.MonkeyPatch, estimated_s: float, anew: int
) -> None:
    searched = searching()
    whole = searched._whole(4, None)
    stage = cut(whole.micro.graph, whole.seams, (0, 3))[0]
    stage = replace(stage, graph=with_gradient_sums(stage.graph, 4, None))
    options = replace(searched._stage_options(4, 2), memory_budget_bytes=search.UNLIMITED)
    made: list[Graph] = []
    plan_forms = search.plan_forms
    monkeypatch.setattr(
        search, "plan_forms", lambda graph, *args, **more: made.append(graph) or plan_forms(graph, *args, **more)
    )
    found = searched._stage(whole, stage, options, options, estimated_s)
    assert len(made) == anew
    again = searched._stage(whole, stage, options, options, estimated_s)  # an equal one takes it over
    assert len(made) == anew and again.timeline.seconds <= found.timeline.seconds


def test_an_estimate_counts_what_is_gathered_and_delivered_once_a_step() -> None:
    wanted = searching(search="baseline:ZeRO-1/2")
    whole = wanted._whole(4, None)
    drawn = next(d for d in wanted.drawing.drawn(whole) if d.schedule.name == "1f1b")
    assert min(drawn.costs.last_backward) > 0
    rest = replace(drawn.costs, last_backward=(0.0,) * 2, first_forward=(0.0,) * 2)
    assert simulate(drawn.schedule, rest).seconds < drawn.seconds


def test_parameters_keep_constraints_in_the_stage_that_has_them() -> None:
    made = planned(constraints={"head.weight": "S0R", "blocks.0.up.weight": "S0R"})
    assert str(made.stages[1].specs["head.weight"]) == "S0R"
    assert str(made.stages[0].specs["blocks.0.up.weight"]) == "S0R"


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ({"pp": 1, "dp": 2}, {}, "at least two ranks along pp"),
    ({"pp": 2, "dp": 2}, {"pipeline": Pipeline(micro_batches=5)}, "4"),
    ({"pp": 2, "dp": 2}, {"pipeline": Pipeline(micro_batches=4, split=["nowhere"])}, "nowhere"),
    ({"pp": 2, "dp": 2}, {"pipeline": Pipeline(micro_batches=3, schedule="interleaved", chunks=2)}, "micro-batches"),
    ({"pp": 2, "dp": 2}, {"pipeline": 4}, "asks for 4"),
    ({"pp": 16}, {"pipeline": Pipeline(micro_batches=16)}, "stages"),
    ((2, 2), {"pipeline": 2}, "axis"),
    ({"pp": 2, "dp": 2}, {"pipeline": "sideways"}, "pipeline"),
]


@pytest.mark.parametrize(("mesh", "options", "named"), BAD)
def test_a_request_that_cannot_be_met_is_refused_with_the_reason(
    mesh: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(AutoparError, match=named) as raised:
        planned(mesh, **options)
    text = str(raised.value)
    assert "found:" in text and "hint:" in text


def test_requests_are_checked_when_they_are_made() -> None:
    for wrong in ({"stages": 0}, {"micro_batches": True}, {"schedule": "fastest"}, {"split": "halves"}):
        with pytest.raises(AutoparError, match="hint:"):
            Pipeline(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (None, None),
        ("auto", "auto"),
        ("4", 4),
        ("micro_batches=8,schedule=1f1b", Pipeline(micro_batches=8, schedule="1f1b")),
        ("stages=2,split=blocks.3", Pipeline(stages=2, split=["blocks.3"])),
    ],
)
def test_the_command_line_reads_what_pipeline_takes(text: str | None, meant: object) -> None:
    assert pipeline_of(text) == meant


def test_the_ranks_of_a_stage_have_their_share_of_the_network() -> None:
    cluster = Cluster.load("dgx-h100:32")
    outer, part = without_axis(Mesh((4, 8), ("pp", "dp")), "pp", cluster)
    assert (str(outer), part.nodes, part.devices_per_node, part.inter_node.nics) == ("(dp=8)", 1, 8, 8)
    inner, part = without_axis(Mesh((8, 4), ("dp", "pp")), "pp", cluster)
    assert (str(inner), part.nodes, part.devices_per_node, part.inter_node.nics) == ("(dp=8)", 4, 2, 2)


def test_activations_that_are_replicated_in_a_stage_are_sent_in_parts() -> None:
    """Sums of tensor parallel products are whole on every rank. Over a slow link each sends a part, which the next
    stage gathers."""
    text = Cluster.load("p3.16xlarge").to_toml().replace("devices_per_node = 8", "devices_per_node = 2")
    within, between = text.split("[inter_node]")
    between = re.sub(r"(?m)^bandwidth_bytes_per_s = .*$", "bandwidth_bytes_per_s = 1e6", between, count=1)
    columns = {f"*{n}_proj.weight": "S0R" for n in ("q", "k", "v", "gate", "up")}
    rows = {f"*{n}_proj.weight": "RS0" for n in ("o", "down")}
    made = autopar.plan(
        seeded(llama),
        seeded(tokens),
        {"pp": 2, "tp": 2},
        Cluster.from_toml(f"{within}[inter_node]{between}"),
        pipeline=Pipeline(micro_batches=4, schedule="1f1b"),
        constraints={**columns, **rows, "input:*": "RR"},
    )
    assert isinstance(made, PipelinePlan)
    sent = [
        stage.program.tensors[name] for stage in made.stages for o, name in stage.program.results if o.kind == "sent"
    ]
    assert sent
    assert all(tensor.spec.axes for tensor in sent)
