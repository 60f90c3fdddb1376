"""Each parameter's gradient has memory of its own: clipping and accumulating it changes no other, and nothing of the
caller's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.tracer import ColoTracer
from autopar.tracer.own_gradients import _are_apart

ROWS, WIDTH = 4, 6


class Shared(nn.Module):
    """A model that computes ``of`` from its parameters and a batch."""

    def __init__(self, of: Callable[[Any, Tensor], Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.of = of
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Any:
        return self.of(self, x)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x)
        return self.cell(x, (h, c))[0].square().sum()


WHOLE = (ROWS, WIDTH)
CASES = {
    "two of a sum": lambda: Shared(lambda m, x: (x * (m.a + m.b)).square().sum(), a=WHOLE, b=WHOLE),
    "a view of the other's": lambda: Shared(lambda m, x: (x * (m.a + m.b.t())).square().sum(), a=WHOLE, b=WHOLE[::-1]),
    "a part of another's": lambda: Shared(
        lambda m, x: (x * (torch.cat([m.a, m.b]) + m.c)).square().sum(), a=(1, WIDTH), b=(3, WIDTH), c=WHOLE
    ),
    "one number for all elements": lambda: Shared(lambda m, x: x.square().sum() + m.a.sum(), a=WHOLE),
    "the tangent": lambda: Shared(lambda m, x: x + m.a + m.b, a=WHOLE, b=WHOLE),
    "of what is returned as it is": lambda: Shared(lambda m, x: (m.a, x * m.b), a=WHOLE, b=WHOLE),
    "biases of a cell": Cell,
}


def two_steps(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The gradients of two accumulated backwards, clipped and scaled in place; and the tangent, which is the
    caller's."""
    tangent = torch.ones(WHOLE)
    for _ in range(2):
        made = model(x)
        outputs = made if isinstance(made, tuple) else (made,)
        torch.autograd.backward(list(outputs), [tangent if o.ndim else torch.ones_like(o) for o in outputs])
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    found = {"tangent": tangent}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)
        found[name] = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return found


@pytest.mark.parametrize("case", CASES)
def test_gradients_that_are_changed_in_place_are_those_of_one_device(case: str) -> None:
    torch.manual_seed(0)
    alone, x = CASES[case](), torch.randn(WHOLE)
    model = autopar.autoparallelize(copy.deepcopy(alone), {"x": x}, mesh=(1,), cluster="cpu-2")
    torch.testing.assert_close(two_steps(model, x), two_steps(alone, x))


def test_parts_that_have_no_element_in_common_are_not_copied() -> None:
    model = Shared(lambda m, x: (x * torch.cat([m.a, m.b], 1)).square().sum(), a=(ROWS, 2), b=(ROWS, 4))
    graph = ColoTracer().capture(model, {"x": torch.randn(WHOLE)}).graph
    assert "aten.clone" not in {n.packet for n in graph.nodes}


@given(st.data())
def test_views_that_are_apart_have_no_element_in_common(data: st.DataObject) -> None:
    base = torch.arange(60).reshape(3, 4, 5)
    views = []
    for _ in range(2):
        view = base.permute(data.draw(st.permutations(range(3))))
        for dim in range(3):
            first = data.draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, first, data.draw(st.integers(1, view.shape[dim] - first)))
        views.append(view.flatten() if data.draw(st.booleans()) and view.is_contiguous() else view)
    a, b = views
    common = set(a.flatten().tolist()) & set(b.flatten().tolist())
    assert not (_are_apart(a, b) and common)
    if a.stride() == b.stride() == (20, 5, 1):
        assert _are_apart(a, b) == (not common)
