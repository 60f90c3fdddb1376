"""Tensors that a forward leaves in attributes are outputs of the parallel model too."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar

X = torch.randn(6, 4)
SEEN: dict[str, Tensor] = {}


@dataclass
class Statistics:
    mean: Tensor
    rows: int


class Inner(nn.Module):
    """A layer that keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.attention: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.attention = out.softmax(-1)
        return out


class Leaving(nn.Module):
    """``leave`` puts something away."""

    def __init__(self, leave: Callable[[Any, Tensor], Any], *, loss: bool = True) -> None:
        super().__init__()
        self.inner, self.leave, self.loss = Inner(), leave, loss
        self.last: Any = None
        self.losses: Any = []
        self.recent: Any = deque(maxlen=2)
        self.cache: dict[str, Any] = {"kept": 3}

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.leave(self, h)
        return h.square().mean() if self.loss else h


def _set(name: str, make: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], None]:
    return lambda model, h: setattr(model, name, make(h))


def _cleared(model: Any, h: Tensor) -> None:
    model.losses.clear()
    model.losses += [h.mean(), h.sum()]


PLACES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "attribute": (_set("last", lambda h: h.mean()), lambda m: m.last),
    "attribute that was not there": (_set("fresh", lambda h: h.mean()), lambda m: m.fresh),
    "detached": (_set("last", lambda h: h.detach() * 2), lambda m: m.last),
    "of an inner module": (lambda m, h: None, lambda m: m.inner.attention),
    "tuple": (_set("last", lambda h: (h, [h + 1, None])), lambda m: [m.last[0], m.last[1][0]]),
    "dataclass": (_set("last", lambda h: Statistics(h.mean(), 6)), lambda m: m.last.mean),
    "new list": (_set("losses", lambda h: [h.mean()]), lambda m: m.losses),
    "list that grows": (lambda m, h: m.losses.append(h.mean()), lambda m: m.losses),
    "list that is cleared": (_cleared, lambda m: m.losses),
    "deque": (lambda m, h: m.recent.append(h.mean()), lambda m: list(m.recent)),
    "dict": (lambda m, h: m.cache.update(attention=h), lambda m: [m.cache["attention"], torch.tensor(m.cache["kept"])]),
    "of a layer of torch": (lambda m, h: setattr(m.inner.linear, "out", h), lambda m: m.inner.linear.out),
}


def whole(value: Any) -> list[Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in (value if isinstance(value, list) else [value])]


def parallel(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return copy.deepcopy(model), autopar.autoparallelize(model, (X,), time_limit=2, **options)


@pytest.mark.parametrize("where", PLACES)
def test_it_is_there_after_every_call(where: str):
    leave, look = PLACES[where]
    reference, model = parallel(Leaving(leave))
    for x in (X, 2 * X, X[:3]):  # the last is another program
        for module in (reference, model):
            module(x).backward()
        for found, expected in zip(whole(look(model)), whole(look(reference)), strict=True):
            assert found.requires_grad == expected.requires_grad
            torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert torch.equal(model(X), model(X))
    assert not model.plan.notices


@pytest.mark.parametrize("loss", [True, False])
def test_gradients_flow_through_it(loss: bool):
    reference, model = parallel(Leaving(_set("last", lambda h: h.abs().mean()), loss=loss))
    for _ in range(2):
        for module in (reference, model):
            (module(X).sum() + 3 * module.last + whole(module.inner.attention)[0].square().sum()).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    assert type(model(X)) is Tensor


def test_what_is_left_alone_is_no_part_of_the_backward():
    _, model = parallel(Leaving(_set("last", lambda h: h.abs()), loss=False))
    before = [i.name for i, _ in model._autopar.programs[0].executable.tangents]
    assert before == ["0"]
    assert {n for n in model.plan.specs if n.startswith("output:")} == {
        "output:0",
        "output:self.last",
        "output:self.inner.attention",
    }
    model(X).sum().backward()
    assert len(model._autopar.programs) == 1


class Classes(nn.Module):
    """Returns what has no gradient, and leaves the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.loss = h.logsumexp(-1).mean()
        return h.argmax(-1)


class Penalised(nn.Module):
    """Takes a derivative, and leaves what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.penalty = nn.Linear(4, 1), None

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.detach().requires_grad_()).tanh()
        slope = torch.autograd.grad(out.sum(), self.linear.weight, create_graph=True)[0]
        self.penalty = slope.square().sum()
        return out.square().mean()


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Classes, lambda m: [m(X), m.loss][1]),
        (Penalised, lambda m: m(X) + m.penalty),
    ],
)
def test_a_loss_may_be_left_there(kind: Callable[[], nn.Module], loss: Callable[[Any], Tensor]):
    reference, model = parallel(kind())
    for module in (reference, model):
        loss(module).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def test_a_copy_has_its_own():
    _, model = parallel(Leaving(lambda m, h: m.losses.append(h.mean())))
    other = copy.deepcopy(model)
    other(X)
    assert (len(model.losses), len(other.losses)) == (0, 1)


def _longer(model: Any, h: Tensor) -> None:
    model.losses = [*model.losses, h.mean()]


def _elsewhere(model: Any, h: Tensor) -> None:
    SEEN["h"] = h.detach()


@pytest.mark.parametrize(("leave", "name"), [(_longer, "losses"), (_elsewhere, "SEEN")])
def test_what_no_call_can_leave_is_told_at_the_first_call(leave: Callable[[Any, Tensor], Any], name: str):
    _, model = parallel(Leaving(leave))
    with pytest.warns(UserWarning, match=rf"forward of Leaving stores tensors in {name}, .*return them"):
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


def _masked(model: Any, h: Tensor) -> None:
    if model.last is None:
        model.last = torch.ones(4, 4).tril()


def test_a_cache_of_what_is_always_the_same_is_none():
    _, model = parallel(Leaving(_masked))
    assert {n for n in model.plan.specs if n.startswith("output:")} == {"output:0", "output:self.inner.attention"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
    assert model.last is None
