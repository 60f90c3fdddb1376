"""Adaptive pooling and sampling of images. Samples and channels may be cut, spatial dims are whole."""

from __future__ import annotations

from autopar.strategies.registry import LinearSets, aten, rule


def _space(prefix: str, n: int) -> str:
    return " ".join(f"[{prefix}{i}]" for i in range(n))


def _pooled(n: int, *, results: int = 1) -> str:
    pooled = f"... {_space('y', n)}"
    return f"... {_space('x', n)} -> {', '.join([pooled] * results)}"


def _unpooled(n: int, *, indices: bool = False) -> str:
    """Write the rule of pooling's gradient. The operands are the result's gradient, x, and indices of the maxima."""
    y, x = f"... {_space('y', n)}", f"... {_space('x', n)}"
    return f"{y}, {x}, {y} -> {x}" if indices else f"{y}, {x} -> {x}"


LINEAR: LinearSets = ((0,),)

for _n in (2, 3):
    rule(f"aten._adaptive_avg_pool{_n}d", _pooled(_n), linear=LINEAR)
    rule(f"aten._adaptive_avg_pool{_n}d_backward", _unpooled(_n), linear=LINEAR)
    rule(f"aten.adaptive_max_pool{_n}d", _pooled(_n, results=2))
    rule(f"aten.adaptive_max_pool{_n}d_backward", _unpooled(_n, indices=True), linear=LINEAR)

rule(aten.max_unpool2d, f"... {_space('y', 2)}, ... {_space('y', 2)} -> ... {_space('x', 2)}", linear=LINEAR)

_SAMPLED = "n c [x0] [x1], n y0 y1 [xy]"
rule(aten.grid_sampler_2d, f"{_SAMPLED} -> n c y0 y1", linear=LINEAR)
rule(aten.grid_sampler_2d_backward, f"n c y0 y1, {_SAMPLED} -> {_SAMPLED}", linear=LINEAR)
_SAMPLED_3D = "n c [x0] [x1] [x2], n y0 y1 y2 [xyz]"
rule(aten.grid_sampler_3d, f"{_SAMPLED_3D} -> n c y0 y1 y2", linear=LINEAR)
rule(aten.grid_sampler_3d_backward, f"n c y0 y1 y2, {_SAMPLED_3D} -> {_SAMPLED_3D}", linear=LINEAR)

for _kind in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    rule(f"aten.{_kind}", f"n c {_space('x', 2)} -> n c {_space('y', 2)}", linear=LINEAR)
    rule(f"aten.{_kind}_backward", f"n c {_space('y', 2)} -> n c {_space('x', 2)}", linear=LINEAR, shape_args={2: 0})

for _n in (2, 3):
    _x, _y = f"n c {_space('x', _n)}", f"n c {_space('y', _n)}"
    rule(f"aten.fractional_max_pool{_n}d", f"{_x}, n c [at] -> {_y}, {_y}")
    rule(f"aten.fractional_max_pool{_n}d_backward", f"{_y}, {_x}, {_y} -> {_x}", linear=LINEAR)


# Sliding blocks: channels are the first factor of a block's elements.
rule(aten.im2col, "n c [x0] [x1] -> n (c [k]) [windows]", linear=LINEAR)
rule(aten.col2im, "n (c [k]) [windows] -> n c [x0] [x1]", linear=LINEAR)
