"""Bad input is refused on every rank at once, within seconds, and leaves every rank's model as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from tests.cpu.bad_input_checks import Net, batch, untouched
from tests.multiprocess.pool import RankPool


class FailsOnRankOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if dist.get_rank() == 1 and h.sum() > 0:
            return -h
        return h


class Sleepy(FailsOnRankOne):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("rank 1 is out of memory")
        return self.lin(x)


def attempt(model: nn.Module, inputs: Any, **options: Any) -> dict[str, Any]:
    """Everything about the error that this rank raised; the model is checked to be as it was."""
    with untouched(model):
        try:
            autopar.autoparallelize(model, inputs, **{"mesh": (2,), **options})
        except AutoparError as error:
            return dict(kind=type(error).__name__, what=error.what, found=error.found, hint=error.hint, text=str(error))
    raise AssertionError("nothing was refused")


def torn_model() -> nn.Module:
    return Net(hidden=8 if dist.get_rank() == 0 else 16)


CASES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, str], tuple[str, ...]]] = {}


def case(rank0: str, rank1: str, *parts: str) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """A case whose error on rank 0 and on rank 1 has these kinds, with ``parts`` in both texts."""

    def register(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        CASES[function.__name__] = (function, (rank0, rank1), parts)
        return function

    return register


@case("MeshError", "MeshError", "world size 2", "8 ranks")
def mesh_of_another_size() -> dict[str, Any]:
    return attempt(Net(), batch(), mesh=(2, 4))


@case("InfeasibleError", "InfeasibleError", "memory_budget=", "smallest budget that works")
def budget_that_nothing_fits() -> dict[str, Any]:
    return attempt(Net(), batch(), memory_budget=100)


@case("ConstraintError", "ConstraintError", "head.weight")
def constraint_that_names_nothing() -> dict[str, Any]:
    return attempt(Net(), batch(), constraints={"head.wieght": "RR"})


@case("ConstraintError", "ConstraintError", "tied", "S0R", "RS0")
def constraints_that_contradict_through_a_tie() -> dict[str, Any]:
    return attempt(Net(tied=True), batch(), constraints={"embed.weight": "S0R", "head.weight": "RS0"})


@case("SpecError", "SpecError")
def spec_that_does_not_fit() -> dict[str, Any]:
    return attempt(Net(), batch(), constraints={"head.weight": "S3R"})


@case("PlanError", "PlanError", "another model")
def plan_from_another_model() -> dict[str, Any]:
    return attempt(Net(), batch(), plan=autopar.plan(Net(hidden=16), batch(), mesh=(2,)))


@case("PlanError", "RankError", "nowhere")
def plan_file_that_one_rank_lacks() -> dict[str, Any]:
    if dist.get_rank() == 0:
        return attempt(Net(), batch(), plan="nowhere.json")
    return attempt(Net(), batch())


@case("RankError", "RankError", "rank 1 differs from that of rank 0")
def rank_whose_model_differs() -> dict[str, Any]:
    return attempt(torn_model(), batch())


@case("RankError", "RankError", "rank 1 differs from that of rank 0")
def rank_whose_inputs_differ() -> dict[str, Any]:
    return attempt(Net(), batch(4 + 4 * dist.get_rank()))


@case("RankError", "RankError", "rank 1 differs from that of rank 0")
def rank_whose_options_differ() -> dict[str, Any]:
    return attempt(Net(), batch(), memory_budget="1GiB" if dist.get_rank() else "2GiB")


@case("RankError", "MeshError", "8 ranks")
def rank_whose_mesh_differs() -> dict[str, Any]:
    return attempt(Net(), batch(), mesh=(8,) if dist.get_rank() else (2,))


@case("RankError", "CaptureError", "h.sum() > 0", "test_bad_input.py")
def rank_that_cannot_capture() -> dict[str, Any]:
    return attempt(FailsOnRankOne(), torch.randn(4, 4))


@case("RankError", "CaptureError", "out of memory")
def rank_that_runs_out_of_memory() -> dict[str, Any]:
    return attempt(Sleepy(), torch.randn(4, 4))


@case("InputError", "InputError", "signature")
def meta_inputs_that_do_not_fit() -> dict[str, Any]:
    return attempt(Net(), dict(idss=batch()["ids"]))


@case("SolverError", "SolverError", "CBC")
def no_cbc_binary() -> dict[str, Any]:
    import pulp

    kept = pulp.PULP_CBC_CMD.__init__

    def moved(self: Any, *args: Any, **kwargs: Any) -> None:
        kept(self, *args, **kwargs)
        self.path = "/nowhere/cbc"

    pulp.PULP_CBC_CMD.__init__ = moved
    try:
        return attempt(Net(), batch(), solver="cbc")
    finally:
        pulp.PULP_CBC_CMD.__init__ = kept


def every_case() -> dict[str, tuple[dict[str, Any], float]]:
    """All cases in one job: after each, the ranks must still be in step for the next."""
    results = {}
    for name, (function, _, _) in CASES.items():
        start = time.perf_counter()
        results[name] = (function(), time.perf_counter() - start)
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def outcomes(pool: RankPool) -> list[dict[str, tuple[dict[str, Any], float]]]:
    return pool.run(every_case, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses(outcomes: list[dict[str, Any]], name: str) -> None:
    _, kinds, parts = CASES[name]
    for rank, kind in enumerate(kinds):
        error, _ = outcomes[rank][name]
        assert error["kind"] == kind
        assert error["what"]
        assert error["found"]
        assert error["hint"]
        for part in parts:
            assert part in error["text"], error["text"]


def inputs_of_another_kind() -> list[str]:
    """After a plan: each kind of wrong input on all ranks, on one rank alone, then a good step."""
    torch.manual_seed(0)
    model = autopar.autoparallelize(Net(), batch(), mesh=(2,))
    said = []
    ids, target = batch()["ids"], batch()["target"]
    wrong = (dict(ids=ids), dict(ids=ids[0], target=target), dict(ids=ids.int(), target=target))
    for inputs in wrong:
        try:
            model(**inputs)
        except AutoparError as error:
            said.append(f"{type(error).__name__} {bool(error.what and error.found and error.hint)}")
    model(**batch()).backward()
    return said


def test_inputs_of_another_kind_than_planned(pool: RankPool) -> None:
    for said in pool.run(inputs_of_another_kind):
        assert said == ["InputError True"] * 3
