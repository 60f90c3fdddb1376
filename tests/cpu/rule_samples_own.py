"""Samples of autopar's own ops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar import ops  # noqa: F401  registers torch.ops.autopar
from autopar.mesh import Mesh
from autopar.strategies import strategies
from tests.cpu.rule_operands import index, mask, positive, x
from tests.cpu.rule_simulation import Sample, sample

autopar = torch.ops.autopar


def speech() -> Iterator[Sample]:
    log_probs = torch.randn(6, 4, 5, dtype=torch.float64).log_softmax(-1)
    lengths = torch.tensor([6, 5, 6, 4]), torch.tensor([3, 2, 1, 2])
    for infinite in (False, True):
        yield sample(
            autopar.ctc.default, log_probs, torch.randint(1, 5, (4, 3)), *lengths, blank=0, zero_infinity=infinite
        )


def contractions() -> Iterator[Sample]:
    yield sample(autopar.contract.default, x(2, 5, 3), x(4, 3), "bsk,nk->bsn")
    yield sample(autopar.contract.default, x(2, 5, 3), x(2, 5, 4), "bsk,bsn->nk")
    yield sample(autopar.contract.default, x(2, 4, 5), x(2, 5, 3), "bmk,bkn->bmn")
    yield sample(autopar.contract.default, x(4, 2, 3), x(3, 2), "bfh,hf->bhf")


def experts() -> Iterator[Sample]:
    """Yield products of rows that go to one expert or several, with experts that get none."""
    one, several = torch.tensor([2, 0, 0, 4, 1]), torch.tensor([[0, 3], [3, 1], [1, 0], [5, 3]])
    for ids, lead in ((one, (5,)), (several, (4,)), (torch.tensor([[[0, 1]], [[2, 2]]]), (2, 1))):
        for k, n in ((4, 8), (5, 3)):
            for matrices, transposed in (((3, k, n), False), ((3, n, k), True)):
                yield sample(autopar.experts_mm.default, x(*lead, k), x(*matrices), ids, transposed=transposed)
                yield sample(
                    autopar.experts_mm_weight.default,
                    x(*lead, k),
                    x(*ids.shape, n),
                    ids,
                    experts=3,
                    transposed=transposed,
                )


def attention() -> Iterator[Sample]:
    seed = torch.tensor(7)
    documents = torch.tensor([0, 0, 1, 2])[:, None] == torch.tensor([0, 0, 0, 1, 1, 3])
    cases: list[tuple[int, int, int, Tensor | None, dict[str, Any]]] = [
        (4, 4, 5, None, {"is_causal": True}),
        (4, 2, 4, None, {"is_causal": False}),
        (4, 4, 4, mask(2, 1, 4, 6) | (torch.arange(6) == 0), {"is_causal": False}),
        (4, 2, 5, x(2, 4, 5, 6), {"is_causal": False}),
        (4, 4, 4, x(4, 6), {"is_causal": False, "dropout_p": 0.5}),
        (6, 3, 5, None, {"is_causal": True, "dropout_p": 0.25}),
        (4, 2, 13, None, {"is_causal": True}),
        (4, 2, 12, None, {"is_causal": True, "width": 3}),  # as wide as queries, for which there are kernels
        (4, 2, 4, documents, {"is_causal": False}),  # some rows read nothing, some nothing of a block
        (2, 2, 4, torch.zeros(4, 6).masked_fill(~documents, -math.inf).double(), {"is_causal": False, "width": 3}),
    ]
    for heads, groups, queries, allowed, changes in cases:
        keys = queries if changes["is_causal"] else 6
        q, k, v = x(2, heads, queries, 3), x(2, groups, keys, 3), x(2, groups, keys, changes.pop("width", 4))
        options: dict[str, Any] = {
            "scale": 0.5,
            "dropout_p": 0.0,
            "site": 3,
            "global_shape": [2, heads, queries, keys],
            "offset": [0, 0, 0, 0],
            **changes,
        }
        dice = seed if options["dropout_p"] else None
        forward = sample(autopar.attention.default, q, k, v, allowed, dice, **options)
        yield forward
        out, lse = forward.results
        grad = x(*out.shape)
        yield sample(autopar.attention_backward.default, grad, q, k, v, allowed, out, lse, dice, **options)
    yield from flash()


def flash() -> Iterator[Sample]:
    """Yield torch's attention for CPUs."""
    aten = torch.ops.aten
    op, backward = (getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{b}").default for b in ("", "_backward"))
    for groups, causal, allowed in ((4, True, None), (2, False, None), (4, False, x(2, 1, 4, 4)), (4, False, x(4, 4))):
        q, k, v = x(2, 4, 4, 8), x(2, groups, 4, 8), x(2, groups, 4, 8)
        forward = sample(op, q, k, v, 0.0, causal, attn_mask=allowed)
        yield forward
        if groups == 4:
            grad = x(2, 4, 4, 8)
            yield sample(backward, grad, q, k, v, *forward.results, 0.0, causal, attn_mask=allowed)
    for allowed in (None, x(2, 1, 4, 6)):
        yield sample(aten._scaled_dot_product_attention_math.default, q, x(2, 4, 6, 8), x(2, 4, 6, 8), allowed)
    yield from gpu_kernels(aten)


def gpu_kernels(aten: Any) -> Iterator[Sample]:
    """Yield torch's attention for GPUs, as references with the same values and shapes."""
    q, k, v, grad, bias = x(2, 4, 5, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 5, 8), x(2, 1, 5, 6)
    for causal in (False, True):
        flash = sample(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, causal)
        yield flash
        out, lse, state = *flash.results[:2], torch.zeros(2, dtype=torch.int64)
        name = aten._scaled_dot_product_flash_attention_backward.default
        yield sample(name, grad, q, k, v, out, lse, None, None, 5, 6, 0.0, causal, state, state)
    for given in (bias, x(2, 4, 5, 6)):
        efficient = sample(aten._scaled_dot_product_efficient_attention.default, q, k, v, given, True, 0.0, False)
        yield efficient
        name, asked = aten._scaled_dot_product_efficient_attention_backward.default, [True] * 4
        saved = (out, efficient.results[1], state, state)
        yield sample(name, grad, q, k, v, given, *saved, 0.0, asked, False)
        fused = sample(aten._scaled_dot_product_fused_attention_overrideable.default, q, k, v, given, 0.0, False)
        yield fused
        name = aten._scaled_dot_product_fused_attention_overrideable_backward.default
        rest = (None, None, 5, 6, 0.0, False, state, state)
        yield sample(name, grad, q, k, v, given, asked, out, fused.results[1], *rest)
        cudnn = sample(aten._scaled_dot_product_cudnn_attention.default, q, k, v, given, True, 0.0, False)
        yield cudnn
        name, saved = aten._scaled_dot_product_cudnn_attention_backward.default, (out, cudnn.results[1], state, state)
        yield sample(name, grad, q, k, v, *saved, given, None, None, 5, 6, 0.0, False)
    half = sample(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.5, False)
    assert len(strategies(half.node, half.metas, Mesh((2,)))) == 1, "dropout by no position"


def positional() -> Iterator[Sample]:
    """Yield ops whose arguments include the position of their shard."""
    seed, place = torch.tensor(3), {"global_shape": [4, 5, 6], "offset": [0, 0, 0]}
    yield from speech()
    yield sample(autopar.dropout.default, x(4, 5, 6), seed, p=0.5, site=1, **place)
    yield sample(autopar.uniform.default, seed, site=1, shape=[4, 5, 6], dtype=torch.float64, **place)
    for exact in (False, True):
        yield sample("autopar.checked_length.default", x(4, 5), torch.tensor(3), steps=3, exact=exact)
    table, rows = x(7, 6), index(7, 4, 5)
    for padding in (-1, 3):
        yield sample(autopar.lookup.default, table, rows, offset=0, padding_idx=padding)
        yield sample(autopar.lookup_backward.default, x(4, 5, 6), rows, rows=7, offset=0, padding_idx=padding)
    logits, target = x(4, 2, 7), index(7, 4, 2)
    target[0] = -100
    lse = logits.logsumexp(-1)
    options = {"ignore_index": -100, "offset": 0}
    yield sample(autopar.sumexp.default, logits, logits.amax(-1))
    for smoothed in ({}, {"own": 0.75, "each": 0.25 / 7}):
        yield sample(autopar.nll.default, logits, lse, target, **options, **smoothed)
        yield sample(autopar.nll_backward.default, x(4, 2), logits, lse, target, **options, **smoothed)
    weights = x(4, 2), x(7)
    yield sample(autopar.nll.default, logits, lse, target, *weights, **options)
    yield sample(autopar.nll_backward.default, x(4, 2), logits, lse, target, *weights, **options)
    yield from linear_losses(target)


def linear_losses(target: Tensor) -> Iterator[Sample]:
    hidden, table = x(4, 2, 3), x(7, 3)
    smoothed, weights = {"own": 0.75, "each": 0.25 / 7}, (x(4, 2), x(7))
    for bias, options, weighted in ((None, {}, ()), (x(7), smoothed, ()), (None, {}, weights), (x(7), {}, weights)):
        ignored = {"ignore_index": -100, **options}
        forward = sample(autopar.linear_nll.default, hidden, table, bias, target, *weighted, **ignored)
        yield forward
        for wanted in ([True, True, bias is not None], [True, False, False]):
            given = (x(4, 2), hidden, table, bias, forward.results[1], target, *weighted)
            case = sample(autopar.linear_nll_backward.default, *given, offset=0, mask=wanted, **ignored)
            absent = [made is None or not made.numel() for made in case.results]
            outputs = tuple(None if no else m for no, m in zip(absent, case.node.outputs, strict=True))
            results = tuple(None if no else r for no, r in zip(absent, case.results, strict=True))
            yield replace(case, node=replace(case.node, outputs=outputs), results=results)


def batch_norm() -> Iterator[Sample]:
    for shape, affine in (((4, 6, 2, 5), (x(6), x(6))), ((4, 6), (None, None)), ((4, 5, 6), (x(5), None))):
        image, grad, c, n = x(*shape), x(*shape), shape[1], 1000
        mean, rstd = x(c), positive(c)
        yield sample(autopar.batch_var_mean.default, image)
        yield sample(autopar.batch_norm.default, image, *affine, mean, rstd, count=n)
        yield sample(autopar.batch_norm_backward_reduce.default, grad, image, mean, rstd)
        yield sample(autopar.batch_norm_backward_input.default, grad, image, affine[0], mean, rstd, x(c), x(c), count=n)
