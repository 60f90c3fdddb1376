"""Master weights: the optimizer steps on higher-precision copies, from which the parameters are rounded."""

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
"""Key of the copy in the optimizer's per-parameter state, so it is saved, sharded and loaded like other state."""


class MasterWeights(OptimizerWrapper):
    """Steps on copies of the parameters, with gradients and state, in ``dtype``, as in Micikevicius et al. (2018).

    Groups, gradients, clipping and state dict names stay those of the parameters.

    Args:
        optim: the optimizer that steps, made from the model's parameters.
        dtype: the dtype of the copies.

    Raises:
        AutoparError: ``dtype`` is not wider than any parameter's.
    """

    def __init__(self, optim: Optimizer, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(optim)
        narrow = [p for p in parameters(optim) if p.dtype.itemsize < dtype.itemsize]
        if not narrow:
            raise AutoparError(
                "Master weights must have a higher precision than the parameters.",
                found=f"parameters of {sorted({str(p.dtype) for p in parameters(optim)})}, master weights of {dtype}",
                hint='store parameters in "bf16", or use the optimizer without master weights.',
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
        # torch's optimizers cast what they load to the dtype of their parameters, which are the copies here.
        with self._masters():
            self.optim.load_state_dict(state_dict)
            loaded = [(p, self.optim.state[p].pop(KEY, None)) for p in parameters(self.optim)]
            with torch.no_grad():
                for master, saved in loaded:
                    if isinstance(saved, Tensor) and saved is not master:
                        master.copy_(saved)

    @contextlib.contextmanager
    def _masters(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Make the optimizer one over the copies while the context lasts; yields each parameter with its copy."""
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
        """Return the copy of a parameter, or the parameter itself if it is precise enough."""
        if not parameter.is_floating_point() or parameter.dtype.itemsize >= self.dtype.itemsize:
            return parameter
        known = self.optim.state.get(parameter, {}).get(KEY)
        if isinstance(known, Tensor):
            return known
        master = parameter.detach().to(self.dtype)
        if is_marked(parameter):
            mark(master)
        return master
