"""Master weights: the optimizer steps on copies of higher precision, which the parameters are rounded from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import AutoparError
from autopar.runtime.accumulation import refuse_partial
from autopar.runtime.optimizers import mark
from autopar.runtime.shard_step import is_marked
from autopar.training.optimizers import OptimizerWrapper, parameters

KEY = "master"
"""Of the copy in the optimizer's state for a parameter: it is saved, cut and loaded as any other state."""


class MasterWeights(OptimizerWrapper):
    """Steps on copies of the parameters in ``dtype``, with gradients and state in it, as Micikevicius et al. (2018) do.

    Groups, gradients, clipping and the names in a state dict stay those of the parameters.

    Args:
        optim: the optimizer that steps, made of the model's parameters.
        dtype: of the copies.

    Raises:
        AutoparError: ``dtype`` is no wider than a parameter's.
    """

    def __init__(self, optim: Optimizer, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(optim)
        narrow = [p for p in parameters(optim) if p.dtype.itemsize < dtype.itemsize]
        if not narrow:
            raise AutoparError(
                "Master weights are of higher precision than the parameters.",
                found=f"parameters of {sorted({str(p.dtype) for p in parameters(optim)})}, master weights of {dtype}",
                hint='store parameters in "bf16", or use the optimizer as it is.',
            )
        self.dtype = dtype

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step on the copies, and round the parameters from them."""
        refuse_partial(self)
        with self._masters() as masters:
            for parameter, master in masters:
                gradient = parameter.grad
                master.grad = None if gradient is None else gradient.detach().to(self.dtype)
            result = self.optim.step(*args, **kwargs)
            with torch.no_grad():
                for parameter, master in masters:
                    if master.grad is not None:
                        parameter.copy_(master)
                    master.grad = None
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch's optimizers cast what they load to the dtype of the parameters, which for the time are the copies.
        with self._masters():
            self.optim.load_state_dict(state_dict)
            loaded = [(p, self.optim.state[p].pop(KEY, None)) for p in parameters(self.optim)]
            with torch.no_grad():
                for master, saved in loaded:
                    if isinstance(saved, Tensor) and saved is not master:
                        master.copy_(saved)

    @contextlib.contextmanager
    def _masters(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """While it lasts, the optimizer is one of the copies; each parameter with its copy."""
        held = [group["params"] for group in self.optim.param_groups]
        pairs = [(p, self._master(p)) for params in held for p in params]
        copies = {id(p): master for p, master in pairs}
        state = self.optim.state
        try:
            for group, params in zip(self.optim.param_groups, held, strict=True):
                group["params"] = [copies[id(p)] for p in params]
            for parameter, master in pairs:
                if parameter is not master and parameter in state:
                    state[master] = {k: v for k, v in state.pop(parameter).items() if k != KEY}
            yield pairs
        finally:
            for group, params in zip(self.optim.param_groups, held, strict=True):
                group["params"] = params
            state = self.optim.state
            for parameter, master in pairs:
                if parameter is not master:
                    state[parameter] = {**state.pop(master, {}), KEY: master}

    def _master(self, parameter: Tensor) -> Tensor:
        """The copy of a parameter; itself where that is precise enough."""
        if not parameter.is_floating_point() or parameter.dtype.itemsize >= self.dtype.itemsize:
            return parameter
        known = self.optim.state.get(parameter, {}).get(KEY)
        if isinstance(known, Tensor):
            return known
        master = parameter.detach().to(self.dtype)
        if is_marked(parameter):
            mark(master)
        return master
