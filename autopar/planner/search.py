"""The search: decide, price, solve, schedule, and check the exact memory; again with a tighter row until it fits."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.errors import InfeasibleError
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.constraints import resolve
from autopar.planner.decisions import Decisions, decide
from autopar.planner.liveness import MemoryProfile, profile
from autopar.planner.options import Options
from autopar.planner.pricing import Prices, problem
from autopar.planner.random_plans import random_solution
from autopar.planner.schedule import schedule
from autopar.planner.timeline import Timeline, simulate_streams
from autopar.program import Program
from autopar.solver import Problem, Solution, minimum_limit, solve
from autopar.strategies import find_rule, missing_rule

TIGHTEN_ROUNDS = 12

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A planned program and how good it is. Seconds and bytes."""

    program: Program
    decisions: Decisions
    solution: Solution
    memory: MemoryProfile
    timeline: Timeline
    timings: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def plan_graph(
    graph: Graph, mesh: Mesh, cluster: Cluster, options: Options, progress: Progress | None = None
) -> Planned:
    """Plan ``graph`` on ``mesh``.

    Raises:
        InfeasibleError: nothing fits the memory budget; the hint names the smallest that would.
        ConstraintError: a constraint names nothing or contradicts another.
    """
    say = progress or (lambda _: None)
    started = time.perf_counter()
    forced = resolve(graph, mesh, options.constraints, options.aliases)
    notices = warn_of_missing_rules(graph)
    say("strategies")
    decisions = decide(graph, mesh, options, forced)
    listed = time.perf_counter()
    say("build")
    prices = Prices(mesh, cluster)
    search = _Search(graph, decisions, prices, options, _budget(cluster, options), say)
    result = search.run(started + options.time_limit_s)
    result.timings["strategies"] = listed - started
    return Planned(
        result.program, decisions, result.solution, result.memory, simulate_streams(result.program),
        result.timings, notices,
    )  # fmt: skip


def _budget(cluster: Cluster, options: Options) -> float:
    if options.memory_budget_bytes is not None:
        return float(options.memory_budget_bytes)
    return float(cluster.device.memory_bytes)


def warn_of_missing_rules(graph: Graph) -> tuple[str, ...]:
    """One warning for each op without a rule: it is replicated."""
    notices = []
    seen: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or node.packet in seen or find_rule(node) is not None:
            continue
        seen.add(node.packet)
        line = missing_rule(node, tuple(graph.meta(v) for v in node.inputs))
        notices.append(f"{node.packet} has no sharding rule, so every rank runs it whole. To shard it, add: {line}")
        warnings.warn(notices[-1], stacklevel=3)
    return tuple(notices)


@dataclass
class _Result:
    program: Program
    solution: Solution
    memory: MemoryProfile
    timings: dict[str, float]


@dataclass
class _Search:
    graph: Graph
    decisions: Decisions
    prices: Prices
    options: Options
    budget: float
    say: Progress
    timings: dict[str, float] = field(default_factory=lambda: {"build": 0.0, "solve": 0.0, "lower": 0.0, "verify": 0.0})

    def run(self, deadline: float) -> _Result:
        """Solve; while the exact liveness is over the budget, add a row for that moment, tightened by what the rows
        do not see (redistributed copies and what an op holds while it runs)."""
        nodes = self.graph.nodes
        backward = (i for i, n in enumerate(nodes) if n.phase == "backward" and n.op != "placeholder")
        turn = next(backward, len(nodes))
        positions = [turn, len(self.graph.nodes)]
        limit = self.budget
        incumbent: Sequence[int] | None = None
        for _ in range(TIGHTEN_ROUNDS):
            result, modelled = self._once(positions, limit, deadline, incumbent)
            over = result.memory.peak_bytes - self.budget
            if over <= 0:
                return result
            incumbent = result.solution.choice
            self.say(f"over the budget by {over / 2**20:.0f} MiB: tighter")
            position = self._position(result)
            if position not in positions:
                positions.append(position)
                limit = min(limit, self.budget - self._unseen(result, position))
            else:
                limit = min(limit, modelled) - over
            if limit <= 0:
                break
        raise self._infeasible(deadline, positions)

    def _once(
        self, positions: Sequence[int], limit: float, deadline: float, warm: Sequence[int] | None
    ) -> tuple[_Result, float]:
        start = time.perf_counter()
        asked = problem(self.decisions, self.prices, self.options, positions, limit)
        built = time.perf_counter()
        self.say("solve")
        try:
            solution = self._choose(asked, deadline, warm)
        except InfeasibleError:
            raise self._infeasible(deadline, positions) from None
        solved = time.perf_counter()
        program = schedule(self.decisions, solution.choice, self.prices)
        lowered = time.perf_counter()
        memory = profile(program, self.graph, self.decisions.mesh, self.options)
        ends = {"build": built, "solve": solved, "lower": lowered, "verify": time.perf_counter()}
        for stage, end in ends.items():
            self.timings[stage] += end - start
            start = end
        return _Result(program, solution, memory, self.timings), limit

    def _choose(self, asked: Problem, deadline: float, warm: Sequence[int] | None) -> Solution:
        kind, _, seed = self.options.search.partition(":")
        if kind == "random":
            return random_solution(asked, int(seed))
        return solve(
            asked, time_limit=max(deadline - time.perf_counter(), 1.0), backend=self.options.solver,
            gap=self.options.gap, warm_starts=() if warm is None else (warm,),
        )  # fmt: skip

    def _position(self, result: _Result) -> int:
        """The graph node that runs when the program's memory is highest."""
        at = min(result.memory.peak_at, len(result.program.ops) - 1)
        if result.memory.peak_at >= len(result.program.ops):
            return len(self.graph.nodes)
        names = {n.name: i for i, n in enumerate(self.graph.nodes)}
        return names[result.program.ops[at].node]

    def _unseen(self, result: _Result, position: int) -> float:
        """Bytes at the peak that the rows do not model, as this solution has them."""
        from autopar.planner.pricing import usages

        rows = usages(self.decisions, self.options, [position])
        modelled = sum(float(u.option[result.solution.choice[u.node]]) for u in rows)
        return max(result.memory.peak_bytes - modelled, 0.0)

    def _infeasible(self, deadline: float, positions: Sequence[int]) -> InfeasibleError:
        asked = problem(self.decisions, self.prices, self.options, positions, 1e30)
        least = minimum_limit(asked, time_limit=max(min(deadline - time.perf_counter(), 20.0), 5.0))
        least = self._smallest_that_works(least, positions)
        return InfeasibleError(
            "No plan fits the memory budget.",
            found=f"a budget of {_text(self.budget)} a device on mesh {self.decisions.mesh}",
            hint=f"the smallest budget that works is {_text(least)}: memory_budget={math.ceil(least)}; "
            "more ranks need less each.",
        )

    def _smallest_that_works(self, least: float, positions: Sequence[int]) -> float:
        """Exact liveness of the plan that the rows say is smallest: what would really have to be granted."""
        best = math.inf
        limit = least
        for _ in range(4):
            asked = problem(self.decisions, self.prices, self.options, positions, limit * (1 + 1e-6) + 1)
            try:
                solution = solve(asked, time_limit=10.0, backend=self.options.solver, gap=self.options.gap)
            except InfeasibleError:
                break
            program = schedule(self.decisions, solution.choice, self.prices)
            memory = profile(program, self.graph, self.decisions.mesh, self.options)
            best = min(best, memory.peak_bytes)
            if memory.peak_bytes <= limit * 1.02:
                break
            limit *= 1.1
        return best if math.isfinite(best) else least


def _text(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
