"""Mixtures of experts on routed rows: what a step gives where tokens go to the ranks of their experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar import planner
from autopar.errors import AutoparError
from autopar.ir import Graph, Value
from autopar.mesh import Mesh
from autopar.planner.graphs.routed import with_routed_experts
from autopar.planner.search.forms import as_planned, plan_forms
from autopar.program import Program
from autopar.sharding.strategy import moved_axes
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import (
    Promoted,
    Subject,
    assert_equal,
    cluster_where_sharding_pays,
    eager,
    predicted_during_the_step,
    run,
)

EXPERTS, CHOSEN = 8, 2
SIZES: dict[str, Any] = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=24,
    max_position_embeddings=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
DEEPSEEK: dict[str, Any] = dict(
    moe_intermediate_size=8,
    n_routed_experts=EXPERTS,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=0,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(SIZES, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, output_router_logits=True),
    "Qwen3Moe": dict(SIZES, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=8, head_dim=8),
    "DeepseekV3": dict(SIZES, num_experts_per_tok=CHOSEN, **DEEPSEEK),
    "GptOss": dict(SIZES, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, head_dim=8, sliding_window=4),
}
ROUTINGS = ("as it comes", "some experts get none", "one expert gets all")
ALL_ROOM = 8.0
"""Room with which no rank gets more rows than it has room for, whatever the router does."""


@functools.cache
def of_model(name: str, routing: str = "as it comes", length: int = 8) -> Subject:
    """A model whose experts are on routed rows, beside one device."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], experts_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    for parameter, p in model.named_parameters():
        if routing != "as it comes" and parameter.endswith(("gate.weight", "router.weight")):
            with torch.no_grad():
                p[3 if routing == "some experts get none" else CHOSEN :] = 0
                p[: 3 if routing == "some experts get none" else CHOSEN] *= 100
    ids = torch.randint(3, config.vocab_size, (8, length))
    inputs = {"input_ids": ids, "labels": ids}
    with Promoted():
        capture = ColoTracer().capture(model, inputs)
        routed = dataclasses.replace(capture, graph=with_routed_experts(capture.graph, ALL_ROOM))
        return Subject(model, inputs, routed, eager(model, inputs))


def graph_of(name: str) -> Graph:
    """As it is captured."""
    of = of_model(name)
    return ColoTracer().capture(of.model, of.inputs).graph


TWO_RANKS = Mesh((2,)), cluster_where_sharding_pays().sized(2)


def moving(program: Program) -> int:
    return sum(bool(op.strategy and moved_axes(op.strategy)) for op in program.ops)


@pytest.mark.parametrize("name", MODELS)
def test_all_that_lies_between_two_products_is_on_routed_rows(name: str) -> None:
    graph = of_model(name).capture.graph
    packets = [n.packet for n in graph.nodes]
    assert not {"autopar.experts_mm", "autopar.experts_mm_weight"} & set(packets)
    assert packets.count("autopar.route") == 1
    # The tokens and their weights there, the sum back; in the backward the gradients of these.
    assert (packets.count("autopar.send"), packets.count("autopar.collect")) == (3, 3)
    assert with_routed_experts(graph, ALL_ROOM) is graph


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (8,)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_tokens_go_to_their_experts_equals_one_device(name: str, mesh: tuple[int, ...]) -> None:
    of = of_model(name)
    ran = run(of, mesh, search="baseline:EP x FSDP")
    assert moving(ran.planned.program) >= 7
    assert of.reference is not None
    assert_equal(ran.result, of.reference, 1e-9)
    assert ran.result.peak_memory <= predicted_during_the_step(of, ran, mesh)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_over_one_axis_and_weights_stored_over_both_equal_one_device(name: str, axis: int) -> None:
    of = of_model(name)
    ran = run(of, (2, 2), search=f"baseline:EP over axis {axis} x FSDP")
    assert moving(ran.planned.program) >= 7
    stored = next(op for op in ran.planned.program.ops if op.kind == "input" and len(op.writes[0].meta.shape) == 3)
    assert stored.writes[0].spec.dims[0] == (axis,)
    assert stored.writes[0].spec.ways(Mesh((2, 2))) == 4
    assert of.reference is not None
    assert_equal(ran.result, of.reference, 1e-9)


@pytest.mark.parametrize("routing", ROUTINGS[1:])
def test_whatever_the_router_does_is_what_one_device_does(routing: str) -> None:
    of = of_model("Mixtral", routing)
    assert of.reference is not None
    for mesh in ((4,), (2, 2)):
        assert_equal(run(of, mesh, search="baseline:EP x FSDP").result, of.reference, 1e-9)


