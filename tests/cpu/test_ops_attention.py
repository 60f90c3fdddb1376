import math

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar import _torch
from autopar._torch import FakeTensorMode
from autopar.errors import AutoparError
from autopar.ops import attention as module
from tests.cpu.test_ops_random import keep_mask

OPS = torch.ops.autopar
B, H, G, S, T, D = 2, 4, 2, 6, 7, 8


def _operands(g=G, s=S, t=T, d_v=D, dtype=torch.float64):
    return [
        torch.randn(B, heads, length, d, dtype=dtype, requires_grad=True)
        for heads, length, d in ((H, s, D), (g, t, D), (g, t, d_v))
    ]


def _attend(q, k, v, mask=None, *, is_causal=False, scale=0.3, p=0.0, global_shape=None, offset=(0, 0, 0, 0)):
    shape = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
    return OPS.attention(
        q,
        k,
        v,
        mask,
        torch.tensor(11) if p else None,
        is_causal=is_causal,
        scale=scale,
        dropout_p=p,
        site=5,
        global_shape=global_shape or shape,
        offset=list(offset),
    )


def _torchs(q, k, v, mask=None, *, is_causal=False, scale=0.3):
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _assert_equal(found, expected, operands, **tolerance):
    torch.testing.assert_close(found, expected, **tolerance)
    grad = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, operands, grad), torch.autograd.grad(expected, operands, grad), strict=True
    ):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.fixture(params=["kernel", "a GPU's kernel", "formulas", "formulas in blocks"])
def path(request, monkeypatch):
    """The same results by torch's flash kernel, by what a GPU would do, and by the formulas, all queries at once or two
    at a time. The GPU's kernel is played by the CPU's, and takes what that of a GPU takes: causal squares, no masks."""
    if request.param != "kernel":
        monkeypatch.setattr(module._Attention, "flash", lambda *_: False)
    if request.param == "a GPU's kernel":
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

        def attention(q, k, v, *, causal, scale):
            assert q.shape[2] == k.shape[2] or not causal
            return tuple(x.contiguous() for x in forward(q, k, v, 0.0, causal, scale=scale))

        def gradients(grad, q, k, v, out, lse, *, causal, scale):
            return tuple(x.contiguous() for x in backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale))

        monkeypatch.setattr(_torch, "flash_takes", lambda q: True)
        monkeypatch.setattr(_torch, "flash_attention", attention)
        monkeypatch.setattr(_torch, "flash_attention_backward", gradients)
    if request.param == "formulas in blocks":
        monkeypatch.setattr(module, "CPU_SCORES", 2 * B * H * T)
    return request.param


MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(B, 1, S, T) < 0.7,
    "bool of keys": lambda: torch.tensor([True, False, True, True, False, True, True]),
    "float": lambda: torch.randn(B, H, S, T, dtype=torch.float64),
    "float of queries and keys": lambda: torch.randn(S, T, dtype=torch.float64),
    "padding": lambda: torch.where(torch.rand(B, 1, 1, T) < 0.3, -math.inf, 0.0).double(),
    "bool by head": lambda: torch.rand(H, S, T) < 0.7,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("g", [1, G, H])
def test_it_is_torchs_attention_under_every_mask(path, g, mask):
    operands, mask = _operands(g=g), MASKS[mask]()
    out, lse = _attend(*operands, mask)
    _assert_equal(out, _torchs(*operands, mask), operands, rtol=1e-10, atol=1e-11)
    assert lse.shape == (B, H, S)
    assert not lse.requires_grad


@pytest.mark.parametrize(("s", "t"), [(6, 6), (6, 9), (9, 6), (1, 4)])
def test_causal_attention_is_aligned_at_the_top_left(path, s, t):
    operands = _operands(s=s, t=t)
    _assert_equal(
        _attend(*operands, is_causal=True)[0], _torchs(*operands, is_causal=True), operands, rtol=1e-10, atol=1e-11
    )


def test_a_causal_mask_and_a_mask_both_hold(path):
    operands, mask = _operands(), torch.rand(B, 1, S, T) < 0.7
    both = mask & torch.ones(S, T, dtype=torch.bool).tril()
    _assert_equal(
        _attend(*operands, mask, is_causal=True)[0], _torchs(*operands, both), operands, rtol=1e-10, atol=1e-11
    )


def test_values_may_have_their_own_width(path):
    operands = _operands(d_v=5)
    _assert_equal(_attend(*operands)[0], _torchs(*operands), operands, rtol=1e-10, atol=1e-11)


