"""Schedules: a batch goes through an engine, whole or in micro-batches, with the same gradients."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.training import BaseGradientHandler, BaseSchedule, Engine, GradAccumOptimizer, NonPipelineSchedule


def made(**options) -> Engine:
    model = nn.Linear(4, 3).double()
    return Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, **options)


def one_batch(rows: int = 6):
    return iter([(torch.randn(rows, 4).double(), torch.randn(rows, 3).double())])


def test_a_step_returns_output_label_and_loss_and_leaves_gradients():
    engine = made()
    data, label = next(one_batch())
    output, returned, loss = NonPipelineSchedule().forward_backward_step(engine, iter([(data, label)]))
    assert torch.equal(returned, label)
    assert torch.equal(output, engine.model(data))
    assert torch.equal(loss, nn.functional.mse_loss(output, label))
    expected = torch.autograd.grad(nn.functional.mse_loss(engine.model(data), label), list(engine.model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(engine.model.parameters(), expected, strict=True))


@pytest.mark.parametrize(("loss", "outputs"), [*itertools.product([True, False], repeat=2)])
def test_what_is_not_asked_for_is_none(loss: bool, outputs: bool):
    engine = made()
    output, label, value = NonPipelineSchedule().forward_backward_step(
        engine, one_batch(), return_loss=loss, return_output_label=outputs
    )
    assert (output is None, label is None, value is None) == (not outputs, not (loss and outputs), not loss)
    assert all(p.grad is not None for p in engine.model.parameters())


def test_forward_only_makes_no_gradients():
    engine = made()
    output, _, loss = NonPipelineSchedule().forward_backward_step(engine, one_batch(), forward_only=True)
    assert not output.requires_grad
    assert loss.ndim == 0
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("pieces", [2, 3, 4, 9])  # 4 makes uneven pieces of 6 rows, 9 is more than there are
def test_micro_batches_give_the_gradient_of_the_whole_batch(pieces: int):
    whole = made()
    cut = Engine(copy.deepcopy(whole.model), None, whole.criterion)
    data, label = next(one_batch())
    expected = NonPipelineSchedule().forward_backward_step(whole, iter([(data, label)]))
    found = NonPipelineSchedule(num_microbatches=pieces).forward_backward_step(cut, iter([(data, label)]))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    for p, q in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_micro_batches_are_one_backward_of_an_accumulating_optimizer():
    engine = made()
    optimizer = engine.optimizer = GradAccumOptimizer(engine.optimizer, 2, engine.model)
    schedule = NonPipelineSchedule(num_microbatches=3)
    before = copy.deepcopy(engine.model.state_dict())
    for complete in (False, True):
        engine.zero_grad()
        schedule.forward_backward_step(engine, one_batch())
        assert optimizer.complete is complete
        engine.step()
        assert torch.equal(engine.model.weight, before["weight"]) is not complete


def test_a_dict_goes_in_by_keyword_and_the_model_may_have_the_loss():
    class Own(nn.Linear):
        def forward(self, x, labels):
            return nn.functional.mse_loss(super().forward(x), labels), "more"

    engine = Engine(Own(4, 3))
    batch = {"x": torch.randn(5, 4), "labels": torch.randn(5, 3)}
    schedule = NonPipelineSchedule()
    output, label, loss = schedule.forward_backward_step(engine, iter([batch]))
    assert label is batch["labels"]
    assert torch.equal(loss, output[0])
    assert schedule.batch_size == 5


def test_the_process_function_takes_a_batch_apart():
    schedule = NonPipelineSchedule(lambda batch: (batch["a"], batch["b"]))
    data, label = schedule.load_batch(iter([{"a": torch.ones(7, 4), "b": torch.zeros(7, 3)}]), to_gpu=False)
    assert data.shape == (7, 4)
    assert label.shape == (7, 3)
    assert schedule.batch_size == 7


def test_handlers_run_and_gradients_are_clipped_before_the_step():
    class Ones(BaseGradientHandler):
        def handle_gradient(self):
            for p in self._model.parameters():
                p.grad.fill_(1.0)

    engine = made(clip_grad_norm=0.5)
    engine.gradient_handlers = [Ones(engine.model, engine.optimizer)]
    before = engine.model.weight.detach().clone()
    NonPipelineSchedule().forward_backward_step(engine, one_batch())
    engine.step()
    expected = before - 0.1 * 0.5 / 15**0.5  # 15 gradients of one
    torch.testing.assert_close(engine.model.weight.detach(), expected, rtol=1e-6, atol=1e-9)


def test_modes_and_errors():
    engine = made()
    assert not engine.eval().training
    assert engine.train().training
    with pytest.raises(AutoparError, match="no data"):
        NonPipelineSchedule().load_batch(None)
    with pytest.raises(AutoparError, match="neither a pair"):
        NonPipelineSchedule().load_batch(iter([torch.ones(3)]))
    with pytest.raises(AutoparError, match="returns no loss"):
        NonPipelineSchedule().forward_backward_step(Engine(nn.Linear(4, 3)), iter([(torch.ones(2, 4), None)]))
    with pytest.raises(AutoparError, match="needs an optimizer"):
        Engine(nn.Linear(1, 1)).step()
    with pytest.raises(AutoparError, match="at least 1"):
        NonPipelineSchedule(num_microbatches=0)
    with pytest.raises(StopIteration):
        NonPipelineSchedule().load_batch(iter([]))
    with pytest.raises(TypeError, match="abstract"):
        BaseSchedule()
