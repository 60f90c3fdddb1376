"""Accumulation: n batches make one step, bit for bit none before, and the gradients are those of the n batches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError
from autopar.training import (
    BaseGradientHandler,
    GradAccumDataloader,
    GradAccumGradientHandler,
    GradAccumOptimizer,
    GradScaler,
    MixedPrecisionOptimizer,
    accumulate_gradient,
    make_gradient_handlers,
    register_gradient_handler,
)


class Listed:
    """A loader that is not torch's, and counts what was read."""

    def __init__(self, size: int):
        self.size, self.read = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        for i in range(self.size):
            self.read += 1
            yield i


class Counting(BaseGradientHandler):
    calls = 0

    def handle_gradient(self):
        self.calls += 1


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 4))


def same(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_parameters_change_at_the_fourth_backward_and_not_before():
    model = nn.Linear(4, 2)
    data = batches(10)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    handler = Counting(model, inner)
    optimizer, loader, handlers, scheduler = accumulate_gradient(model, inner, data, 4, [handler], schedule)
    changed, rates, calls = [], [], []
    for batch in loader:
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        optimizer.backward(model(batch).square().mean())
        for each in handlers:
            each.handle_gradient()
        optimizer.step()
        scheduler.step()
        changed.append(not same(model, before))
        rates.append(scheduler.get_last_lr()[0])
        calls.append(handler.calls)
    assert changed == [False, False, False, True] * 2  # the last two batches make no cycle
    assert rates == [0.1] * 3 + [0.05] * 4 + [0.025]
    assert calls == [0, 0, 0, 1, 1, 1, 1, 2]


def test_the_gradient_is_the_average_of_the_batches():
    model = nn.Linear(4, 2).double()
    other = copy.deepcopy(model)
    data = [b.double() for b in batches(4)]
    optimizer = GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 4, model)
    for batch in data:
        optimizer.zero_grad()
        optimizer.backward(model(batch).square().mean())
        optimizer.step()
    other(torch.cat(data)).square().mean().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_without_handlers_and_scheduler_there_are_none():
    model = nn.Linear(4, 2)
    _, _, handlers, scheduler = accumulate_gradient(model, torch.optim.SGD(model.parameters(), lr=1.0), [], 2)
    assert handlers is None
    assert scheduler is None


def test_a_torch_loader_stops_after_the_last_whole_cycle():
    loader = GradAccumDataloader(DataLoader(list(range(10))), 4)
    assert len(loader) == 8
    assert [int(b) for b in loader] == list(range(8))
    assert loader.batch_size == 1  # what the wrapper lacks is the loader's


def test_another_loader_is_read_to_its_end():
    source = Listed(10)
    loader = GradAccumDataloader(source, 4)
    assert list(loader) == list(range(8))
    assert source.read == 10
    assert list(loader) == list(range(8))
    assert list(zip(loader, range(8), strict=False))[-1] == (7, 7)
    assert source.read == 30  # also where the loop does not ask for more than the last batch
    assert list(GradAccumDataloader(Listed(3), 4)) == []


def test_a_loader_without_a_length_gives_whole_cycles_only():
    class Stream:
        def __iter__(self):
            return iter(range(10))

    assert list(GradAccumDataloader(Stream(), 4)) == list(range(8))


def test_step_without_a_backward_of_the_wrapper_is_an_error():
    model = nn.Linear(4, 2)
    optimizer = GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(AutoparError, match="No backward was accumulated") as caught:
        optimizer.step()
    assert "optimizer.backward(loss)" in caught.value.hint


def test_a_wrapped_optimizer_is_an_optimizer():
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = GradAccumOptimizer(inner, 2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert torch.optim.lr_scheduler.ConstantLR(optimizer) is not None
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state_dict() == inner.state_dict()
    assert pickle.loads(pickle.dumps(optimizer)).accumulate_size == 2


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_size_that_is_no_positive_integer_is_refused(size: object):
    with pytest.raises(AutoparError, match="accumulate_size"):
        GradAccumDataloader([], size)


def test_handlers_are_found_by_name_and_registered_once():
    from autopar.training import handlers

    try:
        register_gradient_handler(Counting)
        model = nn.Linear(1, 1)
        (made,) = make_gradient_handlers(["Counting"], model, None)
        assert isinstance(made, Counting)
        with pytest.raises(AutoparError, match="already registered"):
            register_gradient_handler(Counting)
        with pytest.raises(AutoparError, match="No gradient handler is named"):
            make_gradient_handlers(["Missing"], model, None)
    finally:
        handlers.GRADIENT_HANDLERS.pop("Counting")
    with pytest.raises(AutoparError, match="not a gradient handler"):
        register_gradient_handler(Listed)
    with pytest.raises(AutoparError, match="not a gradient handler"):
        GradAccumGradientHandler(Listed(1), 2)


def test_an_accumulating_optimizer_scales_and_clips_what_is_complete():
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    optimizer = GradAccumOptimizer(MixedPrecisionOptimizer(inner, scaler), 2, model)
    before = model.weight.detach().clone()
    norms = []
    for _ in range(2):
        optimizer.backward(model(torch.ones(1, 4)).sum())
        norms.append(optimizer.clip_grad_by_norm(0.5))
        optimizer.clip_grad_norm(model, 0.5)
        optimizer.clip_grad_by_value(10.0)
        optimizer.step()
    assert norms[0] is None
    torch.testing.assert_close(norms[1].item(), 10**0.5)  # eight weights and two biases with a gradient of one
    torch.testing.assert_close(model.weight.detach(), before - 0.5 / 10**0.5, rtol=1e-5, atol=1e-6)
    assert optimizer.unwrap() is inner


def test_a_scaler_has_torch_s_defaults_and_is_strict_about_order():
    scaler = GradScaler("cpu")
    state = scaler.state_dict()
    assert (state["scale"], state["growth_factor"], state["backoff_factor"]) == (2.0**16, 2.0, 0.5)
    assert state["growth_interval"] == 2000
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert p.tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    off = GradScaler("cpu", enabled=False)
    off.step(optimizer)
    assert p.tolist() != [0.0, 0.0]


def test_no_sync_is_entered_for_all_backwards_but_the_last():
    entered = []

    class Synced(nn.Linear):
        def no_sync(self):
            entered.append(True)
            return torch.enable_grad()

    model = Synced(4, 2)
    optimizer = GradAccumOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 3, model)
    for _ in range(3):
        optimizer.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
    assert len(entered) == 2


def test_a_pipeline_that_was_planned_for_other_steps_is_refused_at_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipeline, options = autopar.Pipeline(micro_batches=2), {"mesh": {"pp": 2}, "cluster": "cpu-2"}
    model.plan = autopar.plan(model, torch.randn(4, 4), pipeline=pipeline, accumulation_steps=3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert GradAccumOptimizer(optimizer, 3, model).accumulate_size == 3
    with pytest.raises(AutoparError, match="different number of backwards") as caught:
        GradAccumOptimizer(optimizer, 2, model)
    assert "accumulation_steps=3" in caught.value.found
