"""Readable Python of a local program: what each rank runs, in order, with what is freed when."""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from autopar._torch import OpOverload
from autopar.program import LocalTensor, Op

PRELUDE = """\
import torch
from torch import device, float16, float32, float64, bfloat16, int8, int16, int32, int64, uint8  # noqa: F401

import autopar.ops  # noqa: F401
from autopar import spmd

aten = torch.ops.aten
autopar = torch.ops.autopar
"""


def emit(
    forward: fx.GraphModule, backward: fx.GraphModule, header: Sequence[str], accumulate: fx.GraphModule | None = None
) -> str:
    """The program as a Python module with ``forward(rank, inputs)`` and ``backward(rank, inputs)``; where gradients add
    up over micro-batches, ``accumulate(rank, inputs)`` is the backward of all but the last.

    Each takes its inputs as a list, which it empties, so that every tensor is freed after its last use.
    """
    parts = ['"""' + "\n".join(header) + '\n"""', PRELUDE.rstrip()]
    parts += [_function("forward", forward.graph), _function("backward", backward.graph)]
    parts += [_function("accumulate", accumulate.graph)] if accumulate is not None else []
    return "\n\n\n".join(parts) + "\n"


def load(source: str, name: str = "autopar_program") -> Mapping[str, Any]:
    """Run an emitted module and return its names. Debuggers and tracebacks show its lines."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, filename, "exec"), namespace)  # noqa: S102  it is our own program
    return namespace


def _function(name: str, graph: fx.Graph) -> str:
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.target != "rank"]
    lines = [f"def {name}(rank, inputs):"]
    if inputs:
        unpacked = "".join(f"\n        {n.name},{_shape_comment(n)}" for n in inputs)
        lines += [f"    ({unpacked}\n    ) = inputs", "    inputs.clear()"]
    last = _last_uses(graph)
    section = ""
    for node in graph.nodes:
        if node.op == "output":
            results = "".join(f"\n        {_text(a)}," for a in node.args[0])
            lines += ['    spmd.section("")'] if section else []
            lines.append(f"    return ({results}\n    )" if results else "    return ()")
        elif node.op == "call_function":
            section = _section(node, section, lines)
            lines.append(f"    {node.name} = {_call(node)}{_comment(node)}")
        dead = [d.name for d in last.get(node, ())]
        if dead and node.op != "output":
            lines.append(f"    del {', '.join(dead)}")
    return "\n".join(lines)


def _section(node: fx.Node, current: str, lines: list[str]) -> str:
    module = str(node.meta.get("module", current))
    if module != current:
        lines += ["", f'    spmd.section("{module}")']
    return module


def _call(node: fx.Node) -> str:
    args = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    if node.target is operator.getitem:
        return f"{_text(node.args[0])}[{_text(node.args[1])}]"
    return f"{_target(node.target)}({', '.join(args)})"


def _target(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target) if target.namespace in ("aten", "autopar") else f"torch.ops.{target}"
    return f"spmd.{target.__name__}"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_text, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and math.isnan(value):
        return 'float("nan")'
    if isinstance(value, float) and math.isinf(value):
        return f'float("{value}")'
    return repr(value)


def _shape_comment(node: fx.Node) -> str:
    tensor = node.meta.get("tensor")
    return f"  # {_tensor(tensor)}" if isinstance(tensor, LocalTensor) else ""


def _tensor(tensor: LocalTensor) -> str:
    return f"{tensor.meta} {tensor.spec}" + (" on the host" if tensor.host else "")


def _comment(node: fx.Node) -> str:
    tensor, op = node.meta.get("tensor"), node.meta.get("op")
    parts = []
    if isinstance(tensor, LocalTensor):
        parts.append(_tensor(tensor))
    if isinstance(op, Op) and op.is_collective and op.step is not None:
        several = f"{len(op.writes)} tensors, " if op.bucket else ""
        parts.append(f"{several}{op.wire_bytes:,} bytes over axis {op.step.axis}, {op.seconds * 1e6:.1f} us")
    elif isinstance(op, Op) and op.is_transfer:
        parts.append(f"{op.writes[0].bytes:,} bytes, {op.seconds * 1e6:.1f} us")
    return f"  # {'; '.join(parts)}" if parts else ""


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What may be freed after each node. A value that is never read is freed at once."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
        if node.op in ("call_function", "placeholder"):
            last.setdefault(node, node)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node, end in last.items():
        if node.target != "rank":
            # An unused placeholder is freed with the first op; a statement cannot stand inside the unpacking.
            dead.setdefault(end, []).append(node)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in [n for n in dead if n.op == "placeholder"]:
        dead.setdefault(first, []).extend(dead.pop(node))
    return dead
