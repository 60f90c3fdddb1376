"""Layers that capture takes apart: bags of embeddings, instance norm, and norms of standardised weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import passes, planner
from autopar.errors import CaptureError
from autopar.mesh import Mesh
from autopar.runtime.simulation import simulate_program
from autopar.tracer import ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.cpu.model_checks import assert_equal, cluster_where_sharding_pays
from tests.zoo.entry import Entry
from tests.zoo.measure import captured, check


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, body: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.body = body

    def forward(self, **inputs: Tensor) -> Tensor:
        found = self.layer(*inputs.values()) if self.body is None else self.body(self.layer, **inputs)
        weight = torch.linspace(0.5, 2.0, found.numel(), dtype=found.dtype).reshape(found.shape)
        return (found * weight).square().sum()


def equal(layer: nn.Module, inputs: Mapping[str, Tensor], body: Callable[..., Any] | None = None) -> set[str]:
    """Sharded and whole are equal; returns the ops of the graph."""
    entry = Entry("layer", "other", lambda: Layer(layer, body), lambda: dict(inputs))
    of = captured(entry)
    for mesh in [(4,), (2, 2)]:
        check(entry, of, mesh)
    return {n.packet for n in of.capture.graph.nodes}


def rows(*shape: int) -> Tensor:
    return torch.randint(0, 12, shape)


STARTS = torch.tensor([0, 3, 3, 7])  # the second bag is empty


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_equal_length(mode) -> None:
    ops = equal(nn.EmbeddingBag(12, 8, mode=mode), {"ids": rows(8, 5)})
    assert "autopar.lookup" in ops
    assert "aten._embedding_bag" not in ops


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_bags_by_their_starts(mode, padding_idx) -> None:
    layer = nn.EmbeddingBag(12, 8, mode=mode, padding_idx=padding_idx)
    assert "autopar.lookup" in equal(layer, {"ids": rows(11), "offsets": STARTS})


def test_bags_whose_last_offset_is_the_end() -> None:
    layer = nn.EmbeddingBag(12, 8, mode="sum", include_last_offset=True)
    equal(layer, {"ids": rows(11), "offsets": torch.tensor([0, 3, 3, 7, 11])})


def test_weighted_bags() -> None:
    def body(m: Any, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return m(ids, offsets, weights)

    layer = nn.EmbeddingBag(12, 8, mode="sum")
    equal(layer, {"ids": rows(11), "offsets": STARTS, "weights": torch.rand(11)}, body)


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm(affine) -> None:
    layer = nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8, affine=affine))
    assert "aten.native_group_norm" in equal(layer, {"x": torch.randn(4, 3, 5, 5)})


def test_a_weight_that_is_standardised_by_batch_norm() -> None:
    """As timm's ScaledStdConv2d does it."""

    def body(m: Any, x: Tensor) -> Tensor:
        flat = m.weight.reshape(1, m.out_channels, -1)
        weight = F.batch_norm(flat, None, None, weight=(m.bias * 2).view(-1), training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(m.weight))

    equal(nn.Conv2d(3, 8, 3), {"x": torch.randn(4, 3, 5, 5)}, body)


def test_weight_norm() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3))
    assert "aten._weight_norm_interface" in equal(layer, {"x": torch.randn(4, 4, 9)})


def test_solving_and_inverting_batches_of_matrices() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        a = x + 8 * torch.eye(4, dtype=x.dtype)
        solved = torch.linalg.solve(a, m(x)) + torch.linalg.inv(a) + torch.linalg.cholesky(a @ a.mT)
        return solved * torch.linalg.slogdet(a).logabsdet[:, None, None]

    equal(nn.Linear(4, 4), {"x": torch.randn(8, 4, 4)}, body)


