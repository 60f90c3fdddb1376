"""Whose line it was: errors of capture in the user's terms."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator
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
    'make it an op, by @triton_op("mylib::name", mutates_args={}) for Triton and @custom_op for the rest (both are in '
    "torch's library), with register_autograd for its gradient and autopar.register_rule to shard it."
)

UNROLLED = (
    "in place of torch.cond compute both sides and choose by torch.where; unroll loops; in place of flex_attention use "
    "scaled_dot_product_attention with a mask."
)

_KNOWN = {
    "active drivers": AS_AN_OP + ' Where there is no GPU it needs a CPU version too: op.register_kernel("cpu").',
    "data pointer": AS_AN_OP,
    "data is not allocated": AS_AN_OP,
    "modified by an inplace operation": "on one device it fails too: compute a new tensor in place of changing one.",
    "Couldn't swap": "make modules and parameters in __init__, not in forward.",
    "igherOrderOp": UNROLLED,
    "torch._C.Generator": "draw without a generator: the program's own numbers are one sequence from one seed, on "
    "every mesh.",
    "is not an instance of torch.nn.Parameter": "give the module itself, not torch.jit.script or trace of it.",
}
"""What helps, by words of torch's error."""

_EXPERTS = (
    "this loop goes over the experts that were hit, which are values of a tensor: multiply each token by the matrices "
    "of its experts, torch.bmm(weight[ids], x), or sort tokens by expert and call torch._grouped_mm, or let every "
    "expert see all tokens and weigh what it makes, expert(x) * (weights * (ids == i)).sum(-1, keepdim=True); experts "
    "that set_experts_implementation knows are captured as they are."
)

_EDGES = (
    "which edges there are depends on values here: choose them before the model is called, as "
    "torch_geometric.utils.add_remaining_self_loops(edge_index) in the data set, and make graph convolutions with "
    "add_self_loops=False; or keep every edge, and give those that do not count a weight of zero by torch.where."
)

_NODES = (
    "how many nodes there are is read from values here: say it, as num_nodes=x.shape[0] or size=(n, n), and make the "
    "calls that ask before the model is called."
)

_BY_NAME = {"expert": _EXPERTS, "self_loop": _EDGES, "num_nodes": _NODES, "edge_index": _EDGES}
"""What helps where values are needed, by names in the line or of its function."""

_COUNTS = ("DynamicOutputShape", "Unbacked", "dynamic shape operator")
_NEEDS_VALUES = ("DataDependent", ".item()", "data-dependent", "_local_scalar_dense", "tolist", "__format__")


def is_installed(file: Path) -> bool:
    """Whether a file belongs to a library, in whatever environment, and not to the user."""
    return bool({"site-packages", "dist-packages"} & set(file.parts)) or _STANDARD in file.parents


def is_ours(file: Path) -> bool:
    """Whether a file is autopar's own."""
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
    """The error for the user: their line, what torch said, and what usually helps."""
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
            "how many elements this line gives depends on values; keep all of them, and choose by "
            "torch.where(mask, a, b), by weights that are zero elsewhere, or by topk instead; where it is always the "
            "same number, pass indices in place of the mask, x[:, index] with index = mask.nonzero()[:, 0] made before."
        )
    if any(w in text for w in _NEEDS_VALUES):
        return "this line needs the values of a tensor; write it with torch.where or masks, or move it out of forward."
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "capture allocates nothing itself; the model allocates a large constant here."
    if "cuda" in text.lower():
        return "leave the device out, or use that of an input: the plan decides where tensors are."
    return (
        "if the model runs on one device with inputs like these, this line does what a graph cannot hold: NumPy, "
        "branches on values, input or output."
    )


def user_line(error: BaseException) -> str:
    """The innermost line of the user's code, else of the library that they use, else of torch's modules."""
    lines = [line for line in _lines(error) if not is_ours(line.file) and line.file.name != "contextlib.py"]
    outside = [line for line in lines if _TORCH not in line.file.parents]
    own = [line for line in outside if not is_installed(line.file)]
    inside = [line for line in lines if _TORCH / "nn" in line.file.parents]
    chosen = next((found for found in (own, outside, inside) if found), [])
    if not chosen:
        return ""
    deeper = outside[-1] if own and outside[-1] != own[-1] else None
    return f"{chosen[-1]}" + (f" (in {deeper})" if deeper else "")


def _lines(error: BaseException) -> Iterator[Line]:
    """Of the traceback, and of the traceback that torch.fx quotes when it failed in running a captured op."""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<"):
            yield Line(Path(frame.filename).resolve(), frame.lineno or 0, frame.name, frame.line or "")
    _, quoted, stack = str(error).rpartition("Original traceback:")
    if quoted:
        for file, number, function, code in _FRAME.findall(stack):
            yield Line(Path(file).resolve(), int(number), function, code)
