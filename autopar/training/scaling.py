"""Loss scaling for fp16 whose decision to skip a step is one of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for gradients in any mixture of placements.

    DTensor reduces what a rank found over the axes that cut the first gradient of the list alone (autopar mends that
    for parallel models), and plain gradients stay a rank's own. Here all ranks have one finding. Fused optimizers,
    whose kernels take no plain tensor beside DTensors, work too.

    Args:
        device: type of the gradients' device; None is cuda where there is one, else cpu.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as torch's.
        process_group: of the ranks that step together; None is all.
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
        """Divide the gradients by the scale, and learn whether those of any rank are not finite."""
        super().unscale_(optimizer)
        found = list(self._state(optimizer)["found_inf_per_device"].values()) if self.is_enabled() else []
        if not found or not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return
        most = torch.stack([f.to(found[0].device) for f in found]).amax().reshape(1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.process_group)
        for each in found:
            each.fill_(most.item())

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step unless a gradient of any rank is not finite.

        Optimizers that would look at the scale themselves, as fused ones do, are told nothing: their gradients are
        unscaled already, and their kernels take no plain tensor beside DTensors.
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
