"""A linear layer over classes fused with cross-entropy, in chunks of classes, so that the full logits never exist.

In the forward, the logits of a chunk give its log-sum-exp for each row and, if the chunk has the row's target, that
logit. Chunks are combined like the shards of a cut vocabulary (``cross_entropy``), of which a rank may hold any part.
The backward recomputes the logits chunk by chunk, and uses their gradient in both products before the next chunk. One
additional product is the price of never holding logits, or their gradient, of more than a chunk (Wijmans et al., "Cut
your losses in large-vocabulary language models", 2024). Chunks are of classes and not of rows: each row of the weight's
gradient is then written once, and only the smaller gradient of the activations accumulates over chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.ops.cross_entropy import _flat, _nll_backward, _place, _softmax_statistics, _sum, options_of_loss
from autopar.ops.embedding import refuse_outside
from autopar.ops.registration import accumulation_dtype, define, differentiate, once_differentiable

# Logits of a chunk, and the fewest classes of one, so that products stay efficient with many rows.
CPU_CHUNK = 1 << 22
CHUNK = 1 << 26
LEAST_CLASSES = 128


def _chunks(flat: Tensor, classes: int) -> Iterator[slice]:
    chunk = CPU_CHUNK if flat.device.type == "cpu" else CHUNK
    step = max(LEAST_CLASSES, chunk // max(1, len(flat)) // LEAST_CLASSES * LEAST_CLASSES)
    return (slice(start, min(classes, start + step)) for start in range(0, classes, step))


def _logits(flat: Tensor, weight: Tensor, bias: Tensor | None, part: slice) -> Tensor:
    columns = weight[part].t()
    return flat @ columns if bias is None else torch.addmm(bias[part], flat, columns)


def _linear_nll_part(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int,
    own: float = 1.0,
    each: float = 0.0,
) -> Tensor:
    """Return the log-sum-exp of this shard's logits, and the target's logit if it is here, else 0: [2, ...].

    With smoothed labels the second is the sum of logits weighted by the labels.
    """
    flat, labels, shares = _flat(x), target.reshape(-1), None if share is None else share.reshape(-1)
    summary = torch.zeros([2, len(flat)], dtype=accumulation_dtype(x.dtype), device=x.device)
    lse, chosen = summary.unbind()
    lse.fill_(-math.inf)
    for part in _chunks(flat, len(weight)):
        logits = _logits(flat, weight, bias, part)
        largest, total = _softmax_statistics(logits)
        torch.logaddexp(lse, total.log_().add_(largest), out=lse)
        here, position = _place(labels, ignore_index, offset + part.start, logits.shape[1])
        found = logits.gather(-1, position.unsqueeze(-1)).squeeze(-1).where(here, 0)
        if shares is not None and classes is not None:
            chosen.add_(found * shares).add_(_sum(logits, classes[part]).mul_(1 - shares))
        else:
            chosen.add_(found, alpha=own)
        if each:
            chosen.add_(_sum(logits), alpha=each)
        del logits, found
    return summary.view(2, *x.shape[:-1])


def _linear_nll_part_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int,
    own: float = 1.0,
    each: float = 0.0,
) -> Tensor:
    return x.new_empty([2, *x.shape[:-1]], dtype=accumulation_dtype(x.dtype))


def _linear_nll_of_parts(
    gathered: Tensor, target: Tensor, *, ignore_index: int, vocabulary: int = 0
) -> tuple[Tensor, Tensor]:
    """Return each row's loss, 0 if it is ignored, and its log-sum-exp, from the gathered summaries of the shards."""
    refuse_outside(target, vocabulary, ignore_index)
    lse = gathered[:, 0].logsumexp(0)
    return (lse - gathered[:, 1].sum(0)).where(target != ignore_index, 0).contiguous(), lse.contiguous()


def _linear_nll_of_parts_fake(
    gathered: Tensor, target: Tensor, *, ignore_index: int, vocabulary: int = 0
) -> tuple[Tensor, Tensor]:
    return gathered.new_empty(gathered.shape[2:]), gathered.new_empty(gathered.shape[2:])


