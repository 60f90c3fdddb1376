"""Samples of views, reductions, scans and creation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.cpu.rule_operands import distinct, mask, overload, unit, x
from tests.cpu.rule_simulation import Sample, sample

aten = torch.ops.aten


def views() -> Iterator[Sample]:
    for before, after in (
        ((4, 6), (24,)),
        ((24,), (4, 6)),
        ((4, 6), (6, 4)),
        ((4, 5, 6), (20, 6)),
        ((4, 6), (2, 2, 6)),
        ((5, 1, 6), (5, 6)),
        ((6,), (1, 6, 1)),
        ((4, 6, 5), (4, 3, 2, 5)),
        ((1,), ()),
        ((2, 6, 5), (6, 2, 5)),
        ((6, 4), (3, 8)),
        ((2, 2, 5), (4, 5)),
        ((5, 0), (0, 5)),
    ):
        yield sample(aten.view.default, x(*before), list(after))
    yield sample(aten._unsafe_view.default, x(4, 6), [2, 12])
    yield sample(aten.reshape.default, x(4, 6), [8, -1])
    yield sample(aten.view_copy.default, x(4, 6), [24])
    yield sample(aten._reshape_alias.default, x(4, 6), [24], [1])
    yield sample(aten.permute.default, x(2, 4, 5), [2, 0, -2])
    yield sample(aten.transpose.int, x(2, 4, 5), -1, 0)
    yield sample(aten.t.default, x(4, 5))
    yield sample(aten.unsqueeze.default, x(4, 5), -1)
    yield sample(aten.unsqueeze.default, x(), 0)
    yield sample(aten.squeeze.default, x(4, 1, 2, 1))
    yield sample(aten.squeeze.dim, x(4, 1, 5), 1)
    yield sample(aten.squeeze.dims, x(2, 1, 5, 1), [0, 1, -1])
    yield sample(aten.expand.default, x(4, 1, 5), [2, 4, 6, 5])
    yield sample(aten.expand.default, x(4, 1), [-1, 5])
    yield sample(aten.broadcast_to.default, x(5), [4, 5])
    yield sample(aten.slice.Tensor, x(4, 5), 1, 1, 4)
    yield sample(aten.slice.Tensor, x(4, 5), 1, 0, 9223372036854775807)
    yield sample(aten.slice.Tensor, x(4, 5))
    yield sample(aten.split.Tensor, x(4, 6), 4, 1)
    yield sample(aten.split_with_sizes.default, x(4, 6), [1, 2, 3], -1)
    yield sample(aten.unsafe_split.Tensor, x(4, 6), 3, 1)
    yield sample(aten.unsafe_split_with_sizes.default, x(4, 6), [1, 2, 3], -1)
    yield sample(aten.diag_embed.default, x(4, 2, 3))
    yield sample(aten.diag_embed.default, x(4, 3), 1, 0, 2)
    yield sample(aten.select.int, x(4, 3, 5), 1, -1)
    yield sample(aten.unbind.int, x(3, 5), 0)
    yield sample(aten.diagonal.default, x(4, 5, 6), 0, 0, -1)
    yield sample(aten.unfold.default, x(4, 6), 1, 3, 2)
    yield sample(aten.slice_backward.default, x(4, 3), [4, 5], 1, 1, 4, 1)
    yield sample(aten.slice_backward.default, x(4, 5), [4, 5], 1, 0, 9223372036854775807, 1)
    yield sample(aten.select_backward.default, x(4, 5), [4, 3, 5], 1, 2)
    yield sample(aten.diagonal_backward.default, x(5, 4), [4, 5, 6], 0, 0, 2)
    yield sample(aten.unfold_backward.default, x(4, 2, 3), [4, 6], 1, 3, 2)
    yield sample(aten.slice_scatter.default, x(4, 5), x(4, 3), 1, 1, 4)
    yield sample(aten.select_scatter.default, x(4, 3, 5), x(4, 5), 1, 0)
    yield sample(aten.diagonal_scatter.default, x(4, 5, 6), x(5, 4), 0, 0, 2)
    yield from joins()


def joins() -> Iterator[Sample]:
    yield sample(aten.cat.default, [x(4, 5), x(4, 2)], 1)
    yield sample(aten.cat.default, [x(0), x(4, 2), x(3, 2)])
    yield sample(aten.stack.default, [x(4, 5), x(4, 5)], -1)
    yield sample(aten.flip.default, x(4, 5), [-1])
    yield sample(aten.roll.default, x(4, 5), [1], [1])
    yield sample(aten.roll.default, x(4, 5), [3])
    yield sample(aten.repeat.default, x(4, 5), [2, 1, 3])
    yield sample(aten.tril.default, x(4, 5, 5), 1)
    yield sample(aten.triu.default, x(2, 4, 5))
    yield sample(aten.constant_pad_nd.default, x(4, 5), [1, 2])
    yield sample(aten.constant_pad_nd.default, x(4, 5), [1, -1, 0, 0], 3)
    for n in (1, 2, 3):
        for kind in ("reflection_pad", "replication_pad"):
            image = x(2, 4, *[3] * n)
            padded = sample(overload(f"{kind}{n}d"), image, [1] * (2 * n))
            yield padded
            yield sample(overload(f"{kind}{n}d_backward"), x(*padded.results[0].shape), image, [1] * (2 * n))
    yield sample(aten.pixel_shuffle.default, x(2, 16, 3, 5), 2)
    yield sample(aten.pixel_unshuffle.default, x(2, 4, 4, 6), 2)
    yield sample(aten.as_strided.default, x(4, 5), [5, 4], [1, 5])
    yield sample(aten.as_strided_scatter.default, x(4, 5), x(5, 4), [5, 4], [1, 5])
    yield sample(aten.as_strided.default, x(4, 6, 1, 1), [4, 6, 1, 1], [6, 1, 6, 6])
    yield sample(aten.as_strided.default, x(4, 6), [24], [1])
    yield sample(aten.as_strided_scatter.default, x(24), x(4, 6), [4, 6], [6, 1])
    yield sample(aten.narrow_copy.default, x(4, 6), 1, 2, 3)
    yield sample(aten.view_as_complex.default, x(4, 5, 2))
    z = torch.complex(x(4, 6), x(4, 6))
    yield sample(aten.view_as_real.default, z)
    yield sample(aten._fft_r2c.default, x(4, 6), [1], 0, True)
    yield sample(aten._fft_c2c.default, z, [1], 0, True)
    yield sample(aten._fft_c2r.default, z, [1], 0, 10)


def reductions() -> Iterator[Sample]:
    a, d = x(4, 5, 3), distinct(4, 5)
    for op in (aten.sum, aten.mean, aten.max, aten.min, aten.median):
        yield sample(op.default, distinct(4, 5, 3) + 1)
    yield sample(aten.prod.default, 2.0 ** mask(4, 5, 3))
    yield sample(aten.sum.default, x())
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default):
        yield sample(op, a, [0, -1])
        yield sample(op, a, [1], True)
    yield sample(aten.sum.dim_IntList, a, [])
    yield sample(aten.nansum.default, a, [1])
    yield sample(aten.count_nonzero.dim_IntList, a, [1])
    for op in (aten.max, aten.min, aten.median, aten.nanmedian):
        yield sample(op.dim, d, 1)
        yield sample(op.dim, d, 0, True)
    yield sample(aten.aminmax.default, d, dim=1)
    yield sample(aten.aminmax.default, d, dim=0, keepdim=True)
    yield sample(aten.max.other, a, x(5, 1))
    yield sample(aten.min.other, a, x(5, 1))
    for op in (aten.argmax.default, aten.argmin.default):
        yield sample(op, d)
        yield sample(op, d, 1, True)
    for op, k in ((aten.kthvalue.default, [2]), (aten.mode.default, [])):
        yield sample(op, d, *k)
        yield sample(op, d, *k, 0, True)
    m = mask(4, 5)
    for op in (aten.any, aten.all):
        yield from (sample(op.default, m), sample(op.dim, m, 1), sample(op.dims, m, [0], True))
    yield sample(aten.prod.dim_int, a, 1)
    yield sample(aten.var.correction, a, [1], correction=1)
    yield sample(aten.std.correction, a, [1], correction=0, keepdim=True)
    yield sample(aten.var_mean.correction, a, [0, 2], correction=1, keepdim=True)
    yield sample(aten.var.correction, unit(7), correction=0)
    yield sample(aten.std_mean.correction, a, [0, 1])
    yield sample(aten.linalg_vector_norm.default, a)
    for p in (1, 3, float("inf"), 0):
        yield sample(aten.linalg_vector_norm.default, a, p, [0, 1])
    yield sample(aten.linalg_vector_norm.default, a, 2, [1], True)
    yield sample(aten.norm.ScalarOpt_dim, a, 2, [1])
    yield from along()


def along() -> Iterator[Sample]:
    a, d = x(4, 5), distinct(4, 5)
    for op in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin):
        yield sample(op.default, d / 4, 1)
    for op in (aten.cummax, aten.cummin):
        yield sample(op.default, torch.tensor([0.0, 2, 2, torch.nan, 2, torch.nan, 1]), 0)
        yield sample(op.default, mask(6, 7).double(), 0)
    yield sample(aten.cumsum.default, a / 2, 1, dtype=torch.int64)
    yield sample(aten.sum.dim_IntList, a / 2, [1], dtype=torch.int64)
    yield sample(aten._softmax.default, a, -1, False)
    yield sample(aten._log_softmax.default, a, -1, False)
    yield sample(aten._safe_softmax.default, a.masked_fill(mask(4, 1), -torch.inf), -1)
    yield sample(aten._softmax.default, (unit(3, 7) * 800).bfloat16(), -1, False)
    yield sample(aten.softmax.int, a, 0)
    yield sample(aten.log_softmax.int, a, 0)
    yield sample(aten._softmax_backward_data.default, a, unit(4, 5), 1, torch.float64)
    yield sample(aten._log_softmax_backward_data.default, a, -unit(4, 5), -1, torch.float64)
    yield sample(aten.sort.default, d)
    yield sample(aten.sort.default, d, 0, True)
    yield sample(aten.sort.stable, d, stable=True, dim=0)
    yield sample(aten.argsort.default, d, 0)
    yield sample(aten.topk.default, d, 2)
    yield sample(aten.topk.default, d, 3, 0)
    yield sample(aten.topk.default, distinct(9, 2), 1, 0, False)
    yield sample(aten.glu.default, x(4, 6), 1)
    yield sample(aten.glu_backward.default, x(4, 3), x(4, 6), -1)


def creation() -> Iterator[Sample]:
    yield sample(aten.full.default, [4, 5], 3.0)
    yield sample(aten._efficientzerotensor.default, [4, 5], values=False)
    yield sample(aten.zeros.default, [4, 5])
    yield sample(aten.ones.default, [4, 5])
    yield sample(aten.empty.memory_format, [4, 5], values=False)
    yield sample(aten.arange.default, 5)
    yield sample(aten.scalar_tensor.default, 5.0)
    yield sample(aten.eye.default, 4)
    yield sample(aten.linspace.default, 0, 1, 4)
    yield sample(aten.logspace.default, 0, 1, 4)
    windows = (aten.hann_window, aten.hamming_window, aten.blackman_window, aten.bartlett_window, aten.kaiser_window)
    yield from (sample(op.default, 5) for op in windows)
    yield sample(aten.tril_indices.default, 3, 3)
    yield sample(aten.triu_indices.default, 3, 3)
    for op, args in ((aten.rand, ([4],)), (aten.randn, ([4],)), (aten.randint, (5, [4])), (aten.randperm, (5,))):
        yield sample(op.default, *args, values=False)
    for op, args in ((aten.new_zeros, ()), (aten.new_ones, ()), (aten.new_full, (3,))):
        yield sample(op.default, x(4, 5), [5, 2], *args)
    yield sample(aten.new_empty.default, x(4, 5), [4, 5, 1], values=False)
    yield sample(aten.new_empty_strided.default, x(4, 5), [4, 5], [5, 1], values=False)
    a = unit(4, 5)
    yield from (sample(op.default, a, values=False) for op in (aten.bernoulli, aten.rand_like, aten.randn_like))
    yield sample(aten.randint_like.default, a, 5, values=False)
    yield sample(aten.multinomial.default, a, 2, values=False)
    yield sample(aten.native_dropout.default, a, 0.5, True, values=False)
