"""Gradient handlers, registered by name: they run between the last backward and the optimizer's step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError


class BaseGradientHandler(ABC):
    """Changes a model's gradients before each optimizer step.

    Args:
        model: the model whose gradients it handles.
        optimizer: the optimizer that steps afterwards.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Handle the gradients; called once per step, on every rank."""


Handler = TypeVar("Handler", bound=type[BaseGradientHandler])
GRADIENT_HANDLERS: dict[str, type[BaseGradientHandler]] = {}
"""All registered handlers by class name."""


def register_gradient_handler(kind: Handler) -> Handler:
    """Register a handler under its class name; use it as a decorator.

    Raises:
        AutoparError: the class is not a handler, or another handler of this name is registered.
    """
    if not (isinstance(kind, type) and issubclass(kind, BaseGradientHandler)):
        raise AutoparError(
            "The object is not a gradient handler.", found=repr(kind), hint="derive the class from BaseGradientHandler."
        )
    if kind.__name__ in GRADIENT_HANDLERS:
        raise AutoparError(
            f"A gradient handler named {kind.__name__} is already registered.",
            found=repr(GRADIENT_HANDLERS[kind.__name__]),
            hint="give the class another name.",
        )
    GRADIENT_HANDLERS[kind.__name__] = kind
    return kind


def make_gradient_handlers(names: Iterable[str], model: nn.Module, optimizer: Any) -> list[BaseGradientHandler]:
    """Create the named handlers for ``model``, in order.

    Raises:
        AutoparError: a name is not registered.
    """
    made = []
    for name in names:
        if name not in GRADIENT_HANDLERS:
            raise AutoparError(
                f"No gradient handler is named {name}.",
                found=", ".join(sorted(GRADIENT_HANDLERS)),
                hint="register it with @register_gradient_handler.",
            )
        made.append(GRADIENT_HANDLERS[name](model, optimizer))
    return made


@register_gradient_handler
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages plain gradients over all ranks, for modules that autopar did not make; leaves DTensors alone."""

    def handle_gradient(self) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for parameter in self._model.parameters():
            gradient = parameter.grad
            if gradient is not None and not isinstance(gradient, DTensor):
                dist.all_reduce(gradient)
                gradient.div_(dist.get_world_size())
