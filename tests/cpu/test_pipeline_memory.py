"""What a pipeline holds is what was predicted, with the messages that a rank receives ahead and those that it sent."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.errors import InfeasibleError
from autopar.mesh import Cluster, Mesh
from autopar.pipelines.messages import Message, waiting
from autopar.pipelines.orders import schedule
from autopar.planner import Options, plan_graph
from autopar.planner.pipeline.carry import Known, carried
from autopar.planner.pricing.prices import Prices
from autopar.planner.search.phases import Free, Given
from autopar.plans.pipeline import PipelinePlan
from autopar.tracer import ColoTracer
from tests.cpu.capture_checks import eager
from tests.cpu.model_checks import cluster_where_sharding_pays
from tests.cpu.test_copied_parts import ROWS, WIDTH, Stack

SOON = {"training_steps": 100, "time_limit": 60}
"""A plan for a short run is searched until one is there that fits, on a slow machine too."""


def without_offloading(ranks: int) -> Cluster:
    made = cluster_where_sharding_pays()
    return replace(made.sized(ranks), host=replace(made.host, bandwidth_bytes_per_s=1.0))


def gpt2(**sizes: int) -> GPT2LMHeadModel:
    without_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **without_dropout, n_positions=32, use_cache=False))


@cache
def plan(name: str, micro_batches: int, stages: int = 2, budget: int | None = None) -> PipelinePlan:
    mesh = {"pp": stages, "dp": 4 // stages}
    asked = autopar.Pipeline(stages=stages, micro_batches=micro_batches, schedule=name)
    options = {} if budget is None else {"memory_budget": budget, **SOON}
    x = {"x": torch.zeros(ROWS, WIDTH)}
    cluster = without_offloading(4)
    return autopar.plan(Stack(), x, mesh=mesh, cluster=cluster, optimizer="sgd", pipeline=asked, **options)


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb"])
def test_no_rank_holds_more_than_was_predicted(name, micro_batches) -> None:
    made = plan(name, micro_batches)
    held = autopar.simulate(Stack(), {"x": torch.randn(ROWS, WIDTH)}, made).peak_memory
    assert held <= made.peak_memory <= (1.1 if name == "interleaved" else 1.03) * held


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb"])
def test_no_rank_holds_more_than_its_budget(name, micro_batches) -> None:
    budget = int(0.85 * plan(name, micro_batches).peak_memory)
    made = plan(name, micro_batches, budget=budget)
    held = autopar.simulate(Stack(), {"x": torch.randn(ROWS, WIDTH)}, made).peak_memory
    assert held <= made.peak_memory <= min(budget, 1.03 * held)


@pytest.mark.slow
def test_zero_bubbles_give_way_to_a_budget() -> None:
    """Where a rank cannot hold what it would put off, it puts off less, or runs backwards whole: as 1F1B does."""
    budget = int(0.8 * plan("zb", 4).peak_memory)
    made = plan("zb", 4, budget=budget)
    free = plan("zb", 4)
    assert made.peak_memory <= budget
    assert made.schedule.order != free.schedule.order
    torch.manual_seed(0)
    model, x = Stack(), {"x": torch.randn(ROWS, WIDTH)}
    run = autopar.simulate(model, x, made)
    _, grads, _ = eager(model, x)
    for name, grad in grads.items():
        torch.testing.assert_close(run.grads[name], grad)


def test_two_stages_of_a_rank_share_its_budget() -> None:
    """What one stage needs at least, the other one leaves; and a rank that cannot hold split backwards runs them
    whole."""
    model = gpt2(n_embd=32, n_layer=8, n_head=4, vocab_size=64)
    ids = torch.randint(3, 64, (8, 16))
    inputs = {"input_ids": ids, "labels": ids}
    asked = autopar.Pipeline(stages=2, micro_batches=4, schedule="zbv")
    options = {"mesh": {"pp": 2, "dp": 2}, "cluster": cluster_where_sharding_pays().sized(4), "optimizer": "sgd"}
    free = autopar.plan(model, inputs, pipeline=asked, **options)
    budget = int(0.5 * free.peak_memory)
    made = autopar.plan(model, inputs, pipeline=asked, memory_budget=budget, **SOON, **options)
    assert made.peak_memory <= budget
    kinds = [{a.kind for a in row} for row in made.schedule.order]
    assert made.schedule.name == "zbv" and any("I" not in row for row in kinds)
    run = autopar.simulate(model, inputs, made)
    assert run.peak_memory <= made.peak_memory
    for name, grad in eager(model, inputs)[1].items():
        torch.testing.assert_close(run.grads[name], grad, rtol=1e-4, atol=1e-5)


def test_a_budget_that_no_pipeline_fits_is_told_with_one_that_works() -> None:
    with pytest.raises(InfeasibleError, match="of the pipeline holds more") as told:
        plan("1f1b", 2, budget=4096)
    assert "4.00 KiB" in str(told.value)
    least = int(re.findall(r"memory_budget=(\d+)", str(told.value))[0])
    assert 4096 < plan("1f1b", 2, budget=least).peak_memory <= least


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_outputs_of_all_micro_batches_are_held(name) -> None:
    """Logits are the caller's: those of each micro-batch until the last one's, and once more when they are joined."""
    model = gpt2(n_embd=8, n_layer=2, n_head=2, vocab_size=2048)
    ids = torch.randint(2048, (16, 16))
    asked = autopar.Pipeline(stages=2, micro_batches=8, schedule=name)
    batch = {"input_ids": ids, "labels": ids}
    made = autopar.plan(model, batch, mesh={"pp": 2}, cluster=without_offloading(2), optimizer="sgd", pipeline=asked)
    held = autopar.simulate(model, batch, made).peak_memory
    logits = 16 * 16 * 2048 * 4
    assert held > 2 * logits
    assert held <= made.peak_memory <= 1.03 * held


def test_parameters_of_several_stages_are_stored_alike() -> None:
    """Their parts of the gradient are added up over the stages, shard by shard."""
    model = gpt2(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    ids = torch.randint(3, 64, (8, 16))
    inputs = {"input_ids": ids, "labels": ids}
    options = {
        "mesh": {"pp": 2, "dp": 2},
        "cluster": without_offloading(4),
        "optimizer": "sgd",
        "pipeline": autopar.Pipeline(stages=2, micro_batches=2, schedule="1f1b"),
    }
    free = autopar.plan(model, inputs, **options)
    made = autopar.plan(model, inputs, memory_budget=int(0.7 * free.peak_memory), **SOON, **options)
    assert made.tied
    for name, stages in made.tied.items():
        assert len({str(made.stages[s].specs[name]) for s in stages}) == 1
    _, grads, _ = eager(model, inputs)
    found = autopar.simulate(model, inputs, made).grads
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5)


def test_what_a_rank_sent_waits_until_its_receiver_is_known_to_have_it() -> None:
    made = schedule("gpipe", 2, 3, 1, None, None)
    first = [(str(action), coming, going) for action, coming, going in waiting(made.order, made.rank_of, 0)]
    sent = tuple(Message("F", 1, i) for i in range(3))
    assert [going for action, _, going in first if action.startswith("0F")] == [(), sent[:1], sent[:2]]
    assert [going for action, _, going in first if not action.startswith("0F")] == [(), (), ()]
    coming = {action: each for action, each, _ in first}
    assert coming["0F0"] == coming["0F1"] == ()
    assert [m.kind for m in coming["0F2"]] == ["B"]
    last = [(str(action), going) for action, _, going in waiting(made.order, made.rank_of, 1)]
    assert [len(going) for action, going in last if action.startswith("1B")] == [0, 1, 2]


def test_a_stage_is_held_otherwise_than_the_whole_where_it_does_not_fit_so() -> None:
    """The search begins from the shardings of the whole, and what is kept, recomputed and offloaded is chosen anew."""
    capture = ColoTracer().capture(Stack(), {"x": torch.zeros(ROWS, WIDTH)})
    mesh, cluster, options = Mesh((4,)), without_offloading(4), Options(optimizer="sgd", memory_budget_bytes=2**40)
    whole, prices = plan_graph(capture.graph, mesh, cluster, options), Prices(mesh, cluster)
    known = Known(whole, like={})
    same = carried(known, capture.graph, prices, options)
    assert same is not None and same.solution.objective == pytest.approx(whole.solution.objective)
    budget = int(0.85 * same.memory.peak_bytes)
    tight = replace(options, memory_budget_bytes=budget)
    over = carried(known, capture.graph, prices, tight)
    assert over is not None and over.memory.peak_bytes > budget
    held = plan_graph(capture.graph, mesh, cluster, tight, before={Free: Given(known.still)}, prices=prices)
    assert held.memory.peak_bytes <= budget
    assert "given choices" in [record.phase for record in held.trace]