def _linear_nll(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    own: float = 1.0,
    each: float = 0.0,
) -> tuple[Tensor, Tensor]:
    summary = _linear_nll_part(
        x, weight, bias, target, share, classes, ignore_index=ignore_index, offset=0, own=own, each=each
    )
    return _linear_nll_of_parts(summary.unsqueeze(0), target, ignore_index=ignore_index, vocabulary=len(weight))


def _linear_nll_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    own: float = 1.0,
    each: float = 0.0,
) -> tuple[Tensor, Tensor]:
    rows = x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
    return rows, torch.empty_like(rows)


def _linear_nll_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    mask: list[bool],
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias for a shard of the classes; empty if ``mask`` does not request one."""
    flat, labels, grads, sums = _flat(x), target.reshape(-1), grad.reshape(-1), lse.reshape(-1)
    shares = None if share is None else share.reshape(-1)
    dx = torch.zeros_like(flat, dtype=accumulation_dtype(x.dtype)) if mask[0] else None
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if mask[1] else None
    db = torch.empty_like(bias) if mask[2] and bias is not None else None
    for part in _chunks(flat, len(weight)):
        logits = _logits(flat, weight, bias, part)
        of_logits = _nll_backward(
            grads,
            logits,
            sums,
            labels,
            shares,
            None if classes is None else classes[part],
            ignore_index=ignore_index,
            offset=offset + part.start,
            own=own,
            each=each,
        )
        del logits
        if dw is not None:
            torch.mm(of_logits.t(), flat, out=dw[part])
        if db is not None:
            torch.sum(of_logits, 0, out=db[part])
        if dx is not None and dx.dtype == of_logits.dtype:
            dx.addmm_(of_logits, weight[part])
        elif dx is not None:
            dx += of_logits @ weight[part]
        del of_logits
    return (
        x.new_empty(0) if dx is None else dx.to(x.dtype).view(x.shape),
        x.new_empty(0) if dw is None else dw,
        x.new_empty(0) if db is None else db,
    )


def _linear_nll_backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    mask: list[bool],
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    given = zip((x, weight, bias), mask, strict=True)
    made = [x.new_empty(t.shape if wanted and t is not None else [0]) for t, wanted in given]
    return made[0], made[1], made[2]


def _context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, weight, bias, target, *rest = inputs
    ctx.save_for_backward(x, weight, bias, output[1], target, *(t for t in rest if t is not None))
    ctx.options = options_of_loss(keyword_only_inputs)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad[:3])
    found = torch.ops.autopar.linear_nll_backward(grad, *ctx.saved_tensors, mask=mask, **ctx.options)
    return (*(g if wanted else None for g, wanted in zip(found, mask, strict=True)), None, None, None)


define(
    "linear_nll(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? share=None,"
    " Tensor? classes=None, *, int ignore_index,"
    " float own=1.0, float each=0.0) -> (Tensor, Tensor)",
    _linear_nll,
    _linear_nll_fake,
)
define(
    "linear_nll_part(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? share=None,"
    " Tensor? classes=None, *, int ignore_index, SymInt offset,"
    " float own=1.0, float each=0.0) -> Tensor",
    _linear_nll_part,
    _linear_nll_part_fake,
)
define(
    "linear_nll_of_parts(Tensor gathered, Tensor target, *, int ignore_index, SymInt vocabulary=0) -> (Tensor, Tensor)",
    _linear_nll_of_parts,
    _linear_nll_of_parts_fake,
)
define(
    "linear_nll_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor lse, Tensor target,"
    " Tensor? share=None, Tensor? classes=None, *,"
    " int ignore_index, bool[] mask, SymInt offset=0, float own=1.0, float each=0.0) -> (Tensor, Tensor, Tensor)",
    _linear_nll_backward,
    _linear_nll_backward_fake,
)
differentiate("linear_nll", _gradient, _context)
once_differentiable("linear_nll_backward")
