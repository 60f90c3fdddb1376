"""Compare Triton kernels with references in float64, interpreted on a CPU or compiled on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels import KERNELS
from tests import triton_interpreter  # noqa: F401

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
"""Tolerance as a share of the largest element: only the result is rounded, since kernels add in float32."""

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INDICES = [torch.int64, torch.int32]


def made(name: str, *args, **kwargs):
    """Launch the kernel with its first configuration and return the results."""
    return KERNELS[name].launch(*args, **kwargs, **KERNELS[name].configs[0])


def assert_near(found: Tensor, expected: Tensor, *, times: float = 1.0) -> None:
    """Assert equality up to rounding in ``found``'s dtype."""
    assert found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    error = float((found.double() - expected.double()).abs().max()) if expected.numel() else 0.0
    assert error <= TOLERANCE[found.dtype] * scale * times, f"{error} beside {scale}"


def check_packing(x: Tensor, dim: int, ways: int, dtype: torch.dtype | None = None) -> None:
    """Check that ``pack`` stacks padded chunks and that ``unpack`` restores the tensor."""
    part = -(-x.shape[dim] // ways)
    chunks = list(x.split(part, dim)) if part else [x] * ways
    padded = []
    for chunk in chunks + [x.narrow(dim, 0, 0)] * (ways - len(chunks)):
        shape = list(x.shape)
        shape[dim] = part
        whole = torch.zeros(shape, dtype=x.dtype, device=x.device)
        whole.narrow(dim, 0, chunk.shape[dim]).copy_(chunk)
        padded.append(whole)
    expected = torch.stack(padded).to(dtype or x.dtype)
    packed = made("pack", x, dim, ways, dtype)
    assert packed.is_contiguous() and packed.dtype == expected.dtype
    if packed.dtype == x.dtype:
        assert torch.equal(packed, expected)
    else:  # triton's interpreter truncates where devices round
        assert_near(packed, expected)
    back = made("unpack", expected, dim, x.shape[dim], x.dtype)
    assert back.is_contiguous()
    assert torch.equal(back, x.to(packed.dtype).to(x.dtype))
    strided = expected.transpose(0, -1).contiguous().transpose(0, -1)
    assert torch.equal(made("unpack", strided, dim, x.shape[dim]), x.to(packed.dtype))


def check_lookup(
    dtype: torch.dtype, index: torch.dtype, shape: tuple[int, ...], rows: int, d: int, offset: int, device
) -> None:
    """Check that lookup gives local rows and zeros, and that its backward sums gradients except the padding's."""
    weight = torch.randn(rows, d, device=device).to(dtype)
    at = torch.randint(0, rows + 2 * offset + 1, shape, device=device).to(index)
    here = (at >= offset) & (at < offset + rows)
    local = torch.where(here, at - offset, 0).long()
    expected = weight[local] * here.unsqueeze(-1)
    assert torch.equal(made("lookup", weight, at, offset=offset), expected)
    grad = torch.randn(*shape, d, device=device).to(dtype)
    for padding in (-1, offset, offset + rows - 1, 0):
        table = torch.zeros(rows, d, dtype=torch.float64, device=device)
        counted = here & (at != padding)
        table.index_add_(0, local[counted], grad.double()[counted])
        found = made("lookup_backward", grad, at, rows=rows, offset=offset, padding_idx=padding)
        assert found.dtype == dtype
        assert_near(found, table)


def check_cross_entropy(
    dtype: torch.dtype, index: torch.dtype, rows: int, v: int, ways: int, device, *, large: float = 1.0
) -> None:
    """Compare the kernels on shards of the logits with torch's loss and gradient of the whole in float64."""
    logits = (torch.randn(rows, v, device=device) * 4 * large).to(dtype)
    target = torch.randint(0, v, (rows,), device=device).to(index)
    target[::3] = -100
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, target.long(), ignore_index=-100, reduction="none")
    weight = torch.rand(rows, device=device)
    (expected * weight).sum().backward()
    part = -(-v // ways)
    shards = list(zip(range(0, v, part), logits.split(part, -1), strict=True))
    each = [made("statistics", s) for _, s in shards]
    m = torch.stack([top for top, _ in each]).amax(0)
    total = sum(s * torch.exp(top.float() - m.float()) for top, s in each)
    assert_near(sum(made("sumexp", s, m) for _, s in shards), total, times=4)
    lse = m.float() + total.log()
    options = [{"ignore_index": -100, "offset": offset} for offset, _ in shards]
    loss = sum(made("nll", s, lse, target, **o) for (_, s), o in zip(shards, options, strict=True))
    assert_near(loss, expected.detach(), times=4)
    found = [made("nll_backward", weight, s, lse, target, **o) for (_, s), o in zip(shards, options, strict=True)]
    assert {f.dtype for f in found} == {dtype}
    assert_near(torch.cat(found, -1), exact.grad, times=4 * large)
    options = [{**o, "own": 0.9, "each": 0.1 / v} for o in options]
    found = [made("nll_backward", weight, s, lse, target, **o) for (_, s), o in zip(shards, options, strict=True)]
    exact.grad = None
    loss = torch.nn.functional.cross_entropy(
        exact, target.long(), ignore_index=-100, reduction="none", label_smoothing=0.1
    )
    (loss * weight).sum().backward()
    assert_near(torch.cat(found, -1), exact.grad, times=4 * large)
    check_weighted_classes(logits, target, lse, weight, shards, large=large)


def check_weighted_classes(logits, target, lse, weight, shards, *, large: float) -> None:
    """Check the gradient with class weights and label smoothing."""
    v, device = logits.shape[-1], logits.device
    classes, counted = torch.rand(v, device=device), target != -100
    own = classes[target.where(counted, 0).long()] * 0.9
    row = own + classes.sum() * 0.1 / v
    share, part = own / row, classes / classes.sum()
    exact = logits.double().requires_grad_()
    options = {"weight": classes.double(), "label_smoothing": 0.1, "reduction": "none"}
    expected = torch.nn.functional.cross_entropy(exact, target.long(), **options)
    (expected * weight).sum().backward()
    found = [
        made(
            "nll_backward",
            weight * row,
            s,
            lse,
            target,
            share,
            part[offset : offset + s.shape[-1]],
            ignore_index=-100,
            offset=offset,
        )
        for offset, s in shards
    ]
    assert_near(torch.cat(found, -1), exact.grad, times=4 * large)


def check_norm(
    dtype: torch.dtype, shape: tuple[int, ...], device, *, centred: bool, scaled: bool, shifted: bool, wire=None
) -> None:
    """Compare the sum with a residual and its norm, forward and backward, with autograd in float64."""
    d = shape[-1]
    x = torch.randn(shape, device=device).to(wire or dtype)
    residual = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(d, device=device).to(dtype) if scaled else None
    bias = torch.randn(d, device=device).to(dtype) if shifted else None
    options = {"eps": 1e-5, "centred": centred}
    wanted = ["total", "out", "wide", "rstd", *(["mean"] if centred else [])]
    total, out, wide, rstd, *means = made("add_norm", x, residual, weight, bias, **options, results=wanted)
    assert_near(total, x.to(dtype).double() + residual.double())
    assert torch.equal(wide, total.float())
    exact = [t.double().requires_grad_() if t is not None else None for t in (total, weight, bias)]
    expected = _norm(*exact, 1e-5, centred=centred)
    assert_near(out, expected.detach(), times=2)
    (alone,) = made("add_norm", total, None, weight, bias, **options, results=["out"])
    assert torch.equal(alone, out)
    hat, rounded = made("add_norm", total, None, weight, bias, **options, results=["hat", "out"])
    assert_near(hat, _norm(exact[0].detach(), None, None, 1e-5, centred=centred), times=2)
    assert_near(rounded, expected.detach(), times=4)
    grad, beside = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    expected.backward(grad.double())
    names = ["input_gradient", "weight_gradient", "bias_gradient"]
    for y, added in ((total, None), (total, beside), (wide, beside)):
        # Two Triton programs share the rows, and the second has fewer.
        dx, dw, db = KERNELS["norm_backward"].launch(
            grad, y, means[0] if centred else None, rstd, weight, added, results=names, GROUPS=2
        )
        assert dx.dtype == dtype
        assert_near(dx, exact[0].grad + (0 if added is None else added.double()), times=4)
        if scaled:
            assert_near(dw, exact[1].grad, times=4)
        if shifted:
            assert_near(db, exact[2].grad, times=4)


def _norm(y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool) -> Tensor:
    if centred:
        return torch.nn.functional.layer_norm(y, y.shape[-1:], weight, bias, eps)
    return torch.nn.functional.rms_norm(y, y.shape[-1:], weight, eps)
