"""The ranks that run a local program: a process of a job, or one of several simulated ranks in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from autopar import _torch
from autopar.errors import MeshError
from autopar.mesh import Mesh
from autopar.sharding.spec import Reduction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ExchangeKind = Literal["all_gather", "all_to_all", "all_reduce", "reduce_scatter", "permute"]


@dataclass(frozen=True)
class Exchange:
    """One collective on contiguous buffers whose dim 0 runs over the ranks of a group.

    Args:
        kind: all_gather concatenates along dim 0, reduce_scatter and all_to_all chunk it evenly.
        axis: the mesh axis whose groups exchange; by default, and for a permute, the whole mesh exchanges.
        reduction: sum, max or min.
        sources: for a permute, the rank of the mesh whose buffer each rank receives.
        shape: for a permute, and what else the whole mesh exchanges, the shape of what this rank receives.
        sent, received: for an all_to_all of unequal parts, the length of the part for each rank, and from each.
        in_place: for an all_reduce, whether the result may overwrite the sent buffer.
    """

    kind: ExchangeKind
    axis: int = -1
    reduction: Reduction = "sum"
    sources: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    in_place: bool = False
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Rank(Protocol):
    """What a local program knows about the rank that runs it."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def coordinate(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def micro_batch(self) -> int:
        """The number of the micro-batch that it runs, from 0."""
        ...

    def launch(self, buffer: Tensor, exchange: Exchange) -> Tensor:
        """Start a collective on ``buffer``. ``finish`` returns what it receives."""
        ...

    def finish(self, received: Tensor) -> Tensor:
        """Wait for what ``launch`` started, and return it."""
        ...

    def symmetric(self, axis: int) -> str:
        """Return the name of the group along ``axis`` if its ranks have access to each other's memory, else ""."""
        ...


@dataclass(frozen=True)
class LocalRank:
    """A simulated rank. Its launches return what it would send; ``spmd.simulate`` exchanges it."""

    mesh: Mesh
    coordinate: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    micro_batch: int = 0

    def launch(self, buffer: Tensor, exchange: Exchange) -> Tensor:
        return buffer

    def finish(self, received: Tensor) -> Tensor:
        return received

    def symmetric(self, axis: int) -> str:
        return ""


def local_ranks(mesh: Mesh) -> tuple[LocalRank, ...]:
    """Return one simulated rank for each position of ``mesh``, in order."""
    return tuple(LocalRank(mesh, mesh.coordinate(r)) for r in range(mesh.size))


@dataclass(frozen=True, eq=False)
class ProcessRank:
    """This process, a member of a torch ``DeviceMesh``.

    Every process of the job must create it at the same time, since it may create process groups.

    Raises:
        MeshError: if this process is not in the mesh, or ranks do not increase along its axes.
    """

    device_mesh: DeviceMesh
    micro_batch: int = 0
    mesh: Mesh = field(init=False)
    coordinate: tuple[int, ...] = field(init=False)
    groups: tuple[str, ...] = field(init=False)
    whole: str = field(init=False)

    def __post_init__(self) -> None:
        device_mesh = self.device_mesh
        ranks = device_mesh.mesh
        names = device_mesh.mesh_dim_names
        coordinate = device_mesh.get_coordinate()
        if coordinate is None or ranks.flatten().tolist() != sorted(ranks.flatten().tolist()):
            raise MeshError(
                "A DeviceMesh must contain this process, and its ranks must increase in row-major order.",
                found=f"rank {torch.distributed.get_rank()}, mesh {ranks.tolist()}",
                hint="create it with torch.distributed.device_mesh.init_device_mesh.",
            )
        groups = tuple(_torch.group_name(_torch.in_order(device_mesh.get_group(a))) for a in range(ranks.ndim))
        object.__setattr__(self, "mesh", Mesh(tuple(ranks.shape), tuple(names) if names else ()))
        object.__setattr__(self, "coordinate", tuple(coordinate))
        object.__setattr__(self, "groups", groups)
        whole = _torch.in_order(_torch.whole_group(device_mesh))
        object.__setattr__(self, "whole", _torch.group_name(whole))

    @property
    def device(self) -> torch.device:
        kind = self.device_mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def launch(self, buffer: Tensor, exchange: Exchange) -> Tensor:
        if exchange.kind == "permute":
            here = self.mesh.rank(self.coordinate)
            return _torch.permute(buffer, exchange.sources, here, exchange.shape, self.whole)
        if exchange.axis < 0:
            size, group = self.mesh.size, self.whole
        else:
            size, group = self.mesh.shape[exchange.axis], self.groups[exchange.axis]
        if exchange.kind == "all_gather":
            return _torch.all_gather(buffer, size, group)
        if exchange.kind == "all_to_all":
            parts = (exchange.sent, exchange.received) if exchange.sent else None
            return _torch.all_to_all(buffer, size, group, parts)
        if exchange.kind == "all_reduce":
            return _torch.all_reduce(buffer, exchange.reduction, group, in_place=exchange.in_place)
        return _torch.reduce_scatter(buffer, exchange.reduction, size, group)

    def finish(self, received: Tensor) -> Tensor:
        return _torch.wait(received)

    def symmetric(self, axis: int) -> str:
        if self.device_mesh.device_type != "cuda":
            return ""
        return _torch.symmetric_group(self.device_mesh.get_group(axis))


@dataclass(frozen=True, eq=False)
class StartingRank:
    """``rank`` at the start of a program: calls ``ready`` before each collective."""

    rank: ProcessRank
    ready: Callable[[], None]
    mesh: Mesh = field(init=False)
    coordinate: tuple[int, ...] = field(init=False)
    micro_batch: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", self.rank.mesh)
        object.__setattr__(self, "coordinate", self.rank.coordinate)
        object.__setattr__(self, "micro_batch", self.rank.micro_batch)

    @property
    def device(self) -> torch.device:
        return self.rank.device

    def launch(self, buffer: Tensor, exchange: Exchange) -> Tensor:
        self.ready()
        return self.rank.launch(buffer, exchange)

    def finish(self, received: Tensor) -> Tensor:
        return self.rank.finish(received)

    def symmetric(self, axis: int) -> str:
        self.ready()  # the caller goes on with a collective of its own
        return self.rank.symmetric(axis)


AnyRank = TypeVar("AnyRank", LocalRank, ProcessRank, StartingRank)


def at_micro_batch(rank: AnyRank, number: int) -> AnyRank:
    """Return ``rank`` as it runs micro-batch ``number``. Its groups are the same."""
    made = copy.copy(rank)
    object.__setattr__(made, "micro_batch", number)
    return made
