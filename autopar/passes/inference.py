"""Reduce a program to its forward, for calls without gradients."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar._torch import LazyGraphModule
from autopar.spmd import Lowered


def forward_only(lowered: Lowered) -> Lowered:
    """Return ``forward(rank, *inputs) -> results``, without saved tensors and the ops that only they need."""
    graph = fx.Graph()
    results = graph.graph_copy(lowered.forward.graph, {})
    assert isinstance(results, tuple)
    graph.output(results[: len(lowered.results)])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    nothing = fx.Graph()
    nothing.placeholder("rank")
    nothing.output(())
    return replace(
        lowered,
        forward=LazyGraphModule(lowered.forward, graph),
        backward=LazyGraphModule(lowered.backward, nothing),
        saved=(),
        tangents=(),
        gradients=(),
        accumulators=(),
        accumulate=None,
        accumulated=(),
    )
