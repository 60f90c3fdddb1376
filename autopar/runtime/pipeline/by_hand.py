"""A training step of a pipeline whose forwards and backwards the caller runs, and whose messages the caller sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar import _torch
from autopar.errors import AutoparError
from autopar.pipelines.actions import Action
from autopar.runtime.accumulation import add_to_gradient
from autopar.runtime.execution import uncast
from autopar.runtime.pipeline.failures import stopping_all_ranks
from autopar.runtime.pipeline.running import PipelineRun, begun
from autopar.runtime.requests import agreed_request
from autopar.runtime.tables import tables
from autopar.runtime.variants import ParallelBase


class StepByHand:
    """One step on a rank that holds one stage. All ranks must make it, and run everything that follows, together.

    Args:
        model: a module that trains as a pipeline.
        args, kwargs: the whole batch, as the model takes it.
    """

    def __init__(self, model: ParallelBase, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        stored = tables(model)
        request, self.settle = agreed_request(model, args, kwargs, stored)
        if request.variant is None:
            self.settle()  # otherwise at the end: a later stage waits for this one before it begins
        self.run: PipelineRun = begun(model, request, stored)
        if len(self.run.program.stages) != 1:
            raise AutoparError(
                "A step by hand needs one stage on each rank.",
                found=f"{len(self.run.program.stages)} stages on this rank",
                hint="plan with autopar.Pipeline(chunks=1), or call forward_backward_step.",
            )
        (self.stage,) = self.run.program.stages.values()
        self.forwards = self.backwards = 0
        with torch.no_grad(), uncast(self.run):  # type: ignore[arg-type]
            self.run.prepare()

    @property
    def micro_batches(self) -> int:
        return self.run.program.schedule.micro_batches

    def forward(self, received: Sequence[Tensor]) -> list[Tensor]:
        """Run the next micro-batch forward on this rank's shards of what the stage receives; return those to send."""
        self._check("forward", self.forwards, self.micro_batches, received, self.stage.receives)
        self.forwards += 1
        made = self._act(Action("F", self.stage.number, self.forwards - 1), received)
        if self.forwards == self.micro_batches:
            self.run.store_buffers()
        return made

    def outputs(self) -> dict[str, Tensor]:
        """Return this rank's shards of the model's outputs of the micro-batch that ran forward last, by name."""
        return {name: made[self.forwards - 1] for name, made in self.run.made.items() if self.forwards - 1 in made}

    def backward(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Run the next micro-batch backward, from the gradients of what it sent; return those of what it received.

        After the last micro-batch of a step parameters have their gradients.
        """
        self._check("backward", self.backwards, self.forwards, tangents, self.stage.takes)
        self.backwards += 1
        self.run.loop.delivers = self.run.sums.completing
        made = self._act(Action("B", self.stage.number, self.backwards - 1), tangents)
        if self.backwards == self.micro_batches:
            self._hand_out()
        return made

    def _hand_out(self) -> None:
        run = self.run
        with torch.no_grad():
            gradients = run.handed_out(1.0)
        for name, local in gradients.items():
            parameter = run.stored.tensor(name)
            add_to_gradient(parameter, _torch.dtensor_like(local, parameter))
        run.let_go()
        self.settle()

    def _act(self, action: Action, taken: Sequence[Tensor]) -> list[Tensor]:
        run = self.run
        with stopping_all_ranks(run.state, run.let_go) as began, torch.no_grad(), uncast(run):  # type: ignore[arg-type]
            began(action)
            return run.loop.act(action, list(taken))

    def _check(self, what: str, done: int, most: int, given: Sequence[Tensor], wanted: Sequence[str]) -> None:
        if done == most:
            raise AutoparError(
                f"There is no micro-batch to run {what}.",
                found=f"{done} of {self.micro_batches} have run {what}, {self.forwards} forward",
                hint="run each micro-batch forward, then backward, and load a batch for the next step.",
            )
        if len(given) != len(wanted):
            raise AutoparError(
                f"Stage {self.stage.number} takes {len(wanted)} tensors to run {what}.",
                found=f"{len(given)} tensors",
                hint=f"pass {', '.join(wanted)} in this order." if wanted else "pass None.",
            )
