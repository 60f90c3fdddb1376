"""Models that change after they were made parallel, on several processes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import autopar
from autopar.errors import AutoparError, RankError
from tests.multiprocess.pool import RankPool

pytestmark = pytest.mark.multiprocess
CUT = {"head.weight": "S0R", "body.weight": "S0R"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return ((self.head(self.norm(self.body(x)).relu()) + self.offset) * self.beta).square().mean()


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Model()
    parallel = autopar.autoparallelize(copy.deepcopy(plain), X, mesh=(2,), constraints=CUT, time_limit=2)
    return parallel, plain


def _distance(parallel: nn.Module, plain: nn.Module) -> float:
    """The largest difference of the loss and of every gradient."""
    plain.zero_grad()
    parallel.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = parallel(X)
    expected = plain(X)
    mine.backward()
    expected.backward()
    found = [float((mine - expected).abs())]
    for a, b in zip(parallel.parameters(), plain.parameters(), strict=True):
        assert isinstance(a.grad, DTensor)
        found.append(float((a.grad.full_tensor() - b.grad).abs().max()))
    return max(found)


def _replaced() -> dict[str, float]:
    """Ranks that draw differently: the values of rank 0 count."""
    found = {}
    for kind in ("module", "parameter", "buffer"):
        parallel, plain = _pair()
        for model, seed in ((parallel, 7 + dist.get_rank()), (plain, 7)):
            torch.manual_seed(seed)
            if kind == "module":
                model.head = nn.Linear(16, 4)
            elif kind == "parameter":
                model.head.weight = nn.Parameter(torch.randn(4, 16))
            else:
                model.offset = torch.randn(4)
        found[kind] = _distance(parallel, plain)
        found[f"{kind} again"] = _distance(parallel, plain)
        assert tuple(parallel.head.weight.to_local().shape) == (2, 16)
    return found


def _placed_otherwise() -> float:
    parallel, plain = _pair()
    weight = torch.linspace(-1, 1, 64).reshape(4, 16)
    plain.head.weight = nn.Parameter(weight.clone())
    _distance(parallel, Model())
    whole = distribute_tensor(weight, parallel.head.weight.device_mesh, [Replicate()])
    parallel.head.weight = nn.Parameter(whole)
    return _distance(parallel, plain)


def test_a_dtensor_that_is_placed_otherwise_stays_as_it_is(pool: RankPool) -> None:
    assert max(pool.run(_placed_otherwise)) < 1e-5


def test_what_is_put_into_the_model_is_cut_as_the_plan_says(pool: RankPool) -> None:
    for found in pool.run(_replaced):
        assert max(found.values()) < 1e-5, found


def _given_data() -> tuple[float, str]:
    parallel, plain = _pair()
    found = []
    for model in (parallel, plain):
        model.head.weight.data = torch.arange(64.0).reshape(4, 16) / 64
        nn.utils.vector_to_parameters(torch.linspace(-1, 1, 16 * 8 + 16), model.body.parameters())
    found.append(_distance(parallel, plain))
    averaged = [(p * 2).detach() for p in parallel.parameters()]
    for p, average in zip(parallel.parameters(), averaged, strict=True):
        p.data = average
    for p in plain.parameters():
        p.data = p.data * 2
    found.append(_distance(parallel, plain))
    try:
        parallel.head.weight.data = torch.zeros(2, 16)
    except AutoparError as error:
        return max(found), str(error)
    return max(found), "nothing was raised"


def test_data_that_is_assigned_is_cut_too(pool: RankPool) -> None:
    for distance, text in pool.run(_given_data):
        assert distance < 1e-5
        assert "(2, 16)" in text


def _statistics_anew() -> float:
    """What ``torch.optim.swa_utils.update_bn`` does: averages instead of moving averages."""
    parallel, plain = _pair()
    for model in (parallel, plain):
        torch.optim.swa_utils.update_bn([X, X + 1, X * 3], model)
    return float((parallel.norm.running_mean - plain.norm.running_mean).abs().max())


def test_statistics_are_averaged_anew(pool: RankPool) -> None:
    assert max(pool.run(_statistics_anew)) < 1e-5


def _changed_on_one_rank(kind: str) -> str:
    parallel, _ = _pair()
    parallel(X)
    if kind == "not everywhere" and dist.get_rank() == 1:
        parallel.beta = 2.0
    if kind == "differently":
        parallel.beta = 2.0 + dist.get_rank()
    if kind == "a module" and dist.get_rank() == 1:
        parallel.head = nn.Linear(16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parallel(X)
        except RankError as error:
            return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("not everywhere", "beta was 1.0 and is 2.0 on rank 1"),
        ("differently", "rank 1 differs from that of rank 0"),
        ("a module", "head.weight"),
    ],
)
def test_ranks_that_change_differently_all_stop(pool: RankPool, kind: str, words: str) -> None:
    for text in pool.run(_changed_on_one_rank, kind, timeout=60):
        assert words in text
