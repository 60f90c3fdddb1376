"""Inputs by position, keyword, *args and **kwargs, nested, passed twice, and with gradients of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._torch import FakeTensorMode
from autopar.errors import InputError
from tests.cpu.capture_checks import assert_simulates, captured, eager


def x(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*(shape or (4, 4)), dtype=torch.float64, requires_grad=grad)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4).double()


class Plain(Base):
    def forward(self, a: Tensor, b: Tensor, scale: float = 2.0) -> Tensor:
        return self.lin(a) * scale + b


class PositionalOnly(Base):
    def forward(self, a: Tensor, b: Tensor, /, c: Tensor | None = None) -> Tensor:
        return self.lin(a) + b if c is None else self.lin(a) + b * c


class KeywordOnly(Base):
    def forward(self, a: Tensor, *, b: Tensor, scale: float = 3.0) -> Tensor:
        return self.lin(a) * scale + b


class VarPositional(Base):
    def forward(self, first: Tensor, *rest: Tensor, factor: float = 1.0) -> Tensor:
        return self.lin(first) * factor + sum(rest)


class VarKeyword(Base):
    def forward(self, a: Tensor, **rest: Tensor) -> Tensor:
        return self.lin(a) + rest["b"] - rest.get("c", 0)


class Everything(Base):
    def forward(self, a: Tensor, /, b: Tensor, *rest: Tensor, c: Tensor, **more: Tensor) -> Tensor:
        return self.lin(a) * b + sum(rest) + c - sum(more.values())


class NestedInputs(Base):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.lin(batch["x"][0]) + batch["x"][1] * batch["deep"]["y"] * batch["n"]


@dataclass
class Batch:
    a: Tensor
    b: Tensor


class DataclassInput(Base):
    def forward(self, batch: Batch) -> Tensor:
        return self.lin(batch.a) + batch.b


CALLS: dict[str, tuple[type[nn.Module], Any]] = {
    "positional": (Plain, lambda: (x(), x())),
    "keyword": (Plain, lambda: dict(a=x(), b=x())),
    "keyword_in_another_order": (Plain, lambda: dict(b=x(), a=x())),
    "number": (Plain, lambda: dict(b=x(), a=x(), scale=5.0)),
    "positional_only": (PositionalOnly, lambda: (x(), x())),
    "positional_only_with_keyword_default": (PositionalOnly, lambda: (x(), x(), x())),
    "keyword_only": (KeywordOnly, lambda: dict(a=x(), b=x())),
    "var_positional": (VarPositional, lambda: (x(), x(), x())),
    "var_positional_empty": (VarPositional, lambda: (x(),)),
    "var_keyword": (VarKeyword, lambda: dict(a=x(), b=x(), c=x())),
    "nested": (NestedInputs, lambda: ({"x": [x(), x()], "deep": {"y": x()}, "n": 2},)),
    "nested_by_keyword": (NestedInputs, lambda: dict(batch={"x": (x(), x()), "deep": {"y": x()}, "n": 2})),
    "dataclass": (DataclassInput, lambda: (Batch(x(), x()),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    kind, inputs = CALLS[name]
    assert_simulates(kind(), inputs())


def test_one_tensor_alone() -> None:
    assert_simulates(nn.Linear(4, 4).double(), x())


def test_the_same_call_by_position_and_by_keyword_is_one_program() -> None:
    model, a, b = Plain(), x(), x()
    graphs = {captured(model, inputs).graph.digest for inputs in ((a, b), dict(a=a, b=b), dict(b=b, a=a))}
    assert len(graphs) == 1


def test_one_tensor_passed_as_two_inputs() -> None:
    class Shifted(Base):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (self.lin(a) - b).pow(2).mean()

    same = x()
    plan = assert_simulates(Shifted(), dict(a=same, b=same))
    assert {"input:a", "input:b"} <= set(plan.specs)


def test_one_tensor_passed_as_two_inputs_needs_grad() -> None:
    same = x(grad=True)
    model = Plain()
    plan = autopar.plan(model, (same, same), mesh=(2,))
    result = autopar.simulate(model, (same, same), plan=plan)
    _, expected, _ = eager(model, (same, same))
    total = result.grads["input:a"] + result.grads["input:b"]
    torch.testing.assert_close(total, expected[f"input {id(same)}"])


def test_gradients_of_inputs() -> None:
    a, b = x(grad=True), x()
    model = Plain()
    plan = autopar.plan(model, (a, b), mesh=(2, 2))
    result = autopar.simulate(model, (a, b), plan=plan)
    _, expected, _ = eager(model, (a, b))
    torch.testing.assert_close(result.grads["input:a"], expected[f"input {id(a)}"])
    assert "input:b" not in result.grads


def test_gradient_of_an_input_that_is_no_leaf() -> None:
    leaf = x(grad=True)
    model = Plain()
    made = leaf * 2
    result = autopar.simulate(model, (made, x()), plan=autopar.plan(model, (made, x()), mesh=(2,)))
    assert result.grads["input:a"].shape == (4, 4)


def test_inputs_that_do_not_fit_the_signature() -> None:
    with pytest.raises(InputError) as caught:
        captured(Plain(), (x(), x(), 1.0, x()))
    assert "found:" in str(caught.value)
    assert "signature" in str(caught.value)


def test_inputs_on_meta_and_fake_devices_give_the_same_graph() -> None:
    model, a, b = Plain(), x(), x()
    real = captured(model, (a, b)).graph.digest
    assert captured(model, (a.to("meta"), b.to("meta"))).graph.digest == real
    with FakeTensorMode():
        fakes = torch.empty(4, 4, dtype=torch.float64), torch.empty(4, 4, dtype=torch.float64)
    assert captured(model, fakes).graph.digest == real


def test_inputs_with_strides() -> None:
    assert_simulates(Plain(), (x(4, 4).t(), x(4, 8)[:, ::2]))


def test_an_expanded_input() -> None:
    assert_simulates(Plain(), (x(1, 4).expand(4, 4), x()))


def test_an_input_changed_in_place_stays_as_it_was_for_the_caller() -> None:
    class InPlace(Base):
        def forward(self, a: Tensor) -> Tensor:
            a += 1
            return self.lin(a)

    given = x()
    before = given.clone()
    plan = assert_simulates(InPlace(), (given,))
    assert torch.equal(given, before)
    assert any("input a in place" in n for n in captured(InPlace(), (given,)).notices)
    assert any("input a in place" in n for n in plan.notices)


@pytest.mark.parametrize("shape", [(), (1,), (1, 4), (3, 4)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    class Scale(Base):
        def forward(self, a: Tensor) -> Tensor:
            return self.lin.weight.sum() * a.sum() + a.mean()

    assert_simulates(Scale(), x(*shape) if shape else torch.tensor(2.0, dtype=torch.float64))
