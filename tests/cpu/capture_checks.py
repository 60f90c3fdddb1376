"""Compare the simulation of a captured model's plan with the model itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.structure import flatten
from autopar.tracer import Capture, ColoTracer
from autopar.tracer.tracer import as_call

TOLERANCE = 1e-9


def captured(model: nn.Module, inputs: Any, **options: Any) -> Capture:
    return ColoTracer(**options).capture(model, inputs)


def ops_of(capture: Capture) -> list[str]:
    return [n.op for n in capture.graph.nodes if n.op != "placeholder"]


def eager(model: nn.Module, inputs: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return the outputs, gradients (of the loss, or else of the sum of the outputs) and buffers of one step."""
    model = copy.deepcopy(model)
    args, kwargs = as_call(inputs)
    leaves, structure = flatten((list(args), dict(kwargs)))
    # A tensor that is passed twice stays one tensor.
    fresh = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in leaves}
    args, kwargs = structure.build([fresh[id(t)] for t in leaves])
    output = model(*args, **kwargs)
    tensors, returned = flatten(output)
    differentiable = [t for t in tensors if t.requires_grad]
    losses = [t for t, p in zip(tensors, returned.paths, strict=True) if t.requires_grad and t.ndim == 0]
    named = [t for t, p in zip(tensors, returned.paths, strict=True) if p.split(".")[-1] == "loss" and t.requires_grad]
    total = (named or losses or [sum(t.sum() for t in differentiable)])[0]
    total.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for tensor in leaves:
        if tensor.requires_grad and fresh[id(tensor)].grad is not None:
            grads[f"input {id(tensor)}"] = fresh[id(tensor)].grad
    return output, grads, dict(model.named_buffers())


def assert_same(found: Any, expected: Any) -> None:
    """Assert equal structures, types and tensors."""
    assert type(found) is type(expected)
    (left, one), (right, two) = flatten(found), flatten(expected)
    assert one.paths == two.paths
    assert one.plain == two.plain
    for path, a, b in zip(one.paths, left, right, strict=True):
        assert a.dtype == b.dtype, path
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, p=path: f"{p}: {m}")


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """Capture a model once for each batch, instead of once to plan and again to run the plan."""
    capture, kept = api.capture_model, {}

    def once(model: nn.Module, call: Any, options: Any, world: int, **more: Any) -> Capture:
        given = tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in zip(call.names, call.tensors, strict=True))
        wanted = options.outputs, options.batch, options.mixed_precision, options.accumulation_steps, world
        key = id(model), given, wanted, tuple(more.items())
        if key not in kept:
            # The model stays alive, so that its id is not reused.
            kept[key] = model, capture(model, call, options, world, **more)
        return kept[key][1]

    with mock.patch.object(api, "capture_model", once):
        yield


def assert_simulates(
    model: nn.Module, inputs: Any, mesh: tuple[int, ...] = (2,), *, again: bool = False, **options: Any
) -> autopar.Plan:
    """Plan, simulate all ranks, and compare outputs, gradients and buffers with the model itself in float64.

    With ``again``, the simulation captures the model a second time, which shows whether the first capture changed it.
    """
    with contextlib.nullcontext() if again else captured_once():
        plan = autopar.plan(model, inputs, mesh=mesh, **options)
        result = autopar.simulate(model, inputs, plan=plan)
    output, grads, buffers = eager(model, inputs)
    assert_same(result.outputs, output)
    found = {n: g for n, g in result.grads.items() if not n.startswith("input:")}
    assert_grads(found, {n: g for n, g in grads.items() if not n.startswith("input ")})
    for name, value in result.buffers.items():
        torch.testing.assert_close(value, buffers[name], rtol=TOLERANCE, atol=TOLERANCE)
    changed = {n for n, b in model.named_buffers() if not torch.equal(b, buffers[n])}
    assert changed <= set(result.buffers)
    return plan


def assert_grads(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = {n for n, g in expected.items() if n not in found and bool(g.any())}
    assert not missing
    for name, value in found.items():
        reference = expected.get(name, torch.zeros_like(value))
        torch.testing.assert_close(value, reference, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
