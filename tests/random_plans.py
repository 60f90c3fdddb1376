"""Random plans: every variable takes any option that its neighbours can reach.

Searched plans avoid odd combinations, so random ones find the errors that searched ones hide.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.errors import SolverError
from autopar.planner.pricing.objective import Objective
from autopar.planner.search.search import SEARCHES
from autopar.planner.search.state import Search, SearchState
from autopar.solver import Problem, Solution, evaluate

TRIES = 50

Mask = npt.NDArray[np.bool_]


def random_solution(problem: Problem, seed: int) -> Solution:
    """A choice without forbidden pairs, drawn variable by variable in program order.

    Raises:
        SolverError: every try ended where no option was left.
    """
    generator = random.Random(seed)
    for _ in range(TRIES):
        choice = _draw(problem, generator)
        if choice is not None:
            objective, _ = evaluate(problem, choice)
            return Solution(choice, objective, 0.0, proven=False, method=f"random, seed {seed}")
    raise SolverError("No random plan was found.", found=f"{TRIES} tries", hint="try another seed.")


def _draw(problem: Problem, generator: random.Random) -> tuple[int, ...] | None:
    """Options are drawn node by node; one that leaves some other node without any is put back."""
    allowed = [np.isfinite(c) for c in problem.costs]
    neighbours: list[list[tuple[int, Mask]]] = [[] for _ in allowed]
    for edge in problem.edges:
        finite = np.isfinite(edge.cost)
        neighbours[edge.u].append((edge.v, finite))
        neighbours[edge.v].append((edge.u, finite.T))
    for node in range(len(allowed)):
        options = [int(o) for o in np.flatnonzero(allowed[node])]
        generator.shuffle(options)
        if not any(_takes(node, option, allowed, neighbours) for option in options):
            return None
    return tuple(int(np.flatnonzero(a)[0]) for a in allowed)


def _takes(node: int, option: int, allowed: list[Mask], neighbours: Sequence[Sequence[tuple[int, Mask]]]) -> bool:
    """Allow ``node`` only ``option``, and the others what that leaves them; False, and nothing changed, where that is
    nothing for one of them."""
    before: dict[int, Mask] = {node: allowed[node]}
    allowed[node] = np.arange(len(allowed[node])) == option
    changed = deque([node])
    while changed:
        at = changed.popleft()
        for other, finite in neighbours[at]:
            left = allowed[other] & finite[allowed[at]].any(0)
            if not left.any():
                for restored, mask in before.items():
                    allowed[restored] = mask
                return False
            if (left != allowed[other]).any():
                before.setdefault(other, allowed[other])
                allowed[other] = left
                changed.append(other)
    return True


@dataclass(frozen=True)
class RandomChoice:
    """The search that draws one plan.

    Args:
        recompute: whether what can be run again is drawn too.
    """

    seed: int
    recompute: bool
    name: str = "random"

    def applies(self, search: Search, state: SearchState) -> bool:
        return True

    def run(self, search: Search, state: SearchState, until: float) -> SearchState:
        objective = Objective(search.with_reruns(), search.prices) if self.recompute else search.objective
        drawn = random_solution(objective.problem(), self.seed)
        found = search.measure(objective, drawn.choice, drawn.method, search.budget)
        return replace(state, plans=(found,), free=found)


SEARCHES["random"] = lambda seed: (RandomChoice(int(seed), recompute=False),)
SEARCHES["random+recompute"] = lambda seed: (RandomChoice(int(seed), recompute=True),)
