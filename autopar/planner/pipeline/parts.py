"""What the program of a stage costs: forward, backward of the inputs, backward of the weights, and delivery."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from autopar.ir import Graph
from autopar.mesh import Mesh
from autopar.planner.graphs.accumulation import accumulated_sums, accumulation_program
from autopar.planner.memory.exact import saved_bytes
from autopar.planner.options import Options
from autopar.planner.schedule.timeline import Event, simulate_streams, simulated_seconds
from autopar.program import Op, Program


@dataclass(frozen=True)
class Parts:
    """Seconds and bytes of a stage for one micro-batch, on the fullest device.

    Args:
        forward: seconds of the forward.
        backward_input: seconds of the backward up to the gradients that the stage before waits for.
        backward_weight: seconds of the rest of the backward, which adds to accumulators.
        delivery: seconds that the last micro-batch's backward takes besides, to give the sums to the parameters.
        delivery_apart: the same where it is split, and beside the backward of the weights alone.
        once: seconds of what runs once for all micro-batches of a call.
        held: bytes that a micro-batch keeps between its forward and its backward.
        held_once: bytes of what all micro-batches of a call share.
        kept: the bytes that the backward of the weights reads of what was made before it.
    """

    forward: float
    backward_input: float
    backward_weight: float
    delivery: float
    delivery_apart: float
    once: float
    held: int
    held_once: int
    kept: int


def parts_of(program: Program, graph: Graph, mesh: Mesh, options: Options, overlap: float) -> Parts:
    """Simulate the parts of a stage's program.

    Args:
        overlap: as for ``simulate_streams``.
    """
    several = bool(accumulated_sums(graph))
    adding = accumulation_program(program, graph) if several else program
    weights, once = weight_ops(adding), frozenset(program.once)
    forward = _seconds((op for op in adding.ops if op.phase == "forward" and op.name not in once), overlap)
    once_s = _seconds((op for op in adding.ops if op.name in once), overlap)
    backward = [op for op in adding.ops if op.phase == "backward"]
    inputs_s = _seconds((op for op in backward if op.name not in weights), overlap)
    whole_s = _seconds(backward, overlap)
    weights_s = max(whole_s - inputs_s, 0.0)
    last_s, last_weights_s = forward + whole_s, weights_s
    if several:
        last = weight_ops(program)
        last_s = simulate_streams(program, overlap).seconds - once_s
        last_weights_s = _seconds((op for op in program.ops if op.phase == "backward" and op.name in last), overlap)
    held, held_once = saved_bytes(program, graph, mesh, options)
    return Parts(
        forward,
        min(inputs_s, whole_s),
        weights_s,
        max(last_s - forward - whole_s, 0.0),
        max(last_weights_s - weights_s, 0.0),
        once_s,
        held,
        held_once,
        _kept_bytes(adding, graph, weights),
    )


def _seconds(ops: Iterable[Op], overlap: float) -> float:
    return simulated_seconds((Event.of(op) for op in ops if op.kind != "input"), overlap)


def weight_ops(program: Program) -> frozenset[str]:
    """Return the names of the backward's ops that no gradient of an input needs; all of them in a first stage."""
    needed = {name for output, name in program.results if output.name.startswith("input:")}
    found = []
    for op in reversed(program.ops):
        if op.phase != "backward" or op.kind == "input":
            continue
        if any(t.name in needed for t in op.writes) or (op.kind == "wait" and op.reads[-1] in needed):
            needed.update(op.reads)
        else:
            found.append(op.name)
    return frozenset(found)


def _kept_bytes(program: Program, graph: Graph, weights: Collection[str]) -> int:
    """Return the bytes that ops named ``weights`` read of what the forward and the other ops of the backward made, and
    of what came from other stages."""
    given = (op for op in program.ops if op.kind == "input" and not graph.comes_from_stage(graph.input_of[op.node]))
    inputs = {op.writes[0].name for op in given} | program.held_once
    inside = {t.name for op in program.ops if op.name in weights for t in op.writes}
    read = {program.root[name] for op in program.ops if op.name in weights for name in op.reads if name not in inside}
    return sum(program.tensors[name].bytes for name in read - inputs)
