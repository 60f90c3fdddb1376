"""Every Triton kernel compiled for this GPU, against references, and through the ops that programs call."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from autopar import _torch, kernels  # noqa: E402
from autopar.kernels import KERNELS  # noqa: E402
from autopar.ops import attention  # noqa: E402
from autopar.ops.linear_nll import CHUNK  # noqa: E402
from tests.kernel_checks import (  # noqa: E402
    FLOATS,
    INDICES,
    assert_near,
    check_cross_entropy,
    check_lookup,
    check_norm,
    check_packing,
)


@pytest.fixture(autouse=True)
def _compiled(tmp_path, monkeypatch) -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: kernels would not be compiled; run `make gpu`")
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (64, 1, 130), (33, 3, 4, 65)], ids=str)
def test_packing(dtype, shape) -> None:
    x = torch.randint(0, 100, shape, device="cuda").to(dtype)
    for dim in range(len(shape)):
        check_packing(x, dim, 2)
        check_packing(x.transpose(0, -1), dim, 3)
        if dtype in FLOATS:
            check_packing(x, dim, 4, torch.bfloat16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_embedding(dtype, index) -> None:
    check_lookup(dtype, index, (3, 7), rows=11, d=33, offset=5, device="cuda")
    check_lookup(dtype, index, (4, 257), rows=1000, d=768, offset=123, device="cuda")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_cross_entropy(dtype, index) -> None:
    check_cross_entropy(dtype, index, rows=5, v=37, ways=2, device="cuda")
    check_cross_entropy(dtype, index, rows=70, v=50257, ways=3, device="cuda")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_norms(dtype, centred) -> None:
    check_norm(dtype, (3, 5, 37), "cuda", centred=centred, scaled=True, shifted=centred)
    check_norm(dtype, (130, 4096), "cuda", centred=centred, scaled=True, shifted=False)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_ops_of_a_program_run_them(dtype) -> None:
    """What the op gives on the GPU, tuned, is what it gives on the CPU."""
    weight, index = torch.randn(50, 64).to(dtype), torch.randint(0, 90, (6, 20))
    assert kernels.enabled(weight.cuda())
    on_cpu = torch.ops.autopar.lookup(weight, index, offset=10)
    assert torch.equal(torch.ops.autopar.lookup(weight.cuda(), index.cuda(), offset=10).cpu(), on_cpu)
    logits, target = torch.randn(40, 90).to(dtype), torch.randint(0, 90, (40,))
    m = logits.amax(-1)
    total = torch.ops.autopar.sumexp(logits, m)
    assert_near(torch.ops.autopar.sumexp(logits.cuda(), m.cuda()).cpu(), total)
    lse, options = m.float() + total.log(), {"ignore_index": -100, "offset": 0}
    for op, operands in (("nll", ()), ("nll_backward", (torch.rand(40),))):
        args = (*operands, logits, lse, target)
        expected = getattr(torch.ops.autopar, op)(*args, **options)
        found = getattr(torch.ops.autopar, op)(*(a.cuda() for a in args), **options)
        assert_near(found.cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_losses_in_chunks_of_classes(dtype) -> None:
    """On the GPU, more classes than a chunk has, what they are on the CPU in float64; and no more is held."""
    rows, classes, width = 8192, 16_411, 64
    x, table = (torch.randn(n, width, device="cuda").to(dtype) / 8 for n in (rows, classes))
    target, grad = torch.randint(0, classes, (rows,), device="cuda"), torch.rand(rows, device="cuda") / rows
    target[:100] = -100
    leaves = [t.double().requires_grad_() for t in (x, table)]
    wanted = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*leaves), target, reduction="none")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops, options = torch.ops.autopar, {"ignore_index": -100}
    loss, lse = ops.linear_nll(x, table, None, target, **options)
    forward = torch.cuda.max_memory_allocated() - before
    assert forward < 1.2 * CHUNK * x.itemsize
    found = ops.linear_nll_backward(grad, x, table, None, lse, target, offset=0, mask=[True, True, False], **options)
    assert_near(loss.to(dtype), wanted.detach(), times=4)
    for a, b in zip(found, torch.autograd.grad(wanted, leaves, grad.double()), strict=False):
        assert_near(a, b, times=4)


@pytest.mark.parametrize("name", ["lookup", "statistics"])
def test_tuning_is_kept(name, tmp_path) -> None:
    x, index = torch.randn(64, 512, device="cuda"), torch.randint(0, 64, (100,), device="cuda")
    args = {"lookup": (x, index), "statistics": (x,)}[name]
    options = {"offset": 0} if name == "lookup" else {}
    kernels.dispatch._tuning.cache_clear()
    kernels.run(name, *args, **options)
    assert name in next(tmp_path.glob("kernels-*.json")).read_text()
    assert KERNELS[name].configs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("g", "causal"), [(8, True), (2, True), (8, False)])
def test_attention_by_the_flash_kernel(dtype, g, causal) -> None:
    """Forward and backward against the formulas in float64, heads shared or not."""
    shapes = [(2, 8, 100, 64), (2, g, 100, 64), (2, g, 100, 64)]
    operands = [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in operands]
    assert _torch.flash_takes(operands[0]) and not _torch.flash_takes(exact[0])
    options = {
        "is_causal": causal,
        "scale": 0.125,
        "dropout_p": 0.0,
        "site": 1,
        "global_shape": [2, 8, 100, 100],
        "offset": [0, 0, 0, 0],
    }
    found, lse = torch.ops.autopar.attention(*operands, None, None, **options)
    expected, wanted = torch.ops.autopar.attention(*exact, None, None, **options)
    assert_near(found.detach(), expected.detach(), times=2)
    assert_near(lse, wanted, times=1e3)
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, operands, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        assert_near(a, b, times=4)


@pytest.mark.parametrize("last", [128, 129, 255], ids=str)
def test_the_last_of_some_rows_attends_all_keys_up_to_its_own(last, monkeypatch) -> None:
    """Rows that a rank lends or keeps, as one call of the flash kernel, forward and backward."""
    first, g, dtype = 100, 2, torch.bfloat16
    shapes = [(2, 8, last - first, 64), (2, g, last, 64), (2, g, last, 64)]
    operands = [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in operands]
    options = {"is_causal": True, "scale": 0.125, "offset": [0, 0, first, 0]}
    with monkeypatch.context() as without_formulas:
        without_formulas.delattr(attention, "_forward")
        found, lse = torch.ops.autopar.attention(*operands, None, None, **options)
    expected, wanted = torch.ops.autopar.attention(*exact, None, None, **options)
    assert_near(found.detach(), expected.detach(), times=2)
    assert_near(lse, wanted, times=1e3)
    grad = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, operands, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        assert_near(a, b, times=4)
