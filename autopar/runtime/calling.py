"""This process while it runs the program of one call: what the runtime adds to a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.mesh import Mesh
from autopar.runtime.late import LateOutputs
from autopar.spmd.ranks import Exchange, ProcessRank


@dataclass(frozen=True, eq=False)
class CallingRank:
    """``rank`` in one call: before each collective begins ``ready`` is called, and what only outputs are made of is
    put off, in the backward to its first wait."""

    rank: ProcessRank
    ready: Callable[[], None]
    late: LateOutputs
    mesh: Mesh = field(init=False)
    coordinate: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", self.rank.mesh)
        object.__setattr__(self, "coordinate", self.rank.coordinate)

    @property
    def device(self) -> torch.device:
        return self.rank.device

    def launch(self, buffer: Tensor, exchange: Exchange) -> Tensor:
        self.ready()
        return self.rank.launch(buffer, exchange)

    def finish(self, received: Tensor) -> Tensor:
        if self.late.due:
            self.late.arrive()
        return self.rank.finish(received)

    def put_off(self, wait: Callable[[], Tensor]) -> Tensor:
        return self.late.put_off(wait)

    def symmetric(self, axis: int) -> str:
        self.ready()  # who asks goes on with a collective of its own
        return self.rank.symmetric(axis)
