"""The sums of gradients between the micro-batches of one step, on this rank."""

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
from autopar.spmd.placements import to_placements
from autopar.spmd.ranks import Rank

Accumulators = Sequence[tuple[Input, ShardingSpec, TensorMeta]]


class Place(Protocol):
    """Where a rank is."""

    @property
    def rank(self) -> Rank: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def device_mesh(self) -> DeviceMesh: ...


@dataclass
class Sums:
    """What this rank has added up since the last step.

    Args:
        steps: backwards in one step; gradients appear with the last of them.
        done: backwards since the last step.
        held: this rank's part of each sum, by parameter, with how it is cut.
    """

    steps: int = 1
    done: int = 0
    held: dict[str, tuple[Tensor, ShardingSpec, TensorMeta]] = field(default_factory=dict)

    @property
    def completing(self) -> bool:
        """Whether the next backward is the last of a step."""
        return self.done + 1 >= self.steps

    def taken(self, accumulators: Accumulators, place: Place) -> list[Tensor]:
        """The sums so far, no longer held here; zeros in the first micro-batch."""
        return [self._take(*a, place) for a in accumulators]

    def _take(self, meaning: Input, spec: ShardingSpec, meta: TensorMeta, place: Place) -> Tensor:
        if meaning.name in self.held:
            return self.held.pop(meaning.name)[0]
        shape = spec.local_shape(meta.shape, place.mesh, place.rank.coordinate)
        return torch.zeros(shape, dtype=getattr(torch, meta.dtype), device=place.rank.device)

    def add(self, accumulators: Accumulators, made: Mapping[tuple[str, str], Tensor]) -> None:
        """One more micro-batch has been added."""
        self.held |= {m.name: (made["accumulator", m.name], spec, meta) for m, spec, meta in accumulators}
        self.done += 1

    def complete(self) -> None:
        """The gradients have been delivered."""
        self.done = 0
        self.held.clear()

    def deliver(self, model: nn.Module, place: Place) -> int:
        """Give parameters the gradients of the micro-batches so far. Returns how many these were."""
        with torch.no_grad():
            for name, (local, spec, meta) in self.held.items():
                parameter = model.get_parameter(name)
                assert isinstance(parameter, DTensor)
                stride = torch.empty(meta.shape, device="meta").stride()
                total = DTensor.from_local(
                    local, place.device_mesh, to_placements(spec, place.mesh, meta.shape), run_check=False,
                    shape=torch.Size(meta.shape), stride=stride,
                )  # fmt: skip
                gradient = total.redistribute(place.device_mesh, parameter.placements).to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        done = self.done
        self.complete()
        return done


_PARALLEL: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_steps(model: nn.Module) -> None:
    """An optimizer must not step ``model`` in the middle of an accumulation: what is summed up would count later."""
    if not _PARALLEL:
        register_optimizer_step_pre_hook(refuse_partial)
    _PARALLEL.add(model)


def refuse_partial(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_PARALLEL):
        sums: Sums = model._autopar_sums  # type: ignore[assignment]
        if sums.done and any(id(p) in stepped for p in model.parameters()):
            raise AutoparError(
                "The optimizer steps before the gradients of all micro-batches are there.",
                found=f"{sums.done} backwards since the last step of a model planned with "
                f"accumulation_steps={sums.steps}",
                hint="step after every accumulation_steps-th backward; after an incomplete cycle, as at the end of an "
                "epoch, call model.deliver_gradients() first.",
            )
