"""Draw specs: a rectangle with the cuts of a tensor, in which the shard of rank 0 is filled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from autopar.mesh import Mesh
from autopar.plans.report.markup import tag
from autopar.sharding import ShardingSpec

WIDTH, HEIGHT = 44, 26
MOST_LINES = 12
"""Largest number of parts drawn along a side."""


def picture(spec: ShardingSpec, mesh: Mesh, shape: Sequence[int] = ()) -> str:
    """Draw the last dim from left to right and all others from top to bottom. A partial sum is hatched."""
    parts = [math.prod(mesh.shape[a] for a in axes) for axes in spec.dims]
    across = parts[-1] if parts else 1
    down = math.prod(parts[:-1]) if len(parts) > 1 else 1
    columns, lines = min(across, MOST_LINES), min(down, MOST_LINES)
    w, h = WIDTH - 2, HEIGHT - 2
    ruled = [f"M{1 + w * i / columns:.1f} 1v{h}" for i in range(1, columns)]
    ruled += [f"M1 {1 + h * i / lines:.1f}h{w}" for i in range(1, lines)]
    own = tag("rect", x=1, y=1, width=f"{w / columns:.1f}", height=f"{h / lines:.1f}", class_="own")
    kind = "cut partial" if spec.partial else "cut"
    said = describe(spec, mesh, shape)
    return tag(
        "svg",
        tag("title", escape(said)),
        tag("rect", x=1, y=1, width=w, height=h, class_="all"),
        own,
        tag("path", d="".join(ruled), class_="rule"),
        class_=kind,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        role="img",
        aria_label=said,
    )


def describe(spec: ShardingSpec, mesh: Mesh, shape: Sequence[int] = ()) -> str:
    """Describe the spec in words, with the local shape if the global one is known."""
    said = [
        f"dim {dim} cut by axis {' and '.join(mesh.names[a] for a in axes)} into "
        f"{math.prod(mesh.shape[a] for a in axes)}"
        for dim, axes in enumerate(spec.dims)
        if axes
    ]
    said += [f"a partial sum over axis {mesh.names[axis]}" for axis, _ in spec.partial]
    text = f"{spec}: " + ("; ".join(said) if said else "whole on every rank")
    if len(shape) == len(spec.dims) and shape:
        text += f"; {list(shape)} as {list(spec.local_shape(tuple(shape), mesh))} on a rank"
    return text
