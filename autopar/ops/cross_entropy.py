"""Cross-entropy in pieces over the last dim, the vocabulary, of which a rank may hold any part.

The formulation is that of Megatron-LM (Shoeybi et al. 2019, section 3): with m the maximum over the global vocabulary
and lse = m + log(sum of ``sumexp(x, m)`` over the shards), an element's loss is the sum of ``nll`` over the shards.

Label smoothing by s over V classes is ``own=1 - s, each=s / V``: the weight of the target's loss, and that of every
class in addition. With class weights both are tensors: the target has the ``share`` [...] of its row's label, and the
rest is distributed over the ``classes`` [v], which sum to 1 over the global vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar import kernels
from autopar.ops.embedding import refuse_outside
from autopar.ops.exponential import exp_
from autopar.ops.registration import accumulation_dtype, define, differentiate, once_differentiable, without_gradient

# Elements held in the accumulation dtype at a time. On a CPU they fit its caches.
CPU_BLOCK = 1 << 18
BLOCK = 1 << 26


def _blocks(x: Tensor) -> Iterator[slice]:
    """Return blocks of the rows of x [rows, v]."""
    block = CPU_BLOCK if x.device.type == "cpu" else BLOCK
    step = max(1, block // max(1, x.shape[1]))
    return (slice(start, min(len(x), start + step)) for start in range(0, len(x), step))


def _flat(x: Tensor) -> Tensor:
    """[..., v] -> [rows, v]"""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _sumexp(x: Tensor, m: Tensor) -> Tensor:
    if kernels.enabled(x, m):
        total: Tensor = kernels.run("sumexp", x, m)
        return total
    dtype = accumulation_dtype(x.dtype)
    out = torch.empty(m.shape, dtype=dtype, device=x.device)
    flat_x, flat_m, flat_out = _flat(x), m.reshape(-1, 1).to(dtype), out.view(-1)
    for rows in _blocks(flat_x):
        torch.sum(exp_(torch.sub(flat_x[rows], flat_m[rows])), dim=-1, out=flat_out[rows])
    return out


def _sumexp_fake(x: Tensor, m: Tensor) -> Tensor:
    return x.new_empty(m.shape, dtype=accumulation_dtype(x.dtype))


def _softmax_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    if kernels.enabled(x):
        found: tuple[Tensor, Tensor] = kernels.run("statistics", x)
        return found
    m = x.amax(-1)
    return m, _sumexp(x, m)


def _softmax_statistics_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    m = x.new_empty(x.shape[:-1])
    return m, torch.empty_like(m, dtype=accumulation_dtype(x.dtype))


def _rescaled(total: Tensor, own: Tensor, m: Tensor) -> Tensor:
    return (total * torch.exp(own.to(total.dtype) - m)).contiguous()


def _place(target: Tensor, ignore_index: int, offset: int, v: int) -> tuple[Tensor, Tensor]:
    """Return whether the target is in this shard and counts, and its local position (else 0): both [...]."""
    here = (target >= offset) & (target < offset + v) & (target != ignore_index)
    return here, (target - offset).where(here, 0)


def _sum(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum over the last dim in the accumulation dtype, without a full copy of x, with optional ``weights`` [v]."""
    out = torch.empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype), device=x.device)
    flat_x, flat_out = _flat(x), out.view(-1)
    wide = None if weights is None else weights.to(out.dtype)
    for rows in _blocks(flat_x):
        part = flat_x[rows].to(out.dtype)
        if wide is None:
            torch.sum(part, -1, out=flat_out[rows])
        else:
            torch.mv(part, wide, out=flat_out[rows])
        del part  # else two exist while the next is created
    return out


def _nll(
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
    vocabulary: int = 0,
) -> Tensor:
    refuse_outside(target, vocabulary, ignore_index)
    if x.shape[-1] == 0:
        return torch.zeros_like(lse, memory_format=torch.contiguous_format)
    if kernels.enabled(x, lse):
        loss: Tensor = kernels.run("nll", x, lse, target, ignore_index=ignore_index, offset=offset)
    else:
        here, position = _place(target, ignore_index, offset, x.shape[-1])
        chosen = x.gather(-1, position.unsqueeze(-1)).squeeze(-1)
        loss = torch.sub(lse, chosen).to(lse.dtype).where(here, 0).contiguous()
        del chosen, here, position
    if share is not None and classes is not None:
        others = _sum(x, classes).sub_(lse * classes.sum()).mul_(share - 1).masked_fill_(target == ignore_index, 0)
        loss.mul_(share).add_(others)
    elif each:
        others = _sum(x).sub_(lse, alpha=x.shape[-1]).mul_(-each).masked_fill_(target == ignore_index, 0)
        loss.mul_(own).add_(others)
    return loss


