"""Converts a normalized joint torch.fx graph to ``ir.Graph``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar import ir
from autopar._torch import OpOverload, is_functionalized
from autopar.errors import CaptureError
from autopar.tracer.blame import is_ours

TORCH = Path(torch.__file__).parent
_WEIGHT_OF_NORM = {"aten.native_layer_norm.default": 2, "aten.native_group_norm.default": 1}
_DROPPED_KWARGS = ("device", "layout", "pin_memory", "memory_format", "requires_grad")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def meta_of(value: Any) -> ir.TensorMeta | None:
    if not isinstance(value, torch.Tensor):
        return None
    return ir.TensorMeta(tuple(int(n) for n in value.shape), dtype_name(value.dtype))


def op_and_arguments(node: fx.Node) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """Return a node's op and arguments; a custom op that changes some of its arguments returns those too."""
    if not is_functionalized(node.target):
        return op_name(node.target), node.args, node.kwargs
    op = node.args[0]
    assert isinstance(op, OpOverload)
    given = [(a, node.kwargs[a.name]) for a in op._schema.arguments]
    args = tuple(v for a, v in given if not a.kwarg_only)
    return op_name(op), args, {a.name: v for a, v in given if a.kwarg_only}


def _returns_nothing(node: fx.Node) -> bool:
    """Whether a call's first result only stands in for the result of an op that returns none."""
    return is_functionalized(node.target) and not node.args[0]._schema.returns  # type: ignore[union-attr]


def _outputs(value: Any) -> tuple[ir.TensorMeta | None, ...]:
    if isinstance(value, (tuple, list)):
        return tuple(meta_of(v) for v in value)
    return (meta_of(value),)


def _results(op: str, args: tuple[Any, ...], value: Any) -> tuple[ir.TensorMeta | None, ...]:
    """Return the metadata of a node's results as its kernel makes them.

    Fake norms give statistics the dtype of the input, but kernels give them the dtype of the weight.
    """
    found = _outputs(value)
    weight = args[_WEIGHT_OF_NORM[op]] if op in _WEIGHT_OF_NORM else None
    if not isinstance(weight, fx.Node):
        return found
    dtype = dtype_name(weight.meta["val"].dtype)
    return (found[0], *(m and ir.TensorMeta(m.shape, dtype) for m in found[1:]))


def value_of(node: fx.Node) -> ir.Value:
    """Return the IR value of an fx node; item reads refer to their source."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return ir.Value(source.name, index - _returns_nothing(source))
    return ir.Value(node.name)


def arg_of(arg: Any) -> ir.Arg:
    """Convert an fx argument to plain data; dtypes become ``"torch.float32"``."""
    if isinstance(arg, fx.Node):
        return value_of(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(arg_of(a) for a in arg)
    if isinstance(arg, torch.dtype):
        return str(arg)
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    if isinstance(arg, complex):
        return f"complex:{arg}"
    if isinstance(arg, (torch.SymInt, torch.SymFloat)):
        raise CaptureError(
            "A size in the program depends on values.",
            found=str(arg),
            hint="use static shapes: pad to a fixed size, or mask with torch.where.",
        )
    return str(arg)


def op_name(target: Any) -> str:
    """Return the name of an op, such as ``aten.mm.default``."""
    return str(target)


def module_path(meta: Mapping[str, Any]) -> str:
    """Return the path of the module, in the user's model, whose forward a node belongs to or is the backward of."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    for prefix in ("L['self'].", "L__self__."):
        path = path.removeprefix(prefix)
    return path.removeprefix("model.") if path != "model" else ""


def source_line(meta: Mapping[str, Any]) -> str:
    """Return the user's line as ``file.py:12 code``: the innermost recorded one outside torch's own modules, if there
    is one."""
    found, lines = "", str(meta.get("stack_trace") or meta.get("fwd_stack_trace") or "").strip().splitlines()
    for at in range(len(lines) - 1, -1, -1):
        text = lines[at].strip()
        if text.startswith("File ") and not text.startswith('File "<'):
            file, line = text.split('"')[1], text.split("line ")[1].split(",")[0]
            ours, of_torch = _origin(file)
            if ours:
                continue
            code = lines[at + 1].strip() if at + 1 < len(lines) else ""
            text_of_line = f"{Path(file).name}:{line} {code}".strip()
            if not of_torch:
                return text_of_line
            found = found or text_of_line
    return found


@cache
def _origin(file: str) -> tuple[bool, bool]:
    """Whether a file belongs to autopar, and whether it belongs to torch."""
    return is_ours(Path(file)), Path(file).is_relative_to(TORCH)


def to_ir(
    graph: fx.Graph, inputs: list[ir.Input], outputs: list[ir.Output], name: str, *, has_loss: bool = True
) -> ir.Graph:
    """Convert a graph; ``inputs`` and ``outputs`` give the meaning of placeholders and results."""
    nodes = []
    for node in graph.nodes:
        if node.op == "output" or node.target is operator.getitem:
            continue
        placeholder = node.op in ("placeholder", "get_attr")
        op, args, options = op_and_arguments(node)
        kwargs = tuple((k, arg_of(v)) for k, v in options.items() if k not in _DROPPED_KWARGS)
        value = node.meta["val"]
        nodes.append(
            ir.Node(
                name=node.name,
                op="placeholder" if placeholder else op,
                args=() if placeholder else tuple(arg_of(a) for a in args),
                kwargs=() if placeholder else kwargs,
                outputs=_results(op, args, value[1:] if _returns_nothing(node) else value),
                phase=node.meta["phase"],
                module=module_path(node.meta),
                source=source_line(node.meta),
            )
        )
    made = ir.Graph(tuple(nodes), tuple(inputs), tuple(outputs), name, has_loss)
    _ = made.kinds, made.consumers, made.digest  # computed once, since every plan needs them
    return made
