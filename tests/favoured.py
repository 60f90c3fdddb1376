"""Plans whose attention is cut in one way, whatever the others cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from autopar.ir import Node
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem import specs
from autopar.program import Op, Program
from autopar.sharding import Strategy
from autopar.sharding.strategy import ring_axes

RING = "s+t"


@contextmanager
def attention_by(choice: str) -> Iterator[None]:
    """Let attention take a second more unless some mesh axis does ``choice``: cut its heads, its queries, or be a ring.

    A ring may be of few rows.
    """
    seconds, least = Prices._node_seconds, specs.MIN_RING_ROWS

    def slower(self: Prices, node: Node, metas: Any, options: Sequence[Strategy], traffic: Any) -> Any:
        found = seconds(self, node, metas, options, traffic)
        if not node.packet.startswith("autopar.attention"):
            return found
        return found + np.array([0.0 if choice in o.axes else 1.0 for o in options])

    Prices._node_seconds, specs.MIN_RING_ROWS = slower, 1  # type: ignore[method-assign]
    try:
        yield
    finally:
        Prices._node_seconds, specs.MIN_RING_ROWS = seconds, least  # type: ignore[method-assign]


def on_rings(program: Program) -> list[Op]:
    """Return the ops of the program that pass blocks round a ring."""
    return [op for op in program.ops if op.strategy is not None and ring_axes(op.strategy)]