def _nll_fake(
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
    vocabulary: int = 0,
) -> Tensor:
    return torch.empty_like(lse, memory_format=torch.contiguous_format)


def _nll_backward(
    grad: Tensor,
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
) -> Tensor:
    if kernels.enabled(x, lse, grad):
        options = {"ignore_index": ignore_index, "offset": offset, "own": own, "each": each}
        fused: Tensor = kernels.run("nll_backward", grad, x, lse, target, share, classes, **options)
        return fused
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    here, position = _place(target.reshape(-1, 1), ignore_index, offset, x.shape[-1])
    # Ignored rows are multiplied by zero below, so their exponentials must be finite.
    scale = grad.reshape(-1, 1).masked_fill(target.reshape(-1, 1) == ignore_index, 0).to(lse.dtype)
    flat_x, flat_lse, flat_out = _flat(x), lse.reshape(-1, 1), _flat(out)
    flat_share = None if share is None else share.reshape(-1, 1)
    for rows in _blocks(flat_x):
        place = flat_out[rows] if out.dtype == lse.dtype else torch.empty_like(flat_x[rows], dtype=lse.dtype)
        part = exp_(torch.sub(flat_x[rows], flat_lse[rows], out=place))
        labels = here[rows].to(part.dtype).mul_(-own if flat_share is None else -flat_share[rows])
        part.scatter_add_(-1, position[rows], labels)
        if flat_share is not None and classes is not None:
            part.addr_(flat_share[rows].flatten() - 1, classes.to(part.dtype))
        elif each:
            part.sub_(each)
        torch.mul(part, scale[rows], out=flat_out[rows])
        del place, part  # else two exist while the next is created
    return out


def _nll_backward_fake(
    grad: Tensor,
    x: Tensor,
    lse: Tensor,
    target: Tensor,
    share: Tensor | None = None,
    classes: Tensor | None = None,
    *,
    ignore_index: int,
    offset: int = 0,
    own: float = 1.0,
    each: float = 0.0,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _nll_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = options_of_loss(keyword_only_inputs)


def options_of_loss(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the gradient, without those of label smoothing if labels are not smoothed."""
    return {k: v for k, v in given.items() if k != "vocabulary" and (k not in ("own", "each") or given["each"])}


def _nll_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    given = [t for t in ctx.saved_tensors if t is not None]
    return torch.ops.autopar.nll_backward(grad, *given, **ctx.options), None, None, None, None


define("sumexp(Tensor x, Tensor m) -> Tensor", _sumexp, _sumexp_fake)
without_gradient("sumexp")
# Maximum and sum in one pass over the logits, if a plan asks for it. The sum is relative to this shard's own maximum,
# and ``rescaled`` makes it relative to the maximum ``m`` of all ranks.
define("softmax_statistics(Tensor x) -> (Tensor, Tensor)", _softmax_statistics, _softmax_statistics_fake)
define(
    "rescaled(Tensor total, Tensor own, Tensor m) -> Tensor",
    _rescaled,
    lambda total, own, m: total.new_empty(total.shape),
)
define(
    "nll(Tensor x, Tensor lse, Tensor target, Tensor? share=None, Tensor? classes=None, *, int ignore_index,"
    " SymInt offset=0, float own=1.0, float each=0.0, SymInt vocabulary=0) -> Tensor",
    _nll,
    _nll_fake,
)
define(
    "nll_backward(Tensor grad, Tensor x, Tensor lse, Tensor target, Tensor? share=None, Tensor? classes=None, *,"
    " int ignore_index, SymInt offset=0, float own=1.0, float each=0.0) -> Tensor",
    _nll_backward,
    _nll_backward_fake,
)
once_differentiable("nll_backward")
differentiate("nll", _nll_gradient, _nll_context)
