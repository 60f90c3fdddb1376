"""Exact liveness of a local program: which bytes are held after each op, by kind.

A tensor lives from the op that makes it to the last op that reads it or a view of it; parameters, buffers, optimizer
state and the batch live throughout, gradients from their making to the end, outputs to the end, where the optimizer
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir import Graph
from autopar.mesh import Mesh
from autopar.planner.options import Options
from autopar.planner.pricing import state_bytes
from autopar.program import Program

KINDS = ("parameters", "optimizer", "gradients", "buffers", "inputs", "activations", "temporaries", "outputs", "step")


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on the fullest device.

    Args:
        timeline: bytes held while each op runs, its operands and results included; the last entry is the
            optimizer's step.
        peak_at: index of the largest entry.
        by_kind: bytes of each kind at that moment.
    """

    timeline: tuple[int, ...]
    peak_at: int
    by_kind: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        return self.timeline[self.peak_at]


def profile(program: Program, graph: Graph, mesh: Mesh, options: Options) -> MemoryProfile:
    """Bytes held during every op of ``program``, and the peak by kind."""
    steady = _steady(program, graph, mesh, options)
    changes = _changes(program, graph)
    changes.setdefault(len(program.ops), []).insert(0, ("step", _step_bytes(program, graph, mesh, options)))
    held = dict.fromkeys(KINDS, 0) | steady
    timeline: list[int] = []
    best: tuple[int, int, dict[str, int]] = (-1, 0, held)
    for at in range(len(program.ops) + 1):
        for kind, size in changes.get(at, ()):
            if size > 0:
                held[kind] += size
        total = sum(held.values())
        timeline.append(total)
        if total > best[0]:
            best = (total, at, dict(held))
        for kind, size in changes.get(at, ()):
            if size < 0:
                held[kind] += size
    return MemoryProfile(tuple(timeline), best[1], {k: v for k, v in best[2].items() if v})


def _steady(program: Program, graph: Graph, mesh: Mesh, options: Options) -> dict[str, int]:
    """What is held throughout."""
    sums = {"parameters": 0, "optimizer": 0, "buffers": 0, "inputs": 0}
    for op in program.ops:
        if op.kind != "input":
            continue
        meaning, tensor = graph.input_of[op.node], op.writes[0]
        if meaning.kind == "parameter":
            held = state_bytes(tensor.meta, tensor.spec, mesh, meaning.trainable, options)
            sums["parameters"] += held.parameter
            sums["optimizer"] += held.optimizer
        elif meaning.kind in ("buffer", "constant"):
            sums["buffers"] += tensor.bytes
        elif meaning.kind == "input" and options.batch == "global":
            sums["inputs"] += tensor.meta.bytes
        else:
            sums["inputs"] += tensor.bytes
    return sums


def _step_bytes(program: Program, graph: Graph, mesh: Mesh, options: Options) -> int:
    """What the optimizer's step needs beside parameters, gradients and state; all parameters step together."""
    total = 0
    for op in program.ops:
        if op.kind == "input" and graph.input_of[op.node].trainable:
            total += state_bytes(op.writes[0].meta, op.writes[0].spec, mesh, True, options).step
    return total


def _changes(program: Program, graph: Graph) -> dict[int, list[tuple[str, int]]]:
    """(kind, bytes) taken before and freed after each op; negative entries are freed."""
    ends: dict[str, int] = {}
    for name, root in program.root.items():
        ends[root] = max(ends.get(root, -1), program.last_read.get(name, program.writer[name]))
    roles = {program.root[name]: output.kind for output, name in program.results}
    backward = (i for i, op in enumerate(program.ops) if op.phase == "backward" and op.kind != "input")
    first_backward = next(backward, len(program.ops))
    changes: dict[int, list[tuple[str, int]]] = {}
    for at, op in enumerate(program.ops):
        for tensor in op.writes:
            name = tensor.name
            if program.root[name] != name or not tensor.bytes or tensor.host:
                continue
            if op.kind == "input":
                # The caller's batch is counted whole and throughout; what a rank keeps of it is a slice op's.
                continue
            role = roles.get(name)
            if role == "gradient":
                kind, end = "gradients", len(program.ops)
            elif role == "output":
                kind, end = "outputs", len(program.ops)
            else:
                end = ends[name]
                kind = "activations" if at < first_backward <= end else "temporaries"
            changes.setdefault(at, []).append((kind, tensor.bytes))
            changes.setdefault(end, []).append((kind, -tensor.bytes))
    return changes
