"""Random small problems for the tests of the solver."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from autopar.solver import Edge, Problem, Usage


@st.composite
def problems(draw: st.DrawFn, *, limited: bool | None = None) -> Problem:
    """Draw problems of up to 6 nodes and 4 options, with forbidden entries, parallel edges, loops and usages."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = random.integers(1, 5, draw(st.integers(1, 6)))
    top = int(random.choice([3, 50]))

    def costs(shape: tuple[int, ...], forbidden: float) -> np.ndarray:
        values = random.integers(0, top, shape).astype(float)
        values[random.random(shape) < forbidden] = math.inf
        return values

    forbidden = float(random.choice([0.0, 0.15, 0.4]))
    edges = []
    for _ in range(draw(st.integers(0, 10))):
        u, v = (int(node) for node in random.integers(0, len(sizes), 2))
        edges.append(Edge(u, v, costs((sizes[u], sizes[v]), forbidden)))
    usages = []
    if limited is not False:
        for _ in range(draw(st.integers(0, 8))):
            node, start, end = int(random.integers(len(sizes))), int(random.integers(6)), int(random.integers(8))
            usages.append(Usage(node, random.integers(0, 10, sizes[node]).astype(float), start, end))
    limit = float(random.integers(0, 30)) if limited is not False and random.random() < 0.8 else math.inf
    return Problem(tuple(costs((size,), forbidden / 2) for size in sizes), tuple(edges), tuple(usages), limit)
