"""The options of a plan, listed once: for ``plan``, ``autoparallelize``, ``compare`` and the command line."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from torch import nn
from typing_extensions import TypedDict

from autopar.arguments import as_bytes, as_constraints, as_optimizer, canonical_names
from autopar.errors import AutoparError
from autopar.pipelines.request import as_pipeline
from autopar.planner import Options
from autopar.planner.ranges import as_ranges
from autopar.precision import as_precision
from autopar.ranged import shapes_of
from autopar.settings import TRAINING_STEPS
from autopar.solver import solver_name
from autopar.tracer.calls import Call


class PlanOptions(TypedDict, total=False):
    """Keyword arguments of ``plan``, ``autoparallelize`` and ``compare``; all of them may be left out.

    Args:
        memory_budget: bytes on each device, or text such as ``"60GiB"``, for parameters, gradients, optimizer state,
            activations and everything else; None, the default, is the memory of the cluster's device.
        optimizer: whose state the budget must hold: a name, a ``torch.optim`` class or instance, or bytes of state per
            parameter element. The default is ``"adamw"``.
        mixed_precision: ``"bf16"`` or ``"fp16"``: every call runs as under autocast, and the parameters are the master
            weights. An ``autopar.MixedPrecision`` also says in which dtype parameters are stored and gradients reduced.
        batch: ``"global"``, the default, when every rank passes the whole batch; ``"local"`` when each passes its
            slice of dim 0.
        outputs: ``"whole"`` for plain tensors, ``"dtensor"`` for DTensors, or ``"auto"``, the default. With ``"auto"``
            a model that returns a scalar loss returns its other outputs as DTensors, and under ``torch.no_grad()`` as
            plain tensors, which metrics expect: whole, or with local batches the rank's slice. A scalar is the loss
            when it is named ``loss``, stands first in a tuple or dataclass, or is the only output.
        constraints: sharding specs or styles by glob over the names of parameters, modules and nodes, and over
            ``input:`` and ``output:`` names: ``{"lm_head.weight": "S0R", "*.c_fc.weight": "column"}``.
        backend: ``"eager"``, the default, or ``"inductor"``, which compiles forward and backward at their first call,
            collectives included.
        time_limit: seconds that the search may take, 60 by default. The call keeps it to within two seconds.
        training_steps: optimizer steps of the run that the plan is for, 30,000 by default. The search ends when what
            it may still gain over the run is less than the seconds that it has taken.
        accumulation_steps: number of backwards in one optimizer step, 1 by default. The gradients add up and appear
            with the last backward; the plan decides whether each is reduced at once or all are at the end.
        expert_room: for how many rows a rank has room, over the mean, where tokens are sent to the ranks of their
            experts. Where a router sends more, the step is run by a program in which tokens stay. ``"auto"``, the
            default, is 1.5, and None leaves tokens where they are; so does ``"auto"`` in a pipeline.
        dynamic_shapes: dims of inputs that vary, as for ``torch.export``: ``{"input_ids": {0: Dim("batch", min=2,
            max=64)}}``. One plan serves the whole range without another search; ``plan.symbolic`` has its formulas.
        async_tensor_parallel: whether a matrix product may be decomposed to run beside the all-gather that feeds it or
            the reduce-scatter that follows it. ``"auto"``, the default, decomposes where that is predicted to be
            faster, between GPUs joined by NVLink; True does so over any link, by a ring of messages; False never does;
            ``"always"`` does so wherever it is possible.
        solver: ``"highs"``, ``"cbc"`` or another that PuLP knows. ``"auto"``, the default, takes HiGHS where it is
            installed.
        gap: relative gap between a plan's cost and the proven lower bound at which the search may stop, 1e-3 by
            default.
        search: ``"joint"``, the default, chooses shardings and what to keep, recompute or offload together;
            ``"two-stage"`` chooses shardings first; ``"baseline:NAME"`` takes a known way to train in parallel, such
            as ``"baseline:ZeRO-3"``.
        pipeline: ``"auto"``, a number of stages, or an ``autopar.Pipeline``. A mesh with an axis named ``pp`` asks for
            ``"auto"``. Without a mesh, ``plan`` tries pipelines where they can pay, also by default; a job that runs
            gets one where it asks, since ranks of a pipeline have other parameters and outputs.
    """

    memory_budget: int | str | None
    optimizer: Any
    mixed_precision: Any
    batch: Literal["global", "local"]
    outputs: Literal["auto", "whole", "dtensor"]
    constraints: Mapping[str, str] | None
    backend: Literal["eager", "inductor"]
    time_limit: float
    training_steps: float
    accumulation_steps: int
    expert_room: float | Literal["auto"] | None
    dynamic_shapes: Any
    async_tensor_parallel: bool | Literal["auto", "always"]
    solver: str
    gap: float
    search: str
    pipeline: Any


_READERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "memory_budget": ("memory_budget_bytes", as_bytes),
    "optimizer": ("optimizer", as_optimizer),
    "mixed_precision": ("mixed_precision", as_precision),
    "constraints": ("constraints", as_constraints),
    "time_limit": ("time_limit_s", lambda seconds: seconds),
    "solver": ("solver", solver_name),
    "pipeline": ("pipeline", as_pipeline),
}
"""Options that the planner takes under another name or in another form: that name, and what reads the user's value."""


_DEFAULTS = {
    "training_steps": TRAINING_STEPS,
    "memory_budget": None,
    "mixed_precision": None,
    "constraints": None,
    "dynamic_shapes": None,
    "pipeline": None,
}

_F = TypeVar("_F", bound=Callable[..., Any])


def lists_options(function: _F) -> _F:
    """Let ``help`` and ``inspect.signature`` list each option with its default, in place of ``**options``."""
    declared = inspect.signature(function)
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS.get(name, getattr(Options, _READERS.get(name, (name,))[0], None)),
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in PlanOptions.__annotations__.items()
    ]
    own = [p for p in declared.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = declared.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def planner_options(model: nn.Module, call: Call, given: Mapping[str, Any]) -> Options:
    """Return what the user asks of a plan in the planner's form.

    Args:
        model: the model, whose tied parameters are looked up.
        call: the captured call, whose shapes ``dynamic_shapes`` refers to.
        given: ``PlanOptions``.

    Raises:
        AutoparError: an option does not exist, or its value means nothing.
    """
    unknown = next((name for name in given if name not in PlanOptions.__annotations__), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, PlanOptions.__annotations__, 1)
        every = ", ".join(PlanOptions.__annotations__)
        raise AutoparError(
            f"There is no option {unknown!r}.",
            found=f"{unknown}={given[unknown]!r:.80}",
            hint=f"did you mean {near[0]}?" if near else f"the options are {every}.",
        )
    read: dict[str, Any] = {"solver": solver_name("auto"), "training_steps": TRAINING_STEPS}
    for name, value in given.items():
        if name != "dynamic_shapes":
            field, reader = _READERS.get(name, (name, lambda same: same))
            read[field] = reader(value)
    ranges = as_ranges(given.get("dynamic_shapes"), shapes_of(call))
    return Options(**read, aliases=canonical_names(model), ranges=ranges)
