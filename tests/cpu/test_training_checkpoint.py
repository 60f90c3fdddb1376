"""A checkpoint is there whole or not at all, and holds everything that a run goes on from."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autopar.errors import AutoparError
from autopar.training import Checkpointer, GradAccumOptimizer, GradScaler, MixedPrecisionOptimizer, ResumableDataLoader

DATA = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Run:
    """A run with dropout, momentum, a schedule, a scaler and shuffled data, in plain torch."""

    def __init__(self, folder: Path, seed: int = 0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.optimizer = MixedPrecisionOptimizer(inner, GradScaler("cpu", growth_interval=3))
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 0.1, total_steps=40)
        self.data = ResumableDataLoader(DataLoader(DATA, batch_size=4, shuffle=True))
        self.checkpointer = Checkpointer(folder)
        self.batches = self.endless()

    def endless(self):
        while True:
            yield from self.data

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            loss = self.model(next(self.batches) + random.random() + float(np.random.rand())).square().mean()
            self.optimizer.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    def parts(self):
        return self.model, self.optimizer, self.scheduler, self.data


@pytest.mark.parametrize("before", [0, 3, 4, 9])
def test_a_resumed_run_repeats_itself_bit_for_bit(tmp_path: Path, before: int):
    run = Run(tmp_path)
    run.steps(before)
    run.checkpointer.save(before, *run.parts(), extra={"note": "here"})
    expected = run.steps(9)  # while it is written
    run.checkpointer.wait()
    again = Run(tmp_path, seed=5)
    again.steps(2)
    again = Run(tmp_path, seed=5)
    resumed = again.checkpointer.load(*again.parts())
    assert (resumed.step, resumed.extra) == (before, {"note": "here"})
    assert again.steps(9) == expected
    assert again.optimizer.scaler.get_scale() == run.optimizer.scaler.get_scale()


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path):
    assert Checkpointer(tmp_path / "none").load(nn.Linear(1, 1)) is None
    assert Checkpointer(tmp_path / "none").plan() is None


def test_the_newest_are_kept_and_a_step_may_be_saved_again(tmp_path: Path):
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(tmp_path, keep=2)
    (tmp_path / ".step-00000009.incomplete").mkdir()
    for step in (1, 2, 3, 3):
        nn.init.constant_(model.weight, float(step))
        checkpointer.save(step, model, extra=step)
    nn.init.constant_(model.weight, 30.0)
    checkpointer.save(3, model, wait=True)
    assert checkpointer.steps() == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003.2"]
    loaded = nn.Linear(1, 1)
    assert checkpointer.load(loaded).step == 3
    assert loaded.weight.item() == 30.0
    assert checkpointer.load(loaded, step=2).extra == 2
    assert loaded.weight.item() == 2.0
    with pytest.raises(AutoparError, match="no checkpoint for this step"):
        checkpointer.load(loaded, step=7)


def test_one_process_saves_and_loads_without_a_warning_and_leaves_the_filters_alone(tmp_path: Path):
    model = nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save(1, model, wait=True)
        assert checkpointer.load(model).step == 1
        assert list(warnings.filters) == before


def test_what_was_copied_is_what_is_written(tmp_path: Path):
    model = nn.Linear(100, 100)
    kept = copy.deepcopy(model.state_dict())
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model)
    nn.init.zeros_(model.weight)
    checkpointer.wait()
    checkpointer.load(model)
    assert torch.equal(model.weight, kept["weight"])


def test_checkpoints_of_another_run_are_refused(tmp_path: Path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, model, optimizer, wait=True)
    with pytest.raises(AutoparError, match="another shape"):
        checkpointer.load(nn.Linear(2, 4))
    with pytest.raises(AutoparError, match="another model"):
        checkpointer.load(nn.Linear(2, 3, bias=False))
    grouped = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with pytest.raises(AutoparError, match="other parameter groups"):
        checkpointer.load(model, grouped)
    with pytest.raises(AutoparError, match="not the model's"):
        checkpointer.save(2, nn.Linear(1, 1), optimizer)


@pytest.mark.parametrize(
    "kind", ["MultiStepLR", "LambdaLR", "SequentialLR", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts"]
)
def test_every_kind_of_schedule_is_read_again(tmp_path: Path, kind: str):
    schedules = torch.optim.lr_scheduler

    def made():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        constant = [schedules.ConstantLR(optimizer), schedules.StepLR(optimizer, 1)] if kind == "SequentialLR" else []
        arguments = {
            "MultiStepLR": ([2, 3],),
            "LambdaLR": (lambda step: 1 / (1 + step),),
            "SequentialLR": (constant, [2]),
            "ReduceLROnPlateau": (),
            "CosineAnnealingWarmRestarts": (3,),
        }[kind]
        return model, optimizer, getattr(schedules, kind)(optimizer, *arguments)

    def rates(optimizer, schedule):
        found = []
        for _ in range(3):
            optimizer.step()
            schedule.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    run, again = made(), made()
    rates(*run[1:])
    Checkpointer(tmp_path).save(3, *run, wait=True)
    Checkpointer(tmp_path).load(*again)
    assert rates(*again[1:]) == rates(*run[1:])


def test_half_accumulated_gradients_are_not_saved(tmp_path: Path):
    model = nn.Linear(2, 3)
    optimizer = GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(AutoparError, match="partly accumulated"):
        Checkpointer(tmp_path).save(1, model, optimizer)


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_the_next_call(tmp_path: Path):
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "below")
    checkpointer.save(1, nn.Linear(1, 1))
    with pytest.raises(AutoparError, match="could not be written"):
        checkpointer.wait()


KILLED = """
import os, random, signal, sys, time
import torch
from torch import nn
from autopar.training import Checkpointer

torch.set_num_threads(1)
folder = sys.argv[1]


def made():
    model = nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)


def train():
    model, optimizer = made()
    checkpointer = Checkpointer(folder, keep=1)
    resumed = checkpointer.load(model, optimizer)
    step = resumed.step if resumed else 0
    while True:
        step += 1
        for p in model.parameters():
            nn.init.constant_(p, step)
            p.grad = torch.ones_like(p)
        optimizer.step()
        checkpointer.save(step, model, optimizer, extra=step)


def check():
    model, optimizer = made()
    resumed = Checkpointer(folder, keep=1).load(model, optimizer)
    if resumed is None:
        return 0
    whole = all(bool((p == resumed.step).all()) for p in model.parameters())
    buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert whole and resumed.extra == resumed.step, resumed
    assert all(bool((b == resumed.step).all()) for b in buffers), resumed
    return resumed.step


def child(function):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = function() or 0
        finally:
            os._exit(min(code, 1))
    return pid


# What is imported on first use is imported here, and not by every child.
Checkpointer(folder + "/warm").save(1, *made(), wait=True)
Checkpointer(folder + "/warm").load(*made())
generator = random.Random(0)
found = []
for _ in range(int(sys.argv[2])):
    pid = child(train)
    time.sleep(0.2 + generator.random())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reader, writer = os.pipe()
    pid = child(lambda: os.write(writer, str(check()).encode()) and 0)
    assert os.waitpid(pid, 0)[1] == 0, "what a kill left behind cannot be loaded"
    os.close(writer)
    found.append(int(os.read(reader, 20)))
    os.close(reader)
print(found)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)
    assert steps == sorted(steps)  # none was lost
    assert steps[-1] > 0
