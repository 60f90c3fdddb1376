"""Cross-entropy over a shard of the vocabulary, without a softmax tensor or a copy of the logits.

Each kernel reads its logits once and keeps what it computes from them in registers. ``statistics`` finds the maximum
and the sum of exponentials in one pass, and rescales the sum when the maximum grows (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018). Shards are combined as in Megatron-LM (Shoeybi et al. 2019).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def statistics_kernel(x, most, total, v, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, v, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < v, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, value)
        # If everything was -inf so far, the difference would be nan.
        base = tl.where(new == float("-inf"), 0.0, new)
        s = s * tl.exp(m - base) + tl.exp(value - base)
        m = new
    top = tl.max(m, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(most + row, top.to(most.dtype.element_ty))
    tl.store(total + row, tl.sum(s * tl.exp(m - base), 0))


def statistics(x: torch.Tensor, *, BLOCK: int = 4096, num_warps: int = 8):
    """[..., v] -> maximum m of each row, and sum of exp(x - m) in float32."""
    flat = _rows(x)
    most = x.new_empty(x.shape[:-1])
    total = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if len(flat):
        block = min(BLOCK, triton.next_power_of_2(x.shape[-1]))
        statistics_kernel[(len(flat),)](
            flat, most, total, x.shape[-1], flat.stride(0), BLOCK=block, num_warps=num_warps
        )
    return most, total


@triton.jit
def sumexp_kernel(x, most, total, v, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(most + row).to(tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    for start in range(0, v, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < v, other=float("-inf")).to(tl.float32)
        s += tl.exp(value - m)
    tl.store(total + row, tl.sum(s, 0))


def sumexp(x: torch.Tensor, m: torch.Tensor, *, BLOCK: int = 4096, num_warps: int = 8):
    """[..., v], [...] -> sum of exp(x - m) over the last dim, in float32."""
    flat = _rows(x)
    total = torch.empty(m.shape, dtype=torch.float32, device=x.device)
    if len(flat):
        block = min(BLOCK, triton.next_power_of_2(max(x.shape[-1], 1)))
        sumexp_kernel[(len(flat),)](
            flat, m.contiguous(), total, x.shape[-1], flat.stride(0), BLOCK=block, num_warps=num_warps
        )
    return total


@triton.jit
def nll_kernel(x, lse, target, out, n, v, stride, offset, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(target + row, mask=row < n, other=0).to(tl.int64)
    local = label - offset
    here = (row < n) & (local >= 0) & (local < v) & (label != ignore)
    chosen = tl.load(x + row * stride + local, mask=here, other=0).to(tl.float32)
    loss = tl.load(lse + row, mask=row < n, other=0) - chosen
    tl.store(out + row, tl.where(here, loss, 0.0), mask=row < n)


def nll(x: torch.Tensor, lse: torch.Tensor, target: torch.Tensor, *, ignore_index: int, offset: int, BLOCK: int = 256):
    """Return the loss lse - x[target - offset] if this shard has the target and it counts, else 0."""
    flat = _rows(x)
    out = torch.empty(lse.shape, dtype=lse.dtype, device=x.device)
    if len(flat):
        nll_kernel[(triton.cdiv(len(flat), BLOCK),)](
            flat,
            lse.contiguous(),
            target.contiguous(),
            out,
            len(flat),
            x.shape[-1],
            flat.stride(0),
            offset,
            ignore_index,
            BLOCK=BLOCK,
        )
    return out


@triton.jit
def nll_backward_kernel(
    grad,
    x,
    lse,
    target,
    share,
    classes,
    out,
    v,
    stride,
    offset,
    ignore,
    own,
    each,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(target + row).to(tl.int64)
    local = label - offset
    scale = tl.load(grad + row).to(tl.float32)
    if label == ignore:
        scale = 0.0
    value = tl.load(x + row * stride + column, mask=column < v, other=float("-inf")).to(tl.float32)
    part = tl.exp(value - tl.load(lse + row))
    if WEIGHTED:
        own = tl.load(share + row).to(tl.float32)
        each = (1.0 - own) * tl.load(classes + column, mask=column < v, other=0).to(tl.float32)
    part = tl.where(column == local, part - own, part) - each
    # 0 for an ignored row, even if the exponential is infinite.
    part = tl.where(scale == 0.0, 0.0, part * scale)
    tl.store(out + row * v + column, part.to(out.dtype.element_ty), mask=column < v)


def nll_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    lse: torch.Tensor,
    target: torch.Tensor,
    share: torch.Tensor | None = None,
    classes: torch.Tensor | None = None,
    *,
    ignore_index: int,
    offset: int,
    own: float = 1.0,
    each: float = 0.0,
    BLOCK: int = 4096,
    num_warps: int = 8,
):
    """Return (softmax - own * one hot - each) * grad of this shard's logits, in their dtype, in one pass.

    With ``share`` and ``classes``, own is the row's share, and each is (1 - share) * classes.
    """
    flat, v, weighted = _rows(x), x.shape[-1], share is not None
    # Any tensor will do for arguments that are not read.
    share, classes = (lse if t is None else t.contiguous() for t in (share, classes))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(v))
        nll_backward_kernel[(len(flat), triton.cdiv(v, block))](
            grad.contiguous(),
            flat,
            lse.contiguous(),
            target.contiguous(),
            share,
            classes,
            out,
            v,
            flat.stride(0),
            offset,
            ignore_index,
            float(own),
            float(each),
            WEIGHTED=weighted,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out


def _rows(x):
    """[..., v] -> [rows, v], each row contiguous."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.numel() == 0 else flat.contiguous()
