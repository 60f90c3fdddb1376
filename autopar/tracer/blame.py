"""Turns errors of capture into the user's terms, with the line of their code."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from autopar.errors import CaptureError

_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\s*\n\s*(.*)')


AS_AN_OP = (
    'make it an op, with @triton_op("mylib::name", mutates_args={}) for Triton or @custom_op otherwise (both are in '
    "torch.library), register_autograd for its gradient, and autopar.register_rule to shard it."
)

UNROLLED = (
    "instead of torch.cond, compute both branches and select with torch.where; unroll loops; instead of "
    "flex_attention, use scaled_dot_product_attention with a mask."
)

_KNOWN = {
    "active drivers": AS_AN_OP + ' Without a GPU it also needs a CPU version: op.register_kernel("cpu").',
    "data pointer": AS_AN_OP,
    "data is not allocated": AS_AN_OP,
    "modified by an inplace operation": "this fails on one device too: compute a new tensor instead of changing one.",
    "Couldn't swap": "create modules and parameters in __init__, not in forward.",
    "igherOrderOp": UNROLLED,
    "torch._C.Generator": "draw without a generator: the program's random numbers are one sequence from one seed, on "
    "every mesh.",
    "is not an instance of torch.nn.Parameter": "pass the module itself, not a result of torch.jit.script or trace.",
}
"""Hints by words in torch's error."""

_EXPERTS = (
    "this loop runs over the experts that were hit, which are values of a tensor: let it do nothing but pick tokens, "
    "torch.where(mask[expert]), and add what alike experts make of each alone, out.index_add_; or multiply each token "
    "by the matrices of its experts, torch.bmm(weight[ids], x), or sort tokens by expert and call torch._grouped_mm, "
    "or let every expert see all tokens and weight its result, expert(x) * (weights * (ids == i)).sum(-1, "
    "keepdim=True); experts that set_experts_implementation supports are captured as they are."
)

_EDGES = (
    "which edges exist depends on values here: choose them before the model is called, for example with "
    "torch_geometric.utils.add_remaining_self_loops(edge_index) in the data set, and create graph convolutions with "
    "add_self_loops=False; or keep every edge, and give those that do not count a weight of zero with torch.where."
)

_NODES = (
    "the number of nodes is read from values here: pass it, as num_nodes=x.shape[0] or size=(n, n), and make the calls "
    "that read it before the model is called."
)

_BY_NAME = {"expert": _EXPERTS, "self_loop": _EDGES, "num_nodes": _NODES, "edge_index": _EDGES}
"""Hints for lines that need values, by names in the line or its function."""

_COUNTS = ("DynamicOutputShape", "Unbacked", "dynamic shape operator")
_NEEDS_VALUES = ("DataDependent", ".item()", "data-dependent", "_local_scalar_dense", "tolist", "__format__")


def is_installed(file: Path) -> bool:
    """Whether a file belongs to an installed library in any environment, and not to the user."""
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or _STANDARD in file.parents


def is_ours(file: Path) -> bool:
    """Whether a file belongs to autopar."""
    return _OURS in file.parents


class Line(NamedTuple):
    file: Path
    number: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}: {self.code}"


def line_at(file: str, number: int, function: str) -> Line:
    return Line(Path(file).resolve(), number, function, linecache.getline(file, number).strip())


def capture_error(model: nn.Module, error: BaseException) -> CaptureError:
    """Return the error for the user: their line, torch's message, and a hint."""
    where = user_line(error)
    line = where.partition(" in ")[2].lower() if _needs_values(error) else ""
    named = next((hint for name, hint in _BY_NAME.items() if name in line), None)
    reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
    return CaptureError(
        f"{type(model).__name__} cannot be captured{f' because of {where}' if where else ''}.",
        found=f"{type(error).__name__}: {reason}",
        hint=named or _hint(error),
    )


def _needs_values(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}"
    return any(word in text for word in (*_COUNTS, *_NEEDS_VALUES))


def _hint(error: BaseException) -> str:
    text = f"{type(error).__name__} {error}"
    known = next((hint for word, hint in _KNOWN.items() if word in text), None)
    if known is not None:
        return known
    if any(w in text for w in _COUNTS):
        return (
            "the number of elements that this line gives depends on values; keep all of them and select with "
            "torch.where(mask, a, b), with weights that are zero elsewhere, or with topk; if the number is always the "
            "same, index instead of masking, x[:, index] with index = mask.nonzero()[:, 0] computed before."
        )
    if any(w in text for w in _NEEDS_VALUES):
        return "this line needs the values of a tensor; use torch.where or masks, or move it out of forward."
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "capture itself allocates nothing; the model allocates a large constant here."
    if "cuda" in text.lower():
        return "omit the device, or use that of an input: the plan decides where tensors are."
    return (
        "if the model runs on one device with inputs like these, this line does what a graph cannot contain: NumPy, "
        "branches on values, input or output."
    )


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code, else of a library that they use, else of torch's modules."""
    return innermost(list(_lines(error)))


def innermost(stack: Sequence[Line]) -> str:
    """Return the line of ``stack``, whose outermost comes first, that ``user_line`` would name."""
    lines = [line for line in stack if not is_ours(line.file) and line.file.name != "contextlib.py"]
    outside = [line for line in lines if _TORCH not in line.file.parents]
    own = [line for line in outside if not is_installed(line.file)]
    inside = [line for line in lines if _TORCH / "nn" in line.file.parents]
    chosen = next((found for found in (own, outside, inside) if found), [])
    if not chosen:
        return ""
    deeper = outside[-1] if own and outside[-1] != own[-1] else None
    return f"{chosen[-1]}" + (f" (in {deeper})" if deeper else "")


def _lines(error: BaseException) -> Iterator[Line]:
    """Yield the lines of the traceback, and of one that torch.fx quotes when a captured op fails."""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<"):
            yield Line(Path(frame.filename).resolve(), frame.lineno or 0, frame.name, frame.line or "")
    _, quoted, stack = str(error).rpartition("Original traceback:")
    if quoted:
        for file, number, function, code in _FRAME.findall(stack):
            yield Line(Path(file).resolve(), int(number), function, code)
