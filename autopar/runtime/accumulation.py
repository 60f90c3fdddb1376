"""The accumulators that hold this rank's part of gradient sums between the micro-batches of a step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError
from autopar.ir import Input, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec
from autopar.spmd.lowered import Key, key_of
from autopar.spmd.placements import to_placements
from autopar.spmd.ranks import Rank

Accumulators = Sequence[tuple[Input, ShardingSpec, TensorMeta]]


class Place(Protocol):
    """What accumulation needs to know of a rank: its coordinate, the mesh and its DeviceMesh."""

    @property
    def rank(self) -> Rank: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def device_mesh(self) -> DeviceMesh: ...


@dataclass
class Sums:
    """The sums that this rank has accumulated since the last step.

    Args:
        steps: backwards per step; gradients appear with the last of them.
        done: backwards since the last step.
        held: this rank's part of each sum, with the global shape.
    """

    steps: int = 1
    done: int = 0
    held: dict[Key, tuple[Tensor, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def completing(self) -> bool:
        """Whether the next backward is the last one of a step."""
        return self.done + 1 >= self.steps

    def taken(self, accumulators: Accumulators, place: Place) -> list[Tensor]:
        """Remove and return the sums so far, zeros where a program is the first to add to one."""
        return [self._take(*a, place) for a in accumulators]

    def _take(self, meaning: Input, spec: ShardingSpec, meta: TensorMeta, place: Place) -> Tensor:
        held = self.held.pop(key_of(meaning, spec, meta), None)
        if held is not None:
            return held[0]
        shape = spec.local_shape(meta.shape, place.mesh, place.rank.coordinate)
        return torch.zeros(shape, dtype=getattr(torch, meta.dtype), device=place.rank.device)

    def add(self, accumulators: Accumulators, made: Mapping[tuple[str, str], Tensor]) -> None:
        """Store the sums that include one more micro-batch."""
        self.held |= {key_of(*a): (made["accumulator", a[0].name], a[2].shape) for a in accumulators}
        self.done += 1

    def deliver(self, model: nn.Module, place: Place) -> int:
        """Add the accumulated sums to the parameters' gradients, and return the number of micro-batches in them.

        In a step's last micro-batch these are the sums that its program did not take.
        """
        for (name, spec, _), (local, shape) in self.held.items():
            parameter = model.get_parameter(name)
            assert isinstance(parameter, DTensor)
            add_to_gradient(parameter, summed(local, spec, shape, parameter, place))
        done, self.done = self.done, 0
        self.held.clear()
        return done


def summed(local: Tensor, spec: ShardingSpec, shape: tuple[int, ...], parameter: DTensor, place: Place) -> Tensor:
    """Return the gradient whose summands the ranks hold as ``local``."""
    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        total = DTensor.from_local(
            local,
            place.device_mesh,
            to_placements(spec, place.mesh, shape),
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        return total.redistribute(place.device_mesh, parameter.placements).to(parameter.dtype)


def add_to_gradient(parameter: DTensor, gradient: Tensor) -> None:
    """Add a gradient as a backward does, so that hooks see it; set it directly if the parameter is frozen by now."""
    if parameter.requires_grad:
        parameter.backward(gradient)  # type: ignore[no-untyped-call]
    else:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


_PARALLEL: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_steps(model: nn.Module) -> None:
    """Make optimizers refuse to step ``model`` amid an accumulation, whose sums would count in a later step."""
    if not _PARALLEL:
        register_optimizer_step_pre_hook(refuse_partial)
    _PARALLEL.add(model)


def refuse_partial(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_PARALLEL):
        sums: Sums = model._autopar_sums  # type: ignore[assignment]
        if sums.done and any(id(p) in stepped for p in model.parameters()):
            raise AutoparError(
                "The optimizer steps before the gradients of all micro-batches are complete.",
                found=f"{sums.done} backwards since the last step of a model planned with "
                f"accumulation_steps={sums.steps}",
                hint="step after every accumulation_steps-th backward; after an incomplete cycle, as at the end of an "
                "epoch, call model.deliver_gradients() first.",
            )
