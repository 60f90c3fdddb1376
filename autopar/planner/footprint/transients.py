"""Bytes that an op holds while it runs, beside its operands and results: what its implementation makes and drops.

An op of ATen is one kernel as the dispatcher sees it, and makes nothing but its results. The ops of autopar are made of
several, and what each holds at its worst moment is written down here, beside a test that measures it. ``n`` elements of
integers or flags, which such an op makes by the dozen, are bounded, not followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.contraction import terms
from autopar.planner.footprint.layouts import DENSE, Layout, contiguous, like, narrowed, permuted, reshaped, with_length
from autopar.planner.footprint.op_work import VIEWS
from autopar.sharding import Halo, Step, Strategy
from autopar.sharding.halo import own_rows
from autopar.sharding.local import LocalChoice, LocalLength, LocalOffset
from autopar.sharding.spec import length, offset
from autopar.strategies import find_lowering, halos, localize

SCALARS = 64
"""Bytes of the 0-dim tensors that Python numbers become on the way."""

_NORM, _NORM_BACKWARD, _SCAN, _SOFTMAX = (0, 1, 1, 2), (3, 2, 3, 3.5), (0, 1, 1, 2), (0, 0, 1, 1.5)
COPIES: Mapping[str, tuple[float, float, float, float]] = {
    **dict.fromkeys(("aten._softmax", "aten._log_softmax", "aten._safe_softmax"), _SOFTMAX),
    "aten._softmax_backward_data": (1, 0, 2, 2), "aten._log_softmax_backward_data": (0, 1, 1, 2.5),
    **dict.fromkeys(("aten.cumsum", "aten.cumprod", "aten.logcumsumexp"), _SCAN),
    **dict.fromkeys(("aten.var", "aten.std", "aten.var_mean", "aten.std_mean"), (0, 0, 1, 0)),
    "aten.native_layer_norm": _NORM, "aten.native_group_norm": _NORM, "aten._fused_rms_norm": _SOFTMAX,
    **dict.fromkeys((
        "aten.native_layer_norm_backward", "aten.native_group_norm_backward", "aten._fused_rms_norm_backward",
    ), _NORM_BACKWARD),
}  # fmt: skip
"""Of ops along a dim that is cut: copies of the largest operand in the accumulation dtype that are held at once while
ranks make their summaries, and beside the results while they finish the op with those of all; then the same of operands
in half precision."""

EXTREMA = frozenset({"aten.cummax", "aten.cummin"})
"""These hold values and places."""

COPIED = DENSE - VIEWS
"""Their operands are held twice where they are not contiguous."""

BLOCKS = {"cpu": (1 << 21, 1 << 18, 1 << 17), "cuda": (1 << 27, 1 << 26, 1 << 26)}
"""Elements that attention, cross-entropy and random numbers work on at a time, by the kind of device; as in
``autopar.ops``."""

CHUNKS = {"cpu": 1 << 22, "cuda": 1 << 26}
LEAST_CLASSES = 128
"""Logits of a chunk, and its fewest classes; as in ``autopar.ops.linear_nll``."""


@dataclass(frozen=True)
class LocalOp:
    """One op on one rank: its operands and results, as (layout, bytes of an element), and where it runs.

    Args:
        metas: of the whole operands.
        strategy, mesh, at: on the rank at this coordinate.
    """

    node: Node
    metas: tuple[TensorMeta, ...]
    operands: tuple[tuple[Layout, int], ...]
    results: tuple[tuple[Layout, int], ...]
    device: str
    strategy: Strategy
    mesh: Mesh
    at: tuple[int, ...]

    @cached_property
    def call(self) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
        """The op that the rank runs, without its overload, and its arguments."""
        if find_lowering(self.node) is None:
            return self.node.packet, self.node.args, dict(self.node.kwargs)
        op, args, kwargs = localize(self.node, self.strategy, self.metas, self.mesh)
        return op.rpartition(".")[0], self._here(args), {k: self._here(v) for k, v in kwargs}

    def _here(self, arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(self._here, arg))
        if isinstance(arg, LocalChoice):
            return arg.values[self.at[arg.axis]]
        if isinstance(arg, (LocalLength, LocalOffset)):
            return (length if isinstance(arg, LocalLength) else offset)(arg.n, arg.axes, self.mesh, self.at)
        return arg

    def nbytes(self, x: tuple[Layout, int]) -> int:
        return x[0].numel * x[1]

    @property
    def written(self) -> int:
        return sum(map(self.nbytes, self.results))


def wide(itemsize: int) -> int:
    """Bytes of an element in the accumulation dtype."""
    return max(itemsize, 4)


def transients(op: LocalOp) -> int:
    """Bytes beside operands and results; 0 where nothing is known of the op."""
    formula = FORMULAS.get(op.call[0])
    copied = sum(op.nbytes(x) for x in op.operands if not x[0].is_contiguous) if op.call[0] in COPIED else 0
    return copied + (max(0, formula(op)) if formula is not None and op.operands else 0)


def least_transients(node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh, device: str) -> int:
    """The same whatever the strides of the operands: at least so much, since what is not contiguous may be copied
    besides. What a contraction copies hangs on strides alone. Of operands with halos, what the window has besides the
    rank's own rows, since these may have gone by then."""
    if node.packet == "autopar.contract" or (node.packet not in FORMULAS and find_lowering(node) is None):
        return 0
    one = local_op(node, option, metas, mesh, device)
    operands = list(one.operands)
    for h in halos(node, option, tuple(metas), mesh) or ():
        x, size = operands[h.operand]
        operands[h.operand] = windowed(x, h, one.at).layout, size
    read = replace(one, operands=tuple(operands))
    return max(0, sum(map(one.nbytes, operands)) - sum(map(one.nbytes, one.operands)) + transients(read))


