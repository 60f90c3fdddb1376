"""Under a memory budget models are recomputed as the laws say, and to the same bits."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import passes, planner
from autopar.arguments import canonical_names
from autopar.errors import InfeasibleError
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, Planned
from autopar.planner.pricing.transfers import exposed_seconds
from autopar.planner.search import phases
from autopar.program import AGAIN
from autopar.runtime.simulation import Simulation, simulate_program
from autopar.solver.clock import only_counted
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import cluster_where_sharding_pays, subject
from tests.infeasible import smallest_budget
from tests.models import ZOO
from tests.pure.memory_graphs import runs_again

QUICK = ("mlp", "gpt2")
EXACT = [name for name, model in ZOO.items() if torch.float64 in model.dtypes]
MODELS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in EXACT]
SHARES = (0.02, 0.4)
"""Of the activations at the free plan's peak: what the budget is short of."""

NEARLY_ALL = 0.55
"""The same of GPT-2, where a little more is too much."""


@cache
def of(name: str):
    return subject(name, torch.float64, 0.1 if ZOO[name].has_dropout else 0.0)


@cache
def planned(name: str, budget: int | None = None, seconds: float = 6.0) -> Planned | None:
    """A plan for one device, whose host is too slow to offload to; None where nothing fits."""
    cluster = cluster_where_sharding_pays().sized(1)
    cluster = dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, bandwidth_bytes_per_s=1.0))
    options = Options(budget, "sgd", aliases=canonical_names(of(name).model), time_limit_s=seconds, gap=1e-4)
    try:
        return planner.plan_graph(of(name).capture.graph, Mesh((1,)), cluster, options, compare=False)
    except InfeasibleError:
        return None


def plans(name: str) -> list[Planned]:
    """From no recomputation to the most that works."""
    free = planned(name)
    assert free is not None
    kept = free.memory.by_kind.get("activations", 0)
    budgets = [int(free.memory.peak_bytes - share * kept) for share in SHARES]
    found = [(p, b) for b in budgets if (p := planned(name, b)) is not None]
    assert all(p.memory.peak_bytes <= b for p, b in found)
    return [free, *(p for p, _ in found)]


def simulated(name: str, plan: Planned, seed: int = 3) -> Simulation:
    graph = of(name).capture.graph
    lowered = passes.lower(plan.program, graph, Mesh((1,)))
    outputs, rest = simulate_program(lowered, graph, Mesh((1,)), of(name).named(), seed=seed)
    return dataclasses.replace(rest, outputs=outputs)


def assert_same_bits(one, other) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, other[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_what_is_recomputed_is_the_same_to_the_bit(name) -> None:
    free, *less = plans(name)
    assert not runs_again(free)
    assert any(map(runs_again, less))
    expected = simulated(name, free)
    for plan in less:
        result = simulated(name, plan)
        assert_same_bits(expected.outputs, result.outputs)
        assert_same_bits(expected.grads, result.grads)
        assert_same_bits(expected.buffers, result.buffers)


def test_dropout_is_drawn_again_to_the_same_bits_also_inside_attention() -> None:
    """The plan makes both again, and what is drawn differs from seed to seed."""
    free = planned("gpt2")
    assert free is not None
    shares = (0.4, 0.45, 0.5, NEARLY_ALL)
    short = [int(free.memory.peak_bytes - share * free.memory.by_kind["activations"]) for share in shares]
    tries = (planned("gpt2", budget, seconds) for seconds in (6.0, 24.0) for budget in short)
    least = next(p for p in tries if p is not None and _draws_again(p))
    expected, result, other = simulated("gpt2", free), simulated("gpt2", least), simulated("gpt2", least, seed=4)
    assert_same_bits(expected.outputs, result.outputs)
    assert_same_bits(expected.grads, result.grads)
    assert not torch.equal(result.outputs["loss"], other.outputs["loss"])


def _draws_again(plan: Planned) -> bool:
    """Whether both are made again; with so little memory that hardly anything is kept they are."""
    again = [of("gpt2").capture.graph.by_name[op.node] for op in plan.program.ops if op.name.endswith(AGAIN)]
    attention = [n for n in again if n.packet == "autopar.attention" and dict(n.kwargs)["dropout_p"] == 0.1]
    return bool(attention) and any(n.packet == "autopar.dropout" for n in again)


@pytest.mark.parametrize("name", MODELS)
def test_less_memory_is_never_faster_and_never_has_a_higher_peak(name) -> None:
    every = plans(name)
    assert len(every) > 1
    for more, less in zip(every, every[1:], strict=False):
        assert less.memory.peak_bytes <= more.memory.peak_bytes
        if less.solution.proven:
            assert more.solution.objective <= less.solution.objective * (1 + 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_with_the_memory_that_the_free_plan_needs_nothing_is_recomputed(name) -> None:
    free = planned(name)
    assert free is not None
    enough = planned(name, free.memory.peak_bytes)
    assert enough is not None
    assert enough.program == free.program


def on_two(name: str, budget: int | None, search: str) -> Planned | None:
    options = Options(
        budget, "sgd", aliases=canonical_names(of(name).model), time_limit_s=10.0, gap=1e-4, search=search
    )
    cluster = cluster_where_sharding_pays().sized(2)
    cluster = dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, bandwidth_bytes_per_s=1.0))
    try:
        return planner.plan_graph(of(name).capture.graph, Mesh((2,)), cluster, options, compare=False)
    except InfeasibleError:
        return None


