"""What the user decides, as the planner takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal

from autopar.errors import AutoparError
from autopar.pipelines.request import Pipeline
from autopar.planner.ranges import Ranges

EXPERT_ROOM = 1.5
"""Rows for which a rank with some of the experts has room, over the mean. Where routing is learned to be balanced, the
fullest rank gets little more than the mean; what is beyond the room is computed by the ranks of the tokens."""


@dataclass(frozen=True)
class Options:
    """Planning options; sizes in bytes, times in seconds.

    Args:
        memory_budget_bytes: for everything on one device; None is the device's memory.
        optimizer: name of the optimizer or bytes of state per parameter element.
        batch: ``"global"``: every rank has the whole inputs; ``"local"``: its slice of dim 0.
        outputs: ``"whole"``, ``"dtensor"`` or ``"auto"``.
        constraints: specs by glob over parameters, buffers, ``input:`` and ``output:`` names, modules and nodes.
        aliases: other names of tied parameters, to the name that the graph uses.
        time_limit_s: for the solver.
        solver: ``"auto"``, ``"cbc"``, ``"highs"`` or another that PuLP knows.
        gap: relative gap at which the solver may stop.
        search: ``"joint"``; ``"two-stage"``: shards without regard to the budget, then decides what to keep, recompute
            or offload; ``"baseline:NAME"``: that known way to train in parallel.
        training_steps: optimizer steps of the run that the plan is for; the search ends when what it may still gain
            over them is less than the seconds that it has taken.
        backend: ``"eager"`` runs op by op; ``"inductor"`` fuses pointwise ops and reductions, which then cost what
            they move at the borders of their kernels.
        mixed_precision: the text of a ``precision.MixedPrecision``.
        ranges: of the sizes of inputs that one plan serves.
        compare: schedule, time and measure every baseline, also those that cannot be better than the plan.
        async_tensor_parallel: ``"auto"``: products may be decomposed beside their gather or scatter where that is
            predicted to be shorter, over NVLink; True: over any link, by a ring; False: nowhere; ``"always"``: wherever
            they can be.
        device: whose kernels decide what an op holds while it runs, as ``mesh.Device.kernels`` says.
        expert_room: where ranks have some of the experts each, rows for which one has room, over the mean; None where
            tokens stay with their ranks. ``"auto"``: ``EXPERT_ROOM``, where a step can be run again without.
        accumulation_steps: micro-batches whose gradients add up before the optimizer steps.
        accumulators: specs in which they do, by parameter, where an earlier plan has decided them.
        in_flight: micro-batches whose activations are held at once, between their forward and their backward, as by a
            stage of a pipeline.
        seam_s: seconds for each byte that a rank sends to the stage after or before its own.
        held_batches: times the inputs that the caller holds: as many micro-batches are cut out of them.
        pipeline: what the user asks of a pipeline; None asks for none.
    """

    memory_budget_bytes: int | None = None
    optimizer: str | float = "adamw"
    batch: Literal["global", "local"] = "global"
    outputs: Literal["auto", "whole", "dtensor"] = "auto"
    constraints: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    time_limit_s: float = 60.0
    solver: str = "auto"
    gap: float = 1e-3
    search: str = "joint"
    training_steps: float = math.inf
    backend: str = "eager"
    compare: bool = False
    device: str = "cuda"
    mixed_precision: str | None = None
    ranges: Ranges | None = None
    async_tensor_parallel: bool | Literal["auto", "always"] = "auto"
    expert_room: float | Literal["auto"] | None = "auto"
    accumulation_steps: int = 1
    accumulators: Mapping[str, str] = field(default_factory=dict)
    in_flight: int = 1
    seam_s: float = 0.0
    held_batches: int = 1
    pipeline: Pipeline | None = None

    def dtype_of(self, place: Literal["reduce", "master"]) -> str | None:
        """In which gradients are reduced, or the weights are on which the optimizer steps; None where it is theirs."""
        parts = (self.mixed_precision or "").split(",")
        return dict(part.split("=") for part in parts if "=" in part).get(place)

    def __post_init__(self) -> None:
        steps = self.accumulation_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise AutoparError(
                "accumulation_steps is the number of backwards that make one step of the optimizer.",
                found=repr(steps),
                hint="give a positive integer.",
            )
        if not _number(self.time_limit_s) > 0:
            raise AutoparError(
                "time_limit is the seconds that the search may take.",
                found=repr(self.time_limit_s),
                hint="give a positive number.",
            )
        if not 0 <= _number(self.gap) < 1:
            raise AutoparError(
                "gap is the share by which a plan may cost more than the bound.",
                found=repr(self.gap),
                hint="give a number from 0 to below 1, such as 1e-3.",
            )
        if self.expert_room not in ("auto", None) and not _number(self.expert_room) >= 1:
            raise AutoparError(
                "expert_room is the number of rows for which a rank has room, over the mean.",
                found=repr(self.expert_room),
                hint="give a number from 1 on, such as 1.5, None or 'auto'.",
            )
        if not _number(self.training_steps) > 0:
            raise AutoparError(
                "training_steps is the number of optimizer steps that the plan is for.",
                found=repr(self.training_steps),
                hint="give a positive number; math.inf lets the search go on until its limit or its gap.",
            )
        _check("backend", self.backend, "eager", "inductor")
        _check("device", self.device, "cpu", "cuda", "cuda without flash")
        _check("async_tensor_parallel", self.async_tensor_parallel, "auto", True, False, "always")
        _check("batch", self.batch, "global", "local")
        _check("outputs", self.outputs, "auto", "whole", "dtensor")

    @property
    def room(self) -> float | None:
        """Rows for which a rank with some of the experts has room, over the mean, where tokens may go there."""
        return EXPERT_ROOM if self.expert_room == "auto" else self.expert_room

    @property
    def decomposed(self) -> str:
        """Which products ``planner.decomposition`` takes apart."""
        return {"auto": "near", True: "gains", False: "never"}.get(self.async_tensor_parallel, "always")


def _number(value: object) -> float:
    """NaN, which no comparison holds for, of what is no number."""
    return float(value) if isinstance(value, Real) else math.nan


def _check(name: str, value: object, *allowed: object) -> None:
    if value not in allowed:
        known = ", ".join(map(str, allowed))
        raise AutoparError(f"There is no {name}={value!r}.", found=repr(value), hint=f"write one of {known}.")
