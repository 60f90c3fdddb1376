"""Emits the text that runs from a plan's decisions, always anew, whatever text the plan contains."""

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

SOURCE_DIFFERS = (
    "The text under 'source' in this plan does not run: autopar emits the program from 'program', and the result "
    "differs from that text, which was edited or comes from another version of autopar. To run an edited text, pass "
    "its file: autoparallelize(..., plan=plan, source='step.py')."
)


def lowered(made: Plan, graph: Graph) -> Lowered:
    """Return the plan's program for ``graph`` as torch.fx graphs."""
    return passes.compose(passes.lower(made.program, graph, made.mesh), graph)


def emitted(made: Plan, local: Lowered, capture: Capture) -> str:
    """Return the text of the plan's program, which depends only on its decisions and the model."""
    constants = {**capture.unsaved, **capture.constants}
    return codegen.emit(local, made.mesh, codegen.header(made), constants, made.options.get("accumulation_steps", 1))


def with_emitted_source(made: Plan, capture: Capture, options: Options) -> tuple[Plan, Lowered]:
    """Return the plan with the text that runs, and its lowered program; warn on rank 0 if the plan had another text.

    Args:
        capture: the capture of the graph that the plan is for.

    Raises:
        PlanError: the program does not compute what the graph computes.
    """
    planned = dataclasses.replace(options, batch=made.options.get("batch", "global"))
    planner.verify(made, capture.graph, planned)
    _check_kernels(made)
    try:
        local = lowered(made, capture.graph)
    except (AssertionError, LookupError, TypeError, ValueError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error!s:.200}"
        hint = "plan again, or undo the changes to the plan's program."
        raise PlanError("The plan's program cannot be lowered.", found=found, hint=hint) from error
    text = emitted(made, local, capture)
    if text == made.source:
        return made, local
    if codegen.digest(text) != codegen.digest(made.source) and this_rank() == 0:
        warnings.warn(SOURCE_DIFFERS, stacklevel=2)
    return dataclasses.replace(made, source=text), local


def _check_kernels(made: Plan) -> None:
    unknown = {name for op in made.program.ops for name in op.kernels} - KERNELS.keys()
    if unknown:
        raise PlanError(
            "The plan uses kernels that this version of autopar does not have.",
            found=f"{', '.join(sorted(unknown)):.200}",
            hint=f"plan again; the available kernels are {', '.join(KERNELS)}.",
        )
