"""Connectionist temporal classification (Graves et al. 2006) by sample. The forward also computes the gradient.

log_probs is [t, n, c], targets [n, s], both lengths [n]. torch's kernel saves a table of [n, t, 2 s + 1] for the
backward, whose width depends on the lengths. This op saves the gradient itself, with the shape of log_probs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ops.registration import define, differentiate

aten = torch.ops.aten


def _ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    rest = (targets, input_lengths.cpu(), target_lengths.cpu())
    _check(log_probs, *rest)
    # torch has no kernels for lower precisions.
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    loss, table = aten._ctc_loss.Tensor(wide, *rest, blank, zero_infinity)
    gradient = aten._ctc_loss_backward.Tensor(torch.ones_like(loss), wide, *rest, loss, table, blank, zero_infinity)
    if zero_infinity:
        loss = loss.masked_fill(loss.isinf(), 0)
    return loss.to(log_probs.dtype).contiguous(), gradient.to(log_probs.dtype).contiguous()


def _check(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> None:
    """Check lengths and labels. With invalid ones the kernel would read out of bounds."""
    frames, samples, classes = log_probs.shape
    fits = {len(targets), len(input_lengths), len(target_lengths)} == {samples}
    lengths = fits and int(input_lengths.max()) <= frames and int(target_lengths.max()) <= targets.shape[1]
    if not lengths or not _known(targets, target_lengths, classes):
        raise AutoparError(
            "The CTC loss has lengths beyond its frames or labels, or labels that are not classes.",
            found=f"log_probs {list(log_probs.shape)}, targets {list(targets.shape)}",
            hint="pad labels with a class, and give each sample a length within the padding.",
        )


def _known(targets: Tensor, lengths: Tensor, classes: int) -> bool:
    """Whether every label that counts is a class. Padding is never read."""
    padding = torch.arange(targets.shape[1], device=targets.device) >= lengths.to(targets.device).unsqueeze(1)
    return bool((padding | ((targets >= 0) & (targets < classes))).all())


def _ctc_fake(log_probs: Tensor, *_: Tensor, blank: int, zero_infinity: bool) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty([log_probs.shape[1]]), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    (gradient,) = ctx.saved_tensors
    return gradient * grad.view(1, -1, 1), None, None, None


define(
    "ctc(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, *, int blank,"
    " bool zero_infinity) -> (Tensor loss, Tensor gradient)",
    _ctc,
    _ctc_fake,
)
differentiate("ctc", _gradient, _context)
