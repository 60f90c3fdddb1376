"""Print one call of a local program as the Python that a person would write."""

from __future__ import annotations

import json
import keyword
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar import spmd
from autopar._torch import OpOverload
from autopar.program import LocalTensor

INFIX = {
    "aten.add.Tensor": "+",
    "aten.sub.Tensor": "-",
    "aten.mul.Tensor": "*",
    "aten.div.Tensor": "/",
    "aten.add.Scalar": "+",
    "aten.sub.Scalar": "-",
    "aten.mul.Scalar": "*",
    "aten.div.Scalar": "/",
    "aten.pow.Tensor_Scalar": "**",
    "aten.pow.Tensor_Tensor": "**",
    "aten.pow.Scalar": "**",
    "aten.eq.Tensor": "==",
    "aten.eq.Scalar": "==",
    "aten.ne.Tensor": "!=",
    "aten.ne.Scalar": "!=",
    "aten.lt.Tensor": "<",
    "aten.lt.Scalar": "<",
    "aten.le.Tensor": "<=",
    "aten.le.Scalar": "<=",
    "aten.gt.Tensor": ">",
    "aten.gt.Scalar": ">",
    "aten.ge.Tensor": ">=",
    "aten.ge.Scalar": ">=",
    "aten.bitwise_and.Tensor": "&",
    "aten.bitwise_or.Tensor": "|",
    "aten.bitwise_xor.Tensor": "^",
}

METHODS = {
    f"aten.{op}": op.split(".")[0]
    for op in (
        "reshape.default",
        "transpose.int",
        "permute.default",
        "unsqueeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "expand.default",
        "split.Tensor",
        "split_with_sizes.default",
        "clone.default",
        "sum.default",
        "sum.dim_IntList",
        "amax.default",
        "amin.default",
        "log.default",
        "exp.default",
        "sqrt.default",
        "rsqrt.default",
        "abs.default",
        "masked_fill.Scalar",
        "masked_fill.Tensor",
        "select.int",
        "flatten.using_ints",
        "any.default",
        "any.dim",
        "all.default",
        "cumsum.default",
        "index_select.default",
        "gather.default",
        "add.Tensor",
        "sub.Tensor",
        "add_.Tensor",
        "mul_.Tensor",
        "relu_.default",
        "tanh.default",
        "sigmoid.default",
        "cos.default",
        "sin.default",
        "mean.dim",
        "mean.default",
        "topk.default",
        "sort.default",
        "max.dim",
        "min.dim",
        "scatter.src",
        "scatter.value",
        "scatter_add.default",
        "new_zeros.default",
        "argmax.default",
        "cummax.default",
        "contiguous.default",
    )
}

FUNCTIONS = {
    f"aten.{op}": f"torch.{op.split('.')[0]}"
    for op in (
        "convolution.default",
        "cat.default",
        "stack.default",
        "where.self",
        "relu.default",
        "maximum.default",
        "minimum.default",
        "bmm.default",
        "mm.default",
        "native_layer_norm.default",
        "native_group_norm.default",
        "logical_not.default",
        "logical_and.default",
        "arange.default",
        "zeros_like.default",
        "ones_like.default",
        "full_like.default",
    )
} | {
    "aten._softmax.default": "torch._softmax",
    "aten._log_softmax.default": "torch._log_softmax",
    "aten.gelu.default": "F.gelu",
    "aten.silu.default": "F.silu",
}

LAST = 1 << 62
"""A slice that ends here or later takes the rest of the dim."""

SPREAD = frozenset({"reshape", "expand", "permute"})
"""Methods that take a list as separate arguments."""

OVER_DIMS = frozenset({"sum", "mean", "amax", "amin", "any", "squeeze"})
"""Methods that take a single dim as well as a list."""

VIEWS = frozenset({"reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand"})


def inlined(node: fx.Node) -> bool:
    """Whether ``node`` is printed as part of the line that reads it.

    That is a contiguous copy for a kernel that needs one, or a view that the next line views again.
    """
    if node.target is torch.ops.aten.contiguous.default:
        return True
    reader = node.next
    if len(node.users) != 1 or reader not in node.users or not reader.args or reader.args[0] is not node:
        return False
    views = _is_view(node.target) and _is_view(reader.target)
    return views and reader.meta.get("module") == node.meta.get("module")


@cache
def _is_view(target: Any) -> bool:
    return METHODS.get(str(target)) in VIEWS


@cache
def _name(target: Any) -> str:
    return str(target)


