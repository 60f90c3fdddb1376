"""Check that an error has its three parts and leaves the model unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError


class Net(nn.Module):
    """A model with two layers that can be tied, a buffer that training changes, and a scalar loss."""

    def __init__(self, hidden: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        h = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(torch.tanh(h))
        return logits if target is None else nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(size: int = 4) -> dict[str, Tensor]:
    ids = torch.arange(size * 4).reshape(size, 4) % 16
    return dict(ids=ids, target=ids)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Assert that the code in the context leaves ``model`` bitwise unchanged, with its class and its tensors."""
    kind, training = type(model), model.training
    tensors = {n: (id(t), t.detach().clone(), t.requires_grad) for n, t in _tensors(model).items()}
    attributes = set(vars(model))
    yield
    assert type(model) is kind
    assert model.training is training
    assert set(vars(model)) == attributes
    now = _tensors(model)
    assert set(now) == set(tensors)
    for name, (identity, value, needs_grad) in tensors.items():
        assert id(now[name]) == identity, name
        assert torch.equal(now[name], value), name
        assert now[name].requires_grad is needs_grad
        assert now[name].grad is None


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextlib.contextmanager
def refused(kind: type[AutoparError], *parts: str) -> Iterator[pytest.ExceptionInfo[AutoparError]]:
    """Expect an error of ``kind`` with all three parts, whose text contains ``parts``."""
    with pytest.raises(AutoparError) as caught:
        yield caught
    assert_three_parts(caught.value, kind, *parts)


def assert_three_parts(error: BaseException, kind: type[AutoparError], *parts: str) -> None:
    assert type(error) is kind, repr(error)
    text = str(error)
    assert isinstance(error, AutoparError)
    assert error.what
    assert error.found
    assert error.hint
    assert text == f"{error.what}\n  found: {error.found}\n  hint:  {error.hint}"
    for part in parts:
        assert part in text, text
