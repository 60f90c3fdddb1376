"""The module that users train as a pipeline, on the ranks of one stage or of a few."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import _torch
from autopar.errors import AutoparError
from autopar.runtime.accumulation import add_to_gradient, summed
from autopar.runtime.gathering import EVERY_RANK, gather_whole
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline.absent import absent_at, absent_tensors, positions_of, whole
from autopar.runtime.pipeline.norms import norms_over_pipelines
from autopar.runtime.pipeline.running import add_tied
from autopar.runtime.pipeline.state import PipelineState
from autopar.runtime.tables import tables
from autopar.runtime.waiting import roll_call


def _gathered(state: PipelineState, name: str, tensor: Tensor) -> Tensor:
    """Return a whole tensor on the host; ``tensor`` is on the meta device on ranks that do not hold it."""
    positions = positions_of(state.held.get(name, ()), state.rank_of)
    value = gather_whole(tensor) if not positions or state.position == positions[0] else None
    if positions:
        if value is None:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=state.device)
        value = value.contiguous()
        dist.broadcast(value, state.along[positions[0]], group=state.group)
    assert value is not None
    return value.cpu()


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

    def requires_grad_(self, requires_grad: bool = True) -> PipelineModule:
        """Change all parameters, also what this rank knows of those of other stages."""
        for each in absent_tensors(self).values():
            if isinstance(each.tensor, nn.Parameter):
                each.tensor.requires_grad_(requires_grad)
        super().requires_grad_(requires_grad)
        return self

    def gathered_state(self, caller: str, *, keep: bool) -> dict[str, Any]:
        """Return the state of all stages with whole tensors on the host; every rank must call it.

        Args:
            caller: the function that the user called.
            keep: whether this rank keeps the tensors; if not, it gets empty ones instead.
        """
        roll_call(caller, EVERY_RANK)
        state: Any = self._autopar
        with whole(self):
            names = {id(t): n for n, t in (*self.named_parameters(), *self.named_buffers())}
            every = dict(self.state_dict(keep_vars=True))
        found: dict[str, Any] = {}
        known: dict[int, Any] = {}
        for key, tensor in every.items():
            if id(tensor) not in known:
                value = (
                    tensor if not isinstance(tensor, Tensor) else _gathered(state, names.get(id(tensor), key), tensor)
                )
                known[id(tensor)] = (
                    value if keep or not isinstance(value, Tensor) else torch.empty(0, dtype=value.dtype)
                )
            found[key] = known[id(tensor)]
        return found

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
            part = _torch.shard_of(summed(local, spec, shape, stored.tensor(name), state))
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
