"""Gradient accumulation by wrapping: the loop stays as it was, and every n-th iteration takes a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from autopar.errors import AutoparError
from autopar.plans import Plan
from autopar.plans.pipeline import PipelinePlan
from autopar.training.handlers import BaseGradientHandler
from autopar.training.optimizers import OptimizerWrapper, backward, no_sync


def accumulate_gradient(
    model: nn.Module,
    optimizer: Optimizer,
    dataloader: Iterable[Any],
    accumulate_size: int,
    gradient_handlers: Sequence[BaseGradientHandler] | None = None,
    lr_scheduler: Any = None,
) -> tuple[GradAccumOptimizer, GradAccumDataloader, list[GradAccumGradientHandler] | None, Any]:
    """Wrap the parts of a training loop so that ``accumulate_size`` batches make one step.

    Returns:
        optimizer, dataloader, gradient handlers and lr scheduler; each of the last two is None if none was given.

    Raises:
        AutoparError: ``accumulate_size`` is not a positive integer.
    """
    handlers = None
    if gradient_handlers is not None:
        handlers = [GradAccumGradientHandler(handler, accumulate_size) for handler in gradient_handlers]
    scheduler = None
    if lr_scheduler is not None:
        scheduler = GradAccumLrSchedulerByStep(lr_scheduler, accumulate_size)
    return (
        GradAccumOptimizer(optimizer, accumulate_size, model),
        GradAccumDataloader(dataloader, accumulate_size),
        handlers,
        scheduler,
    )


class GradAccumOptimizer(OptimizerWrapper):
    """Divides each loss by ``accumulate_size``, and steps once that many backwards have run.

    ``zero_grad`` and ``step`` do nothing in between, so that a loop may call them every time.

    Args:
        optim: the optimizer that steps.
        model: if it has a ``no_sync()``, as DistributedDataParallel does, all backwards but the last run inside it.

    Attributes:
        accumulate_step: backwards since the last step.
    """

    def __init__(self, optim: Optimizer, accumulate_size: int, model: nn.Module | None = None) -> None:
        super().__init__(optim)
        self.accumulate_size = _checked(accumulate_size)
        _check_planned(model, accumulate_size)
        self.accumulate_step = 0
        self.model = model
        self._has_backward = False

    def __repr__(self) -> str:
        return f"GradAccumOptimizer({self.optim!r}, accumulate_size={self.accumulate_size})"

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add the gradients of ``loss / accumulate_size``.

        Args:
            last: False for all but the last of the micro-batches that make up one batch.
        """
        completes = last and self.accumulate_step + 1 >= self.accumulate_size
        with contextlib.nullcontext() if completes else no_sync(self.model):
            backward(loss / self.accumulate_size, self.optim)
        self._has_backward = True
        self.accumulate_step += last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, unless some are being accumulated."""
        if self.accumulate_step == 0:
            self.optim.zero_grad(set_to_none=set_to_none)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step once enough backwards have run; before that, return None.

        Raises:
            AutoparError: no backward ran through this optimizer since the last call.
        """
        if not self._has_backward:
            raise AutoparError(
                "No backward was accumulated since the last call of step.",
                found="step() without backward(loss) of this optimizer",
                hint="call optimizer.backward(loss) instead of loss.backward(), which does not divide the loss.",
            )
        self._has_backward = False
        if not self.complete:
            return None
        self.accumulate_step = 0
        return self.optim.step(*args, **kwargs)

    @property
    def complete(self) -> bool:
        """Whether the next ``step`` changes parameters."""
        return self.accumulate_step >= self.accumulate_size

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor | None:
        """Clip the gradients once they are complete, and return their norm before it; Colossal-AI's loops call this."""
        return self.clip_grad_by_norm(max_norm) if max_norm > 0 else None

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        """Clip the gradients once they are complete; before that, return None."""
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite) if self.complete else None

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp the gradients once they are complete."""
        if self.complete:
            super().clip_grad_by_value(clip_value)


class GradAccumDataloader:
    """Yields the batches of ``dataloader`` in full cycles of ``accumulate_size``, and drops the remainder.

    A loader that is not torch's is read to its end, because it may not support being abandoned half-way.
    """

    def __init__(self, dataloader: Iterable[Any], accumulate_size: int) -> None:
        self.dataloader = dataloader
        self.accumulate_size = _checked(accumulate_size)
        self.consume_remain_data = not isinstance(dataloader, DataLoader)

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    @property
    def steps_per_epoch(self) -> int:
        size = len(self.dataloader)  # type: ignore[arg-type]
        return size - size % self.accumulate_size

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self.dataloader, "__len__"):
            yield from self._whole_cycles()
            return
        steps = self.steps_per_epoch
        batches = iter(self.dataloader)
        for step in range(steps):
            batch = next(batches)
            if step == steps - 1 and self.consume_remain_data:
                for _ in batches:
                    pass
            yield batch

    def _whole_cycles(self) -> Iterator[Any]:
        """Yield each cycle once all of its batches have arrived, for loaders whose length is not known."""
        cycle: list[Any] = []
        for batch in self.dataloader:
            cycle.append(batch)
            if len(cycle) == self.accumulate_size:
                yield from cycle
                cycle = []


class GradAccumLrSchedulerByStep(LRScheduler):
    """Steps ``lr_scheduler`` at every ``accumulate_size``-th call."""

    def __init__(self, lr_scheduler: Any, accumulate_size: int) -> None:
        self.lr_scheduler = lr_scheduler
        self.accumulate_size = _checked(accumulate_size)
        self.accumulate_step = 0

    @staticmethod
    def compute_effective_steps_per_epoch(dataloader: Any, accumulate_size: int) -> int:
        """Return the number of optimizer steps in an epoch, which is the unit of lr schedules."""
        return len(dataloader) // accumulate_size

    def __getattr__(self, name: str) -> Any:
        if name == "lr_scheduler":
            raise AttributeError(name)
        return getattr(self.lr_scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.accumulate_step += 1
        if self.accumulate_step >= self.accumulate_size:
            self.accumulate_step = 0
            self.lr_scheduler.step(*args, **kwargs)

    def get_lr(self) -> Any:
        return self.lr_scheduler.get_lr()

    def get_last_lr(self) -> Any:
        return self.lr_scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.lr_scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lr_scheduler.load_state_dict(state_dict)


class GradAccumGradientHandler:
    """Runs ``grad_handler`` at every ``accumulate_size``-th call."""

    def __init__(self, grad_handler: BaseGradientHandler, accumulate_size: int) -> None:
        if not isinstance(grad_handler, BaseGradientHandler):
            raise AutoparError(
                "The object is not a gradient handler.",
                found=repr(grad_handler),
                hint="derive it from BaseGradientHandler.",
            )
        self.grad_handler = grad_handler
        self.accumulate_size = _checked(accumulate_size)
        self.accumulate_step = 0

    def handle_gradient(self) -> None:
        self.accumulate_step += 1
        if self.accumulate_step >= self.accumulate_size:
            self.accumulate_step = 0
            self.grad_handler.handle_gradient()


def _check_planned(model: nn.Module | None, accumulate_size: int) -> None:
    """Raise if the plan's ``accumulation_steps`` do not fit: gradients are complete after its last backward only."""
    plan = getattr(model, "plan", None)
    planned = plan.options.get("accumulation_steps", 1) if isinstance(plan, Plan | PipelinePlan) else 1
    if planned > 1 and planned % accumulate_size:  # each batch may be several micro-batches
        raise AutoparError(
            "The model was planned for a different number of backwards per step.",
            found=f"accumulate_size={accumulate_size}, accumulation_steps={planned}",
            hint="set accumulation_steps to accumulate_size times the micro-batches per batch, or plan without it.",
        )


def _checked(accumulate_size: int) -> int:
    if not isinstance(accumulate_size, int) or isinstance(accumulate_size, bool) or accumulate_size < 1:
        raise AutoparError(
            "accumulate_size must be a positive integer: the number of batches that make one step.",
            found=repr(accumulate_size),
            hint="pass a positive integer.",
        )
    return accumulate_size