def test_the_joint_search_is_never_behind_the_two_stage_one() -> None:
    free = on_two("mlp", None, "joint")
    assert free is not None
    assert on_two("mlp", None, "two-stage").program == free.program
    for share in (0.98, 0.95):
        budget = int(free.memory.peak_bytes * share)
        joint, two_stage = (on_two("mlp", budget, search) for search in ("joint", "two-stage"))
        if two_stage is not None:
            assert joint is not None
            assert joint.timeline.seconds <= two_stage.timeline.seconds * (1 + 1e-4)
            assert max(joint.memory.peak_bytes, two_stage.memory.peak_bytes) <= budget


class Siamese(torch.nn.Module):
    """A contrastive loss, whose plan on four devices holds less once its collectives are arranged."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Linear(10, 24), torch.nn.BatchNorm1d(24), torch.nn.PReLU(24), torch.nn.Linear(24, 16)
        )
        self.head = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        u, v = (functional.normalize(self.head(self.features(x)), dim=-1) for x in (a, b))
        logits, labels = u @ v.T * self.scale.exp(), torch.arange(len(a))
        loss = functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)
        return loss / 2 + 0.1 * functional.triplet_margin_loss(u, v, v.roll(1, 0))


def test_with_the_memory_that_the_free_plan_is_told_to_hold_it_is_the_plan() -> None:
    inputs = torch.empty(8, 10, dtype=torch.float64)
    graph = ColoTracer().capture(Siamese().double(), {"a": inputs, "b": inputs}).graph
    mesh, cluster = Mesh((4,)), cluster_where_sharding_pays().sized(4)
    free = planner.plan_graph(graph, mesh, cluster, Options(), compare=False)
    told = planner.plan_graph(graph, mesh, cluster, Options(free.memory.peak_bytes), compare=False)
    assert told.solution.objective == free.solution.objective
    assert told.memory.peak_bytes == free.memory.peak_bytes


@pytest.mark.parametrize("name", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_the_laws_hold_where_shardings_are_chosen_too(name) -> None:
    free = on_two(name, None, "joint")
    every = [free, *(on_two(name, int(free.memory.peak_bytes * share), "joint") for share in (1.0, 0.97, 0.95))]
    assert every[1].solution.objective == free.solution.objective
    assert not runs_again(every[1])
    for more, less in zip(every, every[1:], strict=False):
        assert less.memory.peak_bytes <= more.memory.peak_bytes
        assert less.solution.proven
        assert more.solution.objective <= less.solution.objective * (1 + 1e-4)


def test_the_two_stage_search_says_that_other_shardings_may_fit() -> None:
    options = Options(1000, "sgd", aliases=canonical_names(of("mlp").model), time_limit_s=4.0, search="two-stage")
    cluster = cluster_where_sharding_pays().sized(2)
    with pytest.raises(InfeasibleError, match='search="joint"'):
        planner.plan_graph(of("mlp").capture.graph, Mesh((2,)), cluster, options, compare=False)


@pytest.mark.parametrize("mesh", [(1,), *(pytest.param(m, marks=pytest.mark.slow) for m in [(2,), (2, 2)])], ids=str)
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "cnn", "t5"))])
def test_the_smallest_budget_that_an_error_names_works(name, mesh) -> None:
    graph, on = of(name).capture.graph, Mesh(mesh)
    cluster = cluster_where_sharding_pays().sized(on.size)
    options = Options(aliases=canonical_names(of(name).model), time_limit_s=6.0 if name == "mlp" else 30.0)

    def within(budget: int) -> Planned:
        with only_counted():  # where the wall ends a search, another one may have less work
            return planner.plan_graph(graph, on, cluster, dataclasses.replace(options, memory_budget_bytes=budget))

    with pytest.raises(InfeasibleError, match="smallest budget that works") as error:
        within(1000)
    named = smallest_budget(error.value)
    assert within(named).memory.peak_bytes <= named
    if "so far" not in str(error.value):
        with pytest.raises(InfeasibleError, match="smallest budget that works"):
            within(int(0.99 * named))


@pytest.mark.parametrize("host", ["fast", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "resnet"))])
def test_a_small_model_on_one_device_is_told_what_rows_find(name: str, host: str) -> None:
    """The exact search alone came to .78 of GPT-2's free peak, .77 of Llama's and .92 of ResNet's; and what is found
    offloads no more than hides."""
    cluster = cluster_where_sharding_pays().sized(1)
    if host == "slow":
        cluster = dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, bandwidth_bytes_per_s=1.0))

    def within(budget: int) -> Planned:
        options = Options(budget, aliases=canonical_names(of(name).model), time_limit_s=6.0)
        return planner.plan_graph(of(name).capture.graph, Mesh((1,)), cluster, options)

    free = within(10**12)
    with pytest.raises(InfeasibleError) as error:
        within(1000)
    named = smallest_budget(error.value)
    assert named <= 0.7 * free.memory.peak_bytes
    plan = within(named)
    assert plan.memory.peak_bytes <= named
    assert exposed_seconds(plan.program) <= 0.05 * plan.timeline.seconds
    assert host == "fast" or not any(op.kind == "offload" for op in plan.program.ops)


@pytest.mark.slow
def test_a_deep_model_on_one_device_is_told_a_budget_far_below_its_free_plan() -> None:
    """By rules, then by rows; in 4 s rules and the exact search alone came to .456 of it."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=256, n_head=4, n_positions=256, vocab_size=8192))
        ids = torch.empty(8, 256, dtype=torch.int64)
    graph = ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).graph

    cluster = Cluster.load("dgx-h100").sized(1)

    def within(budget: int) -> Planned:
        return planner.plan_graph(graph, Mesh((1,)), cluster, Options(budget, time_limit_s=20.0))

    free = within(10**12)
    with pytest.raises(InfeasibleError) as error:
        within(10**6)
    named = smallest_budget(error.value)
    assert named <= 0.45 * free.memory.peak_bytes
    assert within(named).memory.peak_bytes <= named


def test_no_error_names_more_than_the_plan_without_a_budget_holds(monkeypatch) -> None:
    """Also where there is no time to look for less than is known: here every baseline holds more than that plan."""
    monkeypatch.setattr(phases, "search_smallest_peak", lambda *_: iter(()))
    graph, on = of("cnn").capture.graph, Mesh((2, 4))
    cluster = cluster_where_sharding_pays().sized(on.size)
    with only_counted():
        free = planner.plan_graph(graph, on, cluster, Options(time_limit_s=5.0))
        with pytest.raises(InfeasibleError) as error:
            planner.plan_graph(graph, on, cluster, Options(1000, time_limit_s=2.0))
    assert smallest_budget(error.value) <= free.memory.peak_bytes
