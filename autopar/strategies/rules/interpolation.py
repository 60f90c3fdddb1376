"""Interpolation of images. Samples, channels and spatial dims may be cut, the latter with halos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from autopar.ir import Node
from autopar.mesh import Mesh
from autopar.sharding.halo import Halo, Window, halo, own_rows, space_cuts
from autopar.sharding.local import LocalChoice
from autopar.sharding.strategy import Strategy
from autopar.strategies.localize import local_shapes
from autopar.strategies.registry import LocalArg, LocalCall, Metas, find_rule, lowering, rule, windows

KINDS = {
    "upsample_nearest": "nearest",
    "_upsample_nearest_exact": "nearest_exact",
    "upsample_linear": "linear",
    "upsample_bilinear": "linear",
    "upsample_trilinear": "linear",
    "upsample_bicubic": "cubic",
}
SLACK = 2e-3
"""Tolerance, in rows, within which rounding could move a position to the next row."""


@dataclass(frozen=True)
class _Resize:
    """An interpolation from lengths ``n`` to lengths ``out``. A scale that is not given is 0."""

    kind: str
    align: bool
    scales: tuple[float, ...]
    n: tuple[int, ...]
    out: tuple[int, ...]


def _of(node: Node, metas: Metas) -> _Resize:
    given = dict(node.kwargs)
    if node.packet.startswith("autopar."):
        found = (given[k] for k in ("kind", "align", "scales", "n", "out"))
        return _Resize(*found)  # type: ignore[arg-type]
    name = node.packet.removeprefix("aten.")
    backward = name.endswith("_backward")
    dims = int(name.removesuffix("_backward")[-2])
    kind = KINDS[name.removesuffix("_backward")[:-2]]
    result = node.outputs[0]
    assert result is not None
    before, after = (result.shape, metas[0].shape) if backward else (metas[0].shape, result.shape)
    rest = list(node.args[3 if backward else 2 :])
    align = bool(rest.pop(0)) if not kind.startswith("nearest") and rest else False
    if node.op.endswith(".vec"):
        rest = list(cast(Sequence[float], rest[0])) if rest and rest[0] is not None else []
    scales = tuple(float(cast(float, s)) if s else 0.0 for s in (*rest, *[None] * dims)[:dims])
    return _Resize(kind, align, scales, before[-dims:], after[-dims:])


@lru_cache(maxsize=4096)
def _reach(kind: str, align: bool, scale: float, n: int, out: int) -> tuple[Window, ...]:
    """Return, for each row of the result, the rows of x that it may depend on."""
    found = []
    for row in range(out):
        if kind.startswith("nearest"):
            place = (row + 0.5 * (kind == "nearest_exact")) * (1 / scale if scale else n / out)
            low, high = math.floor(place - SLACK), math.floor(place + SLACK)
        else:
            ratio = 1 / scale if scale else n / out
            place = row * ((n - 1) / (out - 1) if out > 1 else 0.0) if align else (row + 0.5) * ratio - 0.5
            more = 1 if kind == "cubic" else 0
            low, high = math.floor(place - SLACK) - more, math.floor(place + SLACK) + 1 + more
        found.append((min(max(low, 0), n - 1), min(max(high, 0), n - 1) + 1))
    return tuple(found)


def _windows_along(resize: _Resize, i: int, ways: int, *, backward: bool) -> list[Window] | None:
    """Return the rows that each rank needs: of x for its result rows, or of the gradient for its rows of x."""
    n, out = resize.n[i], resize.out[i]
    reach = _reach(resize.kind, resize.align, resize.scales[i], n, out)
    if not backward:
        return [
            (min(reach[r][0] for r in range(a, b)), max(reach[r][1] for r in range(a, b)))
            for a, b in own_rows(out, ways)
        ]
    needed = []
    for a, b in own_rows(n, ways):
        rows = [r for r, (low, high) in enumerate(reach) if low < b and high > a]
        if not rows:
            return None
        needed.append((rows[0], rows[-1] + 1))
    return needed


def _cuts(node: Node, strategy: Strategy, resize: _Resize) -> tuple[tuple[int, int], ...] | None:
    return space_cuts(strategy.inputs[0], (1, 1, *resize.n), 2)


def _halos(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    resize, backward = _of(node, metas), node.packet.endswith("_backward")
    cuts = _cuts(node, strategy, resize)
    found = []
    for dim, axis in cuts or ():
        needed = _windows_along(resize, dim - 2, mesh.shape[axis], backward=backward)
        made = needed and halo(0, dim, axis, metas[0].shape[dim], needed, mesh)
        if not made:
            return None
        found.append(made)
    return None if cuts is None else tuple(found)


def _lower(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    halos, resize = _halos(node, strategy, metas, mesh), _of(node, metas)
    if not halos:
        known = find_rule(node)
        assert known is not None
        return local_shapes(node, strategy, mesh, known)
    backward = node.packet.endswith("_backward")
    lengths = resize.n if backward else resize.out
    windows_: list[int | LocalChoice] = [0] * len(lengths)
    own: list[int | LocalChoice] = [0] * len(lengths)
    size: list[int | LocalChoice] = list(lengths)
    for h in halos:
        rows = own_rows(lengths[h.dim - 2], mesh.shape[h.axis])
        windows_[h.dim - 2] = LocalChoice(tuple(start for start, _ in h.windows), h.axis)
        own[h.dim - 2] = LocalChoice(tuple(a for a, _ in rows), h.axis)
        size[h.dim - 2] = LocalChoice(tuple(b - a for a, b in rows), h.axis)
    start, first = (own, windows_) if backward else (windows_, own)
    kwargs: dict[str, LocalArg] = {
        "kind": resize.kind,
        "align": resize.align,
        "scales": resize.scales,
        "n": resize.n,
        "out": resize.out,
        "start": tuple(start),
        "first": tuple(first),
        "size": tuple(size),
    }
    return f"autopar.interpolate_part{'_backward' if backward else ''}.default", node.args[:1], tuple(kwargs.items())


for _kind in ("nearest1d", "linear1d", "nearest2d", "bilinear2d", "bicubic2d", "nearest3d", "trilinear3d"):
    _n = int(_kind[-2])
    _space = " ".join(f"h{i}" for i in range(_n)), " ".join(f"h{i}'" for i in range(_n))
    for _name in [f"aten.upsample_{_kind}", *([f"aten._upsample_nearest_exact{_n}d"] if "nearest" in _kind else [])]:
        rule(_name, f"n c {_space[0]} -> n c {_space[1]}", linear=((0,),))
        rule(f"{_name}_backward", f"n c {_space[1]} -> n c {_space[0]}", linear=((0,),), shape_args={2: 0})
        for _op in (_name, f"{_name}_backward"):
            windows(_op)(_halos)
            lowering(_op)(_lower)


# Captured programs hold autopar's own op, since torch decomposes its op when it is differentiated.


def _captured(node: Node, metas: Metas) -> str:
    dims = [f"h{i}" for i in range(len(metas[0].shape) - 2)]
    short, long = "n c " + " ".join(dims), "n c " + " ".join(f"{d}'" for d in dims)
    return f"{long} -> {short}" if node.packet.endswith("_backward") else f"{short} -> {long}"


for _op in ("autopar.interpolate", "autopar.interpolate_backward"):
    rule(_op, _captured, linear=((0,),))
    windows(_op)(_halos)
    lowering(_op)(_lower)