@pytest.mark.parametrize("name", [n if n == "Mixtral" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_plans_of_every_kind_equal_one_device(name: str) -> None:
    of, ways = of_model(name), set()
    assert of.reference is not None
    for seed in range(6):
        for mesh in ((2,), (2, 2)):
            ran = run(of, mesh, search=f"random:{seed}")
            assert_equal(ran.result, of.reference, 1e-9)
            graph = of.capture.graph
            ops = (op for op in ran.planned.program.ops if op.strategy and "routed" in graph.by_name[op.node].packet)
            ways |= {choice for op in ops for choice in op.strategy.axes}
    assert {"e", "t0", "k", "n"} <= ways, ways


def test_a_router_that_fills_one_rank_is_an_error_of_the_step() -> None:
    of = of_model("Mixtral", "one expert gets all", 12)
    own = ColoTracer().capture(of.model, of.inputs)
    tight = dataclasses.replace(of, capture=dataclasses.replace(own, graph=with_routed_experts(own.graph, 1.0)))
    with pytest.raises(AutoparError, match=r"model\.layers\.0\.mlp.*more rows than there is room for"):
        run(tight, (4,), search="baseline:EP x FSDP")


@pytest.mark.parametrize(
    ("asked", "room"),
    [({}, 1.5), ({"expert_room": 3.0}, 3.0), ({"expert_room": None}, None), ({"backend": "inductor"}, None)],
    ids=str,
)
def test_experts_are_planned_on_routed_rows_unless_lengths_must_be_known(
    asked: dict[str, Any], room: float | None
) -> None:
    own = graph_of("Qwen3Moe")
    planned = plan_forms(own, *TWO_RANKS, planner.Options(time_limit_s=60.0, gap=0.05, **asked)).decisions.graph
    assert planned.digest == (own if room is None else with_routed_experts(own, room)).digest


def test_a_known_way_to_train_keeps_tokens_with_their_ranks_unless_it_is_one_that_sends_them() -> None:
    own = graph_of("Qwen3Moe")
    for name, form in (("ZeRO-3", own), ("EP x FSDP", with_routed_experts(own, 1.5))):
        best = plan_forms(own, *TWO_RANKS, planner.Options(search=f"baseline:{name}"))
        assert best.decisions.graph.digest == form.digest
        assert as_planned(own, form.digest, best.program).digest == form.digest


def test_a_constraint_on_what_is_not_among_routed_rows_is_met() -> None:
    own = graph_of("Mixtral")
    routed = with_routed_experts(own, 1.5)
    gone = next(n for n in own.nodes if n.name not in routed.by_name and n.packet == "aten.expand")
    spec = "S0" + "R" * (len(own.meta(Value(gone.name)).shape) - 1)
    planned = plan_forms(own, *TWO_RANKS, planner.Options(constraints={gone.name: spec}))
    assert planned.decisions.graph.digest == own.digest


def test_what_is_sent_is_a_row_for_each_choice_of_a_ranks_tokens() -> None:
    of, mesh = of_model("Mixtral"), Mesh((4,))
    ran = run(of, (4,), search="baseline:EP x FSDP")
    graph, sent = of.capture.graph, {}
    for op in ran.planned.program.ops:
        for each in op.sent:
            sent.setdefault((graph.by_name[op.node].packet, op.writes[0].meta.shape[-1]), []).append(each.bytes)
    choices, wide = 8 * 8 * CHOSEN // mesh.size, 16
    rows = choices * wide * 8
    assert sent["autopar.send", wide] == sent["autopar.collect", wide] == [rows, rows]
    assert sent["autopar.send", 1] == sent["autopar.collect", 1] == [choices * 8]
    assert sent["autopar.route", EXPERTS] == [choices * 8]


def test_a_saved_plan_runs_as_the_plan_did() -> None:
    of = of_model("Mixtral")
    options: dict[str, Any] = {"mesh": (2,), "cluster": cluster_where_sharding_pays(), "expert_room": ALL_ROOM}
    plan = autopar.plan(of.model, of.inputs, search="baseline:EP x FSDP", **options)
    again = autopar.Plan.from_json(plan.to_json())
    assert again == plan
    assert "spmd.route(" in plan.source
    first, second = (autopar.simulate(of.model, of.inputs, plan=p) for p in (plan, again))
    assert all(torch.equal(first.grads[n], second.grads[n]) for n in first.grads)


def test_a_plan_says_what_room_its_ranks_have_for_rows() -> None:
    of = of_model("Mixtral")
    options: dict[str, Any] = {"mesh": (2,), "cluster": cluster_where_sharding_pays(), "expert_room": 2.0}
    sending = autopar.plan(of.model, of.inputs, search="baseline:EP x FSDP", **options)
    assert "spread in 1 layers; each rank has room for 4 times the mean" in " ".join(str(sending).split())
    staying = autopar.plan(of.model, of.inputs, search="baseline:ZeRO-3", **options)
    assert "times the mean" not in str(staying)


def test_lengths_that_do_not_divide_are_planned_as_they_were() -> None:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**MODELS["Mixtral"], experts_implementation="eager")
    ).double()
    ids = torch.randint(3, 24, (3, 5))
    inputs = {"input_ids": ids, "labels": ids}
    with Promoted():
        capture, expected = ColoTracer().capture(model, inputs), eager(model, inputs)
    routed = dataclasses.replace(capture, graph=with_routed_experts(capture.graph, 1.5))
    for mesh in ((2,), (4,)):
        assert_equal(run(Subject(model, inputs, routed, expected), mesh).result, expected, 1e-9)


def test_a_simulation_has_room_for_what_a_plan_has_none_for() -> None:
    of = of_model("Mixtral", "one expert gets all", 12)
    options: dict[str, Any] = {"mesh": (4,), "cluster": cluster_where_sharding_pays(), "expert_room": 1.0}
    plan = autopar.plan(of.model, of.inputs, search="baseline:EP x FSDP", **options)
    roomy = autopar.plan(of.model, of.inputs, search="baseline:EP x FSDP", **{**options, "expert_room": ALL_ROOM})
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.mlp.*room for all"):
        ran = autopar.simulate(of.model, of.inputs, plan)
    expected = autopar.simulate(of.model, of.inputs, roomy)
    assert all(torch.equal(ran.grads[n], expected.grads[n]) for n in expected.grads)


def test_room_is_at_least_what_an_even_router_needs() -> None:
    with pytest.raises(AutoparError, match="expert_room"):
        planner.Options(expert_room=0.5)


def test_a_graph_without_experts_has_one_form() -> None:
    graph = Graph((), (), ())
    assert with_routed_experts(graph, 1.5) is graph
