"""Data in, decisions and a local program out."""

from autopar.planner.graphs.accumulation import summing
from autopar.planner.options import Options
from autopar.planner.problem.decide import given_whole
from autopar.planner.search.forms import as_planned, plan_forms
from autopar.planner.search.search import Planned, plan_graph
from autopar.planner.verify import verify

__all__ = ["Options", "Planned", "as_planned", "given_whole", "plan_forms", "plan_graph", "summing", "verify"]
