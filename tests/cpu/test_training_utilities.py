"""What a training script uses around the model, alone in its process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError
from autopar.training import (
    AnnealingScheduler,
    CycledDataLoader,
    DistCoordinator,
    ResumableDataLoader,
    all_gather_tensors,
    all_reduce_mean,
    all_reduce_sum,
    is_rank_0,
    priority_execution,
    sampler,
    to_device,
)
from autopar.training.launch import first_host, fresh_store


def test_annealing_is_continuous_from_start_to_end():
    scheduler = AnnealingScheduler(1.0, 0.0, warmup_steps=2, annealing_step=6)
    seen = []
    for _ in range(8):
        seen.append(scheduler.get_temperature())
        scheduler.step_forward()
    assert seen == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert AnnealingScheduler(1.0, 0.5, 5, 0).get_temperature() == 0.5


def test_a_cycled_loader_begins_again():
    loader = CycledDataLoader(DataLoader([0, 1, 2]))
    assert [int(loader.next()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert loader.epoch == 2
    with pytest.raises(AutoparError, match="no batches"):
        CycledDataLoader([]).next()


def test_collectives_of_one_process_change_nothing():
    x = torch.tensor([1.0, 2.0])
    assert is_rank_0()
    assert torch.equal(all_reduce_mean(x.clone()), x)
    assert torch.equal(all_reduce_sum(x.clone()), x)
    assert all_gather_tensors([x])[0] is x
    assert all_gather_tensors(x)[0] is x


def test_to_device_reaches_into_nested_structures():
    moved = to_device({"a": [torch.ones(2), 3], "b": (torch.ones(1),)}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert moved["a"][1] == 3


def test_a_coordinator_alone_is_master_and_last(capsys: pytest.CaptureFixture[str]):
    coordinator = DistCoordinator()
    assert (coordinator.rank, coordinator.world_size) == (0, 1)
    assert coordinator.is_master()
    assert coordinator.is_last_process()
    coordinator.print_on_master("hello")
    assert capsys.readouterr().out == "hello\n"
    assert coordinator.on_master_only()(lambda x: x + 1)(1) == 2
    with priority_execution(), coordinator.priority_execution():
        coordinator.block_all()


def endless(loader: ResumableDataLoader):
    while True:
        for batch in loader:
            yield batch.tolist()


@pytest.mark.parametrize("generator", [None, 5])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 6])
def test_a_loader_goes_on_where_another_stopped(stop: int, generator: int | None):
    def made() -> ResumableDataLoader:
        own = torch.Generator().manual_seed(generator) if generator else None
        return ResumableDataLoader(DataLoader(range(8), batch_size=2, shuffle=True, generator=own))

    torch.manual_seed(3)
    loader = made()
    batches = endless(loader)
    _ = [next(batches) for _ in range(stop)]
    state, present = loader.state_dict(), torch.get_rng_state()
    rest = [next(batches) for _ in range(7)]
    again = made()
    again.load_state_dict(state)
    torch.set_rng_state(present)
    resumed = endless(again)
    assert [next(resumed) for _ in range(7)] == rest


def local_plan() -> autopar.Plan:
    return autopar.plan(torch.nn.Linear(4, 2), (torch.empty(4, 4),), mesh=(2,), batch="local")


def test_ranks_read_disjoint_samples_and_each_batch_the_same_ones_for_any_number_of_ranks():
    plan = local_plan()
    data = list(range(18))

    def of_batches(world: int, ranks: list[list[int]]) -> list[set[int]]:
        each = 4 // world
        return [{i for r in ranks for i in r[k * each : (k + 1) * each]} for k in range(4)]

    two = [list(plan.sampler(data, seed=1, rank=r)) for r in (0, 1)]
    (one,) = [list(autopar.plans.LocalSampler(data, 0, 1, seed=1))]
    assert sorted(two[0] + two[1]) == data
    assert of_batches(2, two) == of_batches(1, [one])
    later = plan.sampler(data, seed=1, rank=0)
    later.set_epoch(1)
    assert list(later) != two[0]
    assert list(sampler(plan, data, seed=1)) == two[0]


def test_samples_that_not_every_rank_gets():
    plan = local_plan()
    data = list(range(5))
    assert [list(plan.sampler(data, shuffle=False, rank=r)) for r in (0, 1)] == [[0, 2], [1, 3]]
    filled = [plan.sampler(data, shuffle=False, rank=r, drop_last=False) for r in (0, 1)]
    assert [list(s) for s in filled] == [[0, 2, 4], [1, 3, 0]]
    assert len(filled[0]) == 3
    with pytest.raises(AutoparError, match="no such rank"):
        plan.sampler(data, rank=2)


def test_a_plan_of_whole_batches_has_no_sampler():
    plan = autopar.plan(torch.nn.Linear(4, 2), (torch.empty(4, 4),), mesh=(2,))
    with pytest.raises(AutoparError, match="reads the whole batch"):
        plan.sampler([1, 2])


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
SLURM = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29512",
}
LAUNCHES = [("torch", TORCHRUN), ("slurm", SLURM), ("openmpi", OPENMPI)]
MISSING = [(kind, variables, name) for kind, variables in LAUNCHES for name in variables]


@pytest.mark.parametrize(("kind", "variables", "name"), MISSING, ids=[f"{k}-{n}" for k, _, n in MISSING])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, kind: str, variables: dict, name: str):
    for each in (*TORCHRUN, *SLURM, *OPENMPI):
        monkeypatch.delenv(each, raising=False)
    for each, value in variables.items():
        if each != name:
            monkeypatch.setenv(each, value)
    with pytest.raises(AutoparError, match=f"{name} is not set") as caught:
        getattr(autopar, f"launch_from_{kind}")()
    assert "start the program with" in caught.value.hint


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch):
    for name, value in (TORCHRUN | {"RANK": "first"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AutoparError, match="RANK is not a number"):
        autopar.launch_from_torch()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(AutoparError, match="does not fit"):
        autopar.launch_from_torch()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node7", "node7"), ("a,b", "a"), ("node[03-05,9],gpu1", "node03"), ("n[1,2]-ib,n4", "n1-ib")],
)
def test_the_first_machine_of_a_list(nodes: str, first: str):
    assert first_host(nodes) == first


def test_a_list_of_machines_that_cannot_be_read():
    with pytest.raises(AutoparError, match="cannot be parsed"):
        first_host("[1-2]")


def test_ranks_that_start_again_agree_on_a_part_of_the_store_without_what_was_left_there():
    store = dist.HashStore()
    words = []
    for _ in range(3):  # the first time, and two restarts on the same store
        with ThreadPoolExecutor(3) as ranks:
            found = list(ranks.map(lambda rank: fresh_store(store, rank, 3, timedelta(seconds=60)), range(3)))
        found[0].set("address", "here")
        assert [s.get("address") for s in found] == [b"here"] * 3
        words.append(found[1])
    words[-1].set("new", "")
    assert not words[0].check(["new"])


def test_a_rank_that_does_not_come_is_an_error():
    for rank in (0, 1):
        with pytest.raises(AutoparError, match="Not every rank"):
            fresh_store(dist.HashStore(), rank, 2, timedelta(seconds=0.2))
