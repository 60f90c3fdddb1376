"""Data in, decisions and a local program out."""

from autopar.planner.accumulation import summing
from autopar.planner.decisions import given_whole
from autopar.planner.forms import as_planned, plan_forms
from autopar.planner.options import Options
from autopar.planner.search import Planned, plan_graph
from autopar.planner.verify import verify

__all__ = ["Options", "Planned", "as_planned", "given_whole", "plan_forms", "plan_graph", "summing", "verify"]
