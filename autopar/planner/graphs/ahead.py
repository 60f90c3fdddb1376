"""Casts of parameters, which can run whenever a phase begins.

Under mixed precision an op reads a 16-bit cast of its weight. The cast of a shard is next to nothing, and its result is
half as large as what was cast. So it is gathered as a parameter would be: ahead of its reader.
"""

from __future__ import annotations

from autopar.ir import Graph
from autopar.planner.footprint.op_work import VIEWS

CAST = "aten._to_copy"


def casts_of_parameters(graph: Graph) -> frozenset[str]:
    """Return the ops of the forward that cast a parameter, or show it or its cast another way."""
    found = {i.node for i in graph.inputs if i.kind == "parameter"}
    parameters = frozenset(found)
    for node in graph.nodes:
        shown = node.packet == CAST or node.packet in VIEWS
        if node.phase == "forward" and shown and node.inputs and all(v.node in found for v in node.inputs):
            found.add(node.name)
    return frozenset(found - parameters)