def test_lse_is_the_logarithm_of_the_sum(path):
    q, k, v = _operands(g=H)
    _, lse = _attend(q, k, v, scale=0.5)
    torch.testing.assert_close(lse, ((q @ k.mT) * 0.5).logsumexp(-1).detach())


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_rows_that_may_read_nothing_give_zeros_and_no_gradient(path, kind, p):
    operands = _operands()
    mask = torch.ones(S, T, dtype=torch.bool)
    mask[[0, 3]] = False
    given = mask if kind == "bool" else torch.zeros(S, T, dtype=torch.float64).masked_fill_(~mask, -math.inf)
    out, lse = _attend(*operands, given, p=p)
    assert torch.equal(out[:, :, [0, 3]], torch.zeros(B, H, 2, D, dtype=torch.float64))
    assert torch.equal(lse[:, :, [0, 3]], torch.zeros(B, H, 2, dtype=torch.float64))
    dq, *others = torch.autograd.grad(out.sum(), operands)
    assert torch.equal(dq[:, :, [0, 3]], torch.zeros_like(dq[:, :, [0, 3]]))
    assert all(bool(g.isfinite().all()) for g in (dq, *others))
    if not p:
        _assert_equal(out := _attend(*operands, given)[0], _torchs(*operands, given), operands, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32, "same"])
