"""What attention holds besides its results while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.planner.footprint.layouts import (
    Layout,
    by_rows,
    contiguous,
    lies_by_rows,
    narrowed,
    pointwise_layout,
    with_length,
)
from autopar.planner.footprint.local_op import BLOCKS, SCALARS, Formulas, LocalOp, wide
from autopar.sharding import Loan
from autopar.sharding.loan import share
from autopar.sharding.strategy import ring_axes
from autopar.sharding.zigzag import shards, zigzag
from autopar.strategies import lent


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
        rows = min(s, max(1, BLOCKS[op.kind][0] // max(1, b * h * t)))
        return _Scores(b, h, s, t, d, e, rows, wide(op.operands[q][1]), bool(op.node.kwarg("dropout_p")))

    @property
    def block(self) -> int:
        return self.b * self.h * self.rows * self.t

    def vectors(self, width: int) -> int:
        return self.b * self.h * self.rows * width


def _flash(op: LocalOp, q: int, masked: bool) -> int | None:
    """Return the bytes that torch's kernel for CPUs takes besides the results; None if it is not used.

    It holds the additive mask and copies of operands whose rows are apart, and after these, copies of results that it
    lays out in another way: attention like the queries, and its row sums by rows. Operand ``q`` is followed by k, v and
    the mask.
    """
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
    read = [*op.operands[: q + 3], *op.operands[q + 3 + masked : q + 4 + masked][:q]]
    copied = sum(op.nbytes(y) for y in read if not _in_rows(y[0]))
    again = 0
    if q == 0:
        again = _copied_again(op, op.operands[:1])
        again += 0 if lies_by_rows(op.results[1][0]) else op.nbytes(op.results[1])
    return max(making + mask - op.written, mask + copied, again)


def _flash_on_gpu(op: LocalOp, q: int, masked: bool, ends_alike: bool) -> int | None:
    """Return the bytes that torch's flash kernel for GPUs takes besides the results; None if it is not used.

    The backward adds up the gradient of the queries in single precision, where heads share keys it makes those of keys
    and values for every head, and it copies the output and its gradient unless the rows of all heads lie together. A
    result is laid out like its operand, and copied if rows of all heads do not lie together there.

    Args:
        ends_alike: whether the last of the queries reads all keys, as the kernel's causal mask has it.
    """
    (x, size), (k, _), (v, _) = op.operands[q : q + 3]
    (b, h, s, d), (_, g, t, _) = x.shape, k.shape
    supported = size == 2 and d % 8 == 0 and d <= 256 and d == v.shape[3] and x.numel * k.numel > 0
    plain = not masked and not op.node.kwarg("dropout_p") and (ends_alike or not op.node.kwarg("is_causal"))
    if op.device != "cuda" or not supported or not plain:
        return None
    width = -(-d // 32) * 32 if d <= 192 else 256
    if q:
        rows = -(-s // 128) * 128
        working = b * h * rows * (width + 1) * 4 + (2 * b * h * t * d * size if g != h else 0)
        working += sum(op.nbytes(y) for y in (op.operands[0], op.operands[4 + masked]) if y[0] != by_rows(y[0].shape))
    else:
        working = b * h * s * (width + 1) * 4 * _splits(b * h * -(-s // 64), t)
    copied = sum(op.nbytes(y) for y in op.operands[: q + 3] if not _in_rows(y[0]))
    again = _copied_again(op, op.operands[q : q + 3] if q else op.operands[:1])
    return copied + max(working, again) + SCALARS


def _copied_again(op: LocalOp, like: Sequence[tuple[Layout, int]]) -> int:
    """Return the bytes of results that kernels lay out like these operands, and that are then copied."""
    made = zip(op.results, like, strict=False)
    return sum(op.nbytes(r) for r, (x, _) in made if _in_rows(x) and not lies_by_rows(pointwise_layout([x], x.shape)))


def _splits(blocks: int, keys: int) -> int:
    """Return at most how many parts of the keys the kernel takes by themselves to keep all processors of a GPU busy;
    0 where it takes all together, as it does when the blocks of queries alone nearly fill the GPU."""
    return 0 if blocks >= PROCESSORS else min(128, -(-keys // 64), -(-3 * PROCESSORS // blocks))


def _in_rows(x: Layout) -> bool:
    return x.is_contiguous or x.strides[-1] == 1


PROCESSORS = 320
"""Blocks of queries that run at a time on the largest GPU: two on each multiprocessor."""


def _has_mask(op: LocalOp, position: int) -> bool:
    from autopar.ir import Value

    return position < len(op.node.args) and isinstance(op.node.args[position], Value)


def _attention(op: LocalOp) -> int:
    if (loan := _loan(op)) is not None:
        return _balanced(op, loan, 0, _attention_in_blocks)
    if axes := ring_axes(op.strategy):
        return _on_a_ring(op, axes, 0)
    return _attention_alone(op)


def _attention_alone(op: LocalOp) -> int:
    flash = _flash(op, 0, _has_mask(op, 3))
    return _attention_in_blocks(op, _all_rows(op, 0)) if flash is None else flash


def _all_rows(op: LocalOp, q: int) -> bool:
    return op.operands[q][0].shape[2] == op.operands[q + 1][0].shape[2]


def _in_parts(op: LocalOp, q: int) -> int | None:
    """Return at most the bytes of causal attention whose first query reads several keys, by torch's kernel for CPUs;
    None if it is not used. Results for those keys and for the others are joined.
    """
    (x, size), (v, _) = op.operands[q], op.operands[q + 2]
    if op.device != "cpu" or op.node.kwarg("dropout_p") or x.shape[-1] != v.shape[-1]:
        return None
    if q:  # gradients of the keys are joined, and those of the queries added
        return op.written + op.nbytes(op.results[0])
    converted = 2 * 4 * op.results[0][0].numel if size < 4 else 0
    return op.written + converted + 4 * op.nbytes(op.results[1])


def _attention_in_blocks(op: LocalOp, ends_alike: bool = True) -> int:
    if (found := _in_parts(op, 0)) is not None:
        return found
    if (flash := _flash_on_gpu(op, 0, _has_mask(op, 3), ends_alike)) is not None:
        return flash
    a = _Scores.of(op, 0)
    converted = sum(x.numel * 4 for x, size in op.operands[:3] if size < 4)
    weights = a.block * (a.wide + (a.wide + 9 if a.dropout else 1))
    return converted + weights + (a.vectors(a.d) + 2 * a.vectors(a.e) + 5 * a.vectors(1)) * a.wide + SCALARS


def _attention_backward(op: LocalOp) -> int:
    if (loan := _loan(op)) is not None:
        return _balanced(op, loan, 1, _backward_in_blocks)
    if axes := ring_axes(op.strategy):
        return _on_a_ring(op, axes, 1)
    return _backward_alone(op)


def _backward_alone(op: LocalOp) -> int:
    flash = _flash(op, 1, _has_mask(op, 4))
    return _backward_in_blocks(op, _all_rows(op, 1)) if flash is None else flash


def _loan(op: LocalOp) -> Loan | None:
    return lent(op.node, op.strategy, op.metas, op.mesh)


def _balanced(op: LocalOp, loan: Loan, q: int, in_blocks: Callable[[LocalOp], int]) -> int:
    """Return the bytes of an attention whose rows are lent, as in ``spmd.lending``.

    These are rows on their way, the results of the kept rows and of the guests, and what either call holds.

    Args:
        q: the position of the queries, before which there is nothing or the gradient of the result.
    """
    own = share(loan.n, loan.axes, loan.lent, op.mesh, op.at)
    cut = {*range(q + 1), *range(q + 3, len(op.operands))}

    def of(rows: int, stop: int, *, arrived: bool = False) -> tuple[LocalOp, int, int]:
        """Return the call of some rows, and the bytes of what it reads and makes for them alone. They are parts of the
        operands, unless rows have arrived from another rank."""
        lengths = {i: rows if i in cut else stop for i, (x, _) in enumerate(op.operands) if len(x.shape) > 2}
        parts = {i: _with_rows(op.operands[i][0], n, dense=arrived and i in cut) for i, n in lengths.items()}
        operands = tuple((parts.get(i, x), size) for i, (x, size) in enumerate(op.operands))
        made = [rows, *(rows if q == 0 else stop for _ in op.results[1:])]
        results = tuple((_with_rows(x, n), size) for (x, size), n in zip(op.results, made, strict=True))
        part = replace(op, operands=operands, results=results)
        return part, sum(op.nbytes(operands[i]) for i in cut if i in lengths), part.written

    def held(part: LocalOp, first: int) -> int:
        """Return what a call holds; products copy the first of the keys and values, if nothing else has."""
        copies = op.operands[q][1] >= 4 and _in_parts(op, q) is None
        alone = _backward_alone if q else _attention_alone
        return (in_blocks if first else alone)(part) + (
            sum(map(op.nbytes, part.operands[q + 1 : q + 3])) if copies else 0
        )

    kept, _, made = of(own.kept, own.start + own.kept)
    guests, arrived, guests_made = of(own.guests, own.first + own.guests, arrived=True)
    going = of(own.lent, own.stop)[1]
    returned = sum(op.nbytes((_with_rows(x, own.lent), size)) for x, size in op.results[: 1 if q else None])
    joined = op.written if own.lent or q else 0
    at_most = max(
        going + arrived + made + held(kept, own.start),
        2 * arrived + made + guests_made + held(guests, own.first),
        made + guests_made + returned + joined,
    )
    return at_most - op.written


def _on_a_ring(op: LocalOp, axes: tuple[int, ...], q: int) -> int:
    """Return at most the bytes of an attention on a ring, as in ``spmd.ring_attention``.

    These are rows on their way into another order and in that order, the block at hand and those on their way, sums in
    the accumulation dtype, and the call of the block. Causal attention calls all rows with a rank's own block or with
    half of another, or half of the rows with a whole one; with dropout it calls halves of both.

    Args:
        q: the position of the queries, before which there is nothing or the gradient of the result.
    """
    causal, dropout, masked = *(bool(op.node.kwarg(k)) for k in ("is_causal", "dropout_p")), _has_mask(op, q + 3)
    n = op.metas[q + 1].shape[2]
    shares = [*shards(n, axes, op.mesh), *(zigzag(n, axes, op.mesh) if causal else ())]
    keys = max(block.rows for block in shares)
    rows = keys if causal else op.operands[q][0].shape[2]
    size, given = wide(op.operands[q][1]), op.operands[q][1]
    whole = _call(op, q, rows, keys)
    block = sum(map(op.nbytes, whole.operands[q + 1 : q + 3]))
    ordered = sum(op.nbytes(x) for i, x in enumerate(whole.operands) if len(x[0].shape) > 2) if causal else 0
    summed = sum(x.numel * size for x, _ in (whole.results if q else whole.results[:1]))
    vectors = rows * math.prod(whole.operands[q][0].shape[:2]) * size
    summed += 0 if q else 2 * vectors

    def work(rows: int, keys: int) -> int:
        call = _call(op, q, rows, keys)
        if q:
            return call.written + _backward_alone(call)
        merging = 6 * vectors + (call.operands[3][0].numel if masked else 0)
        merging += call.results[0][0].numel * size if given < size else 0
        return call.written + max(_attention_alone(call), merging)

    # Beside each call: blocks at hand, to come and copied to be sent; in the backward also gradients that go and come.
    half = -(-keys // 2)
    if not causal:
        most = (4 if q else 2) * block + work(rows, keys)
    elif dropout:
        made = block * size // given if q else 0
        most = (4 * block if q else 5 * block // 2) + made + work(half, half)
    else:
        beside = (3, 4) if q else (2, 2.5)
        most = max(
            3 * block // 2 + work(rows, keys),
            int(beside[0] * block) + work(rows, half),
            int(beside[1] * block) + work(half, keys),
        )
    returned = (whole.written if given < size else 0) + (2 * whole.written if causal else 0) + 2 * vectors
    return max(2 * ordered, ordered + summed + most, summed + returned) - op.written


def _call(op: LocalOp, q: int, rows: int, keys: int) -> LocalOp:
    """Return the attention of some rows to some keys."""
    masked = _has_mask(op, q + 3)

    def cut(i: int, x: Layout) -> Layout:
        if masked and i == q + 3:
            return contiguous((*x.shape[:-1], keys)) if x.shape[-1] > 1 else x
        return _with_rows(x, (keys if i in (q + 1, q + 2) else rows) if len(x.shape) > 2 else None)

    operands = tuple((cut(i, x), size) for i, (x, size) in enumerate(op.operands))
    made = [rows, *(keys if q else rows for _ in op.results[1:])]
    results = tuple((_with_rows(x, n), size) for (x, size), n in zip(op.results, made, strict=True))
    return replace(op, operands=operands, results=results)


def _with_rows(x: Layout, rows: int | None, *, dense: bool = True) -> Layout:
    """Return some rows of [batch, heads, rows, ...] by themselves, or as a part of ``x``."""
    if rows is None:
        return x
    if not dense:
        return narrowed(x, 2, rows)
    shape = with_length(x.shape, 2, rows)
    return by_rows(shape) if len(shape) > 3 else contiguous(shape)


def _backward_in_blocks(op: LocalOp, ends_alike: bool = True) -> int:
    if (found := _in_parts(op, 1)) is not None:
        return found
    if (flash := _flash_on_gpu(op, 1, _has_mask(op, 4), ends_alike)) is not None:
        return flash
    a = _Scores.of(op, 1)
    halves = op.operands[1][1] < 4
    converted = sum(op.operands[i][0].numel * 4 for i in (0, 1, 2, 3)) + a.b * a.h * a.s * a.e * 4 if halves else 0
    gradients = sum(x.numel * 4 for x, _ in op.results) if halves else 0
    weights = a.block * (2 * a.wide + (a.wide + 9 if a.dropout else 1))
    products = max(op.operands[2][0].numel, op.operands[3][0].numel) * a.wide
    return converted + gradients + weights + products + (2 * a.vectors(a.d) + 2 * a.vectors(a.e)) * a.wide + SCALARS


FORMULAS: Formulas = {
    "autopar.attention": _attention,
    "autopar.attention_backward": _attention_backward,
}
