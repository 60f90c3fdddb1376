"""Sparse, nested and quantized tensors of a model: no subject where the forward does not read them, else refused by
name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError, InputError
from tests.cpu.bad_input_checks import refused
from tests.cpu.capture_checks import captured

pytestmark = pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|quantize):UserWarning")


def rows() -> list[Tensor]:
    return [torch.ones(2, 3), torch.ones(1, 3)]


KINDS: dict[str, Callable[[], Tensor]] = {
    "COO": lambda: torch.eye(4).to_sparse(),
    "CSR": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor(rows()),
    "jagged": lambda: torch.nested.nested_tensor(rows(), layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    "MKL-DNN": lambda: torch.eye(4).to_mkldnn(),
}
PLACES = ("buffer", "unsaved buffer", "attribute", "list", "parameter")


class Graph(nn.Module):
    def __init__(self, tensor: Tensor, place: str, read: Callable[[Tensor, Tensor], Any] | None) -> None:
        super().__init__()
        self.lin, self.place, self.read = nn.Linear(4, 4), place, read
        if "buffer" in place:
            self.register_buffer("adjacency", tensor, persistent=place == "buffer")
        elif place == "parameter":
            self.adjacency = nn.Parameter(tensor, requires_grad=False)
        else:
            self.adjacency = [tensor] if place == "list" else tensor

    @property
    def held(self) -> Tensor:
        return self.adjacency[0] if self.place == "list" else self.adjacency

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return h if self.read is None else self.read(self.held, h)


class Model(nn.Module):
    def __init__(self, kind: str, place: str, read: Callable[[Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.graph, self.out = Graph(KINDS[kind](), place, read), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.graph(x)).square().mean()


X = torch.ones(4, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_read_is_left_as_it_is(kind: str) -> None:
    """By plan, simulation and emitted file, by the parallel model, its state dict and the optimizer."""
    for place in PLACES:
        model = Model(kind, place)
        held, expected = model.graph.held, model(X).item()
        plan = autopar.plan(model, X, mesh=(2,), time_limit=2)
        assert autopar.simulate(model, X, plan=plan).outputs.item() == pytest.approx(expected)
        saved = "graph.adjacency" in model.state_dict()
        assert saved == (place in ("buffer", "parameter"))
        parallel = autopar.autoparallelize(model, X, mesh=(1,), time_limit=2)
        loss = parallel(X)
        loss.backward()
        torch.optim.SGD(parallel.parameters(), lr=0.1).step()
        assert loss.item() == pytest.approx(expected)
        assert parallel.graph.held is held
        assert ("graph.adjacency" in parallel.state_dict()) == saved


READS = {
    "COO": (lambda a, h: a @ h, "index_add"),
    "CSR": (torch.sparse.mm, "index_add"),
    "nested": (lambda a, h: h + torch.nested.to_padded_tensor(a, 0.0).sum(), "to_padded_tensor"),
    "jagged": (lambda a, h: h + a.values().sum(), "to_padded_tensor"),
    "quantized": (lambda a, h: h @ a.dequantize(), "dequantize"),
    "MKL-DNN": (lambda a, h: h @ a.to_dense(), "dense"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_refused_by_its_name(kind: str) -> None:
    read, hint = READS[kind]
    for place in PLACES:
        with refused(CaptureError, "graph.adjacency", "test_unread_tensors.py:", hint):
            captured(Model(kind, place, read), X)


@pytest.mark.parametrize("kind", ["COO", "jagged", "quantized"])
def test_what_it_is_may_be_asked(kind: str) -> None:
    def asked(a: Tensor, h: Tensor) -> Tensor:
        plain = a.dtype == torch.float32 and a.device == h.device and not (a.is_sparse or a.is_nested or a.is_quantized)
        return h.double() if plain else h * a.dim()

    model = Model(kind, "buffer", asked)
    plan = autopar.plan(model, X, mesh=(2,), time_limit=2)
    assert autopar.simulate(model, X, plan=plan).outputs.item() == pytest.approx(model(X).item())


def test_an_input_that_is_not_dense_is_refused_by_its_name() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.lin(x).sum()

    with refused(InputError, "edges", "sparse_coo", "index_add"):
        captured(TwoInputs(), (X, torch.eye(4).to_sparse()))
