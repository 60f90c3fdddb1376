"""Packed sequences and clusters of classes: which rows are computed depends on values, what comes out does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

import autopar
from autopar.errors import CaptureError
from autopar.tracer import ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.cpu.capture_checks import assert_simulates, captured
from tests.zoo.entry import Entry
from tests.zoo.measure import captured as subject
from tests.zoo.measure import check

BATCH, STEPS, WIDTH = 4, 3, 4
LENGTHS = torch.tensor([2, 3, 1, 3])


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.body = layer, body

    def forward(self, x: Tensor, n: Tensor) -> Any:
        return self.body(self.layer, x, n)


def model(layer: nn.Module, body: Callable[..., Any]) -> Layer:
    torch.manual_seed(0)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return Layer(layer, body).double()


def batch(lengths: Tensor = LENGTHS) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64), "n": lengths}


def padded(m: Any, x: Tensor, n: Tensor) -> Any:
    packed, last = m(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
    out, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=0.5)
    return out, last, lengths


def data(m: Any, x: Tensor, n: Tensor) -> Tensor:
    """Rows alone, as for the loss of a language model; sorted, and time first, by the user."""
    n, order = n.sort(descending=True)
    given = pack_padded_sequence(x[order].transpose(0, 1), n)
    scores = m(PackedSequence(given.data * 2, given.batch_sizes))[0].data
    labels = pack_padded_sequence((x[order].sum(-1) > 0).long().transpose(0, 1), n).data
    return F.cross_entropy(scores, labels)


def from_given_states(m: Any, x: Tensor, n: Tensor) -> Any:
    states = x[:, 0, :3].expand(2, -1, -1), x[:, 1].expand(2, -1, -1)
    packed, (h, c) = m(pack_padded_sequence(x, n.cpu(), batch_first=True, enforce_sorted=False), states)
    return pad_packed_sequence(packed, total_length=5)[0], h, c


def of_sequences(m: Any, x: Tensor, n: Tensor) -> Any:
    packed, h = m(pack_sequence([x[0, :2], x[1], x[2, :1]], enforce_sorted=False))
    return pad_packed_sequence(packed, batch_first=True)[0], h


def by_a_list(m: Any, x: Tensor, n: Tensor) -> Any:
    packed, h = m(pack_padded_sequence(x, [2, 2, 1, 1], batch_first=True))
    return pad_packed_sequence(packed, batch_first=True)[0], h


@pytest.mark.parametrize(
    ("layer", "body"),
    [
        pytest.param(nn.LSTM(WIDTH, 4, 2, bidirectional=True), padded, marks=pytest.mark.slow),
        (nn.GRU(WIDTH, 3, bidirectional=True), padded),
        (nn.RNN(WIDTH, 3, nonlinearity="relu", bias=False), data),
        (nn.LSTM(WIDTH, 4, bidirectional=True, proj_size=3), from_given_states),
        pytest.param(nn.RNN(WIDTH, 3, bidirectional=True), of_sequences, marks=pytest.mark.slow),
        (nn.GRU(WIDTH, 3), by_a_list),
    ],
    ids=["layers", "gru", "data", "states", "sequences", "list"],
)
def test_packed_sequences(layer: nn.Module, body: Callable[..., Any]) -> None:
    assert_simulates(model(layer, body), batch(), time_limit=5)


def test_a_batch_that_is_longer_than_its_longest_sequence_is_an_error_of_the_step() -> None:
    """On one device the result would be shorter, which no program can have."""
    made = model(nn.GRU(WIDTH, 3), padded)
    plan = autopar.plan(made, batch(), mesh=(2,), time_limit=5)
    with pytest.raises(RuntimeError, match=r"longest packed sequence.*3 steps.*total_length"):
        autopar.simulate(made, batch(LENGTHS.clamp(max=2)), plan=plan)


def test_what_depends_on_the_number_of_rows_is_refused() -> None:
    def rows(m: Any, x: Tensor, n: Tensor) -> Tensor:
        return m(pack_padded_sequence(x, n, batch_first=True))[0].data.flip(0).cumsum(0)

    def unpacked(m: Any, x: Tensor, n: Tensor) -> Tensor:
        return unpack_sequence(m(pack_padded_sequence(x, n, batch_first=True))[0])[0]

    for body in (rows, unpacked):
        with refused(CaptureError, "test_capture_packed.py:", "depends on values"):
            captured(model(nn.GRU(WIDTH, 3), body), batch())


def test_torch_packs_as_before_afterwards() -> None:
    ColoTracer().capture(model(nn.GRU(WIDTH, 3), padded), batch())
    assert len(pack_padded_sequence(batch()["x"], LENGTHS, batch_first=True, enforce_sorted=False).data) == 9


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 8)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 7], div_value=2.0, head_bias=True)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.lin(x), y).loss, self.loss(self.lin(x).detach(), y).output


def test_adaptive_softmax() -> None:
    """One cluster has no sample."""
    entry = Entry("adaptive", "other", Adaptive, lambda: {"x": torch.randn(8, 6), "y": torch.arange(8) % 7})
    of = subject(entry)
    for mesh in [(4,), (2, 2)]:
        check(entry, of, mesh)
