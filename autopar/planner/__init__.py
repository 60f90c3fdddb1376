"""The planner: from a captured graph to decisions and a local program."""

from autopar.planner.graphs.accumulation import with_gradient_sums
from autopar.planner.graphs.routed import with_routed_experts
from autopar.planner.options import Options
from autopar.planner.problem.decide import is_plain_output
from autopar.planner.search.forms import as_planned, plan_forms
from autopar.planner.search.search import Planned, plan_graph
from autopar.planner.verify import verify

__all__ = [
    "Options",
    "Planned",
    "as_planned",
    "is_plain_output",
    "plan_forms",
    "plan_graph",
    "verify",
    "with_gradient_sums",
    "with_routed_experts",
]
