"""The error of a budget that nothing fits: the layer that holds the least, and changes that fit. One process."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import planning, remedies
from autopar.errors import InfeasibleError, Shortfall
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, plan_graph
from autopar.planner.memory.exact import peak, profile
from autopar.planning import capture_model
from autopar.tracer.calls import Call, bind
from autopar.tracer.tracer import as_call
from tests.infeasible import smallest_budget

ROWS, WIDTH = 64, 16
CPU = "cpu-2"


class Layered(nn.Module):
    """Small layers around one with ``hidden`` features."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.after(self.wide(self.before(x))), target)


class Language(nn.Module):
    """A loss over logits, which it returns too unless it is ``alone``."""

    def __init__(self, classes: int = 512, *, alone: bool = False) -> None:
        super().__init__()
        self.alone = alone
        self.embed = nn.Embedding(classes, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor, target: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embed(ids)))
        loss = nn.functional.cross_entropy(logits, target)
        return loss if self.alone else {"loss": loss, "logits": logits}


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randn(count, WIDTH)


def call_of(model: nn.Module, inputs: Any) -> Call:
    return bind(model, *as_call(inputs))


def refused(model: nn.Module, inputs: Any, budget: float, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        autopar.plan(model, inputs, **{"mesh": (1,), "cluster": CPU, **options}, memory_budget=int(budget))
    return caught.value


# --- what is held, and where ---


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,)], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_the_tensors_of_a_peak_add_up_to_it(mesh, steps) -> None:
    model, options = Layered(33), Options(accumulation_steps=steps, device="cpu", time_limit_s=5)
    graph = capture_model(model, call_of(model, rows()), options, 1).graph
    on = Mesh(mesh)
    planned = plan_graph(graph, on, Cluster.load(CPU).sized(on.size), options)
    found = peak(planned.program, planned.decisions.graph, on, options)
    same = profile(planned.program, planned.decisions.graph, on, options)
    assert (found.bytes, found.by_kind) == (same.peak_bytes, same.by_kind)
    kinds = {kind for kind, _ in found.by_node}
    sums = {kind: sum(size for (k, _), size in found.by_node.items() if k == kind) for kind in kinds}
    assert sums == dict(found.by_kind)


def test_an_error_names_the_layer_whose_values_are_held() -> None:
    error = refused(Layered(1024), rows(512), 10)
    assert re.search(r"the least is [\d.]+ MiB, held in the (forward|backward) of wide\.\d: ", error.found)
    assert re.search(r"(activations|temporaries) [\d.]+ MiB \([\d.]+ MiB of wide\.\d\)", error.found)


def test_an_error_names_the_layer_that_holds_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 8, bias=False))
    model[2].requires_grad_(False)
    error = refused(model, torch.randn(2, 8), 10, optimizer="sgd")
    assert re.search(r"parameters [\d.]+ KiB \([\d.]+ KiB of 1\)", error.found)


def test_the_step_of_the_optimizer_is_named() -> None:
    error = refused(Layered(1024), rows(4), 10, optimizer="adamw foreach")
    assert "held in the optimizer's step: temporaries of the optimizer " in error.found


def test_what_belongs_to_no_layer_is_named_by_its_line() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.scale).exp().sum()

    error = refused(Bare(), torch.randn(256, 4), 10)
    assert re.search(r"held in the (forward|backward), outside modules \(test_remedies\.py:\d+\): ", error.found)


# --- what would fit ---


def fitting(model: nn.Module, inputs: Any, budget: int, hint: str, **options: Any) -> set[str]:
    """Plan with each change that a hint names; returns their kinds."""
    found: dict[str, dict[str, Any]] = {}
    if "mixed_precision" in hint:
        found["precision"] = {"mixed_precision": "bf16"}
    if ranks := re.search(r"on mesh (\([\d, ]+\)) with (\d+) ranks", hint):
        shape = tuple(map(int, re.findall(r"\d+", ranks[1])))
        assert torch.Size(shape).numel() == int(ranks[2])
        found["ranks"] = {"mesh": shape}
    if micro := re.search(r"accumulation_steps=(\d+) and batches of (\d+)", hint):
        assert len(inputs[0]) == int(micro[1]) * int(micro[2])
        found["batches"] = {"accumulation_steps": int(micro[1])}
    for kind, change in found.items():
        given = tuple(t[: int(micro[2])] for t in inputs) if kind == "batches" and micro else inputs
        plan = autopar.plan(model, given, **{"mesh": (1,), "cluster": CPU, **options, **change}, memory_budget=budget)
        assert plan.peak_memory <= budget, kind
    return set(found)


