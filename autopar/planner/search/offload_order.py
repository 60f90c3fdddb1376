"""Which of equal layers offload where not all do: the first ones, at the same cost.

What the first layers make is needed last, so it is gone for longest, and its copies have the rest of the forward and of
the backward to hide in. Where layers differ in that alone, no other order of them holds less at any moment. A problem
under constraints on memory alone doesn't see that copies wait for each other, and cares for no order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.holding import Stored
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.transfers import copied, store_seconds
from autopar.planner.search.keeping import Choice
from autopar.solver.problem import Array

EQUAL = 1e-6
"""Relative difference up to which choices cost the same."""


def offloading_first(objective: Objective, choice: Sequence[int]) -> Choice:
    """Return ``choice`` with equal layers in another order, those first that offload for longest, if that costs no
    more."""
    found = tuple(choice)
    seconds = _offload_seconds(objective, found)
    if not seconds.any():
        return found
    most = objective.seconds(found) * (1 + EQUAL)
    made_at = _made_at(objective)
    for run in objective.runs:
        copies = run.copies[np.argsort(made_at[run.copies].min(axis=1), kind="stable")]
        order = np.argsort(-seconds[copies].sum(axis=1), kind="stable")
        if np.all(order[:-1] < order[1:]):
            continue
        chosen = np.array(found)
        chosen[copies] = chosen[copies[order]]
        moved = tuple(chosen.tolist())
        found = moved if objective.seconds(moved) <= most else found
    return found


def _offload_seconds(objective: Objective, choice: Choice) -> Array:
    """Return the seconds for which each variable's value is copied to the host."""
    d, found = objective.decisions, np.zeros(len(objective.decisions.variables))
    for i, v in enumerate(d.variables):
        if v.kind == "hold" and isinstance(v.actions[choice[i]], Stored):
            found[i] = store_seconds(d, v, objective.prices.rates, copied)[choice[i]]
    return found


def _made_at(objective: Objective) -> Array:
    """Return the place in the graph at which the value of each hold variable is made; infinite for other variables."""
    d = objective.decisions
    place = {node.name: at for at, node in enumerate(d.graph.nodes)}
    return np.array([place[v.value.node] if v.kind == "hold" and v.value is not None else np.inf for v in d.variables])
