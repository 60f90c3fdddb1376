"""Every model of the zoo, by the plan that the planner chooses: the same step as on one device."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import autopar
from autopar.mesh import Cluster
from autopar.structure import flatten
from tests.cpu.model_checks import (
    TOLERANCE,
    Ran,
    Reference,
    assert_equal,
    assert_equals_one_device,
    eager,
    predicted_during_the_step,
    run,
    subject,
)
from tests.models import ZOO

MESHES = [(2,), (4,), (2, 2), (2, 4), (2, 2, 2)]
EVERY_STEP = (2, 2)
"""The mesh on which `make test` tries every model; the others are for `make test-all`."""

CASES = [
    (name, mesh, dtype)
    for name, model in ZOO.items()
    for mesh in MESHES + [(3,)] * (name in ("cnn", "llama"))
    for dtype in model.dtypes
]


def cases(quick):
    """Parameters of a test; those that are not quick are marked as slow."""
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if quick(*case) else [pytest.mark.slow])
        for case in CASES
    ]


def in_quick_run(name, mesh, dtype):
    return mesh in (EVERY_STEP, (3,)) and dtype is ZOO[name].dtypes[-1]


@cache
def planned(name: str, mesh: tuple[int, ...], dtype: torch.dtype) -> Ran:
    return run(subject(name, dtype), mesh)


@pytest.mark.parametrize(("name", "mesh", "dtype"), cases(in_quick_run))
def test_the_planned_step_equals_one_device(name, mesh, dtype) -> None:
    assert_equals_one_device(subject(name, dtype), planned(name, mesh, dtype).result, dtype)


@pytest.mark.parametrize("name", ZOO)
def test_the_plan_shards_the_work(name) -> None:
    """Where sharding pays no model is left whole, so that the tests above mean something."""
    ran = planned(name, EVERY_STEP, ZOO[name].dtypes[-1])
    assert ran.collectives.total() > 5
    compute = [op for op in ran.planned.program.ops if op.strategy is not None]
    shared = [op for op in compute if any(s is not None and s.axes for s in op.strategy.outputs)]
    assert len(shared) > len(compute) / 2


@pytest.mark.parametrize("name", ZOO)
def test_the_peak_on_one_device_is_the_predicted_one(name) -> None:
    of = subject(name, ZOO[name].dtypes[-1])
    ran = run(of, (1,))
    predicted = predicted_during_the_step(of, ran, (1,))
    assert 0.75 * predicted <= ran.result.peak_memory <= 1.02 * predicted


@pytest.mark.parametrize("name", ZOO)
def test_the_peak_on_a_mesh_is_at_most_the_predicted_one_and_what_collectives_pack(name) -> None:
    of = subject(name, ZOO[name].dtypes[-1])
    ran = planned(name, EVERY_STEP, ZOO[name].dtypes[-1])
    packed = 2 * max(t.bytes for op in ran.planned.program.collectives for t in op.writes)
    assert ran.result.peak_memory <= 1.02 * predicted_during_the_step(of, ran, EVERY_STEP) + packed


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("mlp", "cnn", "outside", "gpt2") else [pytest.mark.slow]) for n in ZOO]
)
def test_through_the_public_interface(name) -> None:
    dtype = torch.float32
    model, inputs = ZOO[name].made(dtype)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plan = autopar.plan(model, inputs, mesh=(2, 2), cluster="dgx-h100", constraints=batch_is_cut(inputs))
    result = autopar.simulate(model, inputs, plan=plan)
    expected = eager(model, inputs)
    tensors, returned = flatten(result.outputs)
    found = Reference(dict(zip(returned.paths, tensors, strict=True)), result.grads, result.buffers)
    assert_equal(found, expected, TOLERANCE[dtype])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not [n for n in plan.notices if "no sharding rule" in n]
    assert autopar.Plan.from_json(plan.to_json()).source == plan.source


def batch_is_cut(inputs):
    return {f"input:{name}": "S01" + "R" * (t.ndim - 1) for name, t in inputs.items()}


@pytest.mark.parametrize("name", ["cnn", "resnet"])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_batch_norm_ends_with_the_statistics_of_the_whole_batch(name, mesh) -> None:
    of = subject(name)
    found = planned(name, mesh, torch.float64).result.buffers
    for buffer, value in of.model.named_buffers():
        torch.testing.assert_close(found[buffer], of.reference.buffers[buffer], rtol=1e-9, atol=1e-12)
        assert not torch.equal(found[buffer], value)


WITH_DROPOUT = [n for n, model in ZOO.items() if model.has_dropout]
DROPPING = ["outside", "gpt2"]


@pytest.mark.parametrize("search", ["joint", "random:0"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DROPPING else [pytest.mark.slow]) for n in WITH_DROPOUT]
)
def test_dropout_drops_the_same_on_every_mesh(name, search) -> None:
    dtype = ZOO[name].dtypes[-1]
    of = subject(name, dtype, dropout=0.3)
    alone = run(of, (1,), seed=5).result
    for mesh in [(2, 2), (4,)]:
        assert_equal(run(of, mesh, search=search, seed=5).result, alone, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DROPPING else [pytest.mark.slow]) for n in WITH_DROPOUT]
)
def test_dropout_depends_on_the_seed(name) -> None:
    of = subject(name, ZOO[name].dtypes[-1], dropout=0.3)
    one, other, again = (run(of, (2,), seed=seed).result for seed in (1, 2, 1))
    assert all(torch.equal(one.grads[n], again.grads[n]) for n in one.grads)
    assert not all(torch.equal(one.grads[n], other.grads[n]) for n in one.grads)
    with pytest.raises(AssertionError):
        assert_equal(one, other, TOLERANCE[torch.float32])


def test_a_wrong_gradient_output_or_buffer_is_seen() -> None:
    """The comparison itself: a hundred-thousandth too much anywhere fails in float64."""
    of = subject("cnn")
    expected = of.reference
    for kind in ("outputs", "grads", "buffers"):
        for name, value in getattr(expected, kind).items():
            if not value.is_floating_point():
                continue
            parts = {k: dict(getattr(expected, k)) for k in ("outputs", "grads", "buffers")}
            parts[kind][name] = value * (1 + 1e-5)
            with pytest.raises(AssertionError, match="relative errors"):
                assert_equal(Reference(**parts), expected, TOLERANCE[torch.float64])


def test_the_cluster_of_these_tests_has_fast_links_and_slow_devices() -> None:
    from tests.cpu.model_checks import cluster_where_sharding_pays

    real, ours = Cluster.load("dgx-h100"), cluster_where_sharding_pays()
    assert ours.device.peak("float32") < real.device.peak("float32")
    assert ours.intra_node.latency_s < real.intra_node.latency_s
