import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar.ops  # noqa: F401
from autopar.errors import AutoparError
from autopar.runtime.meter import MemoryMeter

contract = torch.ops.autopar.contract
SIZES = dict(zip("abcdeghijkmnst", [2, 3, 4, 5, 3, 2, 4, 3, 2, 6, 3, 5, 4, 2], strict=False))


def _operand(letters, dtype=torch.float64):
    """Small integers, so that sums in any order are equal, in memory in an order of their own."""
    shape = [SIZES[letter] for letter in letters]
    return torch.randint(-3, 4, shape[::-1]).to(dtype).permute(list(range(len(shape)))[::-1])


@st.composite
def equations(draw):
    """Each letter is of two or three of the terms, which have their letters in any order."""
    letters = draw(st.lists(st.sampled_from("abcdegh"), unique=True, min_size=1, max_size=6))
    terms = ["", "", ""]
    for letter in letters:
        for term in draw(st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 1, 2)])):
            terms[term] += letter
    x, w, out = ("".join(draw(st.permutations(term))) for term in terms)
    return f"{x},{w}->{out}"


@given(equations())
def test_it_is_einsum_in_value_and_gradients(equation):
    left, right = equation.split("->")[0].split(",")
    x, w = _operand(left).requires_grad_(), _operand(right).requires_grad_()
    expected, found = torch.einsum(equation, x, w), contract(x, w, equation)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    weight = torch.randint_like(expected, -3, 4)
    for a, b in zip(
        torch.autograd.grad(found, (x, w), weight), torch.autograd.grad(expected, (x, w), weight), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_linear_layer_equals_torchs_bit_by_bit(dtype):
    x, w = torch.randn(4, 6, 32, dtype=dtype, requires_grad=True), torch.randn(24, 32, dtype=dtype, requires_grad=True)
    grad = torch.randn(4, 6, 24, dtype=dtype)
    found, expected = contract(x, w, "bsk,nk->bsn"), torch.nn.functional.linear(x, w)
    assert torch.equal(found, expected)
    for a, b in zip(torch.autograd.grad(found, (x, w), grad), torch.autograd.grad(expected, (x, w), grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("equation", ["bsk,nk->bsn", "bsk,kn->bsn", "bsn,bsk->nk", "bhsd,bhtd->bhst", "bsn,nk->bsk"])
def test_common_equations_are_one_kernel_on_the_operands_as_they_lie(equation):
    left, right = equation.split("->")[0].split(",")
    x, w = _operand(left).contiguous(), _operand(right).contiguous()
    with torch.profiler.profile() as profile:
        contract(x, w, equation)
    kernels = {event.key for event in profile.key_averages()}
    assert kernels & {"aten::mm", "aten::bmm"}
    assert not kernels & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::einsum"}


@pytest.mark.parametrize("equation", ["ab,ab->ab", "ab,b->ab", "abh,hb->abh", "ac,b->bca"])
def test_where_nothing_is_summed_the_result_is_all_that_is_held(equation):
    x, w = (_operand(term) for term in equation.split("->")[0].split(","))
    meter = MemoryMeter()
    meter.hold([x, w])
    before = meter.held
    with meter:
        made = contract(x, w, equation)
    assert meter.peak - before == made.nbytes


def test_low_precision_sums_run_in_float32():
    x, w = torch.full((1, 1, 4096), 1.0, dtype=torch.bfloat16), torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    assert contract(x, w, "bsk,nk->bsn").item() == 4096


@pytest.mark.parametrize("equation", ["bsk,nk->bsn", "bsn,bsk->nk", "bhd,btd->bht"])
@pytest.mark.parametrize("empty", "bskn")
def test_empty_shards_contract(equation, empty):
    left, right = equation.split("->")[0].split(",")
    x, w = (torch.ones([0 if c == empty else SIZES[c] for c in term]) for term in (left, right))
    assert torch.equal(contract(x, w, equation), torch.einsum(equation, x, w))


@pytest.mark.parametrize(
    "equation", ["bsk,nk", "bsk->bs", "bbk,nk->bn", "bsk,nk->bs", "bk,nk->bnq", "b...,b->b", "k,k->,"]
)
def test_an_equation_that_is_no_contraction_is_refused(equation):
    with pytest.raises(AutoparError, match="two operands"):
        contract(torch.ones(2, 2, 2), torch.ones(2, 2), equation)


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(AutoparError, match="differ in k"):
        contract(torch.ones(2, 2, 3), torch.ones(2, 2), "bsk,nk->bsn")
    with pytest.raises(AutoparError, match="do not fit"):
        contract(torch.ones(2, 3), torch.ones(2, 3), "bsk,nk->bsn")
    with pytest.raises(AutoparError, match="float64"):
        contract(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64), "mk,nk->mn")
