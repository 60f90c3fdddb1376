"""Counts the bytes of live storages at the dispatcher, through which every allocation of an eager program passes.

A storage counts once, from the op that creates it until the last tensor on it is gone; views are free. torch's
MemTracker counts the same way but does not look inside custom ops, whose temporaries are as real as any: here autopar's
ops are run through their implementations.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from autopar import _torch
from autopar.ops.registration import IMPLEMENTATIONS
from autopar.runtime.host_state import is_kept_on_host
from autopar.spmd import allocating_on_host


class MemoryMeter(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors created while it is active, and of earlier ones that ``hold`` adds.

    Attributes:
        held: bytes of live storages.
        peak: maximum of ``held`` since the last ``reset``.
        inside: whether temporaries inside autopar's own ops count; torch's MemTracker leaves them out.
    """

    def __init__(self, *, inside: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        self.peak = 0
        self.inside = inside
        self._sizes: dict[int, int] = {}
        self._fake_mode = _torch.active_fake_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor runs first; its ops on shards come back here
        inner = IMPLEMENTATIONS.get(func._schema.name) if self.inside else None
        if inner is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self:
                out = inner(*args, **(kwargs or {}))
        # DTensor infers shapes from fake tensors, which take no memory; host memory is not the device's.
        if _torch.active_fake_mode() is self._fake_mode and not allocating_on_host():
            self.hold(tree_leaves(out))
        return out

    def hold(self, values: Iterable[Any]) -> None:
        """Count the storages of ``values`` (of DTensors, their shards) that are not counted yet."""
        for value in values:
            tensor = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            self._sizes[key] = storage.nbytes()
            self.held += self._sizes[key]
            weakref.finalize(storage, self._let_go, key)
        self.peak = max(self.peak, self.held)

    def reset(self) -> None:
        """Reset the peak to the present value."""
        self.peak = self.held

    def _let_go(self, key: int) -> None:
        self.held -= self._sizes.pop(key)


def held_by(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Return the tensors that live on the device between steps: parameters, gradients, buffers and optimizer state."""
    parameters = list(module.parameters())
    found: list[Any] = [*parameters, *module.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    if optimizer is not None:
        found += tree_leaves([dict(s) for s in optimizer.state.values()])
    return [t for t in found if isinstance(t, Tensor) and not is_kept_on_host(t)]
