"""What a mask chooses: captured where what was not chosen cannot show, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import CaptureError
from tests.cpu.bad_input_checks import refused
from tests.cpu.capture_checks import assert_simulates, captured, captured_once, eager

HERE = "test_capture_masked.py:"
B, T, D = 4, 3, 4


class Chosen(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.scale = nn.Linear(D, D), nn.Parameter(torch.rand(D) + 0.5)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.body = body
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.body(self, self.lin(x), x, labels)


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(B, T, D, dtype=torch.float64), "labels": torch.arange(B * T).reshape(B, T) % D - 1}


# Written back.


def scaled(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    h[labels > 0] *= 2
    h[x > 0] += x.new_tensor(0.5)
    h[:, labels[0] > 0] /= 3
    return h.square().sum()


def columns(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    h[labels > 0, 1] *= 2
    h[..., 2][labels > 0] = 1.0
    h[:, labels[0] > 0] = 0
    return h.square().sum()


def by_parameters(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    h[labels > 0] *= m.scale
    h[x > 0] *= m.temperature
    return h.square().sum()


def from_another(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """Where x is not positive log has neither value nor gradient."""
    y, mask = torch.zeros_like(h), h > 0
    y[mask] = h[mask].log() * x[mask].float() / m.temperature + h[mask].sqrt()
    return y.square().sum()


def without_a_gradient_elsewhere(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """At 1, with which everything that is not chosen is filled, this divides by zero."""
    mask = labels > 0
    h[mask] = m.scale / (h[mask] - 1) + m.temperature
    return h.square().sum()


def masks_written_out(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    y = torch.zeros_like(h)
    y[x > 0] = h[x > 0]
    y[(labels > 0) & (x[..., 0] < 0.5)] += h[(labels > 0) & (x[..., 0] < 0.5)] * 2
    return y.square().sum()


def rows_in_order(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """As features of images take the places of their tokens."""
    features = m.lin(x.flip(0)).view(-1, D)
    h[labels > 1] = features[:3] * m.scale
    h[:, 0][labels[:, 0] < 0] = features[5:6]
    h[x.abs() < 100] = x.sin().reshape(-1) * m.temperature + h.detach().reshape(-1)
    return h.square().sum()


def in_place_between(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    chosen = h[mask]
    before = chosen.clone()
    chosen.mul_(3).add_(before)
    h.mul_(2)
    h[mask] = chosen
    return h.square().sum()


def under_no_grad(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    weight = torch.ones_like(h)
    with torch.no_grad():
        weight[labels > 0] *= 0.25
    return (h * weight).square().sum()


def nothing_chosen(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    h[labels > 100] *= 2
    return h.square().sum() + h[labels > 100].sum()


def rows_behind_other_dims(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """The mask is of the second dim: what treats rows alike may have whole dims before it."""
    mask = labels[0] > -1
    gates, values = (m.lin(h[:, mask]) * m.scale).chunk(2, 2)
    h[:, mask] = F.layer_norm(h[:, mask].softmax(2), (D,), m.scale)
    h[:, mask] += (gates.sigmoid() * values).sum(-1, keepdim=True)
    h[:, mask] = h[:, mask] - h[:, mask].detach().mean(1, keepdim=True)
    return h.square().sum() + F.cross_entropy(h[:, mask].reshape(-1, D), labels[:, mask].flatten().clamp(min=0))


def in_a_copy(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    added = h.index_put((labels > 0,), m.scale.expand(1, D), accumulate=True)
    return h.index_put((labels > 1,), m.temperature * h[0, :1]).square().sum() + added.sin().sum()


def seen_otherwise(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    chosen = h[mask]
    heads = chosen.view(-1, 2, 2) * m.scale.view(2, 2) + torch.zeros_like(chosen).view(chosen.shape[0], 2, 2)
    h[mask] = heads.flatten(1) * m.scale.expand_as(chosen)
    return h.square().sum()


# Added up.


def along_dims(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    chosen, behind = h[labels > 0], h[:, labels[0] > -1]
    pooled = chosen.mean(0) * m.scale + chosen.sum(0, keepdim=True) + chosen.mean((0, 1))
    return pooled.square().sum() + (behind.mean(1) * x[:, 0]).sum() + behind.sum((0, 2), keepdim=True).square().mean()


def selected_rows(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    return h.masked_select(labels.unsqueeze(-1) > 0).exp().mean()


def averaged(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    return (h - x).square()[labels > 0].mean() + h.sin()[x > 0].mean() + h[:, labels[0] > 0].cos().sum()


def selected(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    return h.masked_select(x > 0).exp().mean()


def classified(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    flat = F.cross_entropy(h.view(-1, D)[mask.view(-1)], labels.view(-1)[mask.view(-1)], reduction="sum")
    return flat + F.cross_entropy(h[mask], labels[mask], weight=m.scale.detach(), label_smoothing=0.1)


def regressed(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    loss = F.mse_loss(h[mask], x[mask]) + F.l1_loss(h[mask], x[mask], reduction="sum")
    loss = loss + F.binary_cross_entropy_with_logits(h[mask], x[mask].sigmoid())
    return loss + F.binary_cross_entropy(h[mask].sigmoid() * 0.5, x[mask].sigmoid()) + F.huber_loss(h[mask], x[mask])


def through_layers(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """As heads of masked language models see the tokens that count. What is filled with ones is divided by zero."""
    rows = m.lin(1 / (h[labels > 0] - 1))
    left, right = F.layer_norm(rows, (D,), m.scale).chunk(2, -1)
    left = (left @ m.lin.weight[:2, :2]).softmax(-1) * F.embedding(labels[labels > 0], m.lin.weight)[:, :2]
    return F.cross_entropy(rows, labels[labels > 0]) + (left * right).sum(-1).mean() + rows.log_softmax(-1).mean()


FORMS = (
    scaled,
    columns,
    by_parameters,
    from_another,
    masks_written_out,
    rows_in_order,
    rows_behind_other_dims,
    in_a_copy,
    seen_otherwise,
    along_dims,
    selected_rows,
    without_a_gradient_elsewhere,
    in_place_between,
    under_no_grad,
    nothing_chosen,
    averaged,
    selected,
    classified,
    regressed,
    through_layers,
)


@pytest.mark.parametrize("body", FORMS, ids=lambda b: b.__name__)
@captured_once()
def test_what_a_mask_chooses_equals_one_device(body: Callable[..., Any]) -> None:
    model = Chosen(body)
    for mesh in ((2,), (2, 2)):
        assert_simulates(model, inputs(), mesh, search=f"random:{len(mesh)}", time_limit=5)


class Written(nn.Module):
    """``h[mask] += w`` and its like, for every shape of ``w`` that does not say how many are chosen."""

    def __init__(self, place: Callable[..., Any], shapes: list[tuple[int, ...]], change: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(D, D)
        self.ws = nn.ParameterList([nn.Parameter(torch.rand(shape) + 0.5) for shape in shapes])
        self.place, self.change = place, change
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.lin(x)
        for w in self.ws:
            at = self.place(x, labels)
            h[at] = self.change(h[at], w)
        return h.square().sum()


PLACES = {
    "tokens": (lambda x, labels: labels > 0, [(), (1,), (D,), (1, 1), (1, D)]),
    "tokens, :": (lambda x, labels: (labels > 0, slice(None)), [(), (D,), (1, D)]),
    "elements": (lambda x, labels: x > 0, [(), (1,)]),
    "samples": (lambda x, labels: labels[:, 1] > 0, [(D,), (1, D), (T, 1), (T, D), (1, 1, D), (1, T, 1), (1, T, D)]),
    ":, tokens": (lambda x, labels: (slice(None), labels[0] > -1), [(), (D,), (1, D), (1, 1, D), (B, 1, 1), (B, 1, D)]),
    "..., columns": (lambda x, labels: (..., x[0, 0] > 0), [(), (1,), (T, 1), (1, T, 1), (B, 1, 1), (B, T, 1)]),
}


def affine(chosen: Tensor, w: Tensor) -> Tensor:
    return w - chosen * w + w / (chosen.square() + 1)


def in_place(chosen: Tensor, w: Tensor) -> Tensor:
    chosen *= w
    chosen -= w
    chosen /= w + 1
    chosen += w
    return chosen


@pytest.mark.parametrize("change", [in_place, affine])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_the_same_for_all_that_is_chosen_may_have_any_shape(place: str, change: Callable[..., Any]) -> None:
    assert_simulates(Written(*PLACES[place], change), inputs(), (2,), search="random:1", time_limit=2)


def test_dims_of_size_1_that_a_sum_puts_before_are_dropped_when_it_is_written() -> None:
    """As indexing does."""
    shapes = [(1, 1, D), (1, 1, 1, D)]
    assert_simulates(Written(PLACES["tokens"][0], shapes, affine), inputs(), (2,), search="random:1", time_limit=2)


def test_a_scalar_of_another_dtype_does_not_change_that_of_what_is_chosen() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.scale = nn.Linear(D, D).bfloat16(), nn.Parameter(torch.tensor(1.25))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            h = self.lin(x.bfloat16())
            h[labels > 0] *= self.scale
            return h.float().square().sum()

    model, given = Scaled(), inputs()
    plan = autopar.plan(model, given, mesh=(1,), time_limit=2)
    result, (output, grads, _) = autopar.simulate(model, given, plan=plan), eager(model, given)
    torch.testing.assert_close(result.outputs, output.detach(), rtol=1e-2, atol=0)
    torch.testing.assert_close(result.grads["scale"], grads["scale"], rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_in_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """80 times 1,001 is more than float16 holds, and 1,001 is between two numbers of bfloat16."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale)[x > 0].mean()

    x = torch.cat([torch.linspace(60, 100, 1001), -torch.ones(23)])[None].to(dtype)
    plan = autopar.plan(Mean(), x, mesh=(2,), time_limit=2)
    assert torch.equal(autopar.simulate(Mean(), x, plan=plan).outputs, Mean()(x).detach())


