"""Optimizer wrappers that change what a backward and a step do beyond the update itself."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.training.clipping import clip_grad_norm_, clip_grad_value_
from autopar.training.scaling import GradScaler


class OptimizerWrapper(Optimizer):
    """An optimizer that delegates everything to ``optim``; subclasses override parts.

    It is a ``torch.optim.Optimizer`` with the groups, state and state dict of ``optim``, so that schedulers and
    checkpoints accept it.
    """

    def __init__(self, optim: Optimizer) -> None:
        self.optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet, as when unpickling
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        # torch's schedulers patch ``step`` on the instance, which is not part of its state.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``."""
        backward(loss, self.optim)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optim.step(*args, **kwargs)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        """Clip the gradients of all parameters, and return the norm before clipping. See ``clip_grad_norm_``."""
        own = getattr(self.optim, "clip_grad_by_norm", None)
        if own is not None:
            norm: Tensor | None = own(max_norm, norm_type, error_if_nonfinite)
            return norm
        return clip_grad_norm_(parameters(self), max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp the gradients of all parameters. See ``clip_grad_value_``."""
        own = getattr(self.optim, "clip_grad_by_value", None)
        if own is not None:
            own(clip_value)
        else:
            clip_grad_value_(parameters(self), clip_value)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def unwrap(self) -> Optimizer:
        """Return the optimizer inside all wrappers."""
        return self.optim.unwrap() if isinstance(self.optim, OptimizerWrapper) else self.optim


class MixedPrecisionOptimizer(OptimizerWrapper):
    """Clips gradients before each step, and scales losses if gradients are 16-bit floats.

    Args:
        scaler: scales every loss; a step whose gradients overflowed on any rank is skipped on all. None disables
            scaling.
        max_norm: gradients are clipped to this norm before each step; 0 disables clipping.
    """

    def __init__(self, optim: Optimizer, scaler: GradScaler | None = None, max_norm: float = 0.0) -> None:
        super().__init__(optim)
        self.scaler = scaler
        self.max_norm = max_norm

    def backward(self, loss: Tensor) -> None:
        super().backward(loss if self.scaler is None else self.scaler.scale(loss))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        if self.scaler is None:
            return super().step(*args, **kwargs)
        result = self.scaler.step(self.optim, *args, **kwargs)
        self.scaler.update()
        return result

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor | None:
        self._unscale()
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        self._unscale()
        super().clip_grad_by_value(clip_value)

    def _unscale(self) -> None:
        if self.scaler is not None and not self.scaler.is_unscaled(self.optim):
            self.scaler.unscale_(self.optim)


def backward(loss: Tensor, optimizer: Any = None) -> None:
    """Run the optimizer's own backward if it has one (for scaling or accumulation), else the loss's."""
    own = getattr(optimizer, "backward", None)
    if own is not None:
        own(loss)
    else:
        loss.backward()  # type: ignore[no-untyped-call]


def no_sync(model: nn.Module | None) -> contextlib.AbstractContextManager[Any]:
    """Return ``model.no_sync()``, in which gradients need not be reduced yet, or a null context."""
    own = getattr(model, "no_sync", None)
    return own() if callable(own) else contextlib.nullcontext()


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def scaler_of(optimizer: Any) -> GradScaler | None:
    """Return the scaler of an optimizer or of one that it wraps."""
    while isinstance(optimizer, OptimizerWrapper):
        if isinstance(optimizer, MixedPrecisionOptimizer) and optimizer.scaler is not None:
            return optimizer.scaler
        optimizer = optimizer.optim
    return None
