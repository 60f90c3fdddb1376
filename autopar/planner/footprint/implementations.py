"""The kernels that run an op on a device, and the bytes that they move: torch's one after the other, or one of our own.

Each op can be run by the kernels that its device and dtype allow, and every strategy takes the implementation that
moves the fewest bytes. The choice changes no spec, so it is made before the problem is stated. An op that is one kernel
by itself reads its operands and writes its results once, and so does each of our kernels. An eager op here is composed
of several kernels, and also moves what they hand to each other. ``docs/kernels.md`` has the formulas. CPUs run none of
our kernels, and eager ops were measured there as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.op_work import bytes_moved, local_bytes
from autopar.sharding import ShardingSpec, Step, Strategy
from autopar.sharding.strategy import moved_axes

KERNEL_DTYPES = frozenset({"float32", "float16", "bfloat16"})
COPIED_DTYPES = KERNEL_DTYPES | {"int8", "uint8", "int16", "int32", "int64"}
INDEX_BYTES = 8
SORT_PASSES = 8
"""Passes of a radix sort over keys and values. Each reads and writes them once for a byte of the key."""


class _Sizes:
    """Bytes of an op's operands and results on the fullest rank."""

    def __init__(self, node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh) -> None:
        self.metas, self.option = metas, option
        self.read = [local_bytes(m, s, mesh) for m, s in zip(metas, option.inputs, strict=True)]
        made = [(m, s) for m, s in zip(node.outputs, option.outputs, strict=True) if m is not None and s is not None]
        self.written = [local_bytes(m, s, mesh) for m, s in made]
        self.result = made[0][0]

    def wide(self, nbytes: int, meta: TensorMeta) -> float:
        """Return the bytes of the same elements in the dtype in which sums run."""
        return nbytes / meta.itemsize * max(meta.itemsize, 4)


def _lookup(s: _Sizes) -> float:
    """A cut vocabulary costs a second pass over the result, which writes zeros."""
    cut = bool(s.option.inputs[0].dims[0])
    return 2.0 * s.written[0] + s.read[1] + (2 * s.written[0] + 4 * s.read[1] if cut else 0)


def _lookup_backward(s: _Sizes) -> float:
    """The gradient is masked, converted and added to a cleared table in the wide dtype, which is converted back."""
    grad, table, cut = s.read[0], s.written[0], bool(s.option.outputs[0] and s.option.outputs[0].dims[0])
    half = s.result.itemsize < 4
    masked = 2 * grad if cut else 0
    wide_grad, wide_table = s.wide(grad, s.metas[0]), s.wide(table, s.result)
    converted = grad + wide_grad + wide_table + table if half else 0
    return masked + converted + wide_table + 3 * wide_grad + s.read[1]


def _lookup_backward_kernel(s: _Sizes) -> float:
    keys = s.read[1] / max(s.metas[1].itemsize, 1) * 2 * INDEX_BYTES
    return s.read[0] + s.written[0] + 2 * SORT_PASSES * keys


def _sumexp(s: _Sizes) -> float:
    """The differences, their exponentials and the sum are a pass each."""
    wide = s.wide(s.read[0], s.metas[0])
    return s.read[0] + 4 * wide + s.read[1] + s.written[0]


def _nll_backward(s: _Sizes) -> float:
    wide = s.wide(s.read[1], s.metas[1])
    return s.read[1] + 4 * wide + s.written[0] + sum(s.read) - s.read[1]


Formula: TypeAlias = Callable[[_Sizes], float]

KERNELS: Mapping[str, tuple[str, Formula, Formula | None]] = {
    "autopar.lookup": ("lookup", _lookup, None),
    "autopar.lookup_backward": ("lookup_backward", _lookup_backward, _lookup_backward_kernel),
    "autopar.sumexp": ("sumexp", _sumexp, None),
    "autopar.nll": ("nll", lambda s: 4.0 * s.written[0] + sum(s.read[1:]), None),
    "autopar.nll_backward": ("nll_backward", _nll_backward, None),
    "autopar.linear_nll": ("statistics", lambda s: 0.0, None),
    "autopar.linear_nll_backward": ("nll_backward", lambda s: 0.0, None),
}
"""By op: our kernel, the bytes that the eager op moves, and the bytes that our kernel moves if not each tensor once."""