def expression(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Return the right-hand side of the assignment for ``node``."""

    def text(value: Any) -> str:
        if isinstance(value, fx.Node) and inlined(value):
            return expression(value, names)
        return literal(value, names)

    target, kwargs = node.target, node.kwargs
    name = _name(target)
    if name == "aten.convolution.default" and len(node.args[3]) in (1, 2, 3):  # type: ignore[arg-type]
        return _convolution(node, text)
    args = list(map(text, node.args))
    special = _special(node, args)
    if special is not None:
        return special
    if name in INFIX and not kwargs and len(args) == 2:
        return f"{args[0]} {INFIX[name]} {args[1]}"
    if name == "aten.neg.default":
        return f"-{args[0]}"
    if name in ("aten.bitwise_not.default", "aten.logical_not.default") and _dtype(node.args[0]) == "bool":
        return f"~{args[0]}"
    if name == "aten._to_copy.default" and set(kwargs) == {"dtype"} and _dtype(node) != _dtype(node.args[0]):
        return f"{args[0]}.to({text(kwargs['dtype'])})"
    if name == "aten.slice.Tensor":
        sliced = _slice(node, args)
        if sliced:
            return sliced
    if name == "aten.constant_pad_nd.default":
        return f"F.pad({', '.join([*args[:2], *(f'value={v}' for v in args[2:])])})"
    args = _arguments(node, args, text)
    if name in METHODS and isinstance(node.args[0], fx.Node):
        method = METHODS[name]
        if len(args) > 1 and (method in SPREAD or (method in OVER_DIMS and "," not in args[1])):
            args[1] = args[1].removeprefix("[").removesuffix("]") or args[1]
        return f"{args[0]}.{method}({', '.join(args[1:])})"
    return f"{function(target)}({', '.join(args)})"


@cache
def _arguments_of(target: OpOverload) -> tuple[dict[str, Any], bool]:
    """Return an op's arguments by name, and whether all can be passed as keywords."""
    found = {a.name: a for a in target._schema.arguments}
    return found, not any(map(keyword.iskeyword, found))


def _arguments(node: fx.Node, given: list[str], text: Callable[[Any], str]) -> list[str]:
    """Return the arguments of a call, without defaults, and with flags as keywords."""
    if not isinstance(node.target, OpOverload):
        return given + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    schema, nameable = _arguments_of(node.target)
    made, by_name = list[str](), False
    for argument, value, said in zip(schema.values(), node.args, given, strict=False):
        assumed = nameable and _is_default(argument, value)
        by_name = by_name or assumed or (nameable and isinstance(value, bool))
        if not assumed:
            made.append(f"{argument.name}={said}" if by_name else said)
    return made + [f"{k}={text(v)}" for k, v in node.kwargs.items() if not _is_default(schema[k], v)]


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value():
        return False
    default = argument.default_value
    if argument.name == "end" and isinstance(value, int):
        return value >= LAST
    if isinstance(default, list):
        return isinstance(value, (list, tuple)) and list(value) == default
    return type(value) is type(default) and bool(value == default)


def _convolution(node: fx.Node, text: Callable[[Any], str]) -> str:
    given: Any = node.args
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = given
    options = {"stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1), "groups": ([groups], 1)}
    if transposed:
        options["output_padding"] = (output_padding, 0)
    args = [text(x), text(weight), *([] if bias is None else [text(bias)])]
    for name, (values, default) in options.items():
        if any(v != default for v in values):
            args.append(f"{name}={text(values[0] if len(set(values)) == 1 else list(values))}")
    return f"F.conv{'_transpose' if transposed else ''}{len(stride)}d({', '.join(args)})"


@cache
def function(target: Any) -> str:
    """Return the name by which a program calls ``target``."""
    name = str(target)
    if isinstance(target, OpOverload):
        if target.namespace == "autopar":
            return name.split(".")[1]
        return FUNCTIONS.get(name, name if target.namespace == "aten" else f"torch.ops.{name}")
    if target is torch.nn.functional.linear:
        return "F.linear"
    if target is torch.matmul:
        return "torch.matmul"
    return f"spmd.{target.__name__}"


def _special(node: fx.Node, args: list[str]) -> str | None:
    """Return the text of a call with a syntax of its own, or None."""
    name = getattr(node.target, "__name__", "")
    if isinstance(node.target, OpOverload):
        return None
    if name == "linear_of_transposed":
        return f"F.linear({args[0]}, {args[1]}.t(), {args[2]})"
    if node.target is torch.matmul:
        return f"{args[0]} @ {args[1]}"
    if name == "gradient_of_weight":
        last = node.args[2]
        left, right = (f"{a}.flatten(0, {last})" if last else a for a in args[:2])
        return f"{left}.t() @ {right}"
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    return None


def _slice(node: fx.Node, args: list[str]) -> str:
    """Return a text such as ``x[:, 1:]``, or "" if the bounds are not plain integers."""
    bounds = [*node.args[2:], *[None, None, 1][len(node.args) - 2 :]] if len(node.args) < 5 else list(node.args[2:])
    dim = node.args[1] if len(node.args) > 1 else 0
    start, end, step = bounds
    shape = node.meta["tensor"].meta.shape if isinstance(node.meta.get("tensor"), LocalTensor) else ()
    plain = all(b is None or isinstance(b, int) for b in bounds) and isinstance(dim, int) and shape
    if not plain or step != 1 or not isinstance(dim, int):
        return ""
    first = "" if start in (None, 0) else str(start)
    last = "" if end is None or (isinstance(end, int) and end >= LAST) else str(end)
    where = dim % len(shape)
    before = "..., " if where == len(shape) - 1 > 1 else ":, " * where
    return f"{args[0]}[{before}{first}:{last}]"


def _dtype(value: Any) -> str:
    tensor = value.meta.get("tensor") if isinstance(value, fx.Node) else None
    return tensor.meta.dtype if isinstance(tensor, LocalTensor) else ""


def quoted(text: str) -> str:
    """Quote a module path; keys of a ``ModuleDict`` may contain any character but a dot."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def printable(text: str) -> str:
    """Make ``text`` safe for a one-line comment. A name may hold any character, even one that ends the line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def docstring(text: str) -> str:
    """Return ``text`` as a docstring, with quotes and backslashes escaped."""
    lines = (printable(line).replace("\\", "\\\\").replace('"""', '\\"\\"\\"') for line in text.split("\n"))
    return '"""' + "\n".join(lines) + '\n"""'


def literal(value: Any, names: Mapping[fx.Node, str]) -> str:
    """Return an argument as Python."""
    if isinstance(value, fx.Node):
        return "rank.device" if value.target is spmd.device else names.get(value, value.name)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(literal(v, names) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and math.isnan(value):
        return 'float("nan")'
    if isinstance(value, float) and math.isinf(value):
        return f'float("{value}")'
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, OpOverload):
        return f"torch.ops.{value}"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value)
