"""Cases of the ops that read summaries: one part of a dim, with the gathered summaries of three ranks."""

from __future__ import annotations

from typing import Any

import torch

Case = tuple[str, tuple[Any, ...], dict[str, Any]]


def cases(dtype: torch.dtype) -> list[Case]:
    return [*_along(dtype), *_statistics(dtype), *_indexing(dtype), *_grouped(dtype)]


def _along(dtype: torch.dtype) -> list[Case]:
    x, out = torch.randn(3, 5, 4, dtype=dtype), torch.rand(3, 5, 4, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    told, narrow = torch.randn(3, 3, 1, 4, dtype=wide), torch.randn(3, 3, 1, 4, dtype=dtype)
    values, places = torch.randn(3, 3, 2, 4, dtype=dtype), torch.randint(0, 15, (3, 3, 2, 4))
    return [
        ("lse", (x.transpose(0, 1), 1), {}),
        ("softmax_of_lse", (x, told, False, True, dtype), {}),
        ("softmax_of_lse", (x.transpose(0, 1), told.transpose(1, 2), True, False, wide), {}),
        ("softmax_sum", (x, out, 1, False), {}),
        ("softmax_sum", (x, out, 1, True), {}),
        ("softmax_backward_of_sum", (x, out, told, False, dtype), {}),
        ("softmax_backward_of_sum", (x, out, told, True, wide), {}),
        ("scan_total", (x, 1, "logsumexp", wide), {}),
        ("scan", (x, narrow, 1, "sum", 2, dtype), {}),
        ("scan", (x, narrow, 1, "prod", 0, dtype), {}),
        ("extremum_total", (x, 1, True, 5), {}),
        ("extremum_scan", (x, narrow, places[:, :, :1], 1, False, 1, 5), {}),
        ("top", (x, 2, 1, True, 5), {}),
        ("top_of", (values, places, 2, 1, False, True, True), {}),
        ("top_of", (values, places, 1, 1, True, True, False), {}),
        ("place_of_top", (values, places, 1, True, True), {}),
    ]


def _statistics(dtype: torch.dtype) -> list[Case]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, weight, image = torch.randn(4, 6, dtype=dtype), torch.randn(6, dtype=dtype), torch.randn(2, 6, 3, dtype=dtype)
    told, of_groups = torch.rand(3, 2, 4, 1, dtype=wide), torch.rand(3, 2, 2, 3, 1, 1, dtype=wide)
    counted = {"counts": [6, 6, 2], "eps": 1e-5}
    mean, rstd = torch.randn(4, 1, dtype=dtype), torch.rand(4, 1, dtype=dtype)
    means, rstds = torch.randn(2, 3, dtype=dtype), torch.rand(2, 3, dtype=dtype)
    norm, group = {"count": 14, "own": [0]}, {"groups": 3, "count": 10}
    return [
        ("moments", (image.transpose(0, 1), [0, 2]), {}),
        ("variance_of_moments", (told, [6, 6, 2], 1.0, True, [4], dtype), {}),
        ("var_mean_of_moments", (told, [6, 6, 2], 0.0, False, [4, 1], dtype), {}),
        ("layer_norm_of_moments", (rows, told, weight, weight), counted),
        ("layer_norm_of_moments", (rows, told, None, None), counted),
        ("rms_norm_of_moments", (rows, told, weight), {**counted, "dtype": dtype}),
        ("norm_sums", (rows, rows, mean, rstd, weight, [1]), {}),
        ("norm_sums", (rows, rows, None, rstd, None, [1]), {}),
        ("layer_norm_backward_of_sums", (rows, rows, mean, rstd, weight, told), {**norm, "mask": [True] * 3}),
        ("layer_norm_backward_of_sums", (rows, rows, mean, rstd, None, told), {**norm, "mask": [True, False, False]}),
        ("rms_norm_backward_of_sums", (rows, rows, None, rstd, weight, told), {**norm, "mask": [True, True]}),
        ("group_moments", (image, 3), {}),
        ("group_norm_of_moments", (image, of_groups, weight, None), {**counted, "groups": 3}),
        ("group_norm_sums", (image, image, means, rstds, weight, 3), {}),
        (
            "group_norm_backward_of_sums",
            (image, image, means, rstds, weight, of_groups[:, :, :, :, 0, 0]),
            {**group, "mask": [True] * 3},
        ),
    ]


def _indexing(dtype: torch.dtype) -> list[Case]:
    """Index into positions 3 to 5 of a dim of size 8."""
    x, index = torch.randn(3, 4, dtype=dtype), torch.tensor([[0, 3, 5, 7], [4, 4, 1, 2]])
    once, source = torch.tensor([7, 3, 5, 1]), torch.randn(4, 4, dtype=dtype)
    columns = torch.tensor([0, 2, 3, 3])
    return [
        ("gather_part", (x, 0, index, 3), {}),
        ("index_part", (x.t(), [None, index], 1, 3, 8), {}),
        ("index_part", (x, [once - 8, columns], 0, 3, 8), {}),
        ("scatter_part", (x, 0, once.expand(1, 4), source, 0, "set", True, 3), {}),
        ("scatter_part", (x, 0, index, None, 2.5, "set", True, 3), {}),
        ("scatter_part", (x, 0, index, source, 0, "amax", False, 3), {}),
        ("index_write_part", (x, 0, once, source, "add", 2, True, 3), {}),
        ("index_write_part", (x, 0, once, source, "copy", 1, True, 3), {}),
        ("index_put_part", (x, [once, None], source, False, 0, 3, 8), {}),
        ("index_put_part", (x, [once, columns], source[0], True, 0, 3, 8), {}),
    ]


def _grouped(dtype: torch.dtype) -> list[Case]:
    """Multiply by experts 1 and 2 of 4."""
    rows, weight = torch.randn(6, 8, dtype=dtype), torch.randn(2, 8, 4, dtype=dtype)
    grad = torch.randn(6, 4, dtype=dtype)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    return [
        ("grouped_mm_part", (rows, weight, ends, 1), {}),
        ("grouped_mm_part_weight", (rows.t(), grad, ends, 1, 2), {}),
        ("grouped_mm_part_backward", (rows, weight, ends, grad, 1), {}),
        *_experts(dtype),
        *_routed(dtype),
    ]


def _routed(dtype: torch.dtype) -> list[Case]:
    """Rows of three experts, each row's token one of six, with room for eight."""
    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2], [0, 1], [2, 1]]).view(2, 3, 2)
    keys = torch.ops.autopar.route(ids, experts=3, columns=3)
    tokens, choices = torch.randn(2, 3, 8, dtype=dtype), torch.randn(2, 3, 2, 8, dtype=dtype)
    rows, grad = torch.randn(2, 3, 3, 8, dtype=dtype), torch.randn(2, 3, 3, 4, dtype=dtype)
    weight, bias = torch.randn(3, 8, 4, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    return [
        ("route", (ids,), {"experts": 3, "columns": 3}),
        ("send", (tokens, ids, keys), {}),
        ("send", (choices, ids, keys), {"each": True}),
        ("collect", (rows, ids, keys), {}),
        ("collect", (rows, ids, keys), {"each": True}),
        ("routed_mm", (rows, weight, keys), {"span": 12}),
        ("routed_mm", (rows, weight[1:].transpose(1, 2), keys), {"span": 12, "transposed": True, "first": 1}),
        ("routed_mm_weight", (rows, grad, keys), {"span": 12, "experts": 3}),
        ("routed_mm_weight", (rows, grad, keys), {"span": 12, "experts": 2, "first": 1, "transposed": True}),
        ("of_expert", (bias, keys), {"span": 12}),
        ("sum_of_expert", (rows, keys), {"span": 12, "experts": 3}),
    ]


def _experts(dtype: torch.dtype) -> list[Case]:
    """Multiply by experts 1 and 2 of 4, where each row chooses one or two."""
    rows, weight = torch.randn(4, 3, 8, dtype=dtype).transpose(0, 1), torch.randn(2, 8, 4, dtype=dtype)
    one, several = torch.randint(0, 4, (3, 4)), torch.randint(0, 4, (3, 4, 2))
    grad = torch.randn(3, 4, 2, 4, dtype=dtype)
    return [
        ("experts_mm", (rows, weight, several), {"first": 1}),
        ("experts_mm", (rows, weight.transpose(1, 2), one.t().contiguous().t()), {"first": 1, "transposed": True}),
        ("experts_mm", (rows, weight[:0], one), {}),
        ("experts_mm_weight", (rows, grad, several), {"experts": 2, "first": 1}),
        ("experts_mm_weight", (rows, grad, several), {"experts": 2, "first": 1, "transposed": True}),
        ("experts_mm_weight", (rows, grad[:, :, 0], one), {"experts": 0}),
    ]
