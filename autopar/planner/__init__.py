"""Data in, decisions and a local program out."""

from autopar.planner.accumulation import summing
from autopar.planner.decisions import given_whole
from autopar.planner.options import Options
from autopar.planner.search import Planned, plan_graph

__all__ = ["Options", "Planned", "given_whole", "plan_graph", "summing"]