def implementation(
    node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh, device: str
) -> tuple[str, float]:
    """Return our kernel that runs an op, empty for none, and the bytes that are moved on the fullest rank."""
    once = bytes_moved(node, option, metas, mesh)
    if device != "cuda" or node.packet not in KERNELS or option.outputs[0] is None:
        return "", once
    name, eager, kernel = KERNELS[node.packet]
    sizes = _Sizes(node, option, metas, mesh)
    candidates = [("", max(once, eager(sizes)))]
    if _compute_dtype(node, metas) in KERNEL_DTYPES:
        candidates.insert(0, (name, kernel(sizes) if kernel else once))
    return min(candidates, key=lambda candidate: candidate[1])


def _compute_dtype(node: Node, metas: Sequence[TensorMeta]) -> str:
    """Return the dtype of the tensor that the op is about: the logits of a loss's gradient, else the first operand."""
    return metas[1 if node.packet.endswith("nll_backward") else 0].dtype


def extra_passes(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh) -> tuple[float, ...]:
    """Return the bytes of each pass that an op makes before or after its product, on every device."""
    if node.packet in CHUNKED:
        return _chunked(node, option, metas, mesh)
    if node.packet in MOVING:
        return _moving(node, option, metas, mesh)
    return _sorting(node, option, metas, mesh) if node.packet in SORTING else ()


def _chunked(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh) -> tuple[float, ...]:
    """Logits are written and read chunk by chunk. The backward does this again, then writes their gradient, and reads
    it once for each product."""
    backward = node.packet.endswith("_backward")
    x, weight = (metas[i].local_shape(option.inputs[i], mesh) for i in ((1, 2) if backward else (0, 1)))
    logits = math.prod(x[:-1]) * weight[0] * metas[1].itemsize
    products = sum(made is not None for made in node.outputs[:2])
    return (2.0 * logits, *([2.0 * logits, *[float(logits)] * products] if backward else ()))


def _sorting(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh) -> tuple[float, ...]:
    """Passes over ids, to sort them by expert, and over rows, to bring them into that order and back, as in
    ``autopar.ops.experts``."""
    places = math.prod(metas[2].local_shape(option.inputs[2], mesh))

    def rows(meta: TensorMeta, spec: ShardingSpec) -> float:
        return 2.0 * places * meta.local_shape(spec, mesh)[-1] * meta.itemsize

    other = (metas[1], option.inputs[1]) if node.packet.endswith("_weight") else (node.outputs[0], option.outputs[0])
    moved = [rows(m, s) for m, s in ((metas[0], option.inputs[0]), other) if m is not None and s is not None]
    return (4.0 * SORT_PASSES * places * INDEX_BYTES, *moved)


def sent_rows(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh) -> int:
    """Return the bytes of one row for each choice of a rank's tokens, or of one key."""
    at = MOVING[node.packet]
    choices = math.prod(metas[at].local_shape(option.inputs[at], mesh))
    if node.packet == "autopar.route":
        return choices * INDEX_BYTES
    return choices * metas[0].local_shape(option.inputs[0], mesh)[-1] * metas[0].itemsize


def _moving(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh) -> tuple[float, ...]:
    """Passes that sort the keys; and over rows, to bring them into the order in which they are sent, or summed up."""
    at = MOVING[node.packet]
    choices = math.prod(metas[at].local_shape(option.inputs[at], mesh))
    sorted_keys = 4.0 * SORT_PASSES * choices * INDEX_BYTES
    if node.packet == "autopar.route":
        return (sorted_keys,)
    rows = 2.0 * sent_rows(node, option, metas, mesh)
    return (sorted_keys, rows, rows) if moved_axes(option) else (0.0, rows, 0.0)


MOVING: Mapping[str, int] = {"autopar.route": 0, "autopar.send": 1, "autopar.collect": 1}
"""Ops that put rows into the order of experts, or back, with the position of the experts of each token."""

CHUNKED = frozenset({"autopar.linear_nll", "autopar.linear_nll_backward"})
SORTING = frozenset({"autopar.experts_mm", "autopar.experts_mm_weight"})


def packing_kernels(step: Step, after: ShardingSpec, meta: TensorMeta, mesh: Mesh, device: str) -> tuple[str, ...]:
    """Return the kernels that pack what a collective sends and unpack what it receives, if that copies."""
    if device != "cuda" or meta.dtype not in COPIED_DTYPES or step.kind not in PACKS or step.dim < 0:
        return ()
    shape = meta.local_shape(after, mesh)
    before = {"pack": step.to_dim if step.kind == "all_to_all" else step.dim, "unpack": step.dim}
    return tuple(name for name in PACKS[step.kind] if any(n != 1 for n in shape[: before[name]]))


PACKS: Mapping[str, tuple[str, ...]] = {
    "all_to_all": ("pack", "unpack"),
    "all_gather": ("unpack",),
    "reduce_scatter": ("pack",),
}
"""The packing kernels of each kind of collective."""
