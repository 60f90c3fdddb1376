"""One more search, where the baselines beat every plan in something.

The cost has reductions launched one by one, in the program small ones go together. So a baseline may have a shorter
step than the plan of the least cost, while another costs less than it. A plan of fewer reductions costs less too, and
its step may be as short: it is the best where so much of each launch counts as in that step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar import settings
from autopar.planner.pricing.critical_paths import reduces
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.search.candidates import Candidate
from autopar.planner.search.phases import Joint
from autopar.planner.search.rounds import solve_round
from autopar.planner.search.state import Search, SearchState


def sharing_launches(search: Search, state: SearchState, baselines: Sequence[Candidate]) -> list[Candidate]:
    """The best plan where launches count as the baseline of the shortest step shares them, with its cost as of any
    other; none where that shares none, or nothing that fits was found."""
    assert state.best is not None
    launched = share_of_launches(min(baselines, key=lambda b: b.timeline.seconds), search.prices)
    if launched == 1.0:
        return []
    before = state.best.objective
    objective = Objective(before.decisions, search.prices, launched, before.sections)
    objective.start_from(before)
    again = SearchState(hideable_s=state.hideable_s, free=state.free, free_s=state.free_s)
    if before is search.objective:
        found, again = solve_round(search, again, objective, None, math.inf, search.ends)
        again = again.with_plan(search, found)
    else:
        again = Joint().run(search, replace(again, joint=objective), search.ends)
    if again.best is None:
        return []
    choice = again.best.solution.choice
    method = f"{again.best.solution.method}; launches shared"
    solution = replace(again.best.solution, objective=before.seconds(choice), method=method)
    return [
        Candidate.of("launches shared", before.decisions, solution, again.best.program, search.prices, search.options)
    ]


def share_of_launches(candidate: Candidate, prices: Prices) -> float:
    """How much of the launches of its reductions counts where a plan costs what its step takes, from 0 to 1."""
    d, choice = candidate.decisions, candidate.solution.choice
    launches_s = 0.0
    for h in filter(lambda h: reduces(d, h), d.uses):
        seconds, _ = prices.hideable(d.variables[h.source], d.variables[h.target], h)
        launches_s += seconds.item(choice[h.source], choice[h.target]) / d.accumulation_steps
    shared_s = candidate.solution.objective - candidate.timeline.seconds
    return min(max(1 - shared_s / launches_s, settings.NEAR), 1.0) if launches_s else 1.0