def test_factors_are_read_as_the_matrix_lay_in_memory_at_capture() -> None:
    """torch factors the transposed of a contiguous matrix. A parameter in columns is not, and its shards are."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter((torch.randn(4, 4) + 4 * torch.eye(4)).T.contiguous().T)

        def forward(self, x: Tensor) -> Tensor:
            solved = torch.linalg.solve(self.mix, x.T).square().sum() + torch.linalg.solve(x.T @ x, self.mix).sum()
            return solved + torch.linalg.slogdet(self.mix).logabsdet + torch.det(self.mix.T @ self.mix).log()

    entry = Entry("mixing", "other", Mixing, lambda: {"x": torch.randn(8, 4)})
    of = captured(entry)
    assert not of.model.mix.is_contiguous()
    check(entry, of, (2, 2))
    on = Mesh((2,))
    for seed in range(3):
        options = planner.Options(search=f"random:{seed}", time_limit_s=5)
        planned = planner.plan_graph(of.capture.graph, on, cluster_where_sharding_pays().sized(2), options)
        lowered = passes.lower(planned.program, of.capture.graph, on)
        outputs, result = simulate_program(lowered, of.capture.graph, on, of.named(), 0)
        assert_equal(replace(result, outputs=outputs), of.reference, 1e-9)


@pytest.mark.parametrize(("r", "repeated"), [(2, False), (2, True), (3, False), (5, False)])
def test_combinations(r, repeated) -> None:
    """Of four elements there are none of five."""

    def body(m: Any, x: Tensor) -> Tensor:
        h = m(x).mean(0)
        return torch.cat([h, torch.combinations(h, r, with_replacement=repeated).prod(-1)])

    equal(nn.Linear(6, 4), {"x": torch.randn(8, 6)}, body)


def test_pairs_of_features() -> None:
    """As in factorisation machines: what is combined are numbers of columns."""

    def body(m: Any, x: Tensor) -> Tensor:
        first, second = torch.combinations(torch.arange(5)).unbind(1)
        return m(x)[:, first] * m(x)[:, second]

    equal(nn.Linear(6, 5), {"x": torch.randn(8, 6)}, body)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(smoothing, weighted, reduction) -> None:
    """Classes may be cut with weights and smoothing too: no op needs them whole."""

    def body(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        weight = torch.arange(1, 13, dtype=x.dtype) if weighted else None
        return F.cross_entropy(m(x), labels, weight, reduction=reduction, label_smoothing=smoothing)

    labels = rows(8).masked_fill(torch.arange(8) < 2, -100)
    ops = equal(nn.Linear(6, 12), {"x": torch.randn(8, 6), "labels": labels}, body)
    assert "aten._log_softmax" not in ops


def test_cross_entropy_of_images() -> None:
    def body(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(m(x), labels, ignore_index=11, label_smoothing=0.2)

    equal(nn.Conv2d(3, 12, 1), {"x": torch.randn(4, 3, 4, 4), "labels": rows(4, 4, 4)}, body)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("packed", [False, True])
def test_ctc(reduction, packed) -> None:
    """With labels in rows, or of all samples in one."""
    lengths = torch.tensor([2, 1, 3, 2])
    labels = rows(8) % 5 + 1 if packed else rows(4, 3) % 5 + 1

    def body(m: Any, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        scores = m(x).transpose(0, 1).log_softmax(-1)
        return F.ctc_loss(scores, labels, torch.tensor([7, 7, 6, 7]), lengths, reduction=reduction, zero_infinity=True)

    ops = equal(nn.Linear(5, 6), {"x": torch.randn(4, 7, 5), "labels": labels, "lengths": lengths}, body)
    assert "autopar.ctc" in ops


LABELS = torch.tensor([[0, 3, -1, 1, 1], [2, 1, 4, 0, -1], [-1, 0, 0, 0, 0], [1, 1, 2, -1, 3]])
"""Of several classes each; those after the first -1 do not count."""


def _of_one_number(s: Tensor) -> Tensor:
    """Which has a dim 0 for every op that asks for a dim."""
    chosen = s.topk(1, 0)[0] * s.sort(0)[0] + s.cumsum(0) + s.index_select(0, torch.tensor([0]))
    return chosen * s.mean(0) + s.softmax(0) * s.logsumexp(0) + s.log_softmax(0) + s.max(0)[0]


TAKEN_APART: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "multilabel_margin": lambda m, x: F.multilabel_margin_loss(m(x), LABELS),
    "multilabel_margin_each": lambda m, x: F.multilabel_margin_loss(m(x), LABELS, reduction="none"),
    "multi_margin": lambda m, x: F.multi_margin_loss(m(x), LABELS[:, 0].abs(), p=2, margin=0.7),
    "bilinear": lambda m, x: F.bilinear(m(x), x, m.weight.unsqueeze(0), m.bias[:1]),
    "addbmm": lambda m, x: torch.addbmm(x[:1], m(x).unsqueeze(2), x.unsqueeze(1), beta=0.5, alpha=2),
    "renorm": lambda m, x: m(x).renorm(2, 1, 0.5),
    "dist": lambda m, x: m(x).dist(x) + m(x).dist(x, 1),
    "pdist": lambda m, x: F.pdist(m(x)) * F.pdist(x, 1),
    "rot90": lambda m, x: m(x).rot90(1, (0, 1)) @ x,
    "block_diag": lambda m, x: torch.block_diag(m(x), x),
    "cross": lambda m, x: torch.linalg.cross(m(x)[:, :3], x[:, 1:4]),
    "diag": lambda m, x: torch.diag(m(x).T @ x, 1) + torch.diag(x[0]).trace(),
    "index_fill": lambda m, x: m(x).index_fill(0, torch.tensor([1, 3]), 2.0),
    "eigenvalues": lambda m, x: torch.linalg.eigvals(m(x).T @ x).abs(),
    "covariance": lambda m, x: torch.cov(m(x).T) + torch.cov(x.T, correction=0, aweights=m(x)[:, 0].abs()),
    "covariance_weighted": lambda m, x: m(x).T.cov(fweights=LABELS[3, :4].abs(), aweights=x[:, 0].exp()),
    "correlation": lambda m, x: torch.corrcoef(m(x)) * m(x)[0].cov() + m(x)[0].corrcoef(),
    "one_number": lambda m, x: _of_one_number(m(x).mean()),
    "rrelu_outside_of_training": lambda m, x: F.rrelu(m(x), training=False),
    "affine_grid": lambda m, x: F.affine_grid(m(x)[:, :3].reshape(2, 2, 3), [2, 1, 4, 6], align_corners=False),
}


@pytest.mark.parametrize("name", TAKEN_APART)
def test_what_has_no_rule_of_its_own_is_taken_apart(name: str) -> None:
    equal(nn.Linear(5, 5), {"x": torch.randn(4, 5)}, TAKEN_APART[name])


@pytest.mark.parametrize("layer", [nn.Embedding(12, 8, sparse=True), nn.EmbeddingBag(12, 8, mode="sum", sparse=True)])
def test_sparse_gradients_become_dense_with_a_notice(layer) -> None:
    ids = rows(8, 5)
    capture = ColoTracer().capture(Layer(layer), {"input": ids})
    assert any("sparse=True" in notice for notice in capture.notices)
    dense = copy.deepcopy(layer)
    dense.sparse = False
    equal(dense, {"input": ids})
    plan = autopar.plan(Layer(layer).double(), {"input": ids}, mesh=(2,), time_limit=5)
    found = autopar.simulate(Layer(layer).double(), {"input": ids}, plan=plan).grads["layer.weight"]
    Layer(dense.double())(input=ids).backward()
    torch.testing.assert_close(found, dense.weight.grad, rtol=1e-12, atol=1e-12)


def test_sparse_tensors_are_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.ones(2, dtype=x.dtype), (4, 4)) @ m(x)

    with refused(CaptureError, "sparse", "index_add"):
        ColoTracer().capture(Layer(nn.Linear(5, 5).double(), body), {"x": torch.randn(4, 5, dtype=torch.float64)})


@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d((4, 2)), nn.AdaptiveMaxPool2d((4, 2))], ids=["mean", "maximum"])
def test_adaptive_pooling_by_windows_of_one_length_is_cut_along_rows(pool) -> None:
    image = {"x": torch.randn(1, 1, 16, 6, dtype=torch.float64)}
    entry = Entry("layer", "other", lambda: Layer(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), pool)), lambda: image)
    of = captured(entry)
    pooling = next(n for n in of.capture.graph.nodes if n.packet.startswith(("aten.avg_pool", "aten.max_pool")))
    for mesh in [(4,), (2, 2)]:
        chosen = next(op.strategy for op in check(entry, of, mesh).program.ops if op.node == pooling.name)
        assert chosen.inputs[0].dims[2]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Avg", "Max"])
def test_adaptive_pooling_of_every_size(n, kind) -> None:
    for out in ([4, 3, 2][:n], [3, 2, 5][:n], [1] * n, [8, 6, 4][:n]):
        layer = getattr(nn, f"Adaptive{kind}Pool{n}d")(tuple(out) if n > 1 else out[0])
        equal(nn.Sequential(getattr(nn, f"Conv{n}d")(2, 2, 1), layer), {"x": torch.randn(4, 2, *[8, 6, 4][:n])})
