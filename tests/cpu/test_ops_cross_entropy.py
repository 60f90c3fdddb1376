import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.ops import cross_entropy

OPS = torch.ops.autopar


def _loss(shards, offsets, target, ignore_index=-100, **smoothed):
    """As ranks that hold parts of the vocabulary compute it: [...]."""
    m = torch.stack([s.detach().amax(-1) for s in shards if s.shape[-1]]).amax(0)
    lse = m + sum(OPS.sumexp(s, m) for s in shards).log()
    return sum(
        OPS.nll(s, lse, target, ignore_index=ignore_index, offset=o, **smoothed)
        for s, o in zip(shards, offsets, strict=True)
    )


@pytest.mark.parametrize("cuts", [(0, 11), (0, 6, 11), (0, 3, 3, 7, 11), (0, 11, 11)])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("block", [1, 1 << 18])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_shards_losses_and_gradients_are_torchs(cuts, ignore_index, block, smoothing, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CPU_BLOCK", block)
    x = torch.randn(4, 6, 11, dtype=torch.float64) * 5
    target = torch.randint(0, 11, (4, 6))
    target[1, 2:] = ignore_index
    whole = x.clone().requires_grad_()
    rows = whole.view(-1, 11), target.view(-1)
    expected = functional.cross_entropy(*rows, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing)
    shards = [x[..., a:b].clone().requires_grad_() for a, b in itertools.pairwise(cuts)]
    found = _loss(shards, cuts[:-1], target, ignore_index, own=1 - smoothing, each=smoothing / 11)
    weight = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(found.view(-1), expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(found, shards, weight)
    (expected_grad,) = torch.autograd.grad(expected, whole, weight.view(-1))
    torch.testing.assert_close(torch.cat(grads, -1), expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_run_in_float32_and_the_gradient_has_the_dtype_of_x(dtype):
    x = (torch.randn(5, 5000) * 3).to(dtype)
    target = torch.tensor([0, 4999, -100, 17, 3])
    exact = x.double().requires_grad_()
    expected = functional.cross_entropy(exact, target, reduction="none")
    x.requires_grad_()
    found = _loss([x], [0], target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), exact)[0].to(dtype), rtol=2e-2, atol=1e-5)


def test_large_logits_and_forbidden_classes_stay_finite():
    x = torch.tensor([[3e4, -torch.inf, 0.0], [-3e4, -3e4, -torch.inf]], requires_grad=True)
    target = torch.tensor([0, -100])
    loss = _loss([x], [0], target)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert torch.equal(loss, torch.zeros(2))
    assert torch.equal(grad, torch.zeros(2, 3))


def test_the_backward_allocates_its_result_and_little_else():
    x = torch.randn(64, 1000)
    lse, target, grad = x.logsumexp(-1), torch.randint(0, 1000, (64,)), torch.ones(64)
    with torch.profiler.profile(profile_memory=True) as profile:
        OPS.nll_backward(grad, x, lse, target, ignore_index=-100, offset=0)
    allocated = sum(
        max(0, event.self_cpu_memory_usage) for event in profile.events() if event.self_cpu_memory_usage > 0
    )
    assert x.nbytes <= allocated < 1.1 * x.nbytes


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("spec", ["RR", "S0R"])
@pytest.mark.parametrize("wrong", [12, -3])
def test_an_index_that_no_class_has_is_an_error_on_any_mesh(spec: str, wrong: int) -> None:
    ids, labels = torch.randint(0, 12, (2, 4, 4))
    cut = {"embed.weight": spec, "head.weight": spec}
    plan = autopar.plan(Words(), (ids, labels), mesh=2, cluster="dgx-h100", constraints=cut)
    labels[0, 0] = -100
    assert autopar.simulate(Words(), (ids, labels), plan=plan).outputs.isfinite()
    for tensor in (ids, labels):
        kept, tensor[1, 1] = tensor[1, 1].clone(), wrong
        with pytest.raises(IndexError, match=f"{wrong} is out of bounds for size 12"):
            autopar.simulate(Words(), (ids, labels), plan=plan)
        tensor[1, 1] = kept


def test_a_loss_in_chunks_refuses_them_too() -> None:
    x, table, target = torch.randn(3, 4), torch.randn(300, 4), torch.tensor([1, -100, 300])
    with pytest.raises(IndexError, match="300 is out of bounds for size 300"):
        OPS.linear_nll(x, table, None, target, ignore_index=-100)
    told = torch.randn(2, 2, 3)
    OPS.linear_nll_of_parts(told, target, ignore_index=-100, vocabulary=301)
    with pytest.raises(IndexError, match="for size 300"):
        OPS.linear_nll_of_parts(told, target, ignore_index=-100, vocabulary=300)
