"""Strides of local tensors: which ops return a view, and where a dense copy is made because no view is possible.

The graph knows only shapes, but strides decide whether ``reshape`` copies and whether a collective packs what it sends.
They follow from the ops: views change them as torch does, pointwise ops keep the order of their operands' dims,
attention puts the rows of all heads together, and all other ops make contiguous tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.ir import Graph, Node, Value
from autopar.planner.footprint.op_work import VIEWS
from autopar.strategies import find_rule

MAYBE_VIEWS = frozenset({"aten.view", "aten.reshape", "aten._unsafe_view", "aten._reshape_alias"})
"""Ops that are lowered to ``reshape``: a view if strides allow it, else a copy."""

NEEDS_CONTIGUOUS = frozenset(
    f"aten.{op}"
    for op in (
        "native_group_norm",
        "native_group_norm_backward",
        "view_as_complex",
        "isin",
        "adaptive_max_pool3d_backward",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward",
        "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward",
        "nll_loss2d_backward",
        "_pdist_forward",
        "_pdist_backward",
        "_weight_norm_interface",
        "_weight_norm_interface_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)
"""Kernels that read memory as if operands were contiguous, or refuse others. Autograd makes copies for them, which
capture drops as it drops all copies. The program copies their operands again if they are not contiguous."""

KEEPS_STRIDES = frozenset({"aten.clone", "aten._to_copy", "aten.empty_like", "aten.zeros_like", "aten.full_like"})
"""Ops whose results have the strides of their operand."""


ATTENTION = frozenset({"autopar.attention", "autopar.attention_backward"})
"""Ops whose results [batch, heads, rows, d] lie in memory as [batch, rows, heads, d]."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and strides of a tensor on one rank, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        dense = contiguous(self.shape).strides
        pairs = zip(self.shape, self.strides, dense, strict=True)
        return not self.numel or all(n == 1 or s == d for n, s, d in pairs)


@lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> Layout:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return Layout(shape, tuple(reversed(strides)))


def with_length(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


def narrowed(x: Layout, dim: int, length: int) -> Layout:
    """Return the layout of ``x.narrow(dim, 0, length)``."""
    return Layout(with_length(x.shape, dim, length), x.strides)


def reshaped(x: Layout, shape: tuple[int, ...]) -> Layout | None:
    """Return the layout of ``x.view(shape)``; None if only a copy can have that shape. As
    ``at::detail::computeStride``."""
    if not x.numel or not x.shape:
        return contiguous(shape)
    strides = [0] * len(shape)
    at, base = len(shape) - 1, x.strides[-1]
    old = seen = 1
    for d in range(len(x.shape) - 1, -1, -1):
        old *= x.shape[d]
        if d and (x.shape[d - 1] == 1 or x.strides[d - 1] == old * base):
            continue
        while at >= 0 and (seen < old or shape[at] == 1):
            strides[at] = seen * base
            seen *= shape[at]
            at -= 1
        if seen != old:
            return None
        if d:
            base, old, seen = x.strides[d - 1], 1, 1
    return Layout(shape, tuple(strides)) if at < 0 else None


def permuted(x: Layout, order: Sequence[int]) -> Layout:
    return Layout(tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order))


def results(
    node: Node, operands: Sequence[Layout], shapes: Sequence[tuple[int, ...]]
) -> tuple[tuple[Layout, ...], bool]:
    """Return the layouts of an op's results on one rank, and whether they share the memory of the first operand.

    Args:
        operands: layouts of its tensor operands.
        shapes: local shapes of the results.
    """
    if not operands:
        return tuple(map(contiguous, shapes)), False
    if node.packet in MAYBE_VIEWS:
        view = reshaped(operands[0], shapes[0])
        return (view or contiguous(shapes[0]),), view is not None
    if node.packet in VIEWS and not (node.packet in NEEDS_CONTIGUOUS and not operands[0].is_contiguous):
        return tuple(_view(node, operands[0], shape) for shape in shapes), True
    rule = find_rule(node)
    if node.packet in KEEPS_STRIDES and node.kwarg("memory_format") != "torch.contiguous_format":
        return tuple(pointwise_layout(operands[:1], shape) for shape in shapes), False
    if node.packet.startswith("aten.") and rule is not None and rule.elementwise:
        return tuple(pointwise_layout(operands, shape) for shape in shapes), False
    if node.packet in ATTENTION:
        return tuple(by_rows(shape) if len(shape) > 3 else contiguous(shape) for shape in shapes), False
    return tuple(map(contiguous, shapes)), False


def by_rows(shape: tuple[int, ...]) -> Layout:
    """Return the layout of [batch, heads, rows, d] that lies in memory as [batch, rows, heads, d]."""
    order = (0, 2, 1, *range(3, len(shape)))
    return permuted(contiguous(tuple(shape[i] for i in order)), order)


def lies_by_rows(x: Layout) -> bool:
    return permuted(x, (0, 2, 1, *range(3, len(x.shape)))).is_contiguous


def views_of(graph: Graph, *, whole: bool) -> frozenset[str]:
    """Return the nodes whose results share the memory of their operand.

    If not ``whole``, the tensors are shards. A reshape of whole tensors that is a view counts as a view of shards too.
    """
    shared = whole_layouts(graph)[1]
    return shared if whole else shared | {n.name for n in graph.nodes if n.packet in VIEWS and n.inputs}


