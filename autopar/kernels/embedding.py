"""Look up rows of a table whose vocabulary is cut, and their gradient. Rows of other ranks become zeros in the same
pass.

The gradient is summed in a fixed order: indices are sorted, and each row of the table is written once, in its own
dtype, without atomic additions and without a pass that clears the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def lookup_kernel(weight, index, out, n, d, offset, rows, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    local = tl.load(index + at, mask=at < n, other=-1).to(tl.int64) - offset
    here = (at < n) & (local >= 0) & (local < rows)
    inside = column[None, :] < d
    value = tl.load(weight + local[:, None] * stride + column[None, :], mask=here[:, None] & inside, other=0)
    tl.store(out + at[:, None] * d + column[None, :], value, mask=(at < n)[:, None] & inside)


def lookup(weight: torch.Tensor, index: torch.Tensor, *, offset: int, ROWS: int = 4, COLUMNS: int = 512):
    """[v, d], [...] -> [..., d]: row ``index - offset``, or zeros if this shard does not have it."""
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    rows, d = weight.shape
    out = weight.new_empty([*index.shape, d])
    n = index.numel()
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(n, ROWS), triton.cdiv(d, COLUMNS))
    lookup_kernel[grid](
        weight, index.contiguous(), out, n, d, offset, rows, weight.stride(0), ROWS=ROWS, COLUMNS=COLUMNS
    )
    return out


@triton.jit
def lookup_backward_kernel(grad, order, starts, out, d, padding, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < d
    first = tl.load(starts + row)
    last = tl.load(starts + row + 1)
    if row == padding:
        last = first
    total = tl.zeros([COLUMNS], tl.float32)
    for k in range(first, last):
        at = tl.load(order + k)
        total += tl.load(grad + at * d + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * d + column, total.to(out.dtype.element_ty), mask=inside)


def lookup_backward(
    grad: torch.Tensor, index: torch.Tensor, *, rows: int, offset: int, padding_idx: int = -1, COLUMNS: int = 512
):
    """[..., d], [...] -> [v, d]: the sum over the positions that looked each row up, in float32."""
    d = grad.shape[-1]
    out = grad.new_empty([rows, d])
    if out.numel() == 0:
        return out
    ordered, order = torch.sort(index.reshape(-1), stable=True)
    edges = torch.arange(offset, offset + rows + 1, device=index.device, dtype=ordered.dtype)
    starts = torch.searchsorted(ordered, edges)
    padding = padding_idx - offset if padding_idx >= offset else -1
    grid = (rows, triton.cdiv(d, COLUMNS))
    lookup_backward_kernel[grid](grad.contiguous(), order, starts, out, d, padding, COLUMNS=COLUMNS)
    return out
