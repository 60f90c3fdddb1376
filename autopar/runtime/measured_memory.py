"""Measures the peak memory of one real step on the CPU, which does not track it by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopar.runtime.meter import MemoryMeter, held_by


@dataclass
class MemoryProbe:
    """Counts bytes in the forward, the backward and the optimizer's step, for one step on request.

    Args:
        wanted: whether the next step is to be counted.
        measured: peak bytes of the last step that was counted.
    """

    wanted: bool = False
    measured: int | None = None
    meter: MemoryMeter | None = None
    hooks: tuple[Any, ...] = ()

    def begin(self, model: nn.Module, operands: Iterable[Any]) -> None:
        """Start counting a step, beginning with the tensors that live now."""
        self._end()
        self.wanted = False
        self.meter = MemoryMeter()
        self.meter.hold([*held_by(model), *operands])
        parameters = {id(p) for p in model.parameters()}

        def of_model(optimizer: Optimizer) -> bool:
            return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if of_model(optimizer) and self.meter is not None:
                state = [t for t in held_by(model, optimizer) if isinstance(t, torch.Tensor)]
                held, peak = self.meter.held, self.meter.peak
                self.meter.hold(state)
                self.meter.peak = max(peak + self.meter.held - held, self.meter.held)  # the state existed all along
                self.meter.__enter__()  # type: ignore[no-untyped-call]

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if of_model(optimizer) and self.meter is not None:
                self.meter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self.measured = self.meter.peak
                self._end()

        self.hooks = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count allocations in the body, which is a part of the step."""
        if self.meter is None:
            yield
            return
        with self.meter:
            yield

    @property
    def is_counting(self) -> bool:
        return self.meter is not None

    def _end(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.meter, self.hooks = None, ()
