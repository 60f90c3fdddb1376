"""torch's own attention kernels, and the layout in which they write: [b, h, s, d] that lies in memory as [b, s, h, d].

Models view what attention gives as [b, s, h * d]. So laid out, that is no copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar._torch.tensors import as_tensor


def flash_takes(q: torch.Tensor) -> bool:
    """Whether torch's flash attention kernels for GPUs support heads like those of ``q`` on its device."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and each row's log-sum-exp for [b, h, s, d] and [b, g, t, d], with h a multiple of g.

    Attention lies in memory as ``q`` does, and so do gradients as their operands.
    """
    q, k, v = (_dense(x) for x in (q, k, v))
    made = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return as_tensor(made[0]), as_tensor(made[1])


def flash_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v.

    The kernel reads ``lse`` as if it were contiguous, whatever its strides say.
    """
    grad, q, k, v, out = (_dense(x) for x in (grad, q, k, v, out))
    lse = lse.contiguous()
    unused = [torch.zeros(2, dtype=torch.uint64, device=q.device) for _ in range(2)]  # seed and offset of a dropout
    made = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *unused, scale=scale
    )
    dq, dk, dv = map(as_tensor, made)
    return dq, dk, dv


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else by_rows(x)


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return [b, h, s, d] that lies in memory as [b, s, h, d]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def zeros_by_rows(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return zeros [b, h, s, d] that lie in memory as [b, s, h, d], on the device of ``x``."""
    b, h, s, d = shape
    return x.new_zeros([b, s, h, d], dtype=x.dtype if dtype is None else dtype).transpose(1, 2)


def joined_by_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all parts [b, h, ..., d] one after the other; they lie in memory as [b, s, h, d]."""
    return torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)
