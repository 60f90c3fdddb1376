"""Chooses one option a node: weighted constraint networks with usage limits, solved to proven bounds. Numbers only."""

from autopar.solver.brute_force import brute_force
from autopar.solver.folding import fold
from autopar.solver.minimum_limit import minimum_limit, smallest_choice
from autopar.solver.parts import Tied
from autopar.solver.pipeline import solve
from autopar.solver.problem import Edge, Problem, Solution, TraceEntry, Usage, UsagePrices, evaluate, peak_usage

__all__ = [
    "Edge",
    "Problem",
    "Solution",
    "Tied",
    "TraceEntry",
    "Usage",
    "UsagePrices",
    "brute_force",
    "evaluate",
    "fold",
    "minimum_limit",
    "peak_usage",
    "smallest_choice",
    "solve",
]
