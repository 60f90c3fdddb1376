"""The module that users train: their own, with its forward replaced by the compiled program.

As in FSDP2, the model's class is swapped for a subclass: attributes, methods, FQNs and ``isinstance`` keep working.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, SupportsIndex

from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.frameworks import Prepared
from autopar.runtime.gathering import EVERY_RANK, save_pretrained_method
from autopar.runtime.measured_steps import PredictionCheck
from autopar.runtime.running import run
from autopar.runtime.tables import without_tables
from autopar.runtime.variants import ParallelBase
from autopar.runtime.waiting import roll_call


class ParallelModule(ParallelBase):
    """The mixin that ``autoparallelize`` adds to the user's class."""

    _is_accelerate_prepared = Prepared()
    """Tells Hugging Face Accelerate and its Trainer that the model is already prepared, so that they do not wrap it."""
    accepts_loss_kwargs = False
    """Tells the Trainer that the loss is already the mean over all ranks, and not to pass a number of tokens."""

    @property
    def plan(self) -> Any:
        """The plan of this module."""
        return self._autopar.plan

    def deliver_gradients(self) -> int:
        """Give the parameters the gradients summed up so far, after an incomplete cycle of ``accumulation_steps``.

        Returns:
            The number of micro-batches in these gradients; 0 if none are pending.
        """
        roll_call("deliver_gradients", EVERY_RANK)
        return self._autopar_sums.deliver(self, self._autopar)

    def compare_with_prediction(self, k: int = 10) -> PredictionCheck:
        """Compare predicted and measured seconds, of the last ``k`` steps at the time of reading, and peak memory.

        Seconds are those of forward and backward, on a CPU also by module. A CPU does not track memory, so the next
        step with its optimizer is metered, which is slow, and excluded from the seconds.

        Raises:
            AutoparError: ``k`` is not a positive integer.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise AutoparError("k must be a positive integer.", found=repr(k), hint="model.compare_with_prediction(10)")
        self._autopar.clock.memory.wanted = True
        return PredictionCheck(self.plan, self._autopar.clock, k, self._autopar.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Keep our attributes of the parameters when ``to`` and its like replace DTensors by new ones."""
        known = {name: dict(vars(p)) for name, p in self.named_parameters()}
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        for name, parameter in self.named_parameters():
            vars(parameter).update(known[name])
        return self

    def __copy__(self) -> ParallelModule:
        twin = type(self).__new__(type(self))
        twin.__dict__ = without_tables(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(without_tables(self.__dict__), memo)
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise AutoparError(
            "A parallel model cannot be pickled: each process holds only its shards.",
            found=f"{type(self).__name__} given to pickle or torch.save",
            hint="save model.state_dict() with torch.distributed.checkpoint.save.",
        )


def parallel_class(kind: type[nn.Module], mixin: type[ParallelModule] = ParallelModule) -> type[nn.Module]:
    """Return the subclass of ``kind`` whose forward is the compiled program, with the original's signature."""

    @functools.wraps(kind.forward)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "_autopar_original": kind, "forward": forward}
    return type(f"Parallel{kind.__name__}", (mixin, kind), names | save_pretrained_method(kind))
