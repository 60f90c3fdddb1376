"""Whatever a model returns comes back in the same structure, and no gradient is lost on the way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_checks import assert_simulates, captured


@dataclass
class Record:
    hidden: Tensor
    steps: int
    note: str | None = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Nested:
    pair: Pair
    more: dict[str, Any]


class Returning(nn.Module):
    """A small network whose forward returns what ``build(self, x, h)`` makes of input and hidden state."""

    def __init__(self, build: Callable[..., Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)
        self.build = build

    def forward(self, x: Tensor) -> Any:
        return self.build(self, x, torch.tanh(self.lin(x)))


STRUCTURES: dict[str, Callable[..., Any]] = {
    "tensor": lambda m, x, h: h,
    "tuple": lambda m, x, h: (h, h * 2),
    "list": lambda m, x, h: [h, m.out(h)],
    "dict": lambda m, x, h: {"loss": m.out(h).pow(2).mean(), "hidden": h},
    "ordered_dict": lambda m, x, h: OrderedDict(b=h, a=m.out(h)),
    "dataclass": lambda m, x, h: Record(m.out(h), 3),
    "namedtuple": lambda m, x, h: Pair(h, m.out(h)),
    "nested": lambda m, x, h: Nested(Pair(h, m.out(h)), {"list": [h + 1, (h + 2,)], "none": None, "int": 7}),
    "none_and_int": lambda m, x, h: (None, m.out(h), 5, "text", True, 2.5),
    "several_scalars": lambda m, x, h: (h.sum(), m.out(h).pow(2).sum()),
    "loss_by_name": lambda m, x, h: {"accuracy": h.mean(), "loss": m.out(h).pow(2).mean()},
    "empty_parts": lambda m, x, h: {"h": h, "nothing": (), "no": []},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_comes_back(name: str) -> None:
    model = Returning(STRUCTURES[name]).double()
    assert_simulates(model, (torch.randn(4, 4, dtype=torch.float64),))


ALIASES: dict[str, Callable[..., Any]] = {
    "input": lambda m, x, h: (x, m.out(h)),
    "view_of_input": lambda m, x, h: (x.view(-1), m.out(h)),
    "parameter": lambda m, x, h: (m.out.weight, m.out(h)),
    "view_of_parameter": lambda m, x, h: (m.out.weight.t(), m.out(h)),
    "view_of_output": lambda m, x, h: (h, h.view(-1)),
    "part_of_output": lambda m, x, h: (h, h[:, 1:3]),
    "transpose_of_output": lambda m, x, h: (h, h.t(), h.t().t()),
    "same_twice": lambda m, x, h: (h, h),
    "same_in_dict": lambda m, x, h: {"a": h, "b": {"c": h}},
    "detached": lambda m, x, h: (h, h.detach()),
    "integers": lambda m, x, h: (h, h.argmax(-1)),
    "constant": lambda m, x, h: (h, torch.arange(4)),
    "bool": lambda m, x, h: (h, h > 0),
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_keep_their_gradients(name: str) -> None:
    model = Returning(ALIASES[name]).double()
    assert_simulates(model, (torch.randn(4, 4, dtype=torch.float64),))


def test_output_that_is_an_input_needing_grad() -> None:
    model = Returning(lambda m, x, h: (x, m.out(h))).double()
    assert_simulates(model, (torch.randn(4, 4, dtype=torch.float64, requires_grad=True),))


def test_output_that_is_a_buffer() -> None:
    model = nn.BatchNorm1d(4).double()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.norm(x), self.norm.running_mean

    assert_simulates(Both(), (torch.randn(4, 4, dtype=torch.float64),))


def test_auto_takes_the_backward_of_the_loss_alone() -> None:
    model = Returning(STRUCTURES["dict"]).double()
    inputs = (torch.randn(4, 4, dtype=torch.float64),)
    assert captured(model, inputs).loss == 0
    every = captured(model, inputs, outputs="whole")
    assert [i.name for i in captured(model, inputs).graph.inputs if i.kind == "tangent"] == ["loss"]
    assert every.loss is None or every.differentiable


def test_what_is_no_data_becomes_none_with_a_notice() -> None:
    class Cache:
        pass

    capture = captured(Returning(lambda m, x, h: {"h": h, "cache": Cache()}), (torch.randn(4, 4),))
    assert capture.returned.build([torch.zeros(1)])["cache"] is None
    assert any("cache" in n and "Cache" in n for n in capture.notices)
