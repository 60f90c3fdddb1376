"""Loss scaling for fp16 in which all ranks decide together whether to skip a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for gradients in any mixture of placements.

    DTensor reduces a rank's finding only over the axes that cut the first gradient of the list (autopar corrects that
    for parallel models), and findings about plain gradients stay local. Here all ranks share one finding. Fused
    optimizers, whose kernels do not accept plain tensors beside DTensors, work too.

    Args:
        device: device type of the gradients; None means cuda if available, else cpu.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch's.
        process_group: the ranks that step together; None means all.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and find out whether those of any rank are not finite."""
        super().unscale_(optimizer)
        if not self.is_enabled() or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return
        known = self._state(optimizer)["found_inf_per_device"]
        if not known:  # a rank whose stage of a pipeline is frozen has no gradients, and steps with the others
            assert self._scale is not None
            known[self._scale.device] = torch.zeros(1, device=self._scale.device)
        found = list(known.values())
        most = torch.stack([f.to(found[0].device) for f in found]).amax().reshape(1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.process_group)
        for each in found:
            each.fill_(most.item())

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step unless a gradient of any rank is not finite.

        The scale is not passed to optimizers that would apply it themselves, such as fused ones: the gradients are
        already unscaled, and their kernels do not accept plain tensors beside DTensors.
        """
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        state = self._state(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        overflowed = any(bool(found.item()) for found in state["found_inf_per_device"].values())
        state["stage"] = OptState.STEPPED
        return None if overflowed else optimizer.step(*args, **kwargs)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether ``unscale_`` ran for this optimizer since the last ``update``."""
        return self._state(optimizer)["stage"] is OptState.UNSCALED

    def _state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        return state
