"""``Engine``: holds model, optimizer and criterion together for schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.training.accumulation import GradAccumOptimizer
from autopar.training.clipping import clip_grad_norm_
from autopar.training.optimizers import OptimizerWrapper, backward, no_sync


class Engine:
    """Runs the parts of a training step.

    Args:
        model: any module, parallel or not.
        optimizer: needed only for stepping.
        criterion: called as ``criterion(output, label)``; None if the model returns its loss.
        gradient_handlers: their ``handle_gradient()`` run in order before the step.
        clip_grad_norm: gradients are clipped to this norm before the step; 0 disables clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Tensor] | None = None,
        gradient_handlers: Sequence[Any] | None = None,
        clip_grad_norm: float = 0.0,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion
        self.gradient_handlers = list(gradient_handlers or ())
        self.clip_grad_norm = clip_grad_norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @property
    def training(self) -> bool:
        return self.model.training

    def train(self, mode: bool = True) -> Engine:
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(mode=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._needs_optimizer("zero_grad").zero_grad(set_to_none=set_to_none)

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Add the gradients of ``loss``.

        Args:
            last: False for all but the last micro-batch of a batch.
        """
        if isinstance(self.optimizer, GradAccumOptimizer):
            self.optimizer.backward(loss, last=last)
            return
        with contextlib.nullcontext() if last else no_sync(self.model):
            backward(loss, self.optimizer)

    def step(self) -> Any:
        """Run the gradient handlers, clip, and step."""
        optimizer = self._needs_optimizer("step")
        for handler in self.gradient_handlers:
            handler.handle_gradient()
        if self.clip_grad_norm > 0:
            if isinstance(optimizer, OptimizerWrapper):  # knows when gradients are complete, and unscales
                optimizer.clip_grad_by_norm(self.clip_grad_norm)
            else:
                clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        return optimizer.step()

    def _needs_optimizer(self, what: str) -> Any:
        if self.optimizer is None:
            raise AutoparError(
                f"Engine.{what} needs an optimizer.",
                found="an Engine without one",
                hint="pass Engine(model, optimizer).",
            )
        return self.optimizer