# Refused.


def other_masks(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    h[labels > 0] = h[labels > 0] * 2 + h[x[..., 0] > 0].sum()
    mask = labels > 0
    h[mask] = x[labels.flip(0) > 0]
    return h.square().sum()


def changed_between(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    chosen = h[mask] * 2
    mask[0] = ~mask[0]
    h[mask] = chosen
    return h.square().sum()


def read_and_changed(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """The same text, but not the same mask: what it reads changes by way of a view."""
    y, scores = torch.zeros_like(h), x * 2
    chosen = h[scores > 0] * 2
    scores.view(-1)[:5].neg_()
    y[scores > 0] = chosen
    return y.square().sum()


def sorted_values(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    h[mask] = h[mask].sort(0)[0]
    return h.square().sum()


def softmax_over(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    h[mask] = h[mask].softmax(0)
    return h.square().sum()


def counted(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    return h.sum() / h[labels > 0].shape[0]


def returned(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return h.sum(), h[labels > 0]


def rows_of_it(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    chosen = h[labels > 0]
    chosen[0] *= 2
    return chosen.sum()


def mixed_by_a_product(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    chosen = h[labels > 0]
    return (x.view(-1, D) @ chosen.T).sum()


def a_view_changed(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """The change shows in what it is a view of."""
    chosen = h[labels > 0]
    chosen[:, :2].mul_(3)
    h[labels > 0] = chosen
    return h.square().sum()


def added_in_order(m: Any, h: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """Rows, of which there must be as many as are chosen."""
    h[labels > 0] += x.view(-1, D)[:6]
    return h.square().sum()


LEFT = (
    a_view_changed,
    added_in_order,
    other_masks,
    changed_between,
    read_and_changed,
    sorted_values,
    softmax_over,
    counted,
    returned,
    rows_of_it,
    mixed_by_a_product,
)


@pytest.mark.parametrize("body", LEFT, ids=lambda b: b.__name__)
def test_what_depends_on_how_many_are_chosen_is_refused(body: Callable[..., Any]) -> None:
    with refused(CaptureError, HERE, "torch.where"):
        captured(Chosen(body), inputs())