@pytest.mark.parametrize(
    ("share", "mesh", "kinds"),
    [(0.8, (1,), {"precision", "ranks", "batches"}), (0.4, (1,), {"ranks", "batches"}), (0.5, (2,), {"ranks"})],
)
def test_what_an_error_names_fits(share, mesh, kinds) -> None:
    model, inputs = Layered(256), rows(256)
    budget = int(share * smallest_budget(refused(model, inputs, 10, mesh=mesh)))
    error = refused(model, inputs, budget, mesh=mesh)
    assert "it fits with" in error.hint or "it fits on" in error.hint
    assert fitting(model, inputs, budget, error.hint, mesh=mesh) >= kinds


@pytest.mark.slow
def test_changes_are_made_together_where_none_alone_fits() -> None:
    model, inputs = Layered(256), rows(256)
    smallest = smallest_budget(refused(model, inputs, 10))
    budget = int(0.11 * smallest)
    error = refused(model, inputs, budget)
    named = re.search(
        r"on mesh \((\d),\) with \d ranks and with accumulation_steps=(\d) and batches of (\d+)", error.hint
    )
    assert named, error.hint
    ranks, steps, batch = map(int, named.groups())
    plan = autopar.plan(model, rows(batch), (ranks,), CPU, accumulation_steps=steps, memory_budget=budget)
    assert plan.peak_memory <= budget
    for alone in ({"mesh": (8,)}, {"mixed_precision": "bf16"}):
        assert smallest_budget(refused(model, inputs, 10, **alone)) > budget
    assert smallest_budget(refused(model, rows(256 // 8), 10, accumulation_steps=8)) > budget


def test_micro_batches_multiply_those_that_were_asked_for() -> None:
    model, inputs = Layered(256), rows(256)
    budget = 0.8 * smallest_budget(refused(model, inputs, 10, accumulation_steps=3))
    assert "accumulation_steps=6 and batches of 128" in refused(model, inputs, budget, accumulation_steps=3).hint


def test_local_batches_grow_with_the_ranks() -> None:
    model, inputs = Layered(256), rows(256)
    budget = int(0.8 * smallest_budget(refused(model, inputs, 10, batch="local")))
    error = refused(model, inputs, budget, batch="local")
    assert "batches" in fitting(model, inputs, budget, error.hint, batch="local")


def test_axes_keep_their_names() -> None:
    model, inputs = Layered(256), rows(256)
    budget = 0.5 * smallest_budget(refused(model, inputs, 10, mesh={"dp": 2}))
    assert re.search(r"on mesh \(dp=\d+\) with", refused(model, inputs, budget, mesh={"dp": 2}).hint)


def test_a_running_job_hears_how_many_ranks_would_do() -> None:
    model, inputs = Layered(256), rows(256)
    budget = int(0.8 * smallest_budget(refused(model, inputs, 10)))
    with pytest.raises(InfeasibleError, match=r"in a job of 2 ranks on mesh \(2,\)"):
        autopar.autoparallelize(model, inputs, mesh=(1,), cluster=CPU, memory_budget=budget)
    assert type(model) is Layered


def test_of_a_range_the_largest_has_to_fit() -> None:
    model, inputs = Layered(256), rows(64)
    sizes = {name: {0: torch.export.Dim("batch", min=2, max=256)} for name in ("x", "target")}
    budget = int(0.8 * smallest_budget(refused(model, inputs, 10, dynamic_shapes=sizes)))
    error = refused(model, inputs, budget, dynamic_shapes=sizes)
    assert "accumulation_steps" not in error.hint
    assert fitting(model, inputs, budget, error.hint, dynamic_shapes=sizes) >= {"ranks"}


def ids() -> tuple[Tensor, Tensor]:
    return torch.randint(512, (256,)), torch.randint(512, (256,))


def test_the_graph_of_a_loss_alone_is_that_of_a_model_that_returns_it() -> None:
    more, alone = Language(), Language(alone=True)
    graphs = [capture_model(m, call_of(m, ids()), Options(), 1).graph for m in (more, alone)]
    assert [n.op for n in remedies.loss_alone(graphs[0]).nodes] == [n.op for n in graphs[1].nodes]
    assert len(remedies.loss_alone(graphs[0]).outputs) == len(graphs[1].outputs)


def test_logits_need_not_be_returned(monkeypatch) -> None:
    for module in (remedies, planning.planner.search.forms):
        monkeypatch.setitem(module.CHUNKS, "cpu", 256)
    budget = int(0.9 * smallest_budget(refused(Language(), ids(), 10)))
    assert "if forward returns only the loss" in refused(Language(), ids(), budget).hint
    assert autopar.plan(Language(alone=True), ids(), (1,), CPU, memory_budget=budget).peak_memory <= budget


# --- where nothing is tried ---


@pytest.fixture
def tried(monkeypatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(remedies.Trial, "fits", lambda trial, seconds: bool(seen.append(trial.text)))
    return seen


def test_what_is_hopeless_is_not_tried(tried) -> None:
    error = refused(Layered(64), rows(), 10)
    assert not tried
    assert error.hint.endswith("; more ranks need less each.")


def test_where_time_was_short_the_greatest_changes_are_tried(tried) -> None:
    request = remedies.Request(
        Layered(64), call_of(Layered(64), rows()), (1,), Cluster.load(CPU), Options(), False, None, 0
    )
    for late, trials in ((False, 7 + 15 + 9), (True, 3 + 3 + 1)):
        tried.clear()
        error = InfeasibleError("No plan fits.", hint="memory_budget=100; more ranks need less each.")
        error.shortfall = Shortfall(90, {"activations": 100}, (1,), late)
        assert remedies.with_remedies(error, request) is error
        assert len(tried) == trials
    assert tried[0] == "on mesh (8,) with 8 ranks"
    assert "accumulation_steps=8 " in tried[1]
    assert "bf16" in tried[2], "which divides memory least"


def test_a_trial_may_take_all_the_time_where_the_search_had_too_little(monkeypatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(remedies.Trial, "fits", lambda trial, s: bool(seconds.append(s)))
    request = remedies.Request(
        Layered(64), call_of(Layered(64), rows()), (1,), Cluster.load(CPU), Options(time_limit_s=40), False, None, 0
    )
    remedies.remedies(request, Shortfall(90, {"activations": 100}, (1,), late=False))
    assert max(seconds) <= 10
    seconds.clear()
    remedies.remedies(request, Shortfall(90, {"activations": 100}, (1,), late=True))
    assert all(39 < s <= 40 for s in seconds)


def test_all_trials_take_no_longer_than_the_search(tried) -> None:
    options = Options(time_limit_s=0.1)
    request = remedies.Request(
        Layered(64), call_of(Layered(64), rows()), (1,), Cluster.load(CPU), options, False, None, 0
    )
    assert remedies.remedies(request, Shortfall(90, {"activations": 100}, (1,), late=False)) == []
    assert not tried


def test_a_batch_is_cut_evenly_and_a_precision_is_kept(tried) -> None:
    error = refused(Layered(256), rows(251), 0.9 * smallest_budget(refused(Layered(256), rows(251), 10)))
    assert "accumulation_steps" not in error.hint
    assert any("bf16" in text for text in tried)
    assert not any("accumulation_steps" in text for text in tried)
    tried.clear()
    wanted = {"mixed_precision": "bf16"}
    refused(Layered(256), rows(251), 0.9 * smallest_budget(refused(Layered(256), rows(251), 10, **wanted)), **wanted)
    assert tried
    assert not any("bf16" in text for text in tried)


def test_a_model_that_refuses_another_batch_is_no_error() -> None:
    class Fixed(Layered):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return super().forward(x.view(256, WIDTH), target)

    budget = 0.9 * smallest_budget(refused(Fixed(256), rows(256), 10))
    hint = refused(Fixed(256), rows(256), budget).hint
    assert "accumulation_steps" not in hint
    assert "on mesh (2,) with 2 ranks" in hint


def test_an_error_with_remedies_can_be_sent_to_other_ranks() -> None:
    error = refused(Layered(64), rows(), 10)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_one_mesh_that_nothing_fits_does_not_end_the_search(monkeypatch) -> None:
    real, meshes = planning.search_on, []

    def first_refused(capture, mesh, *rest):
        meshes.append(mesh)
        if len(meshes) == 1:
            raise InfeasibleError("No plan fits the memory budget.")
        return real(capture, mesh, *rest)

    monkeypatch.setattr(planning, "search_on", first_refused)
    options = Options(time_limit_s=8)
    capture = capture_model(model := Layered(64), call_of(model, rows()), options, 4)
    plan = planning.planned_on_meshes(capture, None, Cluster.load("dgx-h100:4"), 4, options, 0.0, None)
    assert len(meshes) > 1
    assert plan.mesh != meshes[0]
