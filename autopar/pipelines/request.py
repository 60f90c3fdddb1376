"""What a user asks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from autopar.errors import AutoparError

AXIS = "pp"
"""The mesh axis along which stages lie."""

AUTO: Literal["auto"] = "auto"

Count: TypeAlias = int | Literal["auto"]


@dataclass(frozen=True)
class Pipeline:
    """How a model is to be trained as a pipeline; what is ``"auto"`` is chosen by the search.

    Args:
        stages: ranks along the pipeline; the size of the mesh axis ``pp`` where there is one.
        micro_batches: parts of the batch that pass through the stages one after the other.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb"`` (zero bubble, ZB-H1), ``"zbv"`` or ``"listed"``
            (an order made for stages that take unequal time).
        chunks: stages that each rank holds; more than one with ``"interleaved"``, two with ``"zbv"``.
        split: how blocks are dealt out: ``"auto"`` balances their predicted seconds, ``"uniform"`` their number; or the
            names of the modules that each stage but the first begins with.
        two_phase: whether all forwards run in the call and all backwards in ``backward()``, as for a model that returns
            no loss. Otherwise the call runs the whole schedule.
        like: the blocks of another plan and the first of each of its stages, which begin with the same blocks here if
            there are such; else ``split`` says where. Blocks may have no name, or that of an earlier one.
    """

    stages: Count = AUTO
    micro_batches: Count = AUTO
    schedule: str = AUTO
    chunks: Count = AUTO
    split: str | Sequence[str] = AUTO
    two_phase: bool = False
    like: tuple[tuple[str, ...], tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("micro_batches", 1), ("chunks", 1)):
            value = getattr(self, name)
            if value != AUTO and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise AutoparError(
                    f"Pipeline({name}=...) is a positive integer.", found=repr(value), hint='give a number, or "auto".'
                )
        if self.schedule not in (AUTO, *SCHEDULE_NAMES):
            known = ", ".join(SCHEDULE_NAMES)
            raise AutoparError(
                f"There is no pipeline schedule {self.schedule!r}.",
                found=repr(self.schedule),
                hint=f'write "auto" or one of {known}.',
            )
        if isinstance(self.split, str):
            if self.split not in (AUTO, "uniform"):
                raise AutoparError(
                    "Pipeline(split=...) lists the modules that stages begin with.",
                    found=repr(self.split),
                    hint='write "auto", "uniform", or a list such as ["model.layers.8", "model.layers.16"].',
                )
        else:
            object.__setattr__(self, "split", tuple(map(str, self.split)))


SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "listed")
"""Names of the schedules, as users write them."""


def as_pipeline(value: Any) -> Pipeline | None:
    """Return the request for ``None``, ``"auto"``, a number of stages, or a ``Pipeline``.

    Raises:
        AutoparError: if it is none of these.
    """
    if value is None or isinstance(value, Pipeline):
        return value
    if value == AUTO:
        return Pipeline()
    if isinstance(value, int) and not isinstance(value, bool):
        return Pipeline(stages=value)
    raise AutoparError(
        "pipeline says how a model is cut into stages.",
        found=repr(value)[:80],
        hint='write "auto", a number of stages, or autopar.Pipeline(stages=4, micro_batches=8).',
    )
