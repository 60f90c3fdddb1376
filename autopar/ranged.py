"""One plan for a range of sizes: checked at the corners of the range, and carried to each size that comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.emission import emitted, lowered
from autopar.errors import PlanError
from autopar.planner.answers.resize import same_but_for_sizes, with_sizes_of
from autopar.planner.answers.symbolic import NoFormulaError, formulas
from autopar.planner.ranges import Ranges, Shapes, Sizes
from autopar.plans import Plan
from autopar.tracer import Capture
from autopar.tracer.calls import Call


def shapes_of(call: Call) -> Shapes:
    """The shape of every input, by name."""
    return {name: tuple(t.shape) for name, t in zip(call.names, call.tensors, strict=True)}


def resized(call: Call, ranges: Ranges, sizes: Sizes) -> Call:
    """The call with inputs of other sizes, which have no values."""

    def like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) == shape:
            return tensor
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    shapes = ranges.resized(shapes_of(call), sizes)
    return Call(call.structure, tuple(like(t, shapes[n]) for n, t in zip(call.names, call.tensors, strict=True)))


def largest(ranges: Ranges) -> Sizes:
    """Every size at its most."""
    return {s.name: s.most for s in ranges.symbols}


def over_range(made: Plan, base: Capture, ranges: Ranges, capture_at: Callable[[Sizes], Capture]) -> Plan:
    """``made`` with its range and formulas.

    Args:
        base: the capture at the planned sizes.
        capture_at: captures the model at other sizes.

    Raises:
        PlanError: at a corner of the range the program is another one.
    """
    corners = [dict(c) for c in ranges.corners()]
    graphs = [base.graph]
    for corner in corners[1:]:
        graph = capture_at(corner).graph
        if not same_but_for_sizes(base.graph, graph):
            raise PlanError(
                "The program is another one at the end of the range, so that one plan cannot serve it.",
                found=f"{len(base.graph.nodes)} nodes at {corners[0]}, {len(graph.nodes)} at {corner}",
                hint="give a smaller range on one side of where the model branches on a size.",
            )
        graphs.append(graph)
    data = ranges.to_data()
    notices = list(made.notices)
    try:
        data["formulas"] = formulas(graphs, corners, made.program, made.mesh, ranges)
    except NoFormulaError as error:
        notices.append(f"a size has no formula in {', '.join(s.name for s in ranges.symbols)}: {error}")
    for corner, graph in zip(corners[1:], graphs[1:], strict=True):
        if with_sizes_of(made.program, graph, made.mesh) is None:
            notices.append(f"at {corner} a cut of the plan leaves ranks without elements; such sizes are planned anew")
    options = {**made.options, "dynamic_shapes": data}
    return dataclasses.replace(made, options=options, notices=tuple(notices))


def ranges_of(made: Plan) -> Ranges | None:
    """The range that a plan serves."""
    data: Any = made.options.get("dynamic_shapes")
    return Ranges.from_data(data) if data else None


def fitted(made: Plan, capture: Capture, call: Call) -> Plan | None:
    """The plan for a call of any sizes in its range; None where it was planned for another program."""
    if made.graph_digest == capture.graph.digest:
        return made
    ranges = ranges_of(made)
    if ranges is None or ranges.sizes(shapes_of(call)) is None:
        return None
    return carried_to(made, capture)


def carried_to(made: Plan, capture: Capture) -> Plan | None:
    """The plan for a program that is like the one that it was made for; None where a cut of it cannot be."""
    if made.graph_digest == capture.graph.digest:
        return made
    try:
        program = with_sizes_of(made.program, capture.graph, made.mesh)
    except KeyError:
        return None
    ends = {i.node for i in capture.graph.inputs} == {op.node for op in made.program.ops if op.kind == "input"}
    if program is None or not ends or [o for o, _ in program.results] != list(capture.graph.outputs):
        return None
    notices = (*made.notices, "made for other sizes or numbers, and carried to these")
    carried_over = dataclasses.replace(made, program=program, graph_digest=capture.graph.digest, notices=notices)
    text = emitted(carried_over, lowered(carried_over, capture.graph), capture)
    return dataclasses.replace(carried_over, source=text)


__all__ = ["carried_to", "fitted", "largest", "over_range", "ranges_of", "resized", "same_but_for_sizes", "shapes_of"]
