"""The error of a budget that nothing fits: what the least is, which layer holds it, and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.errors import InfeasibleError, Shortfall
from autopar.ir import Graph, Node
from autopar.planner.memory.exact import Peak, peak
from autopar.planner.problem.decide import Decisions
from autopar.planner.search.candidates import BaselineCandidate, Candidate
from autopar.planner.search.state import Result, Search, SearchState
from autopar.program import Program
from autopar.solver.clock import now

MORE_RANKS = "more ranks need less each."
"""The hint where no remedy was tried."""

KINDS_NAMED = 3
"""Kinds of memory that the error lists, the largest first."""

LAYER_SHARE = 0.25
"""Share of a kind's bytes from which its largest layer is named: a layer among many equal ones says nothing."""

NAMES = {"optimizer": "optimizer state", "step": "temporaries of the optimizer"}
"""Kinds of memory that the error calls by another name."""


def infeasible(search: Search, state: SearchState) -> InfeasibleError:
    """The error, with the smallest budget that was found to work."""
    decisions, program = _program(_leanest(search, state))
    least = peak(program, decisions.graph, decisions.mesh, search.options)
    late = state.used_up or now() >= search.ends
    mesh = search.objective.decisions.mesh
    two_stage = search.options.search == "two-stage" and mesh.size > 1
    more = f"more time may find smaller ones: time_limit={math.ceil(2 * search.options.time_limit_s)}; " if late else ""
    error = InfeasibleError(
        f"No plan {'was found in time that ' if late else ''}fits the memory budget.",
        found=f"a budget of {bytes_text(search.budget)} a device on mesh {mesh}; "
        f"the least{' so far' if late else ''} is {peak_text(least, decisions.graph)}",
        hint=f"the smallest budget that works{' so far' if late else ''} is {bytes_text(least.bytes)}: "
        f"memory_budget={least.bytes}; {more}"
        + ('search="joint" also shards for the budget.' if two_stage else MORE_RANKS),
    )
    error.shortfall = Shortfall(search.budget, least.by_kind, mesh.shape, late)
    return error


def leanest(search: Search, state: SearchState) -> Candidate:
    """The plan of the smallest peak that was found."""
    found = _leanest(search, state)
    return found.candidate if isinstance(found, BaselineCandidate) else search.arranged(found)


def _leanest(search: Search, state: SearchState) -> Result | BaselineCandidate:
    own = min((r for r in (state.leanest, state.free) if r is not None), key=lambda r: r.memory.peak_bytes)
    found: Result | BaselineCandidate = own
    least = own.memory.peak_bytes
    for baseline in search.baselines:
        if baseline.least_bytes <= least and baseline.peak_bytes < least:
            found, least = baseline, baseline.peak_bytes
    return found


def _program(found: Result | BaselineCandidate) -> tuple[Decisions, Program]:
    stated = found.stated if isinstance(found, BaselineCandidate) else found.objective
    return stated.decisions, found.program


def peak_text(found: Peak, graph: Graph) -> str:
    """The peak of a program, when and in which layer it is, and what is held then: ``3.10 GiB, held in the backward of
    transformer.h.5.mlp: optimizer state 1.40 GiB, ...``."""
    kinds = sorted(found.by_kind, key=lambda kind: -found.by_kind[kind])[:KINDS_NAMED]
    held = ", ".join(_kind_text(found, kind, graph) for kind in kinds)
    return f"{bytes_text(found.bytes)}, held {_when(found, graph)}: {held}"


def _when(found: Peak, graph: Graph) -> str:
    if found.at is None:
        return "in the optimizer's step" if found.by_kind.get("step") else "at the end of the step"
    node = graph.by_name[found.at.node]
    module = _module(node, graph)
    if module:
        return f"in the {found.at.phase} of {module}"
    line = node.source.partition(" ")[0]
    return f"in the {found.at.phase}, outside modules{f' ({line})' if line else ''}"


def _kind_text(found: Peak, kind: str, graph: Graph) -> str:
    """A kind with its bytes, and its largest layer where that has much of them."""
    by_module: dict[str, int] = {}
    for module, size in _of_kind(found, kind, graph):
        by_module[module] = by_module.get(module, 0) + size
    whole, text = found.by_kind[kind], f"{NAMES.get(kind, kind)} {bytes_text(found.by_kind[kind])}"
    module = max(by_module, key=lambda m: by_module[m], default="")
    if not module or by_module[module] < LAYER_SHARE * whole:
        return text
    return f"{text} ({bytes_text(by_module[module])} of {module})"


def _of_kind(found: Peak, kind: str, graph: Graph) -> Iterator[tuple[str, int]]:
    for (other, node), size in found.by_node.items():
        if other == kind:
            yield _module(graph.by_name[node], graph) if node else "", size


def _module(node: Node, graph: Graph) -> str:
    """The path of the module that a node belongs to, or of that whose parameter or buffer it is."""
    meaning = graph.input_of.get(node.name)
    if meaning is None:
        return node.module
    return meaning.name.rpartition(".")[0] if meaning.kind in ("parameter", "buffer", "accumulator") else ""


def bytes_text(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
