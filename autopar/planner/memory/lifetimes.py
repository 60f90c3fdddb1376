"""What a program is given and what it gives back, as device memory holds it: from which event to which, and how much.

The exact profile and the memory constraints both read these rows, each with its own times for the events. What the
forward makes for the backward is described by ``holding``, what one op holds while it runs by ``footprint``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from autopar.cost_models import optimizer_table_bytes
from autopar.holding import Event, Lifetime
from autopar.ir import Graph, Input, Output, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.state import moved_state_bytes, state_bytes
from autopar.planner.options import Options
from autopar.planner.problem.decide import is_plain_output
from autopar.program import Program


def of_input(graph: Graph, meaning: Input, meta: TensorMeta, options: Options, *, cut: bool) -> tuple[Lifetime, ...]:
    """Return what an input holds.

    Args:
        cut: whether a rank has only a shard of it, which the runtime takes of what the caller gives.
    """
    if meaning.kind == "parameter":
        state = Lifetime("optimizer", "optimizer", Event.START, Event.END)
        return Lifetime("parameters", "shard", Event.START, Event.END), state
    if meaning.kind in ("buffer", "constant"):
        return (Lifetime("buffers", "whole", Event.START, Event.END),)
    if meaning.kind == "accumulator":
        return (Lifetime("gradients", "shard", Event.START, Event.READ),)
    if graph.comes_from_stage(meaning):
        born = Event.START if meaning.kind == "received" else Event.TURN
        return (Lifetime("", "shard", born, Event.READ),)
    if meaning.kind == "tangent":
        if not cut or not is_plain_output(graph, meta, options):
            return (Lifetime("inputs", "shard", Event.TURN, Event.BACKWARD_DONE),)
        # Autograd holds the caller's gradient, of which the program takes a part.
        taken = Lifetime("inputs", "shard", Event.TURN, Event.READ)
        return taken, Lifetime("inputs", "whole", Event.TURN, Event.BACKWARD_DONE)
    times = options.held_batches if meaning.kind == "input" else 1
    if options.batch == "local":
        return (Lifetime("inputs", "shard", Event.START, Event.END, times),)
    given = Lifetime("inputs", "whole", Event.START, Event.END, times)
    taken = Lifetime("inputs", "shard", Event.START, Event.READ)
    return (given, taken) if cut and meaning.kind == "input" else (given,)


def of_output(graph: Graph, output: Output) -> Lifetime:
    """Return how long a result is held, from the op that makes it on, which ``Event.READ`` stands for."""
    if output.kind in ("mutation", "sent"):
        return Lifetime("", "shard", Event.READ, Event.FORWARD_DONE)
    if graph.goes_to_stage(output):
        return Lifetime("", "shard", Event.READ, Event.BACKWARD_DONE)
    kind = "outputs" if output.kind == "output" else "gradients"
    return Lifetime(kind, "shard", Event.READ, Event.END)


class HeldThroughout(NamedTuple):
    """Bytes that are held throughout the step, with their kind and the node of the input; the node is empty for what
    belongs to no single one."""

    kind: str
    node: str
    nbytes: int


def held_throughout(
    program: Program, graph: Graph, mesh: Mesh, options: Options, at: tuple[int, ...] = ()
) -> Iterator[HeldThroughout]:
    """Yield what is held throughout the step on the rank at coordinate ``at``, or on the fullest."""
    trained = []
    for op in program.ops:
        if op.kind != "input":
            continue
        meaning, tensor = graph.input_of[op.node], op.writes[0]
        shape = tensor.meta.local_shape(tensor.spec, mesh, at if any(at) else None)
        if meaning.trainable:
            trained.append(prod(shape))
        for row in of_input(graph, meaning, tensor.meta, options, cut=not tensor.spec.is_replicated):
            if not row.throughout:
                continue
            if row.size == "optimizer":
                size = state_bytes(tensor.meta, tensor.spec, mesh, meaning.trainable, options, at).optimizer
                if meaning.name in program.offloaded_optimizer:
                    size -= moved_state_bytes(tensor.meta, tensor.spec, mesh, options, at)
            else:
                size = tensor.meta.bytes if row.size == "whole" else prod(shape) * tensor.meta.itemsize
            yield HeldThroughout(row.kind, op.node, size * row.times)
    yield HeldThroughout("optimizer", "", optimizer_table_bytes(options.optimizer, trained))
