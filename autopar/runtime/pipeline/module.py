"""The module that users train as a pipeline, on the ranks of one stage or of a few."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.accumulation import add_to_gradient, summed
from autopar.runtime.gathering import EVERY_RANK
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline.absent import absent_at, positions_of
from autopar.runtime.pipeline.norms import norms_over_pipelines
from autopar.runtime.pipeline.running import add_tied
from autopar.runtime.pipeline.state import PipelineState
from autopar.runtime.tables import tables
from autopar.runtime.waiting import roll_call


class PipelineModule(ParallelModule):
    """The mixin that ``autoparallelize`` adds to the user's class for a pipeline."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter of this rank's stages.

        Raises:
            AutoparError: another stage holds it.
        """
        absent = absent_at(self, target)
        if absent is not None:
            state: Any = self._autopar
            positions = positions_of(absent.stages, state.rank_of)
            held = ", ".join(str(state.along[p]) for p in positions)
            raise AutoparError(
                f"{target} belongs to another stage of the pipeline.",
                found=f"stage {', '.join(map(str, absent.stages))}, on rank {held} and those beside it in the stage",
                hint="ask for it there; parameters() lists those of this rank.",
            )
        return super().get_parameter(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        twin = super().__deepcopy__(memo)
        norms_over_pipelines(twin)
        return twin

    def deliver_gradients(self) -> int:
        """Give the parameters the gradients summed up so far, after an incomplete cycle of ``accumulation_steps``.

        Returns:
            The number of calls in these gradients; 0 if none are pending.
        """
        roll_call("deliver_gradients", EVERY_RANK)
        state, sums, stored = self._autopar, self._autopar_sums, tables(self)
        assert isinstance(state, PipelineState)
        made: dict[str, Any] = {}
        for (name, spec, _), (local, shape) in sums.held.items():
            part = summed(local, spec, shape, stored.tensor(name), state).to_local()
            made[name] = made[name] + part if name in made else part
        done, sums.done = sums.done, 0
        sums.held.clear()
        if done:
            add_tied(state, stored, made)
        for name, local in made.items():
            parameter = stored.tensor(name)
            add_to_gradient(parameter, _torch.dtensor_like(local, parameter))
        return done

    def compare_with_prediction(self, k: int = 10) -> Any:
        """Not for a pipeline, whose stages wait for each other.

        Raises:
            AutoparError: always.
        """
        raise AutoparError(
            "A pipeline's steps are not compared with the prediction.",
            found=f"compare_with_prediction({k})",
            hint="read plan.step_time and plan.timeline, and time the steps.",
        )