def whole_layouts(graph: Graph) -> tuple[dict[Value, Layout], frozenset[str]]:
    """Return the layouts of all values that are not cut, and the nodes whose results share the memory of their
    operand then."""
    found: set[str] = set()
    known: dict[Value, Layout] = {}
    for node in graph.nodes:
        made = [(Value(node.name, i), m.shape) for i, m in enumerate(node.outputs) if m is not None]
        layouts, shared = results(node, [known[v] for v in node.inputs], [shape for _, shape in made])
        known |= {value: layout for (value, _), layout in zip(made, layouts, strict=True)}
        if shared:
            found.add(node.name)
    return known, frozenset(found)


def of_shard(whole: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a shard whose dims lie in memory as those of the whole tensor, one after the other."""
    order = sorted(range(len(shape)), key=lambda d: -whole.strides[d])
    dense = contiguous(tuple(1 if whole.strides[d] == 0 else shape[d] for d in order))
    strides = dict(zip(order, dense.strides, strict=True))
    return Layout(shape, tuple(strides[d] if whole.strides[d] else 0 for d in range(len(shape))))


def _view(node: Node, x: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a view other than a reshape, with lengths from ``shape`` and strides from ``x`` and the
    arguments."""
    ndim, name = len(x.shape), node.packet.removeprefix("aten.")
    numbers = [a for a in node.args[1:] if isinstance(a, int)]
    if name in ("t", "transpose", "permute"):
        return permuted(x, _order(name, node, ndim))
    if name == "view_as_real":  # in elements of half the size
        return Layout(shape, (*(2 * s for s in x.strides), 1))
    if name == "view_as_complex":
        return Layout(shape, tuple(s // 2 for s in x.strides[:-1]))
    if name == "unfold":
        dim, step = _dim(numbers[0], ndim), numbers[2]
        return Layout(shape, (*(s * step if d == dim else s for d, s in enumerate(x.strides)), x.strides[dim]))
    if name.removeprefix("unsafe_") in ("slice", "split", "split_with_sizes", "alias", "detach", "_conj"):
        strides = list(x.strides)
        if name == "slice" and len(node.args) > 4 and isinstance(node.args[4], int):
            strides[_dim(numbers[0], ndim)] *= node.args[4]
        return Layout(shape, tuple(strides))
    if name in ("select", "unbind"):
        gone = _dim(numbers[0] if numbers else 0, ndim)
        return Layout(shape, x.strides[:gone] + x.strides[gone + 1 :])
    if name == "unsqueeze":
        at = _dim(numbers[0], ndim + 1)
        step = x.strides[at] * x.shape[at] if at < ndim else 1
        return Layout(shape, (*x.strides[:at], step, *x.strides[at:]))
    if name == "squeeze":
        return reshaped(x, shape) or contiguous(shape)
    if name == "expand":
        new = len(shape) - ndim
        old = (0 if n == 1 != m else s for n, s, m in zip(x.shape, x.strides, shape[new:], strict=True))
        return Layout(shape, (*(0 for _ in range(new)), *old))
    return contiguous(shape)


def _dim(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


def _order(name: str, node: Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    if name == "permute":
        dims = node.args[1]
        assert isinstance(dims, tuple)
        return [_dim(d, ndim) for d in dims if isinstance(d, int)]
    if name == "t":
        return order[::-1]
    first, second = (_dim(d, ndim) for d in node.args[1:3] if isinstance(d, int))
    order[first], order[second] = order[second], order[first]
    return order


def pointwise_layout(operands: Sequence[Layout], shape: tuple[int, ...]) -> Layout:
    """Return the layout of a pointwise op's result: dense, its dims in the order of the operands' strides. As
    ``TensorIterator``."""
    full = [_broadcast(x, shape) for x in operands]
    if all(x.is_contiguous for x in full if x.shape == shape and 0 not in x.strides) or not shape:
        return contiguous(shape)
    order: list[int] = []  # from the innermost dim outwards
    for d in range(len(shape) - 1, -1, -1):
        at = len(order)
        for i in range(len(order) - 1, -1, -1):
            side = _compared(full, order[i], d)
            if side > 0:
                at = i
            elif side < 0:
                break
        order.insert(at, d)
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return Layout(shape, tuple(strides))


def _compared(full: Sequence[Layout], inner: int, outer: int) -> int:
    """Return 1 if dim ``outer`` should lie inside of dim ``inner``, -1 if outside, 0 if the operands do not say."""
    for x in full:
        a, b = x.strides[inner], x.strides[outer]
        if not a or not b:
            continue
        if a != b:
            return 1 if a > b else -1
        if x.shape[inner] > x.shape[outer]:
            return 1
    return 0


def _broadcast(x: Layout, shape: tuple[int, ...]) -> Layout:
    new = len(shape) - len(x.shape)
    old = (0 if n == 1 != m else s for n, s, m in zip(x.shape, x.strides, shape[new:], strict=True))
    return Layout(shape, (*(0 for _ in range(new)), *old))
