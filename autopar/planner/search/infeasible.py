"""The error of a budget that nothing fits: what the least is, and what would help."""

from __future__ import annotations

import math

from autopar.errors import InfeasibleError
from autopar.planner.search.state import Search, SearchState
from autopar.solver.clock import now


def infeasible(search: Search, state: SearchState) -> InfeasibleError:
    """The error, with the smallest budget that was found to work."""
    found = [r for r in (state.leanest, state.free) if r is not None]
    least = min((r.memory.peak_bytes for r in found), default=math.inf)
    least = min([least, *(b.peak_bytes for b in search.baselines if b.estimated_peak_bytes <= least)])
    late = now() >= search.ends
    mesh = search.objective.decisions.mesh
    two_stage = search.options.search == "two-stage" and mesh.size > 1
    more = f"more time may find smaller ones: time_limit={math.ceil(2 * search.options.time_limit_s)}; " if late else ""
    return InfeasibleError(
        f"No plan {'was found in time that ' if late else ''}fits the memory budget.",
        found=f"a budget of {_text(search.budget)} a device on mesh {mesh}",
        hint=f"the smallest budget that works{' so far' if late else ''} is {_text(least)}: "
        f"memory_budget={math.ceil(least)}; {more}"
        + ('search="joint" also shards for the budget.' if two_stage else "more ranks need less each."),
    )


def _text(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
