"""Chooses one option a node: weighted constraint networks with usage limits, solved to proven bounds. Numbers only."""

from autopar.repetition import Run, shift_of
from autopar.solver.blocks.folding import fold
from autopar.solver.blocks.parts import Tied
from autopar.solver.blocks.repetition import find_runs
from autopar.solver.dual.planes import highest_point
from autopar.solver.integer.pulp_backend import solver_name
from autopar.solver.minimum_limit import smallest_choice, sum_of_least
from autopar.solver.pipeline import solve
from autopar.solver.problem import (
    NO_DUALS,
    Duals,
    Edge,
    Problem,
    Solution,
    TraceEntry,
    Usage,
    UsagePrices,
    evaluate,
    peak_usage,
    relative_gap,
)
from autopar.solver.reduce.incumbent import Fallback, Gap, gap_of

__all__ = [
    "NO_DUALS",
    "Duals",
    "Edge",
    "Fallback",
    "Gap",
    "Problem",
    "Run",
    "Solution",
    "Tied",
    "TraceEntry",
    "Usage",
    "UsagePrices",
    "evaluate",
    "find_runs",
    "fold",
    "gap_of",
    "highest_point",
    "peak_usage",
    "relative_gap",
    "shift_of",
    "smallest_choice",
    "solve",
    "solver_name",
    "sum_of_least",
]