@dataclass(frozen=True)
class Window:
    """Elements that a rank holds while it makes its window of an operand: rows that it sends in buffers of their own,
    rows that arrive, padding, and the window, 0 where it is a view of the operand."""

    sent: int
    received: int
    padding: int
    made: int
    layout: Layout


def windowed(x: Layout, h: Halo, at: Sequence[int]) -> Window:
    """The window of shard ``x`` on the rank at coordinate ``at``. As ``spmd.halos`` does it."""
    own_start, own_stop = own_rows(h.n, len(h.windows))[at[h.axis]]
    start, stop = h.windows[at[h.axis]]
    row = x.numel // max(1, x.shape[h.dim])
    sides = [n for n in (h.before, h.after) if n]
    sent = sum(0 if narrowed(x, h.dim, n).is_contiguous else n * row for n in sides)
    padding = (max(0, -start) + max(0, stop - h.n)) * row
    made = contiguous(with_length(x.shape, h.dim, stop - start))
    inside = own_start <= start and stop <= own_stop
    if inside and narrowed(x, h.dim, stop - start).is_contiguous:
        return Window(sent, sum(sides) * row, 0, 0, made)
    return Window(sent, sum(sides) * row, padding, made.numel, made)


def told_bytes(op: LocalOp, gathered: int) -> int:
    """Of an op whose ranks tell each other summaries, ``gathered`` bytes in all: these, combined, and what the formulas
    before and after make of the largest operand."""
    if not gathered:
        return 0
    x, size = max(op.operands, key=op.nbytes)
    if op.node.packet in EXTREMA:
        before, after = x.numel * (size + 8), x.numel * (size + 10)
    else:
        copies = COPIES.get(op.node.packet, (0, 0, 0, 0))[2 if size < 4 else 0 :]
        before, after = (int(c * x.numel * wide(size)) for c in copies[:2])
    return max(before - op.written, after) + 5 * gathered // 2 + SCALARS


def local_op(
    node: Node, option: Strategy, metas: Sequence[TensorMeta], mesh: Mesh, device: str,
    layouts: Sequence[Layout] | None = None, at: Sequence[int] = (),
) -> LocalOp:  # fmt: skip
    """``node`` on the rank at coordinate ``at``, or on the first. ``layouts``: of its operands, contiguous where not
    given."""
    where = tuple(at) if any(at) else None
    shapes = [s.local_shape(m.shape, mesh, where) for m, s in zip(metas, option.inputs, strict=True)]
    given = layouts if layouts is not None else [contiguous(tuple(s)) for s in shapes]
    made = [(m, s) for m, s in zip(node.outputs, option.outputs, strict=True) if m is not None and s is not None]
    return LocalOp(
        node, tuple(metas), tuple((x, m.itemsize) for x, m in zip(given, metas, strict=True)),
        tuple((contiguous(tuple(s.local_shape(m.shape, mesh, where))), m.itemsize) for m, s in made),
        device, option, mesh, where or (0,) * mesh.ndim,
    )  # fmt: skip


