"""Samples of products, normalization, convolution, pooling, indexing and losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.cpu.rule_operands import distinct, index, mask, overload, positive, unit, x
from tests.cpu.rule_simulation import Sample, sample

aten = torch.ops.aten


def contraction() -> Iterator[Sample]:
    yield sample(aten.mm.default, x(4, 5), x(5, 6))
    yield sample(aten.bmm.default, x(2, 4, 5), x(2, 5, 3))
    yield sample(aten.mv.default, x(4, 5), x(5))
    yield sample(aten.dot.default, x(5), x(5))
    yield sample(aten.vdot.default, x(5), x(5))
    yield sample(aten.outer.default, x(5), x(4))
    yield sample(aten.linear.default, x(2, 3, 5), x(4, 5))
    yield sample(aten.linear.default, x(4, 5), x(4, 5), x(4))
    vectors = (((5,), (5,)), ((4, 5), (5,)), ((5,), (5, 4)), ((2, 4, 5), (5,)), ((5,), (2, 5, 3)))
    matrices = (((4, 5), (5, 6)), ((2, 4, 5), (5, 3)), ((2, 4, 5), (2, 5, 3)), ((2, 1, 4, 5), (3, 5, 4)))
    for left, right in (*vectors, *matrices):
        yield sample(aten.matmul.default, x(*left), x(*right))
    for bias in ((6,), (4, 6), (4, 1), ()):
        yield sample(aten.addmm.default, x(*bias), x(4, 5), x(5, 6))
    yield sample(aten.addmm.default, x(6), x(4, 5), x(5, 6), beta=2, alpha=3)
    yield sample(aten.baddbmm.default, x(2, 1, 3), x(2, 4, 5), x(2, 5, 3))
    yield sample(aten.addmv.default, x(4), x(4, 5), x(5))
    yield from grouped()
    yield from eight_bits()


def eight_bits() -> Iterator[Sample]:
    """Return small integers that fit into eight bits."""
    left, right = x(5, 32).to(torch.float8_e4m3fn), x(48, 32).to(torch.float8_e4m3fn).t()
    one, two = torch.tensor(0.5), torch.tensor([2.0])
    yield sample(aten._scaled_mm.default, left, right, one, two, out_dtype=torch.float32)
    yield sample(aten._scaled_mm.default, left, right, one, one, x(48).bfloat16(), out_dtype=torch.bfloat16)


def normalization() -> Iterator[Sample]:
    a, w, b = x(4, 5, 6), x(6), x(6)
    for shape, affine in (([6], (w, b)), ([6], (None, None)), ([5, 6], (x(5, 6), x(5, 6))), ([6], (w, None))):
        forward = sample(aten.native_layer_norm.default, a, shape, *affine, 1e-5)
        yield forward
        _, mean, rstd = forward.results
        asked = [True, affine[0] is not None, affine[1] is not None]
        yield sample(aten.native_layer_norm_backward.default, x(4, 5, 6), a, shape, mean, rstd, *affine, asked)
    for shape, weight in (([6], w), ([6], None)):
        forward = sample(aten._fused_rms_norm.default, a, shape, weight, 1e-5)
        yield forward
        rstd = forward.results[1]
        asked = [True, weight is not None]
        yield sample(aten._fused_rms_norm_backward.default, x(4, 5, 6), a, shape, rstd, weight, asked)
    yield from batch_norms()
    image = x(4, 8, 3, 2)
    for groups, affine in ((4, (x(8), x(8))), (1, (None, None)), (8, (x(8), None))):
        forward = sample(aten.native_group_norm.default, image, *affine, 4, 8, 6, groups, 1e-5)
        yield forward
        _, mean, rstd = forward.results
        asked = [True, affine[0] is not None, affine[1] is not None]
        counts = (4, 8, 6, groups)
        backward = aten.native_group_norm_backward.default
        yield sample(backward, x(4, 8, 3, 2), image, mean, rstd, affine[0], *counts, asked)


def batch_norms() -> Iterator[Sample]:
    image, c = x(4, 6, 2, 5), (x(6), x(6), x(6), positive(6))
    for training in (True, False):
        forward = sample(aten._native_batch_norm_legit_functional.default, image, *c, training, 0.1, 1e-5)
        yield forward
        saved = forward.results[1:3] if training else (None, None)
        yield sample(aten.native_batch_norm.default, image, *c, training, 0.1, 1e-5)
        rest = (c[0], c[2], c[3], *saved, training, 1e-5, [True, True, True])
        yield sample(aten.native_batch_norm_backward.default, x(4, 6, 2, 5), image, *rest)
    yield sample(aten._native_batch_norm_legit_no_training.default, image, *c, 0.1, 1e-5)
    yield sample(aten._native_batch_norm_legit.no_stats, image, *c[:2], True, 0.1, 1e-5)


def grouped() -> Iterator[Sample]:
    """Yield grouped products of rows by expert; the kernel supports no dtype wider than float32."""
    rows, experts, grad = x(6, 8).float(), x(3, 8, 16).float(), x(6, 16).float()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    yield sample(aten._grouped_mm.default, rows, experts, ends)
    yield sample(
        aten._grouped_mm.default, x(8, 8).float(), x(8, 16).float(), torch.tensor([4, 4, 8], dtype=torch.int32)
    )
    yield sample(aten._grouped_mm.default, x(2, 4, 8).float(), x(2, 8, 16).float())
    yield sample("transformers.grouped_mm_fallback.default", rows, experts, ends)
    yield sample("transformers.grouped_mm_fallback_backward.default", rows, experts, ends, grad)


def linear_algebra() -> Iterator[Sample]:
    square = x(4, 3, 3) + 20 * torch.eye(3, dtype=torch.float64)
    positive_definite = square @ square.mT
    for op in (aten.linalg_inv_ex, aten.linalg_lu_factor_ex, aten.linalg_lu):
        yield sample(op.default, square)
    for op in (aten.linalg_cholesky_ex, aten._linalg_eigh):
        yield sample(op.default, positive_definite)
    yield sample(aten.linalg_matrix_exp.default, x(4, 3, 3) / 8)
    yield sample(aten.linalg_qr.default, x(4, 5, 3))
    yield sample(aten._linalg_svd.default, positive_definite)
    for contiguous in (False, True):
        yield sample("autopar.linalg_det.default", square, contiguous=contiguous)
        yield sample("autopar.linalg_slogdet.default", square, contiguous=contiguous)
        yield sample("autopar.linalg_solve.default", square, x(4, 3, 5), left=True, contiguous=contiguous)
    yield sample("autopar.linalg_solve.default", square, x(4, 5, 3), left=False, contiguous=True)
    yield sample("autopar.linalg_solve.default", square, x(4, 3), left=True, contiguous=True)
    yield sample(aten.linalg_solve_triangular.default, square.tril(), x(4, 3, 5), upper=False)
    yield sample(aten.linalg_solve_triangular.default, square.tril(), x(4, 5, 3), upper=False, left=False)
    factors, pivots = aten.linalg_lu_factor_ex.default(square)[:2]
    yield sample(aten.linalg_lu_solve.default, factors, pivots, x(4, 3, 5))
    yield sample(aten.linalg_eig.default, square)
    yield sample(aten._linalg_eigvals.default, square)
    yield sample(aten.linalg_householder_product.default, x(4, 5, 3) / 8, unit(4, 3))
    yield sample(aten.cholesky_inverse.default, torch.linalg.cholesky(positive_definite))
    yield sample(aten.cholesky_solve.default, x(4, 3, 5), torch.linalg.cholesky(positive_definite))
    for tolerance in (x(), x(4)):
        yield sample(aten.linalg_pinv.atol_rtol_tensor, x(4, 5, 3), atol=tolerance * 0, rtol=None)
    yield sample(aten._pdist_forward.default, x(5, 3), 2.0)
    yield sample(aten._pdist_backward.default, x(10), x(5, 3), 2.0, x(10))
    yield sample(aten.trace.default, x(5, 5))
    for dim, shape in ((0, (4, 1, 1)), (2, (1, 1, 6))):
        forward = sample(aten._weight_norm_interface.default, x(4, 5, 6) + 9, positive(*shape), dim)
        yield forward
        v, g = forward.operands
        norms = forward.results[1]
        yield sample(aten._weight_norm_interface_backward.default, x(4, 5, 6), v, g, norms, dim)


def convolution() -> Iterator[Sample]:
    cases: list[tuple[tuple[int, ...], tuple[int, ...], bool, bool, int]] = [
        ((4, 5, 4, 4), (6, 5, 3, 3), False, False, 1),
        ((4, 5, 4, 4), (6, 5, 3, 3), True, False, 1),
        ((4, 4, 6), (8, 1, 3), True, False, 4),
        ((4, 8, 6), (4, 4, 3), False, False, 2),
        ((4, 5, 4, 4), (5, 6, 3, 3), False, True, 1),
        ((4, 5, 4), (5, 6, 3), True, True, 1),
        ((4, 4, 4), (4, 2, 3), True, True, 4),
        ((2, 2, 3, 3, 3), (4, 2, 2, 2, 2), False, False, 1),
    ]
    for shape, weight, biased, transposed, groups in cases:
        n = len(shape) - 2
        i, w = x(*shape), x(*weight)
        outs = weight[1] * groups if transposed else weight[0]
        options = ([2] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
        forward = sample(aten.convolution.default, i, w, x(outs) if biased else None, *options)
        yield forward
        grad, sizes = x(*forward.results[0].shape), [outs] if biased else None
        yield sample(aten.convolution_backward.default, grad, i, w, sizes, *options, [True, True, biased])
    yield sample(aten.convolution_backward.default, grad, i, w, None, *options, [False, True, False])
    yield from slides()


def slides() -> Iterator[Sample]:
    """Yield convolutions along a cut dim: with halos, without, and where rows of the result and of x do not match."""
    cases: list[tuple[int, int, int, int, int]] = [  # rows, kernel, stride, padding, dilation
        (6, 1, 1, 0, 1),
        (8, 2, 2, 0, 1),
        (9, 3, 1, 1, 1),
        (12, 3, 2, 1, 1),
        (13, 5, 2, 2, 1),
        (12, 3, 1, 2, 2),
        (9, 3, 1, 0, 1),
        (12, 1, 2, 0, 1),
        (11, 4, 3, 1, 1),
    ]
    for rows, kernel, stride, padding, dilation in cases:
        i, w, b = x(2, 3, rows, 3), x(4, 3, kernel, 2), x(4)
        options = ([stride, 1], [padding, 1], [dilation, 1], False, [0, 0], 1)
        forward = sample(aten.convolution.default, i, w, b, *options)
        yield forward
        grad = x(*forward.results[0].shape)
        yield sample(aten.convolution_backward.default, grad, i, w, [4], *options, [True, True, True])
    yield from spaces()
    forward = sample(aten.convolution.default, x(2, 4, 8), x(4, 1, 3), None, [1], [1], [1], False, [0], 4)
    yield forward
    rest = ([1], [1], [1], False, [0], 4, [True, False, False])
    yield sample(aten.convolution_backward.default, x(2, 4, 8), *forward.operands, None, *rest)


def spaces() -> Iterator[Sample]:
    """Yield convolutions with several spatial dims to cut, transposed ones, and those of volumes."""
    cases: list[tuple[tuple[int, ...], int, int, int, bool, int]] = [
        # space, kernel, stride, padding, transposed, output padding
        ((9, 8), 3, 1, 1, False, 0),
        ((9, 12), 3, 2, 1, False, 0),
        ((6, 7), 3, 1, 1, True, 0),
        ((6, 5), 4, 2, 1, True, 0),
        ((7, 6), 3, 2, 1, True, 1),
        ((6,), 2, 2, 0, True, 0),
        ((8, 4, 6), 3, 1, 1, False, 0),
        ((6, 4, 4), 3, 2, 1, True, 1),
    ]
    for space, kernel, stride, padding, transposed, more in cases:
        n = len(space)
        i, w, b = x(2, 2, *space), x(2, 2, *[kernel] * n), x(2)
        options = ([stride] * n, [padding] * n, [1] * n, transposed, [more] * n, 1)
        forward = sample(aten.convolution.default, i, w, b, *options)
        yield forward
        grad = x(*forward.results[0].shape)
        yield sample(aten.convolution_backward.default, grad, i, w, [2], *options, [True, True, True])


def resampling() -> Iterator[Sample]:
    for n in (2, 3):
        image = distinct(4, 3, *[4] * n) if n == 2 else distinct(2, 2, 4, 4, 4)
        small = x(*image.shape[:2], *[2] * n)
        pool = sample(overload(f"max_pool{n}d_with_indices"), image, [2] * n)
        yield pool
        windows = ([2] * n, [2] * n, [0] * n)
        backward = overload(f"max_pool{n}d_with_indices_backward")
        yield sample(backward, small, image, *windows, [1] * n, False, pool.results[1])
        yield sample(overload(f"avg_pool{n}d"), image, [2] * n)
        yield sample(overload(f"avg_pool{n}d_backward"), small, image, *windows, False, True, None)
        yield sample(overload(f"_adaptive_avg_pool{n}d"), image, [2] * n)
        yield sample(overload(f"_adaptive_avg_pool{n}d_backward"), small, image)
        pool = sample(overload(f"adaptive_max_pool{n}d"), image, [2] * n)
        yield pool
        yield sample(overload(f"adaptive_max_pool{n}d_backward"), small, image, pool.results[1])
    yield from pools()
    pool = aten.max_pool2d_with_indices.default(distinct(4, 3, 4, 4), [2, 2])
    yield sample(aten.max_unpool2d.default, *pool, [4, 4])
    yield from resizes()
    for n in (2, 3):
        image, grid = x(2, 4, *[3] * n), torch.rand(2, *[2] * n, n, dtype=torch.float64)
        forward = sample(overload(f"grid_sampler_{n}d"), image, grid, 0, 0, False)
        yield forward
        grad = x(*forward.results[0].shape)
        yield sample(overload(f"grid_sampler_{n}d_backward"), grad, image, grid, 0, 0, False, [True, True])
    for kind in ("bilinear", "bicubic"):
        name = f"_upsample_{kind}2d_aa"
        yield sample(overload(name), x(2, 4, 3, 3), [5, 5], False)
        yield sample(overload(f"{name}_backward"), x(2, 4, 5, 5), [5, 5], [2, 4, 3, 3], False)
    for n in (2, 3):
        image = distinct(2, 4, *[5] * n)
        pool = sample(overload(f"fractional_max_pool{n}d"), image, [2] * n, [2] * n, unit(2, 4, n))
        yield pool
        grad = x(*pool.results[0].shape)
        yield sample(overload(f"fractional_max_pool{n}d_backward"), grad, image, [2] * n, [2] * n, pool.results[1])
    yield sample(aten.im2col.default, x(2, 4, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2])
    yield sample(aten.col2im.default, x(2, 16, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])


def pools() -> Iterator[Sample]:
    """Yield pooling along cut rows: overlapping, padded, strided, dilated, and beyond the end."""
    cases: list[tuple[int, int, int, int]] = [(8, 3, 2, 1), (9, 3, 1, 1), (12, 2, 2, 0), (11, 3, 2, 0), (13, 3, 2, 1)]
    for rows, kernel, stride, padding in cases:
        image, window = distinct(2, 2, rows, 5), ([kernel, 2], [stride, 2], [padding, 1])
        pool = sample(aten.max_pool2d_with_indices.default, image, *window)
        yield pool
        grad = x(*pool.results[0].shape)
        backward = aten.max_pool2d_with_indices_backward.default
        yield sample(backward, grad, image, *window, [1, 1], False, pool.results[1])
        for include, divisor in ((True, None), (False, None), (True, 3)):
            yield sample(aten.avg_pool2d.default, image, *window, False, include, divisor)
            yield sample(aten.avg_pool2d_backward.default, grad, image, *window, False, include, divisor)
    for space in ((9, 12), (8, 6, 9)):
        n = len(space)
        image, window = distinct(2, *space), ([3] * n, [2] * n, [1] * n)
        pool = sample(overload(f"max_pool{n}d_with_indices"), image, *window)
        yield pool
        grad = x(*pool.results[0].shape)
        yield sample(
            overload(f"max_pool{n}d_with_indices_backward"), grad, image, *window, [1] * n, False, pool.results[1]
        )
        yield sample(overload(f"avg_pool{n}d"), image, *window)
        yield sample(overload(f"avg_pool{n}d_backward"), grad, image, *window, False, True, None)
    wide = ([3, 3], [2, 2], [1, 1], [2, 1])
    pool = sample(aten.max_pool2d_with_indices.default, distinct(2, 2, 13, 4), *wide)
    yield pool
    yield sample(backward, x(*pool.results[0].shape), *pool.operands, *wide, False, pool.results[1])
    image, window = distinct(2, 2, 16, 4), ([3, 3], [2, 2], [1, 1])  # the last windows reach beyond the padding
    pool = sample(aten.max_pool2d_with_indices.default, image, *window, [1, 1], True)
    yield pool
    grad = x(*pool.results[0].shape)
    yield sample(backward, grad, image, *window, [1, 1], True, pool.results[1])
    for include, divisor in ((True, None), (False, None), (False, 3)):
        yield sample(aten.avg_pool2d.default, image, *window, True, include, divisor)
        yield sample(aten.avg_pool2d_backward.default, grad, image, *window, True, include, divisor)


def resizes() -> Iterator[Sample]:
    for kind in ("nearest1d", "linear1d", "nearest2d", "bilinear2d", "bicubic2d", "nearest3d", "trilinear3d"):
        n = int(kind[-2])
        before, after = [2, 4, *[3] * n], [2, 4, *[5] * n]
        corners = () if kind.startswith("nearest") else (False,)
        for name in (f"upsample_{kind}", *([f"_upsample_nearest_exact{n}d"] if not corners else [])):
            yield sample(overload(name), x(*before), after[2:], *corners)
            yield sample(overload(f"{name}_backward"), x(*after), after[2:], before, *corners)
    yield sample(aten.upsample_bilinear2d.vec, x(2, 4, 3, 3), [5, 5], False, None)
    images = (("nearest2d", ()), ("bilinear2d", (False,)), ("bilinear2d", (True,)), ("bicubic2d", (False,)))
    for kind, corners in images:
        for before, after in (([6, 4], [12, 8]), ([12, 9], [6, 4]), ([8, 6], [11, 9])):
            name, shape = f"upsample_{kind}", [2, 2, *before]
            yield sample(overload(name), x(*shape), after, *corners)
            yield sample(overload(f"{name}_backward"), x(2, 2, *after), after, shape, *corners)
    for kind, align in (("nearest", False), ("nearest_exact", False), ("linear", True), ("cubic", False)):
        options = {"kind": kind, "align": align, "scales": [0.0, 1.5], "n": [8, 6], "out": [12, 9]}
        yield sample(torch.ops.autopar.interpolate.default, x(2, 2, 8, 6), **options)
        yield sample(torch.ops.autopar.interpolate_backward.default, x(2, 2, 12, 9), **options)
    yield sample(aten.upsample_nearest2d.vec, x(2, 2, 6, 6), None, [2.5, 1.5])
    yield sample(aten.upsample_bicubic2d.vec, x(2, 2, 6, 6), None, False, [2.5, 1.5])
    yield sample(aten.upsample_linear1d_backward.default, x(2, 2, 15), [15], [2, 2, 6], False, 2.5)


def indexing() -> Iterator[Sample]:
    yield sample(aten.embedding.default, x(7, 6), index(7, 4, 5))
    yield sample(aten.embedding_dense_backward.default, x(4, 5, 6), index(7, 4, 5), 7, -1, False)
    yield sample(aten.embedding_dense_backward.default, x(4, 5), index(3, 4), 3, 0, True)
    table, members, starts = x(7, 6), index(7, 5), torch.tensor([0, 2])
    bags = sample(aten._embedding_bag.default, table, members, starts, False, 2)
    yield bags
    rest = (*bags.results[1:], 7, False, 2, False, None)
    yield sample(aten._embedding_bag_backward.default, x(2, 6), members, starts, *rest)
    yield sample(aten.gather.default, x(4, 7), 1, index(7, 4, 5))
    yield sample(aten.gather.default, x(4, 7), 0, index(4, 3, 5))
    yield sample(aten.gather.default, x(), 0, torch.tensor(0))
    columns = torch.stack([torch.randperm(7)[:5] for _ in range(4)])
    yield sample(aten.scatter.src, x(4, 7), 1, columns, x(4, 5))
    yield sample(aten.scatter.value, x(4, 7), 1, columns, 0)
    yield sample(aten.scatter.value, x(4, 7), -1, columns, 3)
    yield sample(aten.scatter_add.default, x(4, 7), 1, index(7, 4, 5), x(4, 5))
    yield sample(aten.scatter_add.default, x(4, 7), 0, index(4, 6, 5), x(6, 6))
    yield sample(aten.scatter_reduce.two, x(4, 7), 1, index(7, 4, 5), x(4, 5), "amax")
    yield sample(aten.index_select.default, x(4, 7), 1, index(7, 5))
    yield sample(aten.index_select.default, x(4, 7), 1, torch.tensor(2))
    yield sample(aten.index_add.default, x(4, 7), 1, index(7, 5), x(4, 5))
    yield sample(aten.index_copy.default, x(4, 7), 1, torch.randperm(7)[:5], x(4, 5))
    yield sample(aten.index_select.default, mask(5, 4), 0, index(5, 3))
    yield sample(aten.scatter_reduce.two, x(6, 4), 0, index(6, 3, 4), x(3, 4), "sum", include_self=False)
    yield sample(aten.index_add.default, x(7, 4), 0, index(7, 5), x(5, 4), alpha=3)
    yield sample(aten.index_fill.int_Scalar, x(4, 7), 1, index(7, 5), 2)
    yield from advanced_indexing()
    yield sample(aten.index_reduce.default, x(4, 7), 1, index(7, 5), x(4, 5), "amax")
    yield sample(aten.take.default, x(4, 7), index(28, 5, 4))
    yield sample(aten.isin.Tensor_Tensor, x(4, 5), x(2, 3))
    yield sample(aten.masked_scatter_backward.default, x(4, 5), mask(4, 5), [20])
    yield sample(aten.nonzero.default, mask(4, 5))
    yield sample(aten.masked_scatter.default, x(4, 5), mask(4, 5), x(20))
    boundaries = torch.arange(-3.0, 3.0, dtype=torch.float64)
    yield sample(aten.bucketize.Tensor, x(4, 5), boundaries)
    yield sample(aten.searchsorted.Tensor, x(4, 6).sort(-1)[0], x(4, 5))
    yield sample(aten.histc.default, x(20), 4)
    yield sample(aten.histc.default, x(4, 5), 4, -2, 2)
    yield sample(aten.put.default, x(4, 5), index(20, 3), x(3))
    yield sample(aten.repeat_interleave.Tensor, torch.tensor([1, 0, 2]))
    yield sample(aten.bincount.default, index(5, 20))


def advanced_indexing() -> Iterator[Sample]:
    a, i, j = x(4, 7, 5), index(4, 6), index(5, 3, 1)
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        yield sample(op, a, [i])
        yield sample(op, a, [None, index(7, 2, 6)])
        yield sample(op, a, [index(4, 6), None, j])
        yield sample(op, a, [None, index(7, 6), j])
    yield sample(aten.index.Tensor, a, [None, index(14, 6) - 7])
    yield sample(aten.index.Tensor, a, [mask(4)])
    once = torch.randperm(7)[:6]
    for op in (aten.index_put.default, aten._unsafe_index_put.default):
        yield sample(op, a, [None, once], x(4, 6, 5))
        yield sample(op, a, [None, index(7, 6)], x(4, 6, 5), True)
        yield sample(op, a, [None, once], x(5))
        yield sample(op, a, [i.clone(), None, index(5, 6)], x(6, 7), True)
    yield sample(aten.index_put.default, a, [mask(4)], positive())


def losses() -> Iterator[Sample]:
    a, b = unit(4, 5), unit(4, 5)
    compared = (("mse_loss", ()), ("smooth_l1_loss", (0.5,)), ("huber_loss", (0.5,)), ("soft_margin_loss", ()))
    for reduction, grad in ((0, x(4, 5)), (1, x()), (2, x())):
        for name, extra in compared:
            yield sample(overload(name), a, b, reduction, *extra)
            yield sample(overload(f"{name}_backward"), grad, a, b, reduction, *extra)
        for weight in (None, x(5)):
            yield sample(aten.binary_cross_entropy.default, a, b, weight, reduction)
            yield sample(aten.binary_cross_entropy_backward.default, grad, a, b, weight, reduction)
        yield sample(aten.binary_cross_entropy_with_logits.default, a, b, None, None, reduction)
    for reduction in (0, 1, 2):
        for weight in (None, positive(6)):
            yield from nll(aten.nll_loss_forward, aten.nll_loss_backward, (4, 6), (4,), weight, reduction)
        yield from nll(aten.nll_loss2d_forward, aten.nll_loss2d_backward, (4, 6, 2, 3), (4, 2, 3), None, reduction)
    yield from nll(aten.nll_loss_forward, aten.nll_loss_backward, (6,), (), None, 1)
    distances = sample(aten._cdist_forward.default, x(2, 4, 3), x(2, 5, 3), 2.0, None)
    yield distances
    yield sample(aten._cdist_backward.default, x(2, 4, 5), *distances.operands, 2.0, distances.results[0])


def nll(
    op: Any, backward: Any, shape: tuple[int, ...], samples: tuple[int, ...], weight: Tensor | None, reduction: int
) -> Iterator[Sample]:
    logits, target = -unit(*shape), index(6, *samples)
    forward = sample(op.default, logits, target, weight, reduction, 2)
    yield forward
    loss, total = forward.results
    yield sample(backward.default, x(*loss.shape), logits, target, weight, reduction, 2, total)
