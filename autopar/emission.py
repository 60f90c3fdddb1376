"""From a plan's decisions to the text that runs: always anew, whatever text the plan brings along."""

from __future__ import annotations

import dataclasses
import warnings

from autopar import codegen, passes, planner
from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.kernels import KERNELS
from autopar.planner import Options
from autopar.plans import Plan
from autopar.runtime.agreement import this_rank
from autopar.spmd import Lowered
from autopar.tracer import Capture

OTHER_TEXT = (
    "The text under 'source' in this plan is not what runs: the program is emitted anew from 'program', and differs "
    "from that text, which someone has edited or another version of autopar has written. To run an edited text, give "
    "its file: autoparallelize(..., plan=plan, source='step.py')."
)


def lowered(made: Plan, graph: Graph) -> Lowered:
    """The plan's program for ``graph`` as torch.fx graphs."""
    return passes.compose(passes.lower(made.program, graph, made.mesh), graph)


def emitted(made: Plan, local: Lowered, capture: Capture) -> str:
    """The text of the plan's program: a function of its decisions and of the model alone."""
    constants = {**capture.unsaved, **capture.constants}
    return codegen.emit(local, made.mesh, codegen.header(made), constants, made.options.get("accumulation_steps", 1))


def ready(made: Plan, capture: Capture, options: Options) -> tuple[Plan, Lowered]:
    """The plan with the text that runs, and its program; a warning on rank 0 where the plan had another text.

    Args:
        capture: of the graph that the plan is for.

    Raises:
        PlanError: the program does not compute what the graph does.
    """
    planned = dataclasses.replace(options, batch=made.options.get("batch", "global"))
    planner.verify(made, capture.graph, planned)
    _check_kernels(made)
    try:
        local = lowered(made, capture.graph)
    except (AssertionError, LookupError, TypeError, ValueError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error!s:.200}"
        hint = "plan again, or undo what was changed in the plan's program."
        raise PlanError("The plan's program cannot be lowered.", found=found, hint=hint) from error
    text = emitted(made, local, capture)
    if text == made.source:
        return made, local
    if codegen.digest(text) != codegen.digest(made.source) and this_rank() == 0:
        warnings.warn(OTHER_TEXT, stacklevel=2)
    return dataclasses.replace(made, source=text), local


def _check_kernels(made: Plan) -> None:
    unknown = {name for op in made.program.ops for name in op.kernels} - KERNELS.keys()
    if unknown:
        raise PlanError(
            "The plan runs kernels that this version of autopar has not.",
            found=f"{', '.join(sorted(unknown)):.200}",
            hint=f"plan again; there are {', '.join(KERNELS)}.",
        )