def held_by_ring(op: LocalOp, step: Step, operand: int, ways: int) -> int:
    """Bytes of a contraction decomposed beside ``step``, besides what it reads and makes: blocks on their way, one part
    of the product, and what making it holds. As ``spmd.products`` does it.

    Args:
        op: the contraction, of a gather with the operand that is gathered as it is before.
        operand: the one that is cut.
    """
    found = terms(op.node)
    assert found is not None
    (layout, size), (result, result_size) = op.operands[operand], op.results[0]
    gathers = step.kind == "all_gather"
    out_dim = found.becomes(operand, step.dim) if gathers else step.dim
    assert out_dim is not None
    dim = step.dim if gathers else found.operands[operand].index(found.out[out_dim])
    length = -(-result.shape[out_dim] // ways)
    block = contiguous(with_length(layout.shape, dim, length)) if gathers else narrowed(layout, dim, length)
    part = contiguous(with_length(result.shape, out_dim, length))
    operands = tuple((block, size) if i == operand else o for i, o in enumerate(op.operands))
    making = _contract(replace(op, operands=operands, results=((part, result_size),)))
    if not gathers:
        return 2 * part.numel * result_size + making
    copied = 0 if layout.is_contiguous else layout.numel * size
    return copied + min(ways - 1, 2) * block.numel * size + part.numel * result_size + making


def _contract(op: LocalOp) -> int:
    """Copies of operands whose dims cannot be merged by a view; the product before its dims are reordered. Where
    nothing is summed, neither."""
    equation = next(a for a in (*op.node.args, *(a for _, a in op.node.kwargs)) if isinstance(a, str))
    left, out = equation.replace(" ", "").split("->")
    x, w = left.split(",")
    batch = [c for c in out if c in x and c in w]
    rows, columns = [c for c in out if c not in w], [c for c in out if c not in x]
    summed = [c for c in x if c not in out]
    if not summed:
        return 0
    operands = {"x": (op.operands[0], x), "w": (op.operands[1], w)}
    if out == "".join(batch + columns + rows):
        operands, rows, columns = {"x": operands["w"], "w": operands["x"]}, columns, rows
    groups = {"x": [batch, rows, summed], "w": [batch, summed, columns]}
    if not batch:
        groups = {k: g[1:] for k, g in groups.items()}
    copies = sum(_merged(*operands[k], groups[k]) for k in "xw")
    order = "".join(batch + rows + columns)
    if order == out:
        return copies
    sizes = dict(zip(out, op.results[0][0].shape, strict=True))
    product = contiguous(tuple(sizes[c] for c in order))
    if permuted(product, [order.index(c) for c in out]).is_contiguous:
        return copies
    return max(copies, op.written)


def _merged(x: tuple[Layout, int], letters: str, groups: Sequence[Sequence[str]]) -> int:
    """Bytes of the copy that brings the dims of each group together; 0 where a view does."""
    order = [letters.index(c) for group in groups for c in group]
    y = permuted(x[0], order)
    if all(len(g) == 1 for g in groups):
        return 0
    ends = np.cumsum([0, *map(len, groups)]).tolist()
    shape = tuple(math.prod(y.shape[a:b]) for a, b in zip(ends, ends[1:], strict=False))
    return 0 if reshaped(y, shape) is not None else x[0].numel * x[1]


@dataclass(frozen=True)
class _Scores:
    """Sizes of an attention: batch, heads, queries, keys, head dims; ``rows`` of queries at a time."""

    b: int
    h: int
    s: int
    t: int
    d: int
    e: int
    rows: int
    wide: int
    dropout: bool

    @staticmethod
    def of(op: LocalOp, q: int) -> _Scores:
        (b, h, s, d), (t, e) = op.operands[q][0].shape, (op.operands[q + 1][0].shape[2], op.operands[q + 2][0].shape[3])
        rows = min(s, max(1, BLOCKS[op.device][0] // max(1, b * h * t)))
        return _Scores(b, h, s, t, d, e, rows, wide(op.operands[q][1]), bool(op.node.kwarg("dropout_p")))

    @property
    def block(self) -> int:
        return self.b * self.h * self.rows * self.t

    def vectors(self, width: int) -> int:
        return self.b * self.h * self.rows * width


def _flash(op: LocalOp, q: int, masked: bool) -> int | None:
    """Bytes that torch's kernel for CPUs takes beside the results: the additive mask and copies of operands whose rows
    are apart, and after these, copies of results that it lays out in another way; None where it is not taken. Operand
    ``q`` is followed by k, v and the mask."""
    x, v = op.operands[q], op.operands[q + 2]
    if op.device != "cpu" or op.node.kwarg("dropout_p") or x[0].shape[-1] != v[0].shape[-1]:
        return None
    mask = making = 0
    if masked:
        m, given, wanted = op.operands[q + 3][0], op.metas[q + 3].dtype, op.metas[q].dtype
        if given == "bool":
            mask, making = m.numel * x[1], m.numel
        elif given != wanted and (given != "float32" or wanted == "float64"):
            mask = m.numel * x[1]
    if op.node.kwarg("is_causal") and not _same_offset(op.node):
        rows = x[0].shape[2] * op.operands[q + 1][0].shape[2]
        mask, making = mask + rows * (x[1] + 1), making + 3 * rows
    read = [*op.operands[: q + 3], *op.operands[q + 3 + masked : q + 4 + masked][:q]]
    copied = sum(op.nbytes(y) for y in read if not _in_rows(y[0]))
    laid = [_by_rows(r.shape) for r, _ in op.results]
    if q == 0:
        laid[0] = like([x[0] if _in_rows(x[0]) else contiguous(x[0].shape)], x[0].shape)
    again = sum(op.nbytes(r) for r, made in zip(op.results, laid, strict=True) if not made.is_contiguous)
    return max(making + mask - op.written, mask + copied, again)


def _in_rows(x: Layout) -> bool:
    return x.is_contiguous or x.strides[-1] == 1


def _by_rows(shape: tuple[int, ...]) -> Layout:
    """[batch, heads, rows, ...], in memory [batch, rows, heads, ...]."""
    order = (0, 2, 1, *range(3, len(shape)))
    return permuted(contiguous(tuple(shape[i] for i in order)), order)


def _same_offset(node: Node) -> bool:
    offset = node.kwarg("offset", (0, 0, 0, 0))
    return isinstance(offset, tuple) and offset[2] == offset[3]


def _has_mask(op: LocalOp, position: int) -> bool:
    from autopar.ir import Value

    return position < len(op.node.args) and isinstance(op.node.args[position], Value)


def _attention(op: LocalOp) -> int:
    flash = _flash(op, 0, _has_mask(op, 3))
    if flash is not None:
        return flash
    a = _Scores.of(op, 0)
    converted = sum(x.numel * 4 for x, size in op.operands[:3] if size < 4)
    weights = a.block * (a.wide + (a.wide + 9 if a.dropout else 1))
    return converted + weights + (a.vectors(a.d) + 2 * a.vectors(a.e) + 5 * a.vectors(1)) * a.wide + SCALARS


def _attention_backward(op: LocalOp) -> int:
    flash = _flash(op, 1, _has_mask(op, 4))
    if flash is not None:
        return flash
    a = _Scores.of(op, 1)
    halves = op.operands[1][1] < 4
    converted = sum(op.operands[i][0].numel * 4 for i in (0, 1, 2, 3)) + a.b * a.h * a.s * a.e * 4 if halves else 0
    gradients = sum(x.numel * 4 for x, _ in op.results) if halves else 0
    weights = a.block * (2 * a.wide + (a.wide + 9 if a.dropout else 1))
    products = max(op.operands[2][0].numel, op.operands[3][0].numel) * a.wide
    return converted + gradients + weights + products + (2 * a.vectors(a.d) + 2 * a.vectors(a.e)) * a.wide + SCALARS


def _rows_of(x: Layout) -> int:
    return x.numel // max(1, x.shape[-1] if x.shape else 1)


def _class_block(op: LocalOp, x: tuple[Layout, int]) -> int:
    """Elements of the logits that are worked on at a time."""
    v = max(1, x[0].shape[-1])
    return min(_rows_of(x[0]), max(1, BLOCKS[op.device][1] // v)) * v


def _by_kernel(op: LocalOp, x: tuple[Layout, int]) -> bool:
    """Whether a Triton kernel reads the logits, and makes nothing but its result."""
    return op.device == "cuda" and x[1] <= 4 and x[0].is_contiguous


def _sumexp(op: LocalOp) -> int:
    x = op.operands[0]
    if _by_kernel(op, x):
        return 0
    copy = 0 if x[0].is_contiguous else op.nbytes(x)
    narrow = op.operands[1][0].numel * 4 if op.operands[1][1] < 4 else 0
    return copy + narrow + _class_block(op, x) * wide(x[1])


def _nll(op: LocalOp) -> int:
    x = op.operands[0]
    n = _rows_of(x[0])
    chosen = 0 if _by_kernel(op, x) else n * (9 + x[1] + 2 * wide(op.operands[1][1])) + SCALARS
    weights = _class_weights(op, 3, x[1])
    if not op.call[2].get("each") and not weights:
        return chosen
    copy = 0 if x[0].is_contiguous else op.nbytes(x)
    block = _class_block(op, x) * 4 if x[1] < 4 else 0
    factors = n * wide(x[1]) if weights else 0
    return max(chosen, copy + weights + n * wide(x[1]) + max(n, block, factors))


def _class_weights(op: LocalOp, plain: int, itemsize: int) -> int:
    """Of classes with weights, which come after ``plain`` operands, the weights in the accumulation dtype."""
    if op.node.packet.startswith("autopar.linear"):
        plain += len(op.operands) % 2 == 0
    return op.operands[-1][0].numel * wide(itemsize) + SCALARS if len(op.operands) > plain else 0


def _nll_backward(op: LocalOp) -> int:
    x = op.operands[1]
    if _by_kernel(op, x):
        return 0
    part = _class_block(op, x) * 4 if x[1] < 4 else 0
    copy = 0 if x[0].is_contiguous else op.nbytes(x)
    weights = _class_weights(op, 4, x[1])
    shares = _rows_of(x[0]) * wide(x[1]) if weights else 0
    return part + copy + weights + shares + _rows_of(x[0]) * (18 + 2 * wide(op.operands[0][1])) + SCALARS


def _chunk(op: LocalOp, x: Layout, classes: int) -> int:
    """Logits of a chunk of classes."""
    rows = _rows_of(x)
    step = max(LEAST_CLASSES, CHUNKS[op.device] // max(1, rows) // LEAST_CLASSES * LEAST_CLASSES)
    return rows * min(step, classes)


def _linear_nll(op: LocalOp) -> int:
    (x, size), (weight, _) = op.operands[:2]
    chunk, rows = _chunk(op, x, weight.shape[0]), _rows_of(x)
    weights = _class_weights(op, 3, size)
    smoothed = bool(op.call[2].get("each") or weights)
    kernel = op.device == "cuda" and size <= 4 and not (smoothed and size < 4)
    block = 0 if kernel else min(chunk, max(rows and chunk // rows, BLOCKS[op.device][1])) * wide(size)
    copy = 0 if x.is_contiguous else x.numel * size
    shares = rows * 2 * wide(size) if weights else 0
    return (
        copy + weights + shares + chunk * size + block + rows * (26 + 2 * size + (5 + smoothed) * wide(size)) + SCALARS
    )


def _linear_nll_backward(op: LocalOp) -> int:
    """A chunk of logits and its gradient; in half precision also the gradient of x in the accumulation dtype, to which
    that of each chunk is added."""
    (x, size), (weight, _) = op.operands[1:3]
    mask, rows = op.call[2]["mask"], _rows_of(x)
    chunk = _chunk(op, x, weight.shape[0])
    kernel = op.device == "cuda" and size <= 4
    block = min(chunk, max(rows and chunk // rows, BLOCKS[op.device][1])) * 4 if size < 4 and not kernel else 0
    copy = 0 if x.is_contiguous else x.numel * size
    summed = x.numel * 4 if size < 4 and mask[0] else 0
    weights = _class_weights(op, 5, size)
    shares = rows * wide(size) if weights else 0
    return copy + summed + weights + shares + 2 * chunk * size + block + rows * (36 + 3 * wide(size)) + SCALARS


def _has_part(table: Layout, whole: TensorMeta | None) -> bool:
    """Whether the vocabulary is cut."""
    return whole is not None and table.shape[0] != whole.shape[0]


def _lookup(op: LocalOp) -> int:
    """Where the vocabulary is cut, indices and which of them are here."""
    n = op.operands[1][0].numel
    return 26 * n + SCALARS if _has_part(op.operands[0][0], op.metas[0]) else max(0, 3 * n - op.written)


def _lookup_backward(op: LocalOp) -> int:
    grad, n = op.operands[0], op.operands[1][0].numel
    masked = op.nbytes(grad) + 18 * n if _has_part(op.results[0][0], op.node.outputs[0]) else 0
    if grad[1] >= 4:
        return masked + SCALARS
    made = op.results[0][0].numel * 4
    return max(masked + grad[0].numel * 4 + made - op.written, masked + made) + SCALARS


def _channels(op: LocalOp) -> int:
    return op.operands[0][0].shape[1] * wide(op.operands[0][1])


def _batch_var_mean(op: LocalOp) -> int:
    x = op.operands[0]
    return x[0].numel * wide(x[1])


def _batch_norm(op: LocalOp) -> int:
    return _in_single_precision(op, op.operands[0]) + 5 * _channels(op)


def _in_single_precision(op: LocalOp, x: tuple[Layout, int]) -> int:
    """Of a half-precision operand two tensors in single precision, which are gone, or one of them, when the result is
    made; of another the result before it is made contiguous."""
    if x[1] < 4:
        return max(2 * x[0].numel * 4 - op.written, x[0].numel * 4)
    return 0 if x[0].is_contiguous else op.written


def _batch_norm_backward_reduce(op: LocalOp) -> int:
    x = op.operands[1]
    if op.device == "cpu" and x[1] >= 4:
        return _channels(op)
    return x[0].numel * wide(x[1]) + 2 * _channels(op)


def _batch_norm_backward_input(op: LocalOp) -> int:
    x = op.operands[1]
    if op.device == "cpu" and x[1] < 4:  # the gradient is added as it is
        return x[0].numel * 4 + 6 * _channels(op)
    return _in_single_precision(op, x) + 6 * _channels(op)


def _random(op: LocalOp) -> int:
    """Runs of elements that are neighbours in the whole; of those that are drawn at a time words of random bits, what
    they are mixed with, and the numbers or masks that they become."""
    (made, size), block = op.results[0], BLOCKS[op.device][2]
    whole, cut, n = op.node.kwarg("global_shape", ()), len(made.shape), 1
    assert isinstance(whole, tuple)
    while cut and (n == math.prod(whole[cut:]) or made.shape[cut - 1] == 1):  # type: ignore[arg-type]
        cut, n = cut - 1, n * made.shape[cut - 1]
    runs = made.numel // max(1, n)
    rows, width = (min(block // n, runs), n) if n <= block else (1, block)
    dropout = op.node.packet == "autopar.dropout"
    copy = 0 if not dropout or op.operands[0][0].is_contiguous else op.written
    becomes = 4 + (0 if dropout and size == 4 else 14)
    return copy + 16 * runs + 24 * rows + rows * (16 * (width // 2 + 1) + becomes * width) + SCALARS


def _resized(x: Layout, dims: Sequence[int], sizes: Sequence[int]) -> int:
    """Elements with other lengths along ``dims``."""
    return math.prod(dict(zip(dims, sizes, strict=True)).get(d, n) for d, n in enumerate(x.shape))


def _beside_gradient(op: LocalOp, wide: int, made: int) -> int:
    """Of a gradient of more rows than are the rank's own, for an operand of the same size that gives its shape alone:
    the two, or the one and its part, whose rows are copied."""
    return max(2 * wide, wide + (made if made != wide else 0)) - op.written


def _convolution_part_backward(op: LocalOp) -> int:
    (grad, _), (x, size), (weight, _) = op.operands[:3]
    given = op.call[2]
    if not given["mask"][0]:
        return 0
    dims = given["dims"]
    rows = [
        (grad.shape[d] - 1) * given["stride"][d - 2] + given["dilation"][d - 2] * (weight.shape[d] - 1) + 1
        for d in dims
    ]  # fmt: skip
    return _beside_gradient(op, _resized(x, dims, rows) * size, op.nbytes(op.results[0]))


def _avg_pool_part(op: LocalOp) -> int:
    """By what averages at an end of a cut dim are divided, one dim after the other."""
    made, size = op.results[0]
    given, held = op.call[2], [0]
    for dim, pad, start, n in zip(*(given[k] for k in ("dims", "pads", "starts", "whole")), strict=True):
        at = dim - len(made.shape)
        kernel, stride = given["kernel"][at], given["stride"][at]
        first, last = start * stride - pad, (start + made.shape[dim] - 1) * stride - pad + kernel
        end = n + pad if given["include"] else n
        if last > end or (first < 0 and not given["include"]):
            held.append(made.shape[dim] * wide(size))
    return max(held)


def _factors(op: LocalOp) -> int:
    """At most: a copy of the matrix in the layout that is asked for, where it has another, and one of each result in
    that of LAPACK."""
    a, size = op.operands[0]
    order = (*range(len(a.shape) - 2), len(a.shape) - 1, len(a.shape) - 2)
    there = a if op.call[2]["contiguous"] else permuted(a, order)
    return op.written + (0 if there.is_contiguous else a.numel * size)


def _avg_pool_part_backward(op: LocalOp) -> int:
    (grad, _), (x, size) = op.operands
    given = op.call[2]
    dims, first = given["dims"], len(x.shape) - len(given["kernel"])
    rows = [(grad.shape[d] - 1) * given["stride"][d - first] + given["kernel"][d - first] for d in dims]
    counted = grad.numel * size if given["pads"] else 0
    return counted + _beside_gradient(op, _resized(x, dims, rows) * size, op.written)


def _convolution_transposed_part(op: LocalOp) -> int:
    """More rows than are the rank's own."""
    (x, _), (weight, _), (made, size) = op.operands[0], op.operands[1], op.results[0]
    given = op.call[2]
    each = (given[k] for k in ("stride", "padding", "dilation", "output_padding"))
    rows = [
        (n - 1) * stride - 2 * padding + dilation * (k - 1) + more + 1
        for n, k, stride, padding, dilation, more in zip(x.shape[2:], weight.shape[2:], *each, strict=True)
    ]  # fmt: skip
    wide = math.prod((*made.shape[:2], *rows))
    return wide * size if wide != made.numel else 0


def _convolution_transposed_part_backward(op: LocalOp) -> int:
    (grad, size), given = op.operands[0], op.call[2]
    shape = grad.shape
    for dim, n in zip(given["dims"], given["size"], strict=True):
        shape = with_length(shape, dim, n)
    whole = Layout(shape, grad.strides).is_contiguous
    return 0 if whole or not any(given["mask"][:2]) else math.prod(shape) * size


MOVED = 26
"""Bytes for each place in an image that is found in another: integers, and flags of what is inside."""


def _max_pool_part(op: LocalOp) -> int:
    return op.results[1][0].numel * MOVED


def _max_pool_part_backward(op: LocalOp) -> int:
    (index, _), (_, size) = op.operands[2], op.operands[0]
    return max(index.numel * MOVED - op.written, index.numel * (17 + size))


PLACED = 17
"""Bytes for each index of a dim that is cut: where it is here, twice, and whether."""


def _gather_part(op: LocalOp) -> int:
    return PLACED * op.operands[1][0].numel


def _index_of(op: LocalOp, position: int) -> int:
    """Elements of the index of the dim that is cut, which is argument ``position`` of the op; operands are in order."""
    indices = op.call[1][1]
    return op.operands[1 + sum(i is not None for i in indices[: op.call[1][position]])][0].numel


def _index_part(op: LocalOp) -> int:
    """Also whether each element of the result is here."""
    return PLACED * _index_of(op, 2) + op.results[0][0].numel + 2


def _spilling(op: LocalOp) -> tuple[Layout, int]:
    """A copy of the first operand with a place more along the dim that is cut, and that dim."""
    dim = op.call[1][SPILLING[op.call[0]]]
    shape = op.results[0][0].shape
    return contiguous(with_length(shape, dim, shape[dim] + 1)), dim


def surplus(op: LocalOp) -> int:
    """Bytes by which the memory of a result is longer than the result: of which it is the first rows."""
    if op.call[0] not in SPILLING or not op.operands:
        return 0
    big, dim = _spilling(op)
    size = op.results[0][1]
    return 0 if _copied_out(big, dim) else big.numel * size - op.written


def _copied_out(big: Layout, dim: int) -> bool:
    return not narrowed(big, dim, big.shape[dim] - 1).is_contiguous


def _spilled(op: LocalOp, n: int, beside: int) -> int:
    """With ``n`` indices, of which ``beside`` bytes are placed while the copy is there."""
    big, dim = _spilling(op)
    held = big.numel * op.results[0][1]
    if _copied_out(big, dim):
        return max(PLACED * n + (held if beside else 0) - op.written, 8 * n + held)
    return max(PLACED * n - (0 if beside else held), 8 * n)


def _index_put_part(op: LocalOp) -> int:
    return _spilled(op, _index_of(op, 4), 0)


def _scatter_part(op: LocalOp) -> int:
    return _spilled(op, op.operands[1][0].numel, 1)


def _ctc(op: LocalOp) -> int:
    """A table of the widest labels for each frame; both, and the gradient, at least in single precision."""
    (x, size), (targets, _) = op.operands[:2]
    frames, samples = x.shape[:2]
    table = samples * frames * (2 * targets.shape[1] + 1) * wide(size)
    widened = 2 * x.numel * 4 if size < 4 else 0
    return table + widened + samples * (3 * wide(size) + 16) + 4 * targets.numel + SCALARS




SORTED = 8
"""Bytes of a place among the rows that are sorted by expert."""


def _experts_mm(op: LocalOp) -> int:
    """While the ids are sorted; rows in the order of their experts, then the product in that order, then in its own."""
    (rows, size), (weight, _), (ids, _) = op.operands
    if not ids.numel or not weight.numel:
        return 0
    places = ids.numel * (4 if op.device == "cuda" else 1) * SORTED + weight.shape[0] * 4
    taken = ids.numel * rows.shape[-1] * size
    return max(_sorting(ids.numel, weight.shape[0]) - op.written, places + max(taken, op.written))


def _experts_mm_weight(op: LocalOp) -> int:
    (rows, size), (grad, _), (ids, _) = op.operands
    experts = op.results[0][0].shape[0]
    if not ids.numel or not op.written:
        return 0
    taken = ids.numel * (rows.shape[-1] + grad.shape[-1]) * size
    return max(_sorting(ids.numel, experts) - op.written, ids.numel * SORTED + experts * 4 + taken)


def _sorting(n: int, experts: int) -> int:
    """Bytes while n ids are sorted and the ends of ``experts`` are found: ids, sorted ids, their places."""
    return 3 * n * SORTED + experts * (SORTED + 4)


def _interpolate_part(op: LocalOp) -> int:
    """Dim by dim: rows that are weighted are added to others."""
    (x, size), given = op.operands[0], op.call[2]
    several = not given["kind"].startswith("nearest")
    held = 0 if not several or size >= 4 else x.numel * 4
    wide_size, shape, most = wide(size) if several else size, x.shape, 0
    for dim, n in enumerate(given["size"], len(shape) - len(given["size"])):
        shape = with_length(shape, dim, n)
        made = math.prod(shape) * wide_size
        most = max(most, held + made * (1 + several) + VECTORS[given["kind"]] * n)
        held = made
    if wide_size != size:
        return max(most, held + op.written) - op.written
    return most - op.written


def _interpolate_part_backward(op: LocalOp) -> int:
    (grad, size), given = op.operands[0], op.call[2]
    shape, now, most = grad.shape, grad.numel * wide(size), 0
    held = now if size < 4 else 0
    for dim, n in enumerate(given["size"], len(shape) - len(given["size"])):
        rows, shape = shape[dim], with_length(shape, dim, n)
        made = math.prod(shape) * wide(size)
        most = max(most, held + made + now + VECTORS[given["kind"]] * rows)
        held = now = made
    return max(most, held + op.written if size < 4 else 0) - op.written


VECTORS = {"nearest": 48, "nearest_exact": 48, "linear": 64, "cubic": 136}
"""Bytes for each row of a result: places and weights of what it comes from."""

SPILLING = {"autopar.scatter_part": 1, "autopar.index_write_part": 1, "autopar.index_put_part": 4}
"""Ops that write what lies elsewhere into a place of its own, and which of their arguments is the dim."""

FORMULAS: Mapping[str, Callable[[LocalOp], int]] = {
    "autopar.contract": _contract,
    "autopar.attention": _attention,
    "autopar.attention_backward": _attention_backward,
    "autopar.sumexp": _sumexp,
    "autopar.nll": _nll,
    "autopar.nll_backward": _nll_backward,
    "autopar.linear_nll": _linear_nll,
    "autopar.linear_nll_backward": _linear_nll_backward,
    "autopar.lookup": _lookup,
    "autopar.lookup_backward": _lookup_backward,
    "autopar.batch_var_mean": _batch_var_mean,
    "autopar.batch_norm": _batch_norm,
    "autopar.batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "autopar.batch_norm_backward_input": _batch_norm_backward_input,
    "autopar.dropout": _random,
    "autopar.uniform": _random,
    "autopar.convolution_part_backward": _convolution_part_backward,
    "autopar.convolution_transposed_part": _convolution_transposed_part,
    "autopar.convolution_transposed_part_backward": _convolution_transposed_part_backward,
    "autopar.avg_pool_part": _avg_pool_part,
    **dict.fromkeys(("autopar.linalg_det", "autopar.linalg_slogdet", "autopar.linalg_solve"), _factors),
    "autopar.checked_length": lambda op: 1,
    "autopar.avg_pool_part_backward": _avg_pool_part_backward,
    "autopar.max_pool_part": _max_pool_part,
    "autopar.max_pool_part_backward": _max_pool_part_backward,
    "autopar.gather_part": _gather_part,
    "autopar.index_part": _index_part,
    "autopar.index_put_part": _index_put_part,
    "autopar.index_write_part": _scatter_part,
    "autopar.scatter_part": _scatter_part,
    "autopar.ctc": _ctc,
    "autopar.experts_mm": _experts_mm,
    "autopar.experts_mm_weight": _experts_mm_weight,
    "autopar.interpolate_part": _interpolate_part,
    "autopar.interpolate_part_backward": _interpolate_part_backward,
}
