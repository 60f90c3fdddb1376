import itertools

import pytest
import torch
from torch.nn import functional

import autopar.ops  # noqa: F401

OPS = torch.ops.autopar


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding_idx", [-1, 0, 3])
def test_a_whole_table_is_torchs_embedding(dtype, index_dtype, padding_idx):
    weight = torch.randn(10, 4, dtype=dtype, requires_grad=True)
    index = torch.randint(0, 10, (3, 8), dtype=index_dtype)
    index[0, :2] = 3
    found = OPS.lookup(weight, index, offset=0, padding_idx=padding_idx)
    expected = functional.embedding(index, weight, padding_idx=None if padding_idx < 0 else padding_idx)
    grad = torch.randn_like(expected)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, weight, grad)[0], torch.autograd.grad(expected, weight, grad)[0])


@pytest.mark.parametrize("padding_idx", [-1, 0, 3, 9])
@pytest.mark.parametrize("cuts", [(0, 5, 10), (0, 3, 4, 10), (0, 0, 10, 10)])
def test_shards_of_the_vocabulary_add_up(cuts, padding_idx):
    weight, index = torch.randn(10, 4, dtype=torch.float64), torch.randint(0, 10, (6, 7))
    grad = torch.randint(-3, 4, (6, 7, 4)).double()
    parts, grads = [], []
    for start, stop in itertools.pairwise(cuts):
        shard = weight[start:stop].clone().requires_grad_()
        parts.append(OPS.lookup(shard, index, offset=start, padding_idx=padding_idx))
        grads += torch.autograd.grad(parts[-1], shard, grad)
    whole = weight.clone().requires_grad_()
    expected = functional.embedding(index, whole, padding_idx=None if padding_idx < 0 else padding_idx)
    assert torch.equal(sum(parts), expected)
    assert torch.equal(torch.cat(grads), torch.autograd.grad(expected, whole, grad)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_summed_in_float32(dtype):
    index = torch.zeros(4096, dtype=torch.int64)
    grad = torch.ones(4096, 2, dtype=dtype)
    assert OPS.lookup_backward(grad, index, rows=2, offset=0, padding_idx=-1).tolist() == [[4096, 4096], [0, 0]]


def test_rows_that_are_not_finite_stay_where_they_are():
    weight = torch.full((4, 2), float("nan"))
    assert torch.equal(OPS.lookup(weight, torch.tensor([9]), offset=4), torch.zeros(1, 2))
    grad = torch.full((1, 2), float("inf"))
    assert torch.equal(
        OPS.lookup_backward(grad, torch.tensor([9]), rows=4, offset=4, padding_idx=-1), torch.zeros(4, 2)
    )