def test_low_precision_is_accumulated_in_float32(path, dtype, mask_dtype):
    operands = _operands(dtype=dtype)
    mask = None
    if mask_dtype is not None:
        mask = torch.rand(B, 1, S, T) < 0.7
        mask[..., 0] = True
        if mask_dtype != torch.bool:
            mask = torch.zeros(B, 1, S, T, dtype=dtype if mask_dtype == "same" else mask_dtype).masked_fill_(
                ~mask, torch.finfo(torch.float16).min
            )
    out, lse = _attend(*operands, mask)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in operands]
    expected = _torchs(*exact, mask.double() if mask is not None and mask.is_floating_point() else mask)
    grad = torch.randn_like(expected)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(out, operands, grad.to(dtype))
    for a, b in zip(grads, torch.autograd.grad(expected, exact, grad), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def _with_dropout(q, k, v, p, keep, allowed=None):
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * 0.3
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    weights = scores.softmax(-1) * keep / (1 - p) if p < 1 else scores.softmax(-1) * 0
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_dropout_drops_the_elements_of_the_counter_based_mask(path, p, is_causal):
    operands = _operands()
    shape = [B, H, S, T]
    keep = keep_mask(p, shape, seed=11, site=5)
    assert 0.7 < keep.double().mean() < 0.8 or p == 1
    allowed = torch.ones(S, T, dtype=torch.bool).tril() if is_causal else None
    found, _ = _attend(*operands, p=p, is_causal=is_causal)
    _assert_equal(found, _with_dropout(*operands, p, keep, allowed), operands, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("p", "is_causal"), [(0.3, False), (0.3, True), (0.0, True)])
def test_shards_of_batch_heads_and_queries_put_together_are_the_whole(path, dim, p, is_causal):
    operands = _operands(s=6, t=7)
    shape = [B, H, 6, 7]
    out, lse = _attend(*operands, p=p, is_causal=is_causal)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, operands, grad)
    outs, lses, shard_grads = [], [], []
    cut = shape[dim] // 2
    for start, stop in ((0, cut), (cut, shape[dim])):
        q = operands[0].detach().narrow(dim, start, stop - start)
        k, v = (
            x.detach().narrow(dim, start * x.shape[dim] // shape[dim], (stop - start) * x.shape[dim] // shape[dim])
            if dim < 2
            else x.detach()
            for x in operands[1:]
        )
        local = [x.clone().requires_grad_() for x in (q, k, v)]
        offset = [start if d == dim else 0 for d in range(4)]
        part, part_lse = _attend(*local, p=p, is_causal=is_causal, global_shape=shape, offset=offset)
        outs.append(part)
        lses.append(part_lse)
        shard_grads.append(torch.autograd.grad(part, local, grad.narrow(dim, start, stop - start)))
    torch.testing.assert_close(torch.cat(outs, dim), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(lses, dim), lse, rtol=1e-12, atol=1e-12)
    for position, whole in enumerate(grads):
        parts = [g[position] for g in shard_grads]
        together = sum(parts) if dim == 2 and position else torch.cat(parts, dim)
        torch.testing.assert_close(together, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_backward_on_a_shard_of_the_keys_takes_the_lse_of_all_of_them(path, p):
    """Which is what attention over a ring of ranks needs."""
    operands = _operands(t=8)
    shape = [B, H, S, 8]
    out, lse = _attend(*operands, p=p, is_causal=True)
    grad = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, operands, grad)
    q, k, v = (x.detach() for x in operands)
    parts = [
        OPS.attention_backward(
            grad,
            q,
            k[:, :, start : start + 4],
            v[:, :, start : start + 4],
            None,
            out.detach(),
            lse,
            torch.tensor(11),
            is_causal=True,
            scale=0.3,
            dropout_p=p,
            site=5,
            global_shape=shape,
            offset=[0, 0, 0, start],
        )
        for start in (0, 4)
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 2), dk, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 2), dv, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shape", [(0, 4, 2, 6, 7), (2, 0, 0, 6, 7), (2, 4, 2, 0, 7), (2, 4, 2, 6, 0)])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_empty_shards(shape, p):
    b, h, g, s, t = shape
    operands = [torch.randn(b, n, m, D, requires_grad=True) for n, m in ((h, s), (g, t), (g, t))]
    out, lse = _attend(*operands, p=p)
    assert torch.equal(out, torch.zeros(b, h, s, D))
    assert torch.equal(lse, torch.zeros(b, h, s))
    for x, grad in zip(operands, torch.autograd.grad(out.sum(), operands), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


def test_operands_that_do_not_fit_are_refused():
    q, k, v = _operands()
    with pytest.raises(AutoparError, match="multiple of g"):
        _attend(q[:, :3], k, v)
    with pytest.raises(AutoparError, match="float32"):
        _attend(q, k.float(), v)
    with pytest.raises(AutoparError, match="seed"):
        OPS.attention(
            q, k, v, None, None, is_causal=False, scale=1.0, dropout_p=0.1, site=0, global_shape=[1] * 4, offset=[0] * 4
        )


@pytest.mark.parametrize("g", [2, 8])
def test_a_gpus_flash_kernel_is_called_as_torch_declares_it(g):
    """Without values, since there is no GPU: names, order and dtypes of arguments, shapes and strides of results."""
    q, grad = (torch.empty(2, 16, 8, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    k, v = (torch.empty(2, 16, g, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    out, lse = _torch.flash_attention(q, k, v, causal=True, scale=0.1)
    gradients = _torch.flash_attention_backward(grad, q, k, v, out, lse, causal=True, scale=0.1)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 8, 16, 64), (2, 8, 16), torch.float32)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert lse.is_contiguous()
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *gradients))
    names = [a.name for a in torch.ops.aten._scaled_dot_product_flash_attention_backward.default._schema.arguments]
    assert names == [
        "grad_out",
        "query",
        "key",
        "value",
        "out",
        "logsumexp",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "philox_seed",
        "philox_offset",
        "scale",
    ]


def test_a_gpus_flash_kernel_takes_half_precision_only():
    assert not _torch.flash_takes(torch.ones(1, 1, 4, 8))
    with FakeTensorMode():
        on_gpu = [torch.empty(1, 1, 4, d, device="cuda", dtype=t) for d, t in ((8, torch.float32), (7, torch.bfloat16))]
        assert not any(map(_torch.flash_takes, on_gpu))


def test_rows_that_do_not_lie_side_by_side():
    """As convolutions make them, with channels before places: the kernel would read beyond the rows."""
    made = torch.randn(2, 3, 4, 8, 16, dtype=torch.float64).transpose(-1, -2).unbind(1)
    assert all(x.stride(-1) != 1 for x in made)
    leaves = [x.detach().requires_grad_() for x in made]
    q, k, v = leaves
    options = dict(is_causal=False, scale=0.5, dropout_p=0.0, site=0, global_shape=[2, 4, 16, 16], offset=[0, 0, 0, 0])
    out, _ = torch.ops.autopar.attention(q, k, v, None, None, **options)
    expected = (q @ k.mT * 0.5).softmax(-1) @ v
    torch.testing.assert_close(out, expected)
    for grad in (torch.randn(2, 4, 8, 16, dtype=torch.float64).mT, torch.ones((), dtype=torch.float64).expand_as(out)):
        found, wanted = (torch.autograd.grad(o, leaves, grad, retain_graph=True) for o in (out, expected))
        torch.testing.assert_close(found, wanted)
