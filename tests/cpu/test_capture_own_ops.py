"""Ops that users bring: custom ops, Triton ops and products of eight-bit numbers, with rules and without."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn

import autopar
from autopar.errors import CaptureError
from autopar.strategies.registry import remove
from tests.cpu.bad_input_checks import refused
from tests.cpu.capture_checks import assert_simulates, captured, captured_once

triton = pytest.importorskip("triton")
tl = triton.language
FP8, FP8_GRAD = torch.float8_e4m3fn, torch.float8_e5m2


@library.custom_op("covered::gate", mutates_args=())
def gate(x: Tensor, w: Tensor, scale: float) -> Tensor:
    return x * torch.sigmoid(w) * scale


@library.custom_op("covered::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, w: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    opened = torch.sigmoid(w)
    return grad * opened * scale, (grad * x * opened * (1 - opened) * scale).sum(0)


@library.custom_op("covered::add_to", mutates_args=("x",))
def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@library.custom_op("covered::swap", mutates_args=("x", "z"))
def swap(x: Tensor, scale: float, y: Tensor, z: Tensor) -> Tensor:
    before = x.clone()
    x.mul_(scale).add_(y)
    z.copy_(before * 2)
    return before.sum(-1)


@library.custom_op("covered::rms_norm", mutates_args=("out", "scale"))
def rms_norm(out: Tensor, scale: Tensor, x: Tensor, w: Tensor) -> None:
    scale.copy_((x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
    out.copy_(x * scale * w)


@library.custom_op("covered::rms_norm_backward", mutates_args=("of_x", "of_w"))
def rms_norm_backward(of_x: Tensor, of_w: Tensor, grad: Tensor, x: Tensor, w: Tensor, scale: Tensor) -> None:
    scaled = grad * w
    of_x.copy_(scale * scaled - x * scale**3 * (scaled * x).mean(-1, keepdim=True))
    of_w.copy_((grad * x * scale).sum(0))


@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2 + 1, mask=at < n)


@library.triton_op("covered::double", mutates_args={})
def double(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    library.wrap_triton(double_kernel)[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


def _gate_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, w = ctx.saved_tensors
    return *gate_backward(grad.contiguous(), x, w, ctx.scale), None


swap.register_fake(lambda x, scale, y, z: x.new_empty(x.shape[:-1]))
gate.register_fake(lambda x, w, scale: torch.empty_like(x))
gate_backward.register_fake(lambda grad, x, w, scale: (torch.empty_like(x), torch.empty_like(w)))
gate.register_autograd(_gate_gradient, setup_context=_save)
double.register_fake(torch.empty_like)  # by itself it needs no fake but under triton's interpreter
double.register_kernel("cpu")(lambda x: x * 2 + 1)  # where there is a GPU, the kernel itself runs
double.register_autograd(lambda ctx, grad: grad * 2)

RULES = {
    "covered.gate": ("b d, d -> b d", ((0,),)),
    "covered.gate_backward": ("b d, b d, d -> b d, d", ((0,),)),
    "covered.double": ("b d -> b d", ()),
}


@pytest.fixture
def rules() -> Iterator[None]:
    for op, (notation, linear) in RULES.items():
        autopar.register_rule(op, notation, linear=linear)
    yield
    for op in RULES:
        remove(op)


class Net(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.w = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.register_buffer("state", torch.zeros(4))
        self.body = body
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)


def gated(m: Any, x: Tensor) -> Tensor:
    return m.two(gate(m.one(x), m.w, 2.0)).square().mean()


def doubled(m: Any, x: Tensor) -> Tensor:
    return m.two(double(m.one(x))).square().mean()


@pytest.mark.parametrize("body", [gated, doubled])
def test_ops_with_rules_are_cut_and_stay_one_op(body: Any, rules: None) -> None:
    graph = captured(Net(body), X).graph
    own = {n.name: n.packet for n in graph.nodes if "covered" in n.op}
    assert set(own.values()) <= set(RULES)
    cut: set[int] = set()
    for seed in range(4):
        plan = assert_simulates(Net(body), X, (2, 2), search=f"random:{seed}", time_limit=5)
        assert not plan.notices
        cut |= cut_dims(plan, own)
    assert cut == {0, 1}


def cut_dims(plan: autopar.Plan, nodes: Container[str]) -> set[int]:
    """Dims of the first results of ``nodes`` that the plan cuts."""
    chosen = [op.strategy.outputs[0] for op in plan.program.ops if op.node in nodes and op.strategy is not None]
    return {dim for spec in chosen if spec is not None for dim, axes in enumerate(spec.dims) if axes}


@pytest.mark.parametrize("body", [gated, doubled])
def test_ops_without_rules_run_whole_and_the_line_to_add_is_shown(body: Any) -> None:
    with pytest.warns(UserWarning, match=r"autopar\.register_rule\(\"covered\."):
        plan = assert_simulates(Net(body), X, (2, 2), time_limit=5)
    assert any("covered." in n and "register_rule" in n for n in plan.notices)


def changes_its_argument(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    add_to(h, x)
    return (m.one(x) * h).mean()


def changes_parts_under_no_grad(m: Any, x: Tensor) -> Tensor:
    """A view, a buffer of the model, and several arguments besides a result."""
    with torch.no_grad():
        h, z = x.clone(), torch.zeros_like(x)
        add_to(h[2:5], x[:3])
        add_to(m.state, x.mean(0))
        sums = swap(h, 2.0, x.sin(), z)
    return (m.one(x) * (h + z + m.state) * sums.unsqueeze(1)).mean()


class Normed(torch.autograd.Function):
    """As kernels that are given their results are wrapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        out, scale = torch.empty_like(x), x.new_empty(len(x), 1)
        rms_norm(out, scale, x, w)
        ctx.save_for_backward(x, w, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w, scale = ctx.saved_tensors
        of_x, of_w = torch.empty_like(x), torch.empty_like(w)
        rms_norm_backward(of_x, of_w, grad.contiguous(), x, w, scale)
        return of_x, of_w


def changes_them_in_a_function(m: Any, x: Tensor) -> Tensor:
    return m.two(Normed.apply(m.one(x), m.w)).square().mean()


def launches(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    out = torch.empty_like(h)
    library.wrap_triton(double_kernel)[(1,)](h, out, h.numel(), BLOCK=64)
    return m.two(out).mean()


CHANGING = {
    "covered.add_to": ("..., ... -> ...", {"linear": ((0, 1),), "elementwise": True}),
    "covered.swap": ("b [d], b [d], b [d] -> b, b [d], b [d]", {}),
    "covered.rms_norm": ("b [d], b 1, b [d], [d] -> b [d], b 1", {}),
    "covered.rms_norm_backward": ("b [d], [d], b [d], b [d], [d], b 1 -> b [d], [d]", {}),
}
"""Results of the rule of an op that changes arguments: what it returns, then those arguments."""


@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("body", [changes_its_argument, changes_parts_under_no_grad, changes_them_in_a_function])
@pytest.mark.filterwarnings("ignore")
def test_ops_that_change_their_arguments_run_on_copies(body: Any, ruled: bool) -> None:
    for op, (notation, options) in CHANGING.items() if ruled else ():
        autopar.register_rule(op, notation, **options)
    try:
        own = {n.name for n in captured(Net(body), X).graph.nodes if n.packet in CHANGING}
        cut: set[int] = set()
        for search in ("joint", *(f"random:{seed}" for seed in range(4))):
            plan = assert_simulates(Net(body), X, (2, 2), search=search, time_limit=5)
            assert bool(plan.notices) is not ruled
            cut |= cut_dims(plan, own)
        assert own
        assert (0 in cut) is ruled
    finally:
        for op in CHANGING if ruled else ():
            remove(op)


def test_a_program_calls_ops_that_change_their_arguments_from_its_source() -> None:
    with pytest.warns(UserWarning, match="register_rule"):
        plan = autopar.plan(Net(changes_them_in_a_function), X, mesh=(2,), time_limit=5)
    assert "spmd.on_copies(" in plan.source
    assert "torch.ops.covered.rms_norm.default" in plan.source
    model = Net(changes_them_in_a_function)
    found = autopar.simulate(model, X, plan=autopar.Plan.from_json(plan.to_json())).outputs
    torch.testing.assert_close(found, model(X).detach(), rtol=1e-12, atol=0)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="wrap_triton of torch 2.11 takes no interpreted kernel")
@pytest.mark.filterwarnings("ignore")
def test_what_must_be_an_op_says_how() -> None:
    with refused(CaptureError, "triton_op", "register_rule"):
        captured(Net(launches), X)


class Eight(torch.autograd.Function):
    """A product of eight-bit numbers, forward and backward, scaled by the largest of the whole tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        (x8, at_x), (w8, at_w) = _eight(x.float(), FP8), _eight(w.float(), FP8)
        ctx.save_for_backward(x8, w8, at_x, at_w)
        return torch._scaled_mm(x8, w8.t(), scale_a=at_x, scale_b=at_w, out_dtype=torch.float32).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8, at_x, at_w = ctx.saved_tensors
        g8, at_g = _eight(grad.float(), FP8_GRAD)
        columns = [t.t().contiguous().t() for t in (w8, x8)]
        left = torch._scaled_mm(g8, columns[0], scale_a=at_g, scale_b=at_w, out_dtype=torch.float32)
        right = torch._scaled_mm(g8.t().contiguous(), columns[1], scale_a=at_g, scale_b=at_x, out_dtype=torch.float32)
        return left.to(grad.dtype), right.to(grad.dtype)


def _eight(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax() / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


class EightBit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        return Eight.apply(Eight.apply(x, self.up).relu(), self.down).square().mean()


@captured_once()
def test_products_of_eight_bit_numbers_are_those_of_one_device() -> None:
    """Rounding to eight bits happens at the same places: only sums of products are in another order."""
    model, x = EightBit(), torch.linspace(-1, 2, 32 * 32).reshape(32, 32)
    reference = EightBit()
    loss = reference(x)
    loss.backward()
    cut: set[int] = set()
    for search in ("joint", *(f"random:{seed}" for seed in range(4))):
        plan = autopar.plan(model, x, mesh=(2, 2), search=search, time_limit=5)
        assert not plan.notices
        cut |= cut_dims(plan, [n.name for n in captured(model, x).graph.nodes if n.packet == "aten._scaled_mm"])
        result = autopar.simulate(model, x, plan=plan)
        torch.testing.assert_close(result.outputs, loss.detach(), rtol=1e-4, atol=0)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-3, atol=1e-3 * loss.item())
    assert cut == {0, 1}


def test_eight_bits_are_never_a_partial_sum() -> None:
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            return (h + (h.to(FP8).to(h.dtype) - h).detach()).square().mean()

    for seed in range(6):
        assert_simulates(Rounded().double(), X, (2, 2), search=f"random:{seed}", time_limit=5)


class Grouped(nn.Module):
    """Rows by expert, there and back; a second product whose groups are of the dim that it sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
        h = nn.functional.grouped_mm(x, self.up, offs=ends)
        made = nn.functional.grouped_mm(h.relu(), self.down, offs=ends)
        sums = nn.functional.grouped_mm(made.t(), h, offs=ends)
        return made.float().square().mean() + sums.float().square().mean()


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch 2.11 has it under a private name")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@captured_once()
def test_grouped_products_are_those_of_one_device(dtype: torch.dtype, tolerance: float) -> None:
    model, reference, x = Grouped().to(dtype), Grouped().to(dtype), torch.linspace(-1, 2, 128).reshape(8, 16).to(dtype)
    loss = reference(x)
    loss.backward()
    for search in ("joint", *(f"random:{seed}" for seed in range(4))):
        plan = autopar.plan(model, x, mesh=(2, 2), search=search, time_limit=5)
        assert not plan.notices
        result = autopar.simulate(model, x, plan=plan)
        torch.testing.assert_close(result.outputs, loss.detach(), rtol=tolerance, atol=0)
        for name, parameter in reference.named_parameters():
            atol = tolerance * float(parameter.grad.abs().max())
            torch.testing.assert_close(result.grads[name], parameter.grad, rtol=tolerance, atol=atol)
